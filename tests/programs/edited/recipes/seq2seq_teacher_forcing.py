"""Seq2seq with attention and teacher forcing: the decoder writes its outputs into a tensor that outlives the loss."""
import random

import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.rnn = nn.GRU(width, width)

    def forward(self, src):
        return self.rnn(self.embedding(src))


class Decoder(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.rnn = nn.GRU(2 * width, width)
        self.fc_out = nn.Linear(3 * width, vocabulary)

    def forward(self, token, hidden, encoder_outputs):
        embedded = self.embedding(token.unsqueeze(0))
        scores = torch.bmm(encoder_outputs.transpose(0, 1), hidden[-1].unsqueeze(2)).softmax(1)
        context = torch.bmm(scores.transpose(1, 2), encoder_outputs.transpose(0, 1)).transpose(0, 1)
        output, hidden = self.rnn(torch.cat([embedded, context], 2), hidden)
        return self.fc_out(torch.cat([output, context, embedded], 2).squeeze(0)), hidden


class Seq2Seq(nn.Module):
    def __init__(self, encoder, decoder, vocabulary):
        super().__init__()
        self.encoder, self.decoder, self.vocabulary = encoder, decoder, vocabulary

    def forward(self, src, trg, teacher_forcing_ratio=0.5):
        length, batch = trg.shape
        outputs = torch.zeros(length, batch, self.vocabulary)
        encoder_outputs, hidden = self.encoder(src)
        token = trg[0]
        for t in range(1, length):
            output, hidden = self.decoder(token, hidden, encoder_outputs)
            outputs[t] = output
            token = trg[t] if random.random() < teacher_forcing_ratio else output.argmax(1)
        return outputs


def train_epoch(model, batches, optimizer, criterion):
    model.train()
    epoch_loss = 0
    for src, trg in batches:
        optimizer.zero_grad()
        output = model(src, trg)
        loss = criterion(output[1:].view(-1, output.shape[-1]), trg[1:].reshape(-1))
        pass  #! late deallocation -> del output
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()
        epoch_loss += loss.item()
    return epoch_loss / len(batches)


def main():
    random.seed(0)
    vocabulary, width = 1500, 64
    model = Seq2Seq(Encoder(vocabulary, width), Decoder(vocabulary, width), vocabulary)
    optimizer = torch.optim.Adam(model.parameters())
    batches = [(torch.randint(vocabulary, (16, 32)), torch.randint(vocabulary, (14, 32))) for _ in range(4)]
    for _ in range(2):
        train_epoch(model, batches, optimizer, nn.CrossEntropyLoss(ignore_index=0))


if __name__ == "__main__":
    main()
