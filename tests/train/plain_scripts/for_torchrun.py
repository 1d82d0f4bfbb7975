"""Made for torchrun: `for_torchrun.py FORM RESULT STEPS`. What rank 0 sees at the end goes to RESULT.

FORM: mean (a loss that is a mean); sync-norm, sync-norm-compiled and plain-norm (batch norm over batches).
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

form, result, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
plain_python = "RANK" not in os.environ
if plain_python:
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(5)
x = torch.randn(202, 5) * 2 + 1
y = (x.cos().sum(1, keepdim=True) > 0.3).double()
data, held_out = TensorDataset(x[:162], y[:162]), TensorDataset(x[162:], y[162:])
sampler = DistributedSampler(data, shuffle=True, seed=2)
loader = DataLoader(data, batch_size=8 if form == "mean" else 32, sampler=sampler)
evaluation = DataLoader(held_out, batch_size=5, sampler=DistributedSampler(held_out, shuffle=False))
norm = nn.BatchNorm1d(16) if "norm" in form else nn.Identity()
net = nn.Sequential(nn.Linear(5, 16), norm, nn.Tanh(), nn.Linear(16, 1))
if form.startswith("sync-norm"):
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
model = DistributedDataParallel(net)
called = torch.compile(model, backend="eager") if form == "sync-norm-compiled" else model
optimizer = torch.optim.AdamW(model.parameters(), lr=0.002 * world)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01 * world, total_steps=1000)
done, epoch, rates, counts, means = 0, 0, [], [], []
while done < steps:
    sampler.set_epoch(epoch)
    model.train()
    for a, b in loader:
        time.sleep(0.005)
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(called(a), b)
        loss.backward()
        optimizer.step()
        schedule.step()
        done += 1
    model.eval()
    count, mean = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    with torch.no_grad():
        for a, b in evaluation:
            out = model(a)
            count += ((out > 0) == (b > 0.5)).sum()
            mean += nn.functional.binary_cross_entropy_with_logits(out, b) / len(evaluation)
    dist.all_reduce(count)
    dist.all_reduce(mean)
    counts.append(count.item())
    means.append(mean.item() / world)
    rates.append(schedule.get_last_lr()[0])
    epoch += 1
ranks = [torch.zeros(1) for _ in range(world)]
dist.all_gather(ranks, torch.ones(1))
if rank == 0:
    weights = [value.double().flatten().tolist() for value in model.module.state_dict().values()]
    found = {"weights": [number for one in weights for number in one], "steps": done, "world": world}
    found |= {"length": len(loader), "rates": rates, "counts": counts, "means": means, "ranks": len(ranks)}
    with open(result, "w") as file:
        json.dump(found, file)
dist.barrier()
dist.destroy_process_group()
