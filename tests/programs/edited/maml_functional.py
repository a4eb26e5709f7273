"""Meta-learning with torch.func."""
import torch
from torch import nn
from torch.func import functional_call, grad


def main():
    model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128))
    optimizer = torch.optim.Adam(model.parameters())

    def loss(parameters, x):
        return functional_call(model, parameters, (x,)).square().mean()

    for _ in range(6):
        parameters = dict(model.named_parameters())
        gradients = grad(loss)(parameters, torch.randn(256, 128))
        adapted = {name: value - 0.1 * gradients[name] for name, value in parameters.items()}  #? late deallocation -> adapted = {name: value - 0.1 * gradients[name] for name, value in parameters.items()}; del gradients
        loss(adapted, torch.randn(256, 128)).backward()
        optimizer.step()
        optimizer.zero_grad()


main()
