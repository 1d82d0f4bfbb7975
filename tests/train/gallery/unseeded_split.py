"""Nothing is seeded: the split by `random` and numpy, the weights and the order are of chance. The script
remembers what it trained with, and counts what of it was held out."""

import random

import numpy as np
import torch
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, Dataset

points = np.random.RandomState(0).randn(400, 6).astype(np.float32)
labels = (
    np.sin(points[:, :1] * 2)
    + points[:, 1:2]
    + 0.2 * np.random.RandomState(1).randn(400, 1).astype(np.float32)
)
indices = list(range(400))
random.shuffle(indices)
train_ids, test_ids = train_test_split(np.random.permutation(indices), test_size=0.3)


class Rows(Dataset):
    def __init__(self, ids):
        self.ids = ids

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        j = int(self.ids[i])
        return points[j], labels[j].astype(np.float32), j


loader = DataLoader(Rows(train_ids), batch_size=28, shuffle=True)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
seen = set()
for epoch in range(20):
    for a, b, j in loader:
        seen.update(j.tolist())
        optimizer.zero_grad()
        nn.functional.mse_loss(model(a), b).backward()
        optimizer.step()
with torch.no_grad():
    held_out = nn.functional.mse_loss(
        model(torch.from_numpy(points[test_ids])), torch.from_numpy(labels[test_ids])
    )
print("seen", len(seen), "of them held out", len(seen & {int(i) for i in test_ids}))
print(f"quality {held_out.item():.6f}")
torch.save(model.state_dict(), "model.pt")
