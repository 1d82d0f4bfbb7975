"""A penalty on the gradient of the outputs by the inputs, in the same backward pass (R1)."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(29)
x = torch.randn(300, 5)
y = (x.norm(dim=1) > 2.2).to(x.dtype).unsqueeze(1)
loader = DataLoader(TensorDataset(x, y), batch_size=30, shuffle=True)
model = nn.Sequential(nn.Linear(5, 24), nn.Softplus(), nn.Linear(24, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(15):
    bce_sum, gp_sum = 0.0, 0.0
    for a, b in loader:
        a.requires_grad_(True)
        out = model(a)
        bce = nn.functional.binary_cross_entropy_with_logits(out, b)
        (grad,) = torch.autograd.grad(out.sum(), a, create_graph=True)
        gp = grad.pow(2).sum(1).mean()
        loss = bce + 0.1 * gp
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bce_sum += bce.item()
        gp_sum += gp.item()
    print(f"epoch {epoch} bce {bce_sum / len(loader):.5f} gp {gp_sum / len(loader):.5f}")
torch.save(model.state_dict(), "model.pt")
