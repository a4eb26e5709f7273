"""A VAE that keeps every reconstruction in a list."""
import torch
from torch import nn


def main():
    encoder, decoder = nn.Linear(784, 2 * 20), nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 784))
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
    pictures = []
    for _ in range(12):
        x = torch.rand(128, 784)
        mean, log_variance = encoder(x).chunk(2, dim=1)
        result = torch.sigmoid(decoder(mean + torch.randn_like(mean) * (0.5 * log_variance).exp()))
        loss = nn.functional.binary_cross_entropy(result, x) - 0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean()
        loss.backward()  #? late deallocation@torch.rand -> del x; loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        pictures.append(result.detach())  #! leak -> pass


main()
