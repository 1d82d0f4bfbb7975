"""Stops when the validation loss has not improved for some epochs, and restores the best weights."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class EarlyStopping:
    def __init__(self, patience=4, delta=0.0, path="checkpoint.pt"):
        self.patience, self.delta, self.path = patience, delta, path
        self.counter, self.best_score, self.early_stop = 0, None, False
        self.val_loss_min = np.inf

    def __call__(self, val_loss, model):
        score = -val_loss
        if self.best_score is None:
            self.best_score = score
            self.save_checkpoint(val_loss, model)
        elif score < self.best_score + self.delta:
            self.counter += 1
            print(f"EarlyStopping counter: {self.counter} out of {self.patience}")
            self.early_stop = self.counter >= self.patience
        else:
            self.best_score = score
            self.save_checkpoint(val_loss, model)
            self.counter = 0

    def save_checkpoint(self, val_loss, model):
        print(f"Validation loss decreased ({self.val_loss_min:.5f} --> {val_loss:.5f}).  Saving model ...")
        torch.save(model.state_dict(), self.path)
        self.val_loss_min = val_loss


torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
x = torch.randn(220, 10)
y = x[:, :1].tanh() + 0.5 * torch.randn(220, 1)
train_loader = DataLoader(TensorDataset(x[:100], y[:100]), batch_size=20, shuffle=True)
valid_loader = DataLoader(TensorDataset(x[100:], y[100:]), batch_size=40)
model = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
early_stopping = EarlyStopping()
for epoch in range(1, 80):
    train_losses, valid_losses = [], []
    model.train()
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(data), target)
        loss.backward()
        optimizer.step()
        train_losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        for data, target in valid_loader:
            valid_losses.append(nn.functional.mse_loss(model(data), target).item())
    print(f"[{epoch}] train_loss: {np.average(train_losses):.5f} valid_loss: {np.average(valid_losses):.5f}")
    early_stopping(np.average(valid_losses), model)
    if early_stopping.early_stop:
        print("Early stopping")
        break
model.load_state_dict(torch.load("checkpoint.pt"))
torch.save(model.state_dict(), "final.pt")
