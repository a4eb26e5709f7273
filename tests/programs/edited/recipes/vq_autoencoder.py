"""An autoencoder with a vector-quantised code and a straight-through gradient, without a defect."""
import torch
from torch import nn
from torch.nn import functional as F


class Quantizer(nn.Module):
    def __init__(self, codes=128, width=32):
        super().__init__()
        self.codebook = nn.Embedding(codes, width)

    def forward(self, z):
        flat = z.permute(0, 2, 3, 1).reshape(-1, z.shape[1])
        with torch.no_grad():
            nearest = torch.cdist(flat, self.codebook.weight).argmin(1)
        quantized = self.codebook(nearest).view(len(z), z.shape[2], z.shape[3], -1).permute(0, 3, 1, 2)
        loss = F.mse_loss(quantized, z.detach()) + 0.25 * F.mse_loss(z, quantized.detach())
        return z + (quantized - z).detach(), loss


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 4, 2, 1))
        self.quantizer = Quantizer()
        self.decoder = nn.Sequential(nn.ConvTranspose2d(32, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 1, 4, 2, 1))

    def forward(self, x):
        code, loss = self.quantizer(self.encoder(x))
        return F.mse_loss(self.decoder(code), x) + loss


def main():
    model = AutoEncoder()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 1, 32, 32))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


main()
