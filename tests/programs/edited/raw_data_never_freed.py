"""A raw data set that stays allocated after its normalised copy is made."""
import torch
from torch import nn


def main():
    raw = torch.randn(1024, 128)
    data = (raw - raw.mean(0)) / raw.std(0)  #! late deallocation -> centred, deviation = raw - raw.mean(0), raw.std(0); del raw; data = centred / deviation; del centred
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(8):
        x = data[128 * number : 128 * number + 128]
        nn.functional.cross_entropy(model(x), torch.randint(10, (128,))).backward()
        optimizer.step()
        optimizer.zero_grad()


main()
