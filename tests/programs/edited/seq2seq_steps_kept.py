"""A decoder that stacks the outputs of its steps and keeps the list as well."""
import torch
from torch import nn


def main():
    cell, head = nn.GRUCell(64, 128), nn.Linear(128, 2000)
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()])
    for _ in range(6):
        state, outputs = torch.zeros(32, 128), []
        for _ in range(12):
            state = cell(torch.randn(32, 64), state)
            outputs.append(head(state))
        logits = torch.stack(outputs)
        pass  #! late deallocation@head(state) -> outputs.clear()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(2000, (384,)))
        pass  #! late deallocation@torch.stack -> del logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


main()
