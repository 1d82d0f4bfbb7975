"""A script as torchrun wants it: whenever it is started again, it goes on from its last checkpoint."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.runtime.anchors.model import CHECKPOINT_EVERY, FOLDER, setup, train_batch, writer


def main() -> None:
    """Train until this process is ended."""
    checkpoint = FOLDER / "checkpoint.pt"
    dist.init_process_group("gloo")
    model, optimizer = setup()
    step = 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    rank, write = dist.get_rank(), writer(f"rank{dist.get_rank()}")
    while True:
        train_batch(wrapped, optimizer)
        step += 1
        write(dist.get_world_size(), step)
        if rank == 0 and step % CHECKPOINT_EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            writing = checkpoint.with_suffix(".writing")
            torch.save(state, writing)
            writing.rename(checkpoint)


if __name__ == "__main__":
    main()
