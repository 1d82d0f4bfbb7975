"""Questions and answers, the batch's other answers as negatives (sentence-transformers' ranking loss)."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(12)


class Pairs(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(12)
        self.tokens = torch.randint(1, 40, (320, 6), generator=g)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        t = self.tokens[i]
        return {"anchor": t[:4], "positive": t[2:].flip(0)}


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.proj = nn.Embedding(40, 16), nn.Linear(16, 16)

    def forward(self, ids):
        return torch.nn.functional.normalize(self.proj(torch.tanh(self.emb(ids)).mean(1)), dim=-1)


model = Encoder()
loader = DataLoader(Pairs(), batch_size=32, shuffle=True, drop_last=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
cross_entropy = nn.CrossEntropyLoss()
step = 0
for _ in range(16):
    for batch in loader:
        scores = 20 * model(batch["anchor"]) @ model(batch["positive"]).T
        loss = cross_entropy(scores, torch.arange(len(scores)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
        step += 1
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f} lr {warmup.get_last_lr()[0]:.6f}")
torch.save(model.state_dict(), "encoder.pt")
