"""A job of replicas that counts its samples: the script and what its checkpoints must say."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import torch
from benchmarks.runtime.arena import check_counts

from swell.train.state.checkpoint import list_checkpoints, load

SAMPLES, BATCH, MOST_EPOCHS = 37, 9, 13

SCRIPT = textwrap.dedent(
    f"""
    import sys, time
    from pathlib import Path
    import torch, swell
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    folder, epochs = Path(sys.argv[1]), int(sys.argv[2])

    class Model(nn.Module):
        '''Learns something, and counts each sample of each epoch in a weight of its own.'''
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 1))
            self.counts = nn.Parameter(torch.zeros({MOST_EPOCHS}, {SAMPLES}, dtype=torch.float64))
            self.register_buffer("mean", torch.zeros(5))
        def forward(self, x, epoch, index):
            self.mean.copy_(x.mean(0))
            return self.net(x), self.counts[epoch, index]

    torch.manual_seed(3)
    model = Model()
    if "plain" not in sys.argv:
        fully_shard(model.net, mesh=swell.replica_mesh("cpu"))
        fully_shard(model, mesh=swell.replica_mesh("cpu"))
    optimizer = torch.optim.SGD([
        dict(params=list(model.net.parameters()), lr=0.05, momentum=0.9),
        dict(params=[model.counts], lr=1.0),
    ])
    x = torch.randn({SAMPLES}, 5, generator=torch.Generator().manual_seed(4))
    data = [(x[i], x[i, :1].sin() + x[i, 1:2], i) for i in range({SAMPLES})]
    job = swell.elastic(model, optimizer, checkpoint_dir=folder / "saved", checkpoint_every_steps=7)
    loader = job.loader(data, batch_size={BATCH})
    for epoch in job.epochs(epochs):
        for inputs, targets, index in loader:
            for _ in range(3 if job.steps < 40 else 60):  # a slow machine must not come to the end meanwhile
                if not (folder / "hurry").exists():
                    time.sleep(0.101)
            found, counted = model(inputs, epoch, index)
            job.step(((found - targets) ** 2).mean() - counted.mean())
    job.save(wait=True)
"""
)


def newest(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = load(list_checkpoints(folder / "saved")[-1]).state
    return state


def check_every_sample_once(state: dict[str, Any], epochs: int) -> None:
    counts = state["model"]["counts"][:epochs].tolist()
    rounded = [[min((1 / BATCH, 1.0), key=lambda e: abs(e - w)) for w in row] for row in counts]
    assert torch.allclose(torch.tensor(counts), torch.tensor(rounded), atol=1e-12)
    assert check_counts(rounded, SAMPLES, BATCH) is None
