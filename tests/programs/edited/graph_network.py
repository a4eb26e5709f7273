"""Message passing on a graph."""
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.message, self.update = nn.Linear(64, 64), nn.Linear(128, 64)

    def forward(self, x, edges):
        messages = torch.relu(self.message(x[edges[0]]))
        gathered = torch.zeros_like(x).index_add(0, edges[1], messages)
        return torch.relu(self.update(torch.cat([x, gathered], 1)))


def main():
    layers = nn.ModuleList(Layer() for _ in range(3))
    optimizer = torch.optim.Adam(layers.parameters())
    edges = torch.randint(2000, (2, 2000))
    features = torch.randn(2000, 64)
    for _ in range(6):
        x = features
        for layer in layers:
            x = layer(x, edges)
        x.square().mean().backward()  #? late deallocation -> loss = x.square().mean(); del x; loss.backward()
        optimizer.step()
        optimizer.zero_grad()


main()
