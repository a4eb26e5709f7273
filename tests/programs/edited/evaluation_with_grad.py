"""An evaluation after every step that records a graph which no backward uses."""
import torch
from torch import nn


def main():
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(8):
        model(torch.randn(256, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = model(torch.randn(512, 256)).square().mean()  #! forward without backward -> loss = torch.no_grad()(model)(torch.randn(512, 256)).square().mean()
        loss.item()


main()
