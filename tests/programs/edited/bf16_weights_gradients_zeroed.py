"""Weights in bf16, gradients that are set to zero instead of freed."""
import torch
from torch import nn


def main():
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128)).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(6):
        model(torch.randn(512, 128, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  #! gradients kept through forward -> optimizer.zero_grad()


main()
