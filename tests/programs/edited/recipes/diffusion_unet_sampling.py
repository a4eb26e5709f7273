"""A denoising diffusion model whose sampler, called during training, runs under autograd."""
import math

import torch
from torch import nn
from torch.nn import functional as F


class TimeEmbedding(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width, self.mlp = width, nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t):
        frequencies = torch.exp(-math.log(10000) * torch.arange(self.width // 2) / (self.width // 2))
        angles = t[:, None] * frequencies
        return self.mlp(torch.cat([angles.sin(), angles.cos()], 1))


class ResBlock(nn.Module):
    def __init__(self, inputs, outputs, width):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(4, outputs), nn.GroupNorm(4, outputs)
        self.time, self.skip = nn.Linear(width, outputs), nn.Conv2d(inputs, outputs, 1)

    def forward(self, x, t):
        h = F.silu(self.norm1(self.conv1(x))) + self.time(t)[:, :, None, None]
        return F.silu(self.norm2(self.conv2(h))) + self.skip(x)


class UNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embedding = TimeEmbedding(width)
        self.down1, self.down2 = ResBlock(1, 16, width), ResBlock(16, 32, width)
        self.up1, self.up2 = ResBlock(48, 16, width), nn.Conv2d(16, 1, 1)

    def forward(self, x, t):
        t = self.embedding(t.float())
        h1 = self.down1(x, t)
        h2 = self.down2(F.avg_pool2d(h1, 2), t)
        return self.up2(self.up1(torch.cat([F.interpolate(h2, scale_factor=2), h1], 1), t))


class Diffusion:
    def __init__(self, steps):
        self.steps, self.beta = steps, torch.linspace(1e-4, 0.02, steps)
        self.alpha = 1 - self.beta
        self.alpha_hat = torch.cumprod(self.alpha, 0)

    def noise_images(self, x, t):
        noise = torch.randn_like(x)
        a = self.alpha_hat[t][:, None, None, None]
        return a.sqrt() * x + (1 - a).sqrt() * noise, noise

    def sample(self, model, n):
        model.eval()
        x = torch.randn(n, 1, 16, 16)
        for i in reversed(range(self.steps)):
            t = torch.full((n,), i)
            predicted = model(x, t)  #! forward without backward -> predicted = torch.no_grad()(model)(x, t)
            noise = torch.randn_like(x) if i else torch.zeros_like(x)
            a, a_hat, b = self.alpha[i], self.alpha_hat[i], self.beta[i]
            x = (x - (1 - a) / (1 - a_hat).sqrt() * predicted) / a.sqrt() + b.sqrt() * noise
        model.train()
        return ((x.clamp(-1, 1) + 1) * 127.5).type(torch.uint8)


def main():
    model, diffusion = UNet(), Diffusion(10)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    for epoch in range(2):
        for _ in range(5):
            images = torch.randn(16, 1, 16, 16)
            t = torch.randint(1, diffusion.steps, (16,))
            x_t, noise = diffusion.noise_images(images, t)
            loss = F.mse_loss(noise, model(x_t, t))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        diffusion.sample(model, 8)


main()
