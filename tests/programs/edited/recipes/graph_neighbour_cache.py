"""Node classification that caches the features of every sampled neighbourhood and never reads them again."""
import torch
from torch import nn


class SAGE(nn.Module):
    def __init__(self, inputs, hidden, outputs):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(2 * inputs, hidden), nn.Linear(2 * hidden, outputs)

    def propagate(self, x, edge_index):
        out = torch.zeros_like(x)
        out.index_add_(0, edge_index[1], x[edge_index[0]])
        return torch.cat([x, out], dim=1)

    def forward(self, x, edge_index):
        x = self.lin1(self.propagate(x, edge_index)).relu()
        return self.lin2(self.propagate(x, edge_index)).log_softmax(dim=-1)


class NeighbourSampler:
    def __init__(self, x, y, size):
        self.x, self.y, self.size = x, y, size
        self.cache = {}

    def __call__(self, step):
        nodes = torch.randperm(len(self.x))[: self.size]
        features = self.x[nodes]
        self.cache[step] = features  #! leak -> pass
        return features, self.y[nodes], torch.randint(self.size, (2, 4 * self.size))


def main():
    sampler = NeighbourSampler(torch.randn(4000, 64), torch.randint(7, (4000,)), 400)
    model = SAGE(64, 64, 7)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for step in range(15):
        x, y, edge_index = sampler(step)
        optimizer.zero_grad()
        loss = nn.functional.nll_loss(model(x, edge_index), y)
        loss.backward()
        optimizer.step()


main()
