"""A CNN in inference whose activations could be computed in place."""
import torch
from torch import nn


def main():
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())))  #? redundant allocation -> model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(inplace=True))))
    with torch.no_grad():
        for _ in range(6):
            model(torch.randn(4, 32, 64, 64)).mean().item()


main()
