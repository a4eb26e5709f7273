"""A U-Net with skip connections."""
import torch
from torch import nn


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)])
        self.middle = nn.Conv2d(32, 32, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(64, 16, 3, padding=1), nn.Conv2d(32, 8, 3, padding=1)])
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        skips = []
        for layer in self.down:
            x = torch.relu(layer(x))
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = torch.relu(self.middle(x))
        for layer in self.up:
            x = nn.functional.interpolate(x, scale_factor=2)
            x = torch.relu(layer(torch.cat([x, skips.pop()], 1)))
        return self.head(x)


def main():
    model = UNet()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(5):
        model(torch.randn(2, 3, 64, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


main()
