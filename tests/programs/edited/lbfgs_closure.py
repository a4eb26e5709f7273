"""LBFGS with a closure."""
import torch
from torch import nn


def main():
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=4)
    x = torch.randn(256, 128)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(8):
        optimizer.step(closure)


main()
