"""Denoising diffusion with an average of the weights."""
import copy

import torch
from torch import nn


def main():
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.SiLU(), nn.Conv2d(32, 32, 3, padding=1), nn.SiLU(), nn.Conv2d(32, 3, 3, padding=1))
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters())
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)
    for _ in range(6):
        clean, noise = torch.randn(8, 3, 32, 32), torch.randn(8, 3, 32, 32)
        alpha = alphas[torch.randint(1000, (8,))].view(-1, 1, 1, 1)
        noisy = alpha.sqrt() * clean + (1 - alpha).sqrt() * noise
        nn.functional.mse_loss(model(noisy), noise).backward()  #? late deallocation@clean, noise -> del clean; loss = nn.functional.mse_loss(model(noisy), noise); del noise; loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_([p.data for p in average.parameters()], [p.data for p in model.parameters()], 0.01)


main()
