"""An Accelerate loop: prepare, accumulate, clip, schedule, bf16, save_state and load_state."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))
from tools.pace import WIDTH, Pace

epochs, pace, folder = int(sys.argv[1]), Pace(sys.argv[2]), Path(sys.argv[3])
options = dict(option.split("=") for option in sys.argv[4:])  # stop (after so many epochs), resume
torch.manual_seed(3)
x = torch.randn(320, 4)
y = x @ torch.tensor([[1.0], [2.0], [3.0], [4.0]]) + 0.1 * torch.randn(320, 1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
model = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.4 / WIDTH, momentum=0.5)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=epochs * 16)
loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
steps = begin = 0
if "resume" in options:
    newest = max(folder.glob("state-*"), key=lambda path: int(path.name.removeprefix("state-")))
    accelerator.load_state(newest)
    begin = int(newest.name.removeprefix("state-"))
for epoch in range(begin, int(options.get("stop", epochs))):
    for a, b in loader:
        with accelerator.accumulate(model):
            pace.pause(len(a) / 10)
            accelerator.backward(nn.functional.mse_loss(model(a), b))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 5.0)
                steps += 1
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.save_state(folder / f"state-{epoch + 1}")
with torch.no_grad():
    final = nn.functional.mse_loss(model(x), y).item()
accelerator.print("result", json.dumps({"final": final, "steps": steps, "lr": scheduler.get_last_lr()[0]}))
