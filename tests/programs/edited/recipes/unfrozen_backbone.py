"""Linear probing whose optimizer has only the head: backward computes the gradients of the whole backbone."""
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Backbone(nn.Module):
    def __init__(self, width=128, depth=3):
        super().__init__()
        self.stem = nn.Linear(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x.mean(1)


class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        return self.head(self.backbone(x))


def main():
    model = Probe()
    pass  #! unused gradients -> model.backbone.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.head.parameters(), 1e-3)
    for _ in range(8):
        x, y = torch.randn(32, 16, 64), torch.randint(10, (32,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


main()
