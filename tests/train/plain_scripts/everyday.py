"""Files in all the ways people write them, own checkpoints, a package beside, sums, layers unfrozen."""

import csv
import json
import logging
import os
import shutil
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))
from tools.engine import Engine
from tools.pace import WIDTH, Pace

epochs, pace, folder, reduction = int(sys.argv[1]), Pace(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
os.makedirs(folder / "run")
logging.basicConfig(filename=folder / "train.log", filemode="w", level=logging.INFO, format="%(message)s")

torch.manual_seed(3)
x = torch.randn(160, 4)
y = x @ torch.tensor([[1.0], [2.0], [3.0], [4.0]]) + 0.1 * torch.randn(160, 1)
model = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
optimizer = torch.optim.SGD(
    model.parameters(), lr=0.4 / WIDTH / (20 if reduction == "sum" else 1), momentum=0.5
)
engine = Engine(model, optimizer, nn.MSELoss(reduction=reduction))
loader = DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True)
begin, best = 0, float("inf")
if os.path.exists(folder / "last.pt"):
    saved = torch.load(folder / "last.pt")
    begin, best = saved["epoch"] + 1, saved["best"]
    model.load_state_dict(saved["model"])
with open(folder / "curve.csv", "w", newline="") as file:
    csv.writer(file).writerow(["epoch", "loss"])
model[0].requires_grad_(False)
for epoch in range(begin, epochs):
    if epoch == epochs // 16:
        model[0].requires_grad_(True)
    engine.run(loader, lambda samples: pace.pause(samples / 20))
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(x), y).item()
    logging.info("epoch %d", epoch)
    with open(folder / "curve.csv", "a", newline="") as file:
        csv.writer(file).writerow([epoch, loss])
    torch.save({"epoch": epoch, "best": best, "model": model.state_dict()}, folder / "new.pt")
    os.replace(folder / "new.pt", folder / "last.pt")
    if loss < best:
        best = loss
        with open(folder / "best.pt", "wb") as f:
            torch.save(model.state_dict(), f)
        shutil.copyfile(folder / "best.pt", folder / "copy.pt")
model.load_state_dict(torch.load(folder / "copy.pt"))
with torch.no_grad():
    final = nn.functional.mse_loss(model(x), y).item()
print(json.dumps({"final": final, "best": best, "steps": engine.steps}))
