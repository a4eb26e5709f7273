"""A critic with a gradient penalty: backward through backward."""
import torch
from torch import nn


def main():
    critic = nn.Sequential(nn.Linear(256, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1))
    optimizer = torch.optim.Adam(critic.parameters())
    for _ in range(6):
        x = torch.randn(128, 256, requires_grad=True)
        (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        ((gradient.norm(dim=1) - 1).square().mean() + critic(x).mean()).backward()  #? late deallocation -> loss = (gradient.norm(dim=1) - 1).square().mean() + critic(x).mean(); del x, gradient; loss.backward(); del loss
        optimizer.step()
        optimizer.zero_grad()


main()
