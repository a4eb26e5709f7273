"""Training under autocast to bf16."""
import torch
from torch import nn


def main():
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(6):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(256, 256)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


main()
