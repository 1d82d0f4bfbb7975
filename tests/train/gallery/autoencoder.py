"""A denoising autoencoder, with the noise made by the loop and the mean loss over batches printed."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Waves(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(1)
        f, p = torch.rand(n, 1, generator=g) * 3 + 1, torch.rand(n, 1, generator=g) * 6.28
        self.data = torch.sin(f * torch.linspace(0, 3.14, 24) + p)

    def __len__(self):
        return self.data.shape[0]

    def __getitem__(self, i):
        return self.data[i]


torch.manual_seed(0)
loader = DataLoader(Waves(400), batch_size=40, shuffle=True)
encoder = nn.Sequential(nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 5))
decoder = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 24))
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=5e-3, weight_decay=1e-5)
loss_fn = nn.MSELoss()
for epoch in range(18):
    losses = []
    for x in loader:
        noisy = x + 0.1 * torch.randn_like(x)
        loss = loss_fn(decoder(encoder(noisy)), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"epoch [{epoch + 1}/18], loss:{sum(losses) / len(losses):.5f}")
torch.save({"encoder": encoder.state_dict(), "decoder": decoder.state_dict()}, "autoencoder.pth")
