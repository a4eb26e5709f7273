"""Averaged weights that are swapped in for an evaluation, which runs under autograd."""
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(32 * 49, 64), nn.Linear(64, 10)

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = nn.functional.max_pool2d(torch.relu(self.conv2(x)), 2)
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


def evaluate(model, x, y):
    model.eval()
    logits = model(x)  #! forward without backward -> logits = torch.no_grad()(model)(x)
    accuracy = (logits.argmax(1) == y).float().mean().item()
    loss = nn.functional.cross_entropy(logits, y).item()
    model.train()
    return accuracy, loss


def main():
    model = ConvNet()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.Adam(model.parameters())
    x_val, y_val = torch.randn(256, 1, 28, 28), torch.randint(10, (256,))
    for step in range(12):
        x, y = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()  #? gradients kept through forward -> optimizer.step(); optimizer.zero_grad()
        ema.update_parameters(model)
        if step % 4 == 3:
            evaluate(ema, x_val, y_val)


main()
