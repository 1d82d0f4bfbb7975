"""Saves a checkpoint each epoch, and goes on from it when there is one (after pytorch/examples/imagenet)."""

import os
import shutil

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class AverageMeter:
    def __init__(self, name):
        self.name = name
        self.reset()

    def reset(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


def save_checkpoint(state, is_best, filename="checkpoint.pth.tar"):
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, "model_best.pth.tar")


def main():
    torch.manual_seed(181)
    x = torch.randn(300, 6)
    y = (x[:, 0] > x[:, 1] + 0.3 * torch.randn(300)).long()
    train = DataLoader(TensorDataset(x[:240], y[:240]), batch_size=24, shuffle=True)
    val = DataLoader(TensorDataset(x[240:], y[240:]), batch_size=60)
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 6, 0.3)
    start_epoch, best = 0, 0.0
    if os.path.isfile("checkpoint.pth.tar"):
        checkpoint = torch.load("checkpoint.pth.tar")
        start_epoch, best = checkpoint["epoch"], checkpoint["best"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        print(f"=> loaded checkpoint (epoch {start_epoch})")
    losses = AverageMeter("Loss")
    for epoch in range(start_epoch, 16):
        losses.reset()
        model.train()
        for a, b in train:
            output = model(a)
            loss = nn.functional.cross_entropy(output, b)
            losses.update(loss.item(), a.size(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = sum((model(a).argmax(1) == b).sum().item() for a, b in val) / 60
        scheduler.step()
        is_best, best = accuracy > best, max(accuracy, best)
        print(f"Epoch: [{epoch}] Loss {losses.avg:.4f} count {losses.count} Acc {accuracy:.3f}")
        state = {"epoch": epoch + 1, "state_dict": model.state_dict(), "best": best}
        state |= {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        save_checkpoint(state, is_best)


if __name__ == "__main__":
    main()
