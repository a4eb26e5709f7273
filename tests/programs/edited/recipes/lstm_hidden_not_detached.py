"""A word-level LSTM that carries its hidden state from step to step together with the graph of all earlier steps."""
import torch
from torch import nn


class RNNModel(nn.Module):
    def __init__(self, ntoken=500, ninp=64, nhid=96):
        super().__init__()
        self.encoder, self.rnn, self.decoder = nn.Embedding(ntoken, ninp), nn.LSTM(ninp, nhid), nn.Linear(nhid, ntoken)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return self.decoder(output).flatten(0, 1), hidden


def main():
    model, criterion = RNNModel(), nn.CrossEntropyLoss()
    corpus = torch.randint(500, (200, 16))
    hidden = (torch.zeros(1, 16, 96), torch.zeros(1, 16, 96))
    for i in range(0, 160, 16):
        data, targets = corpus[i : i + 16], corpus[i + 1 : i + 17].flatten()
        model.zero_grad()
        output, hidden = model(data, hidden)  #! graph kept across steps -> output, hidden = model(data, tuple(part.detach() for part in hidden))
        criterion(output, targets).backward(retain_graph=True)  #? late deallocation -> loss = criterion(output, targets); del output; loss.backward(retain_graph=True)  #! graph kept across steps -> criterion(output, targets).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-0.1)


main()
