"""A training step in a closure that keeps the regularisation terms of all steps, which are not part of the loss."""
import torch
from torch import nn


def make_step(model, optimizer):
    history = []

    def penalty(hidden):
        return hidden.abs().mean()

    def step(x, y):
        hidden = torch.tanh(model[0](x))
        loss = nn.functional.mse_loss(model[1](hidden), y)
        history.append(penalty(hidden))  #! retained graph -> history.append(penalty(hidden).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step, history


def main():
    model = nn.ModuleList([nn.Linear(128, 512), nn.Linear(512, 16)])
    step, history = make_step(model, torch.optim.SGD(model.parameters(), 0.05))
    for _ in range(12):
        step(torch.randn(128, 128), torch.randn(128, 16))
    print(len(history), sum(float(value) for value in history))


main()
