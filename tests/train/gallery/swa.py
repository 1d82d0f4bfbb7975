"""torch's own averages of weights: AveragedModel, SWALR and update_bn at the end."""

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(13)
x = torch.randn(320, 9)
y = (x[:, :3].sum(1) * x[:, 3] > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(9, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
swa_model = AveragedModel(model)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
swa_start = 9
swa_scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)
for epoch in range(18):
    for inputs, target in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
    if epoch > swa_start:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()
    print(f"epoch {epoch} loss {loss.item():.4f} lr {optimizer.param_groups[0]['lr']:.6f}")
update_bn(loader, swa_model)
torch.save({"model": model.state_dict(), "swa": swa_model.state_dict()}, "swa.pt")
