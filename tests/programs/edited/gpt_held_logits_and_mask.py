"""A GPT whose script holds the logits through backward and allocates a mask that nothing uses."""
import torch
from torch import nn

VOCABULARY, WIDTH, LENGTH = 4000, 128, 64


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))))


model = GPT()
optimizer = torch.optim.AdamW(model.parameters())
mask = torch.ones(256, 256)  #! unused allocation -> mask = None
for _ in range(6):
    tokens = torch.randint(VOCABULARY, (8, LENGTH))
    logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    pass  #! late deallocation -> del logits
    optimizer.zero_grad()  #! gradients kept through forward -> pass
    loss.backward()
    optimizer.step()
    pass  #! gradients kept through forward -> optimizer.zero_grad()
