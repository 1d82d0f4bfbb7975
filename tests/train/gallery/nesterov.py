"""Nesterov's momentum, a MultiStepLR, and a ResNet-like block; best accuracy kept (after pytorch-cifar)."""

import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(91)
best_acc, start_epoch = 0, 0
y = torch.randint(0, 3, (320,))
x = torch.randn(3, 10)[y] + 1.1 * torch.randn(320, 10)
trainloader = DataLoader(TensorDataset(x[:240], y[:240]), batch_size=24, shuffle=True)
testloader = DataLoader(TensorDataset(x[240:], y[240:]), batch_size=40, shuffle=False)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.a, self.b, self.out = (
            nn.Linear(i, o) for i, o in ((10, 16), (16, 16), (16, 16), (16, 3))
        )

    def forward(self, x):
        x = F.silu(self.inp(x))
        return self.out(x + self.b(F.silu(self.a(x))))


net = Residual()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[8, 13], gamma=0.1)


def train(epoch):
    net.train()
    train_loss, correct, total = 0, 0, 0
    for batch_idx, (inputs, targets) in enumerate(trainloader):
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        train_loss += loss.item()
        _, predicted = outputs.max(1)
        total += targets.size(0)
        correct += predicted.eq(targets).sum().item()
    print(f"Epoch: {epoch} Loss: {train_loss / (batch_idx + 1):.4f} | Acc: {correct}/{total}")


def test(epoch):
    global best_acc
    net.eval()
    correct = total = 0
    with torch.no_grad():
        for inputs, targets in testloader:
            predicted = net(inputs).argmax(1)
            total += targets.size(0)
            correct += predicted.eq(targets).sum().item()
    acc = 100.0 * correct / total
    if acc > best_acc:
        print(f"Saving.. {acc:.2f}")
        os.makedirs("checkpoint", exist_ok=True)
        torch.save({"net": net.state_dict(), "acc": acc, "epoch": epoch}, "./checkpoint/ckpt.pth")
        best_acc = acc


for epoch in range(start_epoch, start_epoch + 16):
    train(epoch)
    test(epoch)
    scheduler.step()
