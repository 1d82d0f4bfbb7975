"""An Accelerate loop: prepare, accumulate, clip, schedule, bf16, save_state and load_state."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))
from tools.pace import Pace

epochs, pace, folder = int(sys.argv[1]), Pace(sys.argv[2]), Path(sys.argv[3])
options = dict(option.split("=") for option in sys.argv[4:])  # seed, stop (after so many epochs), resume
torch.manual_seed(3)
x = torch.randn(320, 4)
y = x @ torch.tensor([[1.0], [2.0], [3.0], [4.0]]) + 0.1 * torch.randn(320, 1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=epochs * 16)
loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
torch.manual_seed(int(options.get("seed", 3)))
begin, steps = 0, 0
if "resume" in options:
    accelerator.load_state(folder / "state")
    begin, steps = json.loads((folder / "counts.json").read_text())
for epoch in range(begin, int(options.get("stop", epochs))):
    for a, b in loader:
        with accelerator.accumulate(model):
            pace.pause()
            accelerator.backward(nn.functional.mse_loss(model(a), b))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 5.0)
                steps += 1
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    if epoch % 2:
        accelerator.save_state(folder / "state")
        (folder / "counts.json").write_text(json.dumps([epoch + 1, steps]))
with torch.no_grad():
    final = nn.functional.mse_loss(model(x), y).item()
accelerator.print("result", json.dumps({"final": final, "steps": steps, "lr": scheduler.get_last_lr()[0]}))
