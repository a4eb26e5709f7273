"""Gradient accumulation that collects losses and logits of the epoch in lists for its metrics."""
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(8, 32, 5, padding=2), nn.ReLU(), nn.Conv1d(32, 32, 5, padding=2), nn.ReLU())
        self.head = nn.Linear(32, 256)

    def forward(self, x):
        return self.head(self.features(x).transpose(1, 2))


def train_epoch(model, optimizer, data, accumulation_steps):
    losses, predictions = [], []
    for number, (x, y) in enumerate(data, 1):
        logits = model(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        (loss / accumulation_steps).backward()
        losses.append(loss)
        predictions.append(logits)  #! accumulated results -> predictions.append(logits.argmax(-1)); del logits
        if number % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    classes = torch.cat([part.argmax(-1) if part.is_floating_point() else part for part in predictions])
    accuracy = (classes.flatten() == torch.cat([y.flatten() for _, y in data])).float().mean()
    return torch.stack(losses).mean().item(), accuracy.item()


def main():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    data = [(torch.randn(8, 8, 64), torch.randint(256, (8, 64))) for _ in range(32)]
    train_epoch(model, optimizer, data, 4)


main()
