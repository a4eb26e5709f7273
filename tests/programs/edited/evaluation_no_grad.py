"""Inference that collects its outputs for a metric at the end."""
import torch
from torch import nn


def main():
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    outputs = []
    with torch.no_grad():
        for _ in range(8):
            outputs.append(model(torch.randn(128, 256)))
        torch.cat(outputs).argmax(1).bincount()


main()
