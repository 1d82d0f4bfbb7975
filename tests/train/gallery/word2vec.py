"""Skip-gram with negative sampling: sparse embeddings and SparseAdam."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

rng = np.random.default_rng(5)
corpus = (rng.zipf(1.6, 900) % 60).astype(np.int64)


class SkipGramDataset(Dataset):
    def __init__(self, corpus, window=2, negatives=4):
        self.pairs = [
            (c, corpus[j])
            for i, c in enumerate(corpus)
            for j in range(max(0, i - window), min(len(corpus), i + window + 1))
            if j != i
        ]
        counts = np.bincount(corpus, minlength=60) ** 0.75
        self.neg = np.random.default_rng(6).choice(60, (len(self.pairs), negatives), p=counts / counts.sum())

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        return self.pairs[i][0], self.pairs[i][1], self.neg[i]


class SkipGramModel(nn.Module):
    def __init__(self, size, dim):
        super().__init__()
        self.u_embeddings = nn.Embedding(size, dim, sparse=True)
        self.v_embeddings = nn.Embedding(size, dim, sparse=True)
        nn.init.uniform_(self.u_embeddings.weight, -0.5 / dim, 0.5 / dim)
        nn.init.uniform_(self.v_embeddings.weight, -0.5 / dim, 0.5 / dim)

    def forward(self, pos_u, pos_v, neg_v):
        emb_u, emb_v, emb_neg = self.u_embeddings(pos_u), self.v_embeddings(pos_v), self.v_embeddings(neg_v)
        score = -F.logsigmoid(torch.clamp((emb_u * emb_v).sum(1), max=10, min=-10))
        neg = torch.bmm(emb_neg, emb_u.unsqueeze(2)).squeeze(2)
        return torch.mean(score - F.logsigmoid(-torch.clamp(neg, max=10, min=-10)).sum(1))


torch.manual_seed(0)
loader = DataLoader(SkipGramDataset(corpus), batch_size=64, shuffle=True)
model = SkipGramModel(60, 12)
optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * len(loader))
for iteration in range(3):
    running_loss = 0.0
    for i, (pos_u, pos_v, neg_v) in enumerate(loader):
        optimizer.zero_grad()
        loss = model(pos_u, pos_v, neg_v)
        loss.backward()
        optimizer.step()
        scheduler.step()
        running_loss = running_loss * 0.9 + loss.item() * 0.1
        if i % 20 == 0:
            print(
                f"iteration {iteration} batch {i} loss {running_loss:.4f} lr {scheduler.get_last_lr()[0]:.6f}"
            )
np.save("vectors.npy", model.u_embeddings.weight.detach().numpy())
