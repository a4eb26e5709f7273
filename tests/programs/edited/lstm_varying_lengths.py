"""An LSTM on sequences of varying lengths that carries its state from step to step."""
import torch
from torch import nn


def main():
    model, head = nn.LSTM(64, 128), nn.Linear(128, 64)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
    state = (torch.zeros(1, 16, 128), torch.zeros(1, 16, 128))
    for number in range(10):
        x = torch.randn(20 + number * 13 % 40, 16, 64)
        out, state = model(x, state)
        state = tuple(part.detach() for part in state)
        head(out).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


main()
