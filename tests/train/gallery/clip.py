"""Two towers and a learned scale: every picture of the batch against every text (CLIP)."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
concept = torch.randn(384, 6)
images = concept @ torch.randn(6, 20) + 0.3 * torch.randn(384, 20)
texts = concept @ torch.randn(6, 14) + 0.3 * torch.randn(384, 14)
loader = DataLoader(TensorDataset(images, texts), batch_size=48, shuffle=True, drop_last=True)


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 8))
        self.text = nn.Sequential(nn.Linear(14, 32), nn.GELU(), nn.Linear(32, 8))
        self.logit_scale = nn.Parameter(torch.ones([]) * np.log(1 / 0.07))

    def forward(self, image, text):
        image_features = F.normalize(self.visual(image), dim=-1)
        text_features = F.normalize(self.text(text), dim=-1)
        logits_per_image = self.logit_scale.exp() * image_features @ text_features.t()
        return logits_per_image, logits_per_image.t()


model = CLIP()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6)
for epoch in range(18):
    for image, text in loader:
        logits_per_image, logits_per_text = model(image, text)
        labels = torch.arange(len(image))
        loss = (F.cross_entropy(logits_per_image, labels) + F.cross_entropy(logits_per_text, labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = (logits_per_image.argmax(1) == labels).float().mean().item()
    print(
        f"epoch {epoch} loss {loss.item():.4f} scale {model.logit_scale.exp().item():.4f} acc {accuracy:.3f}"
    )
torch.save(model.state_dict(), "clip.pt")
