"""A CNN with batch normalisation, whose convolutions use workspaces."""
import torch
from torch import nn


def main():
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(6):
        nn.functional.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.randint(10, (8,))).backward()
        optimizer.step()
        optimizer.zero_grad()


main()
