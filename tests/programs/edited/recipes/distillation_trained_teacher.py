"""Distillation whose loss reaches into the teacher: backward computes gradients of the teacher that nobody uses."""
import torch
from torch import nn
from torch.nn import functional as F


def mlp(width, depth):
    layers = [nn.Linear(128, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 100))


def distillation_loss(student_logits, teacher_logits, labels, temperature=4.0, alpha=0.9):
    soft = F.kl_div(F.log_softmax(student_logits / temperature, 1), F.softmax(teacher_logits / temperature, 1), reduction="batchmean")
    return alpha * temperature**2 * soft + (1 - alpha) * F.cross_entropy(student_logits, labels)


def main():
    teacher, student = mlp(512, 3), mlp(128, 1)
    teacher.eval()
    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    for _ in range(8):
        x, labels = torch.randn(256, 128), torch.randint(100, (256,))
        optimizer.zero_grad()
        teacher_logits = teacher(x)  #! unused gradients -> teacher_logits = torch.no_grad()(teacher)(x)
        loss = distillation_loss(student(x), teacher_logits, labels)
        loss.backward()
        optimizer.step()


main()
