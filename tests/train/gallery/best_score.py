"""The best score is a number of numpy's, and the best weights are saved."""

import copy

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(6)
np.random.seed(6)
x = torch.from_numpy(np.random.randn(400, 8).astype(np.float32))
y = (
    (x[:, 0] + x[:, 1] * x[:, 2] + 0.5 * torch.from_numpy(np.random.randn(400).astype(np.float32))) > 0
).long()
train_dl = DataLoader(TensorDataset(x[:300], y[:300]), batch_size=25, shuffle=True)
val_dl = DataLoader(TensorDataset(x[300:], y[300:]), batch_size=20)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
best_score, best_epoch, best_weights = -np.inf, -1, None
scores = []
for epoch in range(16):
    model.train()
    for a, b in train_dl:
        opt.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        score = np.mean([-nn.functional.cross_entropy(model(a), b).item() for a, b in val_dl])
    scores.append(score)
    if score > best_score:
        best_score, best_epoch = score, epoch
        best_weights = copy.deepcopy(model.state_dict())
        torch.save(best_weights, "best.pth")
        print(f"epoch {epoch}: {score:.5f}, best {best_score:.5f} SAVED")
    else:
        print(f"epoch {epoch}: {score:.5f}, best {best_score:.5f} at {best_epoch}")
model.load_state_dict(best_weights)
np.savetxt("scores.txt", np.array(scores))
torch.save(model.state_dict(), "final.pth")
