"""Positional encodings behind functools.lru_cache, whose key differs in every step."""
import functools
import math

import torch
from torch import nn


@functools.lru_cache(maxsize=None)  #! leak -> @(lambda function: function)
def encoding(length, width, offset):
    position = torch.arange(offset, offset + length).unsqueeze(1)
    frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    table = torch.zeros(length, width)
    table[:, 0::2] = torch.sin(position * frequency)
    table[:, 1::2] = torch.cos(position * frequency)
    return table


class Tagger(nn.Module):
    def __init__(self, vocabulary=500, width=128):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 256, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 20)

    def forward(self, tokens, offset):
        x = self.embedding(tokens) + encoding(tokens.shape[1], 128, offset)
        return self.head(self.layer(x))


def main():
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(14):
        tokens, tags = torch.randint(500, (2, 256)), torch.randint(20, (2, 256))
        loss = nn.functional.cross_entropy(model(tokens, 256 * step).transpose(1, 2), tags)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  #? gradients kept through forward -> optimizer.step(); optimizer.zero_grad()


main()
