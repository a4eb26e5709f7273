"""Skip-gram embeddings with sparse gradients."""
import torch
from torch import nn


def main():
    centre, context = nn.Embedding(4000, 64, sparse=True), nn.Embedding(4000, 64, sparse=True)
    optimizer = torch.optim.SparseAdam([*centre.parameters(), *context.parameters()])
    for _ in range(6):
        a, b = torch.randint(4000, (256,)), torch.randint(4000, (256,))
        scores = centre(a) @ context(b).T
        nn.functional.cross_entropy(scores, torch.arange(256)).backward()  #? late deallocation -> loss = nn.functional.cross_entropy(scores, torch.arange(256)); del scores; loss.backward()
        optimizer.step()
        optimizer.zero_grad()


main()
