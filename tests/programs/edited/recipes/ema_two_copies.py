"""Averaged weights that are kept twice: a copy of the model, and a dictionary of clones that every step replaces."""
import copy

import torch
from torch import nn


def main():
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    snapshot = {}
    for _ in range(8):
        x, y = torch.randn(64, 256), torch.randint(10, (64,))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, value in zip(average.parameters(), model.parameters()):
                mean.lerp_(value, 0.01)
        snapshot = {name: value.clone() for name, value in average.state_dict().items()}  #! unused copy -> pass


main()
