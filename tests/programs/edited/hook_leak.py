"""A forward hook that keeps the features of every step."""
import random

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(500, 64)
        self.rnn = nn.GRU(64, 128, batch_first=True)
        self.out = nn.Linear(128, 500)

    def forward(self, x):
        return self.out(self.rnn(self.embedding(x))[0])


def main():
    random.seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    features = []
    model.rnn.register_forward_hook(lambda _, __, output: features.append(output[0].detach()))  #! leak -> pass
    for _ in range(20):
        x = torch.randint(0, 500, (8, random.randint(10, 80)))
        nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


main()
