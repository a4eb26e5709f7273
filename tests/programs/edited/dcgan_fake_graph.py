"""A GAN whose discriminator step runs the generator under autograd although no backward follows."""
import torch
from torch import nn


def main():
    generator = nn.Sequential(nn.ConvTranspose2d(64, 64, 4), nn.ReLU(), nn.ConvTranspose2d(64, 32, 4, 4), nn.ReLU(), nn.ConvTranspose2d(32, 3, 2, 2), nn.Tanh())
    critic = nn.Sequential(nn.Conv2d(3, 32, 4, 2), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, 2), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64 * 36, 1))
    optimizer_g, optimizer_c = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
    loss = nn.functional.binary_cross_entropy_with_logits
    for _ in range(8):
        samples = generator(torch.randn(32, 64, 1, 1))  #! forward without backward -> samples = torch.no_grad()(generator)(torch.randn(32, 64, 1, 1))
        real = torch.randn(32, 3, 32, 32)
        (loss(critic(real), torch.ones(32, 1)) + loss(critic(samples.detach()), torch.zeros(32, 1))).backward()
        optimizer_c.step()
        optimizer_c.zero_grad()
        loss(critic(generator(torch.randn(32, 64, 1, 1))), torch.ones(32, 1)).backward()
        optimizer_g.step()
        optimizer_g.zero_grad()
        optimizer_c.zero_grad()


main()
