"""Fine-tuning of a head on a frozen backbone, with early stopping that keeps the best weights; without a defect."""
import copy

import torch
from torch import nn


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(*(nn.Sequential(nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True)) for _ in range(3)))

    def forward(self, x):
        return self.layers(self.stem(x)).mean((2, 3))


def run_epoch(backbone, head, criterion, batches, optimizer=None):
    total = 0.0
    with torch.set_grad_enabled(optimizer is not None):
        for inputs, labels in batches:
            outputs = head(backbone(inputs))
            loss = criterion(outputs, labels)
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            total += loss.item() * inputs.size(0)
    return total


def main():
    backbone, head = Backbone().eval().requires_grad_(False), nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.SGD(head.parameters(), 0.01, momentum=0.9)
    train = [(torch.randn(16, 3, 48, 48), torch.randint(5, (16,))) for _ in range(4)]
    val = [(torch.randn(16, 3, 48, 48), torch.randint(5, (16,))) for _ in range(2)]
    best, best_weights = float("inf"), copy.deepcopy(head.state_dict())
    for _ in range(3):
        run_epoch(backbone, head, nn.CrossEntropyLoss(), train, optimizer)
        loss = run_epoch(backbone, head, nn.CrossEntropyLoss(), val)
        if loss < best:
            best, best_weights = loss, copy.deepcopy(head.state_dict())
    head.load_state_dict(best_weights)


main()
