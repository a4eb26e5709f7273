"""A teacher that runs under autograd and is then detached."""
import torch
from torch import nn


def main():
    def network(width):
        return nn.Sequential(nn.Linear(256, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 64))

    teacher, student = network(256), network(256)
    optimizer = torch.optim.Adam(student.parameters())
    for _ in range(8):
        x = torch.randn(256, 256)
        goal = teacher(x)  #! forward without backward -> goal = torch.no_grad()(teacher)(x)
        nn.functional.mse_loss(student(x), goal.detach()).backward()
        optimizer.step()
        optimizer.zero_grad()


main()
