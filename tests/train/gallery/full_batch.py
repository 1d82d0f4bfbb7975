"""Gradient descent on all of the data at once, without a loader (a textbook's regression)."""

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(42)
X = torch.linspace(-3, 3, 120).unsqueeze(1)
y = torch.sin(X) + 0.1 * torch.randn(120, 1)
train_split = int(0.8 * len(X))
order = torch.randperm(len(X))
X_train, y_train = X[order[:train_split]], y[order[:train_split]]
X_test, y_test = X[order[train_split:]], y[order[train_split:]]
model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
loss_fn = nn.L1Loss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
epochs = 200
for epoch in range(epochs):
    model.train()
    y_pred = model(X_train)
    loss = loss_fn(y_pred, y_train)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.inference_mode():
        test_loss = loss_fn(model(X_test), y_test)
    if epoch % 20 == 0:
        print(f"Epoch: {epoch} | Train loss: {loss:.5f} | Test loss: {test_loss:.5f}")
torch.save(obj=model.state_dict(), f="01_model.pth")
