"""A GAN that sets the discriminator's gradients to zero right before they are used: those of the generator's step are computed for nothing."""
import torch
from torch import nn


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(256, 1024)
        self.middle = nn.Linear(1024, 1024)
        self.out = nn.Linear(1024, 1)

    def forward(self, x):
        x = torch.relu(self.hidden(x))
        x = torch.relu(self.middle(x))
        return self.out(x)


def main():
    generator, discriminator = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.Tanh()), Discriminator()
    optimizer_g = torch.optim.Adam(generator.parameters(), 2e-4)
    optimizer_d = torch.optim.Adam(discriminator.parameters(), 2e-4)
    criterion, ones, zeros = nn.BCEWithLogitsLoss(), torch.ones(64, 1), torch.zeros(64, 1)
    for _ in range(6):
        optimizer_d.zero_grad()
        with torch.no_grad():
            fake = generator(torch.randn(64, 32))
        criterion(discriminator(torch.randn(64, 256)), ones).backward()
        criterion(discriminator(fake), zeros).backward()
        optimizer_d.step()
        optimizer_d.zero_grad()
        optimizer_g.zero_grad()
        pass  #? unused gradients -> discriminator.requires_grad_(False)
        loss = criterion(discriminator(generator(torch.randn(64, 32))), ones)
        loss.backward()
        optimizer_g.step()
        pass  #? unused gradients -> discriminator.requires_grad_(True)


main()
