"""The snippets of training.md, adaptive.md, streams.md and checkpoints.md, run as one script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch")
DOCS = Path(__file__).parents[2] / "docs" / "guides"

BEFORE = """
import torch
from torch.utils.data import TensorDataset

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
x = torch.randn(512, 4, generator=torch.Generator().manual_seed(1))
train_set = valid_set = TensorDataset(x, (x.sum(1) > 0).long())
loss_fn = torch.nn.functional.cross_entropy
"""
STREAM = """
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job = swell.elastic(model, optimizer, checkpoint_dir="checkpoints")
paths = ["a.txt", "b.txt", "c.txt"]
for path in paths:
    with open(path, "w") as file:
        file.writelines(f"{i}.0\\n" for i in range(128))
parse = lambda line: torch.tensor([float(line) / 128])
loss_fn = lambda out: (out**2).mean()
"""


def fenced(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)


def indented(page: str, first: str) -> str:
    """The indented block that begins with a line."""
    found = re.search(
        rf"^    {re.escape(first)}.*\n(?:(?:    .*)?\n)+", (DOCS / page).read_text(), re.MULTILINE
    )
    assert found is not None, first
    return textwrap.dedent(found[0])


def script() -> str:
    loop, evaluation, target, *elsewhere = fenced("training.md")
    assert [block.split("(")[0] for block in elsewhere] == ["job = swell.elastic"] * 2  # run by test_by_steps
    stream = indented("streams.md", "def read(path):")
    reading = indented("checkpoints.md", "import torch, torch.distributed.checkpoint as dcp")
    saved = re.search(r'checkpoint_id="([^"]+)"', reading)
    assert saved is not None
    return "\n".join(
        [
            BEFORE,
            loop,
            evaluation,
            # The guide shows the head of the loop only.
            target.rstrip() + "\n    for x, y in loader:\n        job.step(loss_fn(model(x), y))\n",
            "assert job.loss <= 0.3, job.loss",
            indented("adaptive.md", "job = swell.elastic("),
            STREAM,
            stream,
            "job.save(wait=True)",
            "before = model.weight.detach().clone()",
            "torch.nn.init.zeros_(model.weight)",
            "import glob",
            reading.replace(f'"{saved[1]}"', "sorted(glob.glob('checkpoints/step-*'))[-1]"),
            "assert torch.equal(model.weight, before)",
            "print('all of it')",
        ]
    )


def test_the_snippets_of_the_guides_run_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script())
    env = {k: v for k, v in os.environ.items() if not k.startswith("SWELL_")} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert "all of it" in done.stdout
