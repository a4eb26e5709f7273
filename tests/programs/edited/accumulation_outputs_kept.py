"""Gradient accumulation that keeps the outputs of all micro-batches until the step."""
import torch
from torch import nn


def main():
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 512))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(6):
        outputs = []
        for _ in range(4):
            out = model(torch.randn(128, 128))
            out.square().mean().backward()  #! late deallocation -> loss = out.square().mean(); del out; loss.backward()
            outputs.append(out)  #! late deallocation -> pass
        optimizer.step()
        optimizer.zero_grad()


main()
