"""An autoencoder whose images are converted and then made contiguous, which copies twice."""
import torch
from torch import nn


def main():
    model = nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.ReLU(), nn.ConvTranspose2d(4, 3, 4, 4))
    optimizer = torch.optim.Adam(model.parameters())
    images = torch.randint(255, (4, 128, 128, 3), dtype=torch.uint8)
    for _ in range(6):
        x = images.permute(0, 3, 1, 2).float().contiguous()  #! double copy -> x = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()


main()
