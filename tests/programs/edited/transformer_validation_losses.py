"""A transformer that keeps its validation losses together with their graphs."""
import torch
from torch import nn


def main():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True), 2)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(10):
        model(torch.randn(8, 32, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(model(torch.randn(8, 32, 64)).square().mean())  #! retained graph -> losses.append(model(torch.randn(8, 32, 64)).square().mean().detach())


main()
