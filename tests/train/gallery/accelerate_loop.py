"""A loop with Accelerate: prepare, accumulate, clip, gather_for_metrics."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

set_seed(3)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
x = torch.randn(300, 6)
y = (x[:, 0] * x[:, 1] > 0).long()
train = DataLoader(TensorDataset(x[:240], y[:240]), batch_size=20, shuffle=True)
test = DataLoader(TensorDataset(x[240:], y[240:]), batch_size=30)
model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30, 0.7)
model, optimizer, train, test, scheduler = accelerator.prepare(model, optimizer, train, test, scheduler)
for epoch in range(14):
    model.train()
    for a, b in train:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(a), b)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    correct = 0
    for a, b in test:
        with torch.no_grad():
            predictions = model(a).argmax(-1)
        predictions, references = accelerator.gather_for_metrics((predictions, b))
        correct += (predictions == references).sum().item()
    accelerator.print(f"epoch {epoch} correct {correct} lr {scheduler.get_last_lr()[0]:.6f}")
accelerator.wait_for_everyone()
torch.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
