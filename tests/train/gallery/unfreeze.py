"""A pretrained body frozen for the first epochs, then unfrozen with a smaller rate (transfer learning)."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(360, 12)
y = (x[:, :4].sum(1) > x[:, 4:8].sum(1)).long()
train = DataLoader(TensorDataset(x[:300], y[:300]), batch_size=30, shuffle=True)
val = DataLoader(TensorDataset(x[300:], y[300:]), batch_size=60)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU())
        self.fc = nn.Linear(16, 2)

    def forward(self, x):
        return self.fc(self.backbone(x))


model = Net()
for param in model.backbone.parameters():
    param.requires_grad = False
optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.05, momentum=0.9)
for epoch in range(18):
    if epoch == 6:
        for param in model.backbone.parameters():
            param.requires_grad = True
        optimizer.add_param_group({"params": model.backbone.parameters(), "lr": 0.02})
    model.train()
    for a, b in train:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(a), b)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        correct = sum((model(a).argmax(1) == b).sum().item() for a, b in val)
    print(f"epoch {epoch} loss {loss.item():.4f} correct {correct}")
torch.save(model.state_dict(), "model.pt")
