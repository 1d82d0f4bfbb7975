"""A replica of torchft with the small model: after each committed step it writes who took part."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from benchmarks.runtime.anchors.model import setup, train_batch, writer


def manage(model: nn.Module, optimizer: torch.optim.Optimizer) -> Manager:
    """A manager of this replica, which consists of one process. All other settings are torchft's own."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=2,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        lighthouse_addr=os.environ["LIGHTHOUSE"],
        replica_id=os.environ["REPLICA"],
    )
    manager.store_of_the_replica = store  # it must live as long as the manager
    return manager


def main() -> None:
    """Train until this process is ended."""
    model, plain = setup()
    manager = manage(model, plain)
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, plain)
    write = writer(os.environ["REPLICA"])
    while True:
        before = manager.current_step()
        train_batch(wrapped, optimizer)
        if manager.current_step() > before:
            write(manager.num_participants(), manager.current_step())


if __name__ == "__main__":
    main()
