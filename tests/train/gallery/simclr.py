"""Two views of each sample, the others of the batch as negatives (NT-Xent), after sthalles/SimCLR."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class TwoViews(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(2)
        self.x = torch.randn(320, 16, generator=g)
        self.noise = 0.4 * torch.randn(320, 2, 16, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return [self.x[i] + self.noise[i, 0], self.x[i] + self.noise[i, 1]], i


def info_nce_loss(features, batch_size, temperature=0.2):
    labels = torch.cat([torch.arange(batch_size) for _ in range(2)], dim=0)
    labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
    features = F.normalize(features, dim=1)
    similarity = features @ features.T
    mask = torch.eye(labels.shape[0], dtype=torch.bool)
    labels = labels[~mask].view(labels.shape[0], -1)
    similarity = similarity[~mask].view(labels.shape[0], -1)
    positives = similarity[labels.bool()].view(labels.shape[0], -1)
    negatives = similarity[~labels.bool()].view(similarity.shape[0], -1)
    logits = torch.cat([positives, negatives], dim=1) / temperature
    return logits, torch.zeros(logits.shape[0], dtype=torch.long)


torch.manual_seed(0)
loader = DataLoader(TwoViews(), batch_size=40, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
optimizer = torch.optim.Adam(model.parameters(), 3e-3, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(loader), eta_min=0)
n_iter = 0
for epoch in range(20):
    for images, _ in loader:
        images = torch.cat(images, dim=0)
        logits, labels = info_nce_loss(model(images), len(images) // 2)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if n_iter % 20 == 0:
            print(f"{n_iter} loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.6f}")
        n_iter += 1
    if epoch >= 10:
        scheduler.step()
torch.save(
    {"epoch": epoch, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, "simclr.pth.tar"
)
