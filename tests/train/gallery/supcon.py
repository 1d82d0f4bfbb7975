"""Supervised contrastive loss over a batch, after HobbitLong/SupContrast."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class SupConLoss(nn.Module):
    def __init__(self, temperature=0.2):
        super().__init__()
        self.temperature = temperature

    def forward(self, features, labels):
        labels = labels.contiguous().view(-1, 1)
        mask = torch.eq(labels, labels.T).float()
        logits = features @ features.T / self.temperature
        logits = logits - logits.max(dim=1, keepdim=True)[0].detach()
        others = 1 - torch.eye(len(features))
        mask = mask * others
        log_prob = logits - torch.log((torch.exp(logits) * others).sum(1, keepdim=True))
        return -((mask * log_prob).sum(1) / mask.sum(1).clamp(min=1)).mean()


torch.manual_seed(8)
y = torch.randint(0, 5, (400,))
x = torch.randn(5, 12)[y] + torch.randn(400, 12)
loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
encoder, head = nn.Sequential(nn.Linear(12, 24), nn.Tanh()), nn.Linear(24, 8)
criterion = SupConLoss()
optimizer = torch.optim.SGD(
    [*encoder.parameters(), *head.parameters()], lr=0.1, momentum=0.9, weight_decay=1e-4
)
for epoch in range(1, 21):
    total, count = 0.0, 0
    for images, labels in loader:
        loss = criterion(F.normalize(head(encoder(images)), dim=1), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * labels.shape[0]
        count += labels.shape[0]
    print(f"epoch {epoch} loss {total / count:.4f}")
torch.save({"encoder": encoder.state_dict(), "head": head.state_dict()}, "supcon.pth")
