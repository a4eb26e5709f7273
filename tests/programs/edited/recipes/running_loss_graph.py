"""A validation that adds every loss to a running total together with its graph, and prints the total at the end."""
import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, images):
        return self.head(self.features(images).mean((2, 3)))


def train(model, optimizer, criterion, num_batches):
    for _ in range(num_batches):
        images, labels = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def validate(model, criterion, num_batches):
    total = 0.0
    for _ in range(num_batches):
        images, labels = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
        total += criterion(model(images), labels)  #! forward without backward -> total += torch.no_grad()(lambda: criterion(model(images), labels))()
    return total / num_batches


model = Classifier()
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(3):
    train(model, optimizer, nn.CrossEntropyLoss(), 4)
    print(f"loss {float(validate(model, nn.CrossEntropyLoss(), 4)):.3f}")
