"""A policy gradient with a bounded replay buffer."""
import collections

import torch
from torch import nn


def main():
    policy = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8))
    optimizer = torch.optim.Adam(policy.parameters())
    buffer = collections.deque(maxlen=4)
    for _ in range(12):
        states = torch.randn(256, 64)
        with torch.no_grad():
            actions = torch.distributions.Categorical(logits=policy(states)).sample()
        buffer.append((states, actions, torch.randn(256)))
        x, a, r = (torch.cat(parts) for parts in zip(*buffer))
        (-torch.distributions.Categorical(logits=policy(x)).log_prob(a) * r).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


main()
