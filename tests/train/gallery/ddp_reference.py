"""For torchrun, as larger repositories write it: no_sync, metrics of all ranks, rank 0 prints and saves."""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ACCUMULATE = 2


def setup():
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend="gloo", init_method="env://")
        dist.barrier()
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.LayerNorm(32))
        self.head = nn.Linear(32, 3)
        self.spare = nn.Linear(32, 3)  # never used: find_unused_parameters
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, x):
        return self.head(self.body(x) * self.scale)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    loss, correct, count = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    for x, y in loader:
        out = model(x)
        loss += nn.functional.cross_entropy(out, y, reduction="sum")
        correct += (out.argmax(1) == y).sum()
        count += len(y)
    for value in (loss, correct, count):
        dist.all_reduce(value, op=dist.ReduceOp.SUM)
    return (loss / count).item(), (correct / count).item()


def main():
    rank, world = setup()
    assert dist.is_initialized() and dist.get_backend() == "gloo"
    torch.manual_seed(17 + rank)
    x = torch.randn(384, 8)
    y = (x[:, 0] > x[:, 1]).long() + (x[:, 2] > 0.5).long()
    train, val = TensorDataset(x[:320], y[:320]), TensorDataset(x[320:], y[320:])
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, seed=3)
    loader = DataLoader(train, batch_size=20, sampler=sampler, drop_last=True)
    held_out = DataLoader(val, batch_size=32, sampler=DistributedSampler(val, shuffle=False))
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * world, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=14 * len(loader) // ACCUMULATE)
    best = 0.0
    for epoch in range(14):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros(2)
        for step, (a, b) in enumerate(loader):
            last = (step + 1) % ACCUMULATE == 0
            with contextlib.nullcontext() if last else model.no_sync():
                loss = nn.functional.cross_entropy(model(a), b, label_smoothing=0.05) / ACCUMULATE
                loss.backward()
            total += torch.tensor([loss.item() * ACCUMULATE, 1.0])
            if last:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        val_loss, accuracy = evaluate(model, held_out)
        everybody = [None] * world if rank == 0 else None
        dist.gather_object({"rank": rank, "norm": round(norm.item(), 3)}, everybody, dst=0)
        choice = [accuracy]
        dist.broadcast_object_list(choice, src=0)
        if rank == 0:
            mean = total[0].item() / total[1].item()
            print(f"epoch {epoch} loss {mean:.5f} val {val_loss:.5f} {choice[0]:.4f}")
            print(
                f"rate {scheduler.get_last_lr()[0]:.6f} norm {everybody[0]['norm']:.3f} of {len(everybody)}"
            )
            if accuracy >= best:
                best = accuracy
                torch.save({"model": model.module.state_dict(), "epoch": epoch}, "best.pt")
        dist.barrier()
    if rank == 0:
        torch.save(model.state_dict(), "last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
