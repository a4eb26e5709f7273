"""Gradient clipping and an optimizer that updates one parameter after the other."""
import torch
from torch import nn


def main():
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 128))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(6):
        model(torch.randn(256, 128)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


main()
