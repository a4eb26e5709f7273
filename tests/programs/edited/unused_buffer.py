"""A buffer that is filled and never used."""
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(128, 128)
        self.cache = torch.zeros(256, 256)  #! unused allocation -> self.cache = None

    def forward(self, x):
        return torch.tanh(self.fc(x))


def main():
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(8):
        model(torch.randn(128, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


main()
