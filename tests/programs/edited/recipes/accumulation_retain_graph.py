"""Gradient accumulation with retain_graph=True, whose loss keeps the graph of a micro-batch through the next forward."""
import torch
from torch import nn


def main():
    encoder = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())  #? redundant allocation -> encoder = nn.Sequential(nn.Linear(128, 512), nn.ReLU(inplace=True), nn.Linear(512, 512), nn.ReLU(inplace=True))
    head = nn.Linear(512, 10)
    optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], 0.05)
    for _ in range(6):
        for _ in range(4):
            x, y = torch.randn(512, 128), torch.randint(10, (512,))
            loss = nn.functional.cross_entropy(head(encoder(x)), y) / 4
            loss.backward(retain_graph=True)  #! graph kept after backward -> loss.backward()
        optimizer.step()
        optimizer.zero_grad()


main()
