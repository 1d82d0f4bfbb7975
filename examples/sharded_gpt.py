"""The GPT of tiny_gpt.py, shared by the workers of a replica: for models that do not fit one GPU.

    python examples/sharded_gpt.py
    swell run --replica 2 --workers 2:4 --start 2 --name big examples/sharded_gpt.py
    swell resize big 4        (a second replica)

Each worker holds its part of every block; torch gathers a block's weights just before they are needed. Only
the lines marked `sharded` differ from a script for whole models.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from tiny_gpt import GPT, Windows, documentation
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import swell


def main() -> None:
    parser = argparse.ArgumentParser(description="A character-level GPT, sharded with FSDP2.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="of a step, over all workers")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--windows", type=int, default=6000, help="pieces of text in one epoch")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    text = documentation()
    cut = len(text) * 9 // 10
    model = GPT(64, args.width, args.layers).to(args.device)
    mesh = swell.replica_mesh(args.device)  # sharded: the workers of this replica
    for block in model.blocks:  # sharded: block by block, so that only one is whole at a time
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)  # sharded: and the rest; the optimizer comes after this
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    job = swell.elastic(model, optimizer, clip_norm=1.0)
    train_loader = job.loader(Windows(text[:cut], 64, args.windows), batch_size=args.batch_size)
    valid_loader = job.loader(Windows(text[cut:], 64, 512), batch_size=64, train=False)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x.to(args.device)).flatten(0, 1), y.to(args.device).flatten())

    loss = float("nan")
    for epoch in job.epochs(args.epochs):
        for x, y in train_loader:
            job.step(loss_of(x, y))
        total = samples = 0.0
        with torch.no_grad():
            for x, y in valid_loader:  # every worker of a replica gets as many batches
                total += loss_of(x, y).item() * len(x)
                samples += len(x)
        loss = job.mean(total / samples, weight=samples)
        if job.is_leader:
            print(f"epoch {epoch + 1}  workers {job.world}  validation loss {loss:.4f}", flush=True)
    if job.is_leader:
        print(f"final validation loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
