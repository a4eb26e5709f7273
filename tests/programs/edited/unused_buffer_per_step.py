"""A buffer that every step fills and never uses."""
import torch
from torch import nn


def main():
    model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(8):
        weights = torch.ones(256, 128)  #! unused allocation -> weights = None
        model(torch.randn(256, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


main()
