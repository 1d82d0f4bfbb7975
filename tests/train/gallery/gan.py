"""A generator and a discriminator, noise drawn in the loop (after pytorch/examples/dcgan)."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(999)
real_data = torch.randn(480, 2) @ torch.tensor([[0.6, 0.2], [0.0, 0.3]]) + torch.tensor([1.0, -0.5])
dataloader = DataLoader(TensorDataset(real_data), batch_size=32, shuffle=True)
netG = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
netD = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid())
criterion = nn.BCELoss()
fixed_noise = torch.randn(64, 4)
optimizerD = torch.optim.Adam(netD.parameters(), lr=0.002, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=0.002, betas=(0.5, 0.999))
for epoch in range(8):
    for i, (data,) in enumerate(dataloader):
        netD.zero_grad()
        batch_size = data.size(0)
        label = torch.full((batch_size,), 1.0)
        output = netD(data).view(-1)
        errD_real = criterion(output, label)
        errD_real.backward()
        D_x = output.mean().item()
        noise = torch.randn(batch_size, 4)
        fake = netG(noise)
        label.fill_(0.0)
        errD_fake = criterion(netD(fake.detach()).view(-1), label)
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        label.fill_(1.0)
        output = netD(fake).view(-1)
        errG = criterion(output, label)
        errG.backward()
        optimizerG.step()
        if i % 5 == 0:
            err = errD_real.item() + errD_fake.item()
            print(f"[{epoch}][{i}/{len(dataloader)}] D {err:.4f} G {errG.item():.4f} D(x) {D_x:.4f}")
with torch.no_grad():
    print("mean", " ".join(f"{v:.4f}" for v in netG(fixed_noise).mean(0).tolist()))
torch.save(netG.state_dict(), "netG.pth")
torch.save(netD.state_dict(), "netD.pth")
