"""A variational autoencoder whose model draws noise, and whose loss is a sum (after pytorch/examples/vae)."""

import argparse

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()
g = torch.Generator().manual_seed(0)
basis = torch.rand(4, 20, generator=g)
data = torch.sigmoid(6 * (torch.rand(600, 4, generator=g) @ basis / 2 - 0.5))
torch.manual_seed(args.seed)
train_loader = DataLoader(TensorDataset(data[:500]), batch_size=50, shuffle=True)
test_loader = DataLoader(TensorDataset(data[500:]), batch_size=50)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(20, 24), nn.Linear(24, 4), nn.Linear(24, 4)
        self.fc3, self.fc4 = nn.Linear(4, 24), nn.Linear(24, 20)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x)
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x, reduction="sum")
    return bce - 0.1 * 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


model = VAE()
optimizer = optim.Adam(model.parameters(), lr=3e-3)
for _ in range(18):
    model.train()
    for (x,) in train_loader:
        optimizer.zero_grad()
        recon, mu, logvar = model(x)
        loss = loss_function(recon, x, mu, logvar)
        loss.backward()
        optimizer.step()
model.eval()
with torch.no_grad():
    test = sum(loss_function(*((out := model(x))[:1]), x, *out[1:]).item() for (x,) in test_loader)
torch.save(model.state_dict(), "vae.pt")
print(f"quality {test / 100:.6f}")
