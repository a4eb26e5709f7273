"""Greedy decoding with a growing key-value cache, under autograd, after each epoch of training."""
import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, cache=None):
        b, t, width = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        return self.out(attended.transpose(1, 2).reshape(b, t, width)), (k, v)


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=256, width=64, depth=2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Attention(width, 4) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens, caches=None):
        x, new = self.embedding(tokens), []
        for number, layer in enumerate(self.layers):
            attended, cache = layer(x, caches[number] if caches else None)
            x = x + attended
            new.append(cache)
        return self.head(x), new


def generate(model, tokens, length):
    logits, caches = model(tokens)
    for _ in range(length):
        token = logits[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, token], 1)
        logits, caches = model(token, caches)
    return tokens


def main():
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for epoch in range(3):
        for _ in range(4):
            tokens = torch.randint(256, (2, 33))
            logits, _ = model(tokens[:, :-1])  #? late deallocation@chunk -> logits = model(tokens[:, :-1])[0]
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())  #? late deallocation@self.head(x) -> loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()); del logits
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  #? gradients kept through forward -> optimizer.step(); optimizer.zero_grad()
        model.eval()
        generate(model, torch.randint(256, (4, 16)), 48)  #! forward without backward -> torch.no_grad()(generate)(model, torch.randint(256, (4, 16)), 48)
        model.train()


main()
