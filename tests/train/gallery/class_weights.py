"""Tagging: class weights, ignored positions and label smoothing in one cross-entropy."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(151)
words = torch.randint(0, 25, (240, 9))
tags = (words % 4 + (words.roll(1, 1) > 12).long()) % 4
lengths = torch.randint(2, 10, (240, 1))
tags[torch.arange(9).expand(240, 9) >= lengths] = -100
loader = DataLoader(TensorDataset(words, tags), batch_size=24, shuffle=True)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.conv, self.out = (
            nn.Embedding(25, 12),
            nn.Conv1d(12, 16, 3, padding=1),
            nn.Linear(16, 4),
        )

    def forward(self, words):
        return self.out(torch.relu(self.conv(self.emb(words).transpose(1, 2))).transpose(1, 2))


model = Tagger()
weight = torch.tensor([0.5, 1.0, 2.0, 4.0])
criterion = nn.CrossEntropyLoss(weight=weight, ignore_index=-100, label_smoothing=0.1)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(15):
    total = 0.0
    for a, b in loader:
        optimizer.zero_grad()
        loss = criterion(model(a).reshape(-1, 4), b.reshape(-1))
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch} loss {total / len(loader):.5f}")
torch.save(model.state_dict(), "tagger.pt")
