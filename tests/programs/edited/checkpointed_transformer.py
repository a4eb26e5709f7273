"""Transformer layers under activation checkpointing."""
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def main():
    layers = nn.ModuleList(nn.TransformerEncoderLayer(128, 4, 128, dropout=0.0, batch_first=True) for _ in range(4))
    optimizer = torch.optim.AdamW(layers.parameters())
    for _ in range(5):
        x = torch.randn(16, 64, 128)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        x.square().mean().backward()  #? late deallocation -> loss = x.square().mean(); del x; loss.backward()
        optimizer.step()
        optimizer.zero_grad()


main()
