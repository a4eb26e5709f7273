"""A fine-tuning script whose first optimizer, with its state, stays alive after a second one replaces it."""
import torch
from torch import nn


def train(model, optimizer, num_steps):
    for _ in range(num_steps):
        x, y = torch.randn(32, 256), torch.randint(50, (32,))
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 50))
warm_up = torch.optim.AdamW(model.parameters(), 1e-4)
train(model, warm_up, 5)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)  #! state of a replaced optimizer -> del warm_up; optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
train(model, optimizer, 15)
