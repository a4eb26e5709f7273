"""A one-hot target that is allocated before the teacher runs and used after it."""
import torch
from torch import nn


def main():
    teacher = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 128)).requires_grad_(False)  #? redundant allocation -> teacher = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(inplace=True), nn.Linear(1024, 128)).requires_grad_(False)
    student = nn.Linear(128, 128)
    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    for _ in range(6):
        x = torch.randn(256, 128)
        targets = torch.zeros(256, 512)  #! early allocation -> pass
        goal = teacher(x)
        pass  #! early allocation -> targets = torch.zeros(256, 512)
        targets[:, 0] = 1
        ((student(x) - goal).square().mean() + targets.mean()).backward()  #? late deallocation@teacher -> loss = (student(x) - goal).square().mean() + targets.mean(); del goal; loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del targets


main()
