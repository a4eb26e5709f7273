"""A classifier without a defect."""
import torch
from torch import nn


def main():
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(8):
        x, y = torch.randn(128, 256), torch.randint(10, (128,))
        nn.functional.cross_entropy(model(x), y).backward()  #? late deallocation -> loss = nn.functional.cross_entropy(model(x), y); del x; loss.backward()
        optimizer.step()
        optimizer.zero_grad()


main()
