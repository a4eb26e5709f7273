"""A metric in the style of torchmetrics that keeps the predictions of a validation without torch.no_grad()."""
import torch
from torch import nn


class Accuracy:
    def __init__(self):
        self.predictions, self.targets = [], []

    def update(self, logits, targets):
        self.predictions.append(logits)
        self.targets.append(targets)

    def compute(self):
        predictions, targets = torch.cat(self.predictions), torch.cat(self.targets)
        return (predictions.argmax(-1) == targets).float().mean().item()


def validate(model, num_batches):
    metric = Accuracy()
    for _ in range(num_batches):
        x, y = torch.randn(64, 128), torch.randint(100, (64,))
        metric.update(model(x), y)
    return metric.compute()


def main():
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 100))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for epoch in range(3):
        for _ in range(4):
            x, y = torch.randn(64, 128), torch.randint(100, (64,))
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  #? gradients kept through forward -> optimizer.step(); optimizer.zero_grad()
        print(validate(model, 8))  #! forward without backward -> print(torch.no_grad()(validate)(model, 8))


main()
