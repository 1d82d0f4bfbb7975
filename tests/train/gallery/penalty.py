"""The sum of the errors plus a penalty on the weights, in one loss."""

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(9)
x = torch.randn(240, 5)
true_w = torch.tensor([[2.0], [-3.4], [0.0], [1.0], [0.5]])
y = x @ true_w + 4.2 + 0.1 * torch.randn(240, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True)
net = torch.nn.Linear(5, 1)
trainer = torch.optim.SGD(net.parameters(), lr=0.002)
lambd, l1 = 3.0, 0.5
for epoch in range(14):
    total = 0.0
    for X, Y in loader:
        error = ((net(X) - Y) ** 2).sum()
        loss = error + lambd * net.weight.pow(2).sum() + l1 * sum(p.abs().sum() for p in net.parameters())
        trainer.zero_grad()
        loss.backward()
        trainer.step()
        total += loss.item()
    print(f"epoch {epoch}, loss {total / len(loader):.6f}, norm {net.weight.norm().item():.6f}")
torch.save(net.state_dict(), "penalty.pt")
