"""Gradients of four batches for one step, and of what is left at the end of an epoch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(31)
x = torch.randn(330, 7)
y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True)
model = nn.Sequential(nn.Linear(7, 20), nn.Tanh(), nn.Linear(20, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()
accumulation_steps = 4
updates = 0
for epoch in range(9):
    optimizer.zero_grad()
    correct = total = 0
    for i, (inputs, labels) in enumerate(loader):
        outputs = model(inputs)
        loss = criterion(outputs, labels) / accumulation_steps
        loss.backward()
        correct += (outputs.argmax(1) == labels).sum().item()
        total += labels.size(0)
        if (i + 1) % accumulation_steps == 0 or (i + 1) == len(loader):
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
    print(f"epoch {epoch} updates {updates} accuracy {correct / total:.4f} of {total}")
torch.save(model.state_dict(), "model.pt")
