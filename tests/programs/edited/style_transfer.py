"""An image that is optimized through a frozen network."""
import torch
from torch import nn


def main():
    network = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU()).requires_grad_(False)
    with torch.no_grad():
        goal = network(torch.randn(1, 3, 96, 96))
    image = torch.randn(1, 3, 96, 96, requires_grad=True)
    optimizer = torch.optim.Adam([image])
    for _ in range(6):
        optimizer.zero_grad()
        nn.functional.mse_loss(network(image), goal).backward()
        optimizer.step()


main()
