"""An elastic Ray Train job of two to three workers; a node for the third one comes when it is asked for."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.cluster_utils import Cluster

from benchmarks.runtime.anchors.model import CHECKPOINT_EVERY, FOLDER, setup, train_batch, writer

RESIZE_INTERVAL_S = 2.0
"""How often Ray Train looks whether it can grow. Its default of 60 s has no part in the pause."""


def train(config: dict[str, Any]) -> None:
    """Train until this process is ended."""
    model, optimizer = setup()
    step = 0
    if (found := ray.train.get_checkpoint()) is not None:
        with found.as_directory() as directory:
            state = torch.load(Path(directory) / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    wrapped = ray.train.torch.prepare_model(model)
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    write = writer(f"rank{rank}")
    while True:
        train_batch(wrapped, optimizer)
        step += 1
        write(world, step)
        if step % CHECKPOINT_EVERY == 0:
            _save(rank, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})


def _save(rank: int, state: dict[str, Any]) -> None:
    """All workers report, and the first one has a checkpoint, as Ray's guide does it."""
    if rank:
        ray.train.report({})
        return
    with tempfile.TemporaryDirectory() as directory:
        torch.save(state, Path(directory) / "state.pt")
        ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(directory))


def main() -> None:
    """Run the job on a head with room for two workers; a file named `grow` adds a node with room for one."""
    head = {"num_cpus": 2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, log_to_driver=False)
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={},
        scaling_config=ray.train.ScalingConfig(
            num_workers=(2, 3), elastic_resize_monitor_interval_s=RESIZE_INTERVAL_S
        ),
        run_config=ray.train.RunConfig(
            storage_path=str(FOLDER / "storage"),
            failure_config=ray.train.FailureConfig(max_failures=3),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=1),
        ),
    )
    fitting = threading.Thread(target=trainer.fit, daemon=True)
    fitting.start()
    while not (FOLDER / "grow").exists():
        time.sleep(0.05)
    cluster.add_node(num_cpus=1)  # only the main thread may do this
    fitting.join()


if __name__ == "__main__":
    main()
