"""The same kind of model as a module, with AdamW and batches drawn by hand."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(3407)
text = "the quick brown fox jumps over the lazy dog while five boxing wizards jump quickly at dawn " * 6
chars = sorted(set(text))
data = torch.tensor([chars.index(c) for c in text])
block = 8


class CharMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(len(chars), 8)
        self.mlp = nn.Sequential(nn.Linear(8 * block, 48), nn.Tanh(), nn.Linear(48, len(chars)))

    def forward(self, idx, targets=None):
        logits = self.mlp(self.wte(idx).flatten(1))
        loss = None if targets is None else F.cross_entropy(logits, targets)
        return logits, loss


model = CharMLP()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01, betas=(0.9, 0.99), eps=1e-8)
for step in range(200):
    ix = torch.randint(len(data) - block, (24,))
    x = torch.stack([data[i : i + block] for i in ix])
    y = torch.stack([data[i + block] for i in ix])
    logits, loss = model(x, y)
    model.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step} | loss {loss.item():.4f}")
torch.save(model.state_dict(), "model.pt")
