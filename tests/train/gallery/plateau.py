"""ReduceLROnPlateau on the running loss of training."""

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(123)
x = torch.randn(300, 6)
y = x @ torch.randn(6, 1) + 0.5 * torch.randn(300, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=25, shuffle=True)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
optimizer = optim.SGD(model.parameters(), lr=0.2)
scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, "min", factor=0.5, patience=0, threshold=0.01)
trace = []
for epoch in range(16):
    epoch_loss = 0.0
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        epoch_loss += loss.item()
    scheduler.step(epoch_loss / len(loader))
    trace.append(optimizer.param_groups[0]["lr"])
    print(f"Epoch {epoch}: loss {epoch_loss / len(loader):.6f} lr {trace[-1]:.8f}")
torch.save({"model": model.state_dict(), "lrs": trace, "scheduler": scheduler.state_dict()}, "plateau.pt")
