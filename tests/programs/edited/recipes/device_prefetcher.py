"""A prefetcher that copies batches ahead and keeps those that the loop has used."""
import collections

import torch
from torch import nn


class Prefetcher:
    def __init__(self, make_batch, depth=2):
        self.make_batch, self.queue, self.depth = make_batch, collections.deque(), depth
        self.used = []

    def next(self):
        while len(self.queue) < self.depth:
            self.queue.append(self.make_batch())
        batch = self.queue.popleft()
        self.used.append(batch)  #! leak -> pass
        return batch


def main():
    model = nn.Sequential(nn.Flatten(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)  #? gradients kept through optimizer step -> optimizers = {p: torch.optim.Adam([p], 1e-3) for p in model.parameters()}; hook = lambda p: (optimizers[p].step(), optimizers[p].zero_grad(), None)[-1]; [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
    prefetcher = Prefetcher(lambda: (torch.randn(64, 1, 32, 32), torch.randint(10, (64,))))
    for _ in range(10):
        images, labels = prefetcher.next()
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()  #? gradients kept through optimizer step -> pass
        loss.backward()
        optimizer.step()  #? gradients kept through optimizer step -> pass


main()
