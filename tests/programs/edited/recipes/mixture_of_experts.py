"""A mixture of experts that routes every token to its two best experts, without a defect."""
import torch
from torch import nn
from torch.nn import functional as F


class Experts(nn.Module):
    def __init__(self, width=64, num_experts=4):
        super().__init__()
        self.gate = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)) for _ in range(num_experts)
        )

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(x[token]) * weights[token, place, None])
        return x + out


def main():
    model = nn.Sequential(nn.Linear(32, 64), Experts(), nn.LayerNorm(64), Experts(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(8):
        loss = F.cross_entropy(model(torch.randn(512, 32)), torch.randint(8, (512,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


main()
