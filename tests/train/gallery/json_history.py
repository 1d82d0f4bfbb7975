"""A history in a defaultdict of lists, written anew as JSON after each epoch; timings are left out."""

import json
from collections import defaultdict
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(171)
x = torch.randn(280, 4)
y = (x[:, :2] * x[:, 2:]).sum(1, keepdim=True)
loaders = {
    "train": DataLoader(TensorDataset(x[:220], y[:220]), batch_size=20, shuffle=True),
    "val": DataLoader(TensorDataset(x[220:], y[220:]), batch_size=30),
}
model = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
log_dir = Path("logs") / "run1"
log_dir.mkdir(parents=True, exist_ok=True)
history = defaultdict(list)
for epoch in range(16):
    for phase in ("train", "val"):
        model.train(phase == "train")
        running = 0.0
        for inputs, labels in loaders[phase]:
            optimizer.zero_grad()
            with torch.set_grad_enabled(phase == "train"):
                loss = nn.functional.mse_loss(model(inputs), labels)
                if phase == "train":
                    loss.backward()
                    optimizer.step()
            running += loss.item() * inputs.size(0)
        history[phase].append(running / len(loaders[phase].dataset))
    scheduler.step(history["val"][-1])
    history["lr"].append(optimizer.param_groups[0]["lr"])
    (log_dir / "history.json").write_text(json.dumps(history))
    print(f"{epoch} train {history['train'][-1]:.5f} val {history['val'][-1]:.5f} lr {history['lr'][-1]:.6f}")
torch.save(model.state_dict(), log_dir / "model.pt")
