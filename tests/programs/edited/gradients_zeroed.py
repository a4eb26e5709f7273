"""Gradients that are set to zero instead of freed."""
import torch
from torch import nn


def main():
    model = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 128))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(8):
        model(torch.randn(256, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  #! gradients kept through forward -> optimizer.zero_grad()


main()
