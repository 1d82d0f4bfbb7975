"""The jobs of the soak: honest ones whose weights count their samples, and hostile ones."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.runtime.arena import check_counts

COUNTING = Path(__file__).parents[1] / "runtime" / "counting.py"
FORKS = 12
"""Processes that a fork bomb of the soak consists of."""
VARIANTS = 103
"""So often a vandal of the soak changes its directory: a run of ten minutes has some twenty of them."""

_TRAIN = """
import json, os, subprocess, sys, time
from pathlib import Path
import torch
import swell
told = Path(sys.argv[1])
directory = Path(os.environ["SWELL_JOB_DIR"]).parent.parent
model = torch.nn.Linear(2, 1)
job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=0.01))
loader = job.loader(torch.utils.data.TensorDataset(torch.randn(64, 2)), batch_size=8)
def train(epochs=1):
    for _ in job.epochs(epochs):
        for (x,) in loader:
            time.sleep(0.05)
            yield job.step(model(x).sum())
"""
HOSTILE = {
    "liar": _TRAIN
    + """
bad = [[1], "many", {"done": float("nan")}, {"step_s": -1, "local_batch": 1}, {"workers": "many"}, None]
for i, _ in enumerate(train(2)):
    for j in range(200):
        job._link.line.send({"type": "beat", "step": 0, "report": bad[(i + j) % 6]})
        job._link.line.send({"type": "event", "name": "generation", "fields": {"members": bad[j % 6]}})
""",
    "forks": _TRAIN
    + f"""
many = [subprocess.Popen(["env", "-i", "setsid", "sleep", "900", sys.argv[2]]) for _ in range({FORKS // 2})]
for _ in range({FORKS // 2}):
    if os.fork() == 0:
        os.setsid()
        time.sleep(900)
        os._exit(0)
for _ in train():
    pass
""",
    "pipe": _TRAIN
    + """
for i, _ in enumerate(train(2)):
    if i == 2 and not (directory / "output.log").is_fifo():
        (directory / "output.log").unlink(missing_ok=True)
        os.mkfifo(directory / "output.log")
""",
    "stubborn": """
import os, signal, subprocess, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleeper = subprocess.Popen(["env", "-i", "setsid", "sleep", "900", sys.argv[2]])
while True:
    sys.stdout.write("x" * 4096)
    sys.stdout.flush()
    time.sleep(0.05)
""",
    "thief": _TRAIN
    + """
home, found = directory.parent.parent, []
for path in [home / "tokens" / "admin", home / "store.db", *Path("/proc").glob("[0-9]*")]:
    try:
        if path.parent == Path("/proc"):
            path = path / "root" / str(home / "tokens" / "admin").lstrip("/")
        path.read_bytes()
        found.append(str(path))
    except OSError:
        pass
told.with_suffix(".stolen").write_text(json.dumps(found))
for _ in train():
    pass
""",
    "vandal": f"""
import os, random, sys, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from benchmarks.soak.vandal import Vandal, remove
directory = Path(os.environ["SWELL_JOB_DIR"]).parent.parent
vandal = Vandal(int(sys.argv[3]), [directory.parent, directory.parent.parent / "tokens"], int(sys.argv[4]))
for i in range({VARIANTS}):
    if i % 10 == 0:  # as many as there are would fill the disk, which is a harm of its own
        for path in directory.iterdir():
            remove(path)
    vandal.vandalise(directory)
    with Path(sys.argv[1] + ".variants").open("a") as file:
        file.write("x")
    time.sleep(0.05)
""",
    "broken": _TRAIN + "raise RuntimeError('[/b] \\x1b[31m')\n",
}


@dataclass(frozen=True, slots=True)
class Honest:
    """One honest job: what it is given, and what its weights must show."""

    name: str
    samples: int
    batch: int
    epochs: int
    options: dict[str, Any]
    args: tuple[str, ...]
    out: Path

    @classmethod
    def drawn(cls, chance: random.Random, number: int, work: Path) -> Honest:
        """A job drawn at random."""
        samples, batch = chance.choice([64, 100, 160]), chance.choice([8, 16])
        epochs = chance.choice([4, 16, 32])
        name, out = f"honest-{number}", work / f"honest-{number}.json"
        args = (
            *("--samples", samples, "--batch", batch, "--epochs", epochs, "--out", out),
            *("--pace", chance.choice([0.02, 0.05, 0.1]), "--checkpoint-every", chance.choice([3, 10])),
            *("--mode", chance.choice(["fixed", "fixed", "consistent"]), "--hurry", work / "hurry"),
        )
        options: dict[str, Any] = {"checkpoint_s": 5.0}
        if chance.random() < 0.3:
            options["max_workers"] = chance.choice([1, 2])
        return cls(name, samples, batch, epochs, options, tuple(map(str, args)), out)

    def problem(self) -> str | None:
        """What is wrong with the samples in the job's weights; None if each was used exactly once."""
        try:
            weight = json.loads(self.out.read_text())["weight"]
        except (OSError, ValueError, KeyError) as error:
            return f"no result: {error!r}"
        if len(weight) != self.epochs:
            return f"{len(weight)} epochs instead of {self.epochs}"
        return check_counts(weight, self.samples, self.batch)
