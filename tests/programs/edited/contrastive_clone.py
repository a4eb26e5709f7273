"""A contrastive loss that clones its similarity matrix for nothing."""
import torch
from torch import nn


def main():
    encoder = nn.Linear(128, 64)
    optimizer = torch.optim.SGD(encoder.parameters(), 0.1)
    for _ in range(6):
        a, b = encoder(torch.randn(256, 128)), encoder(torch.randn(256, 128))
        similarity = (a @ b.T).clone()  #! double copy -> similarity = a @ b.T
        loss = nn.functional.cross_entropy(similarity, torch.arange(256))
        pass  #! late deallocation -> del similarity
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


main()
