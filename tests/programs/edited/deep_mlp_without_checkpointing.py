"""A deep network whose activations dominate: blocks could be checkpointed."""
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(128, 256), nn.Linear(256, 256), nn.Linear(256, 128)

    def forward(self, x):
        return x + self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)  #? recomputable activations -> x = checkpoint(block, x, use_reentrant=False)
        return x


def main():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(5):
        model(torch.randn(512, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


main()
