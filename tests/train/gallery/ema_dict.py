"""An average of the weights in a dict of tensors, applied for evaluation and put back."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class EMA:
    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.shadow, self.backup = {}, {}

    def register(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                self.shadow[name] = param.data.clone()

    def update(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                self.shadow[name] = ((1.0 - self.decay) * param.data + self.decay * self.shadow[name]).clone()

    def apply_shadow(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                self.backup[name] = param.data
                param.data = self.shadow[name]

    def restore(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                param.data = self.backup[name]
        self.backup = {}


torch.manual_seed(77)
x = torch.randn(260, 6)
y = x.sin().sum(1, keepdim=True)
train = DataLoader(TensorDataset(x[:200], y[:200]), batch_size=20, shuffle=True)
test = DataLoader(TensorDataset(x[200:], y[200:]), batch_size=60)
model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
ema = EMA(model, 0.98)
ema.register()
for epoch in range(18):
    for a, b in train:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(a), b)
        loss.backward()
        optimizer.step()
        ema.update()
    ema.apply_shadow()
    with torch.no_grad():
        score = sum(nn.functional.mse_loss(model(a), b).item() for a, b in test)
    ema.restore()
    print(f"epoch {epoch} train {loss.item():.5f} ema test {score:.5f}")
torch.save({"model": model.state_dict(), "ema": ema.shadow}, "ema.pt")
