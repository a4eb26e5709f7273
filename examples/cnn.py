"""Train a small CNN on synthetic images, without memtrace: record it with ``memtrace record examples/cnn.py``."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class CNN(nn.Module):
    """Two convolutions and a linear classifier for images of 32 x 32 pixels."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Linear(64 * 8 * 8, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images).flatten(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="number of training steps (default: %(default)s)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    labels = torch.randint(10, (32 * arguments.steps,))
    images = torch.randn(len(labels), 3, 32, 32) + labels.view(-1, 1, 1, 1) / 10
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batch, target in DataLoader(TensorDataset(images, labels), batch_size=32):
        loss = nn.functional.cross_entropy(model(batch), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"final loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
