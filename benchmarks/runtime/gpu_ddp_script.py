"""For torchrun, as people write it for GPUs: nccl, LOCAL_RANK, SyncBatchNorm, DistributedDataParallel, bf16.

Arguments: where rank 0 saves the weights; a form (float32, bf16, compiled); seconds to rest after a step.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

path, form, rest_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
on_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if on_gpu else "gloo")
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False
torch.manual_seed(0)
x = torch.randn(1024, 3, 16, 16)
data = TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=128, sampler=sampler, pin_memory=on_gpu)
net = nn.Sequential(
    *(nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
    *(nn.Conv2d(32, 32, 3, stride=2, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
    *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2)),
).to(device)
if on_gpu:
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
wrapped = DistributedDataParallel(net, device_ids=[local_rank] if on_gpu else None)
model = torch.compile(wrapped) if form == "compiled" else wrapped
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(20):
    sampler.set_epoch(epoch)
    total = torch.zeros(1, device=device)
    for a, b in loader:
        a, b = a.to(device, non_blocking=True), b.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=form != "float32"):
            loss = nn.functional.cross_entropy(model(a), b)
        loss.backward()
        optimizer.step()
        total += loss.detach()
        time.sleep(rest_s)
    dist.all_reduce(total)
    dist.barrier()
    if dist.get_rank() == 0:
        mean = total.item() / len(loader) / dist.get_world_size()
        print(f"epoch {epoch} loss {mean:.6f}", flush=True)
if dist.get_rank() == 0:
    torch.save({name: value.cpu() for name, value in wrapped.module.state_dict().items()}, path)
dist.barrier()
dist.destroy_process_group()
