"""Momentum contrast with a queue of keys, whose key encoder runs under autograd."""
import copy

import torch
from torch import nn
from torch.nn import functional as F


class MoCo(nn.Module):
    def __init__(self, dim=64, size=2048, momentum=0.99, temperature=0.07):
        super().__init__()
        self.size, self.momentum, self.temperature = size, momentum, temperature
        self.encoder_q = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64),
            nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, dim),
        )
        self.encoder_k = copy.deepcopy(self.encoder_q)
        self.register_buffer("queue", F.normalize(torch.randn(dim, size), dim=0))
        self.pointer = 0

    @torch.no_grad()
    def update_key_encoder(self):
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data = k.data * self.momentum + q.data * (1.0 - self.momentum)

    @torch.no_grad()
    def enqueue(self, keys):
        self.queue[:, self.pointer : self.pointer + len(keys)] = keys.T
        self.pointer = (self.pointer + len(keys)) % self.size

    def forward(self, im_q, im_k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        self.update_key_encoder()
        k = F.normalize(self.encoder_k(im_k), dim=1)  #! forward without backward -> k = F.normalize(torch.no_grad()(self.encoder_k)(im_k), dim=1)
        l_pos = torch.einsum("nc,nc->n", q, k.detach()).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        logits = torch.cat([l_pos, l_neg], dim=1) / self.temperature  #? redundant allocation@torch.cat -> logits = torch.cat([l_pos, l_neg], dim=1).div_(self.temperature)  #? late deallocation@self.queue.clone -> logits = torch.cat([l_pos, l_neg], dim=1); del l_neg; logits = logits / self.temperature
        self.enqueue(k.detach())
        return logits, torch.zeros(len(logits), dtype=torch.long)


def main():
    model = MoCo()
    optimizer = torch.optim.SGD(model.encoder_q.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
    for _ in range(7):
        images = torch.randn(2, 32, 3, 32, 32)
        logits, labels = model(images[0] + 0.1 * torch.randn(32, 3, 32, 32), images[1])
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()  #? late deallocation@torch.cat -> del logits; optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main()
