"""Pairs that are alike or not, drawn by the data set, with a contrastive loss per pair."""

import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class SiamesePairs(Dataset):
    def __init__(self):
        random.seed(7)
        g = torch.Generator().manual_seed(7)
        centers = torch.randn(4, 9, generator=g)
        self.pairs = []
        for _ in range(420):
            a = random.randrange(4)
            b = a if random.random() < 0.5 else random.randrange(4)
            one, two = (centers[c] + 0.3 * torch.randn(9, generator=g) for c in (a, b))
            self.pairs.append((one, two, torch.tensor(float(a != b))))

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        return self.pairs[i]


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 20), nn.Tanh(), nn.Linear(20, 3))

    def forward(self, input1, input2):
        return self.net(input1), self.net(input2)


class ContrastiveLoss(nn.Module):
    def forward(self, output1, output2, label):
        distance = F.pairwise_distance(output1, output2, keepdim=True).squeeze(1)
        return torch.mean((1 - label) * distance.pow(2) + label * torch.clamp(2.0 - distance, min=0.0).pow(2))


torch.manual_seed(0)
loader = DataLoader(SiamesePairs(), shuffle=True, batch_size=32)
net, criterion = SiameseNetwork(), ContrastiveLoss()
optimizer = torch.optim.Adam(net.parameters(), lr=0.003)
counter, loss_history, iteration_number = [], [], 0
for epoch in range(12):
    for i, (img0, img1, label) in enumerate(loader, 0):
        optimizer.zero_grad()
        output1, output2 = net(img0, img1)
        loss = criterion(output1, output2, label)
        loss.backward()
        optimizer.step()
        if i % 7 == 0:
            print(f"Epoch number {epoch}\n Current loss {loss.item():.5f}\n")
            iteration_number += 7
            counter.append(iteration_number)
            loss_history.append(loss.item())
torch.save({"net": net.state_dict(), "counter": counter, "history": loss_history}, "siamese.pt")
