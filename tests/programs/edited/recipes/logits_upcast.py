"""A bf16 language model whose logits are upcast for the loss while the bf16 ones stay in a variable."""
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, vocabulary=2000, width=64):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        return self.head(self.mix(self.embedding(tokens))[0])


def main():
    model = Model().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(6):
        tokens = torch.randint(2000, (8, 65))
        logits = model(tokens[:, :-1])
        logits_fp32 = logits.float()
        loss = nn.functional.cross_entropy(logits_fp32.flatten(0, 1), tokens[:, 1:].flatten())
        pass  #! late deallocation@logits.float -> del logits_fp32  #! late deallocation -> del logits
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main()
