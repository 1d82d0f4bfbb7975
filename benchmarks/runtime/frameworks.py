"""What `--auto` costs on one worker: the processor's time of a batch under it against the same script alone.

    python -m benchmarks.runtime.frameworks [--rounds 8] [--only lightning_fit.py] [--json]

Each script of tests/train/plain_scripts runs twice at the same time, plainly and under `--auto`, in turns: a
block of batches of one, then a block of the other, while the first one waits (tools/blocks.py). So both
blocks of a pair see the same machine, and the ratio of their times says what `--auto` costs even if the
machine is busy. Time is that of the processor. A block is some whole epochs, because swell, like the scripts,
has work at the end of an epoch too. Each round starts both processes anew, because two processes of the same
script differ by some percent from each other for as long as they live (their memory lies elsewhere). Printed
is the median of the rounds' ratios (each the median of its pairs) with an interval that has the true median
with about 95% probability, and the verdict on the goal: `held`, `missed`, or `unclear` if the goal lies
within the interval.

The models are tiny, and every batch multiplies matrices besides, as many as make it 1.5 to 5.5 ms long, as it
was when this benchmark had wide models. Those would not do: two plain processes with the same wide model
differ by up to a tenth, because their memory lies elsewhere. What swell adds hardly depends on the length of
a batch, so the ratio does, and what is added is printed in milliseconds too, and as the number of calls of
swell's functions in a batch, which no other work on the machine changes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GOAL = 1.03
SCRIPTS = Path(__file__).parents[2] / "tests" / "train" / "plain_scripts"
START_S, BLOCK_S = 120.0, 120.0
"""A script that takes longer than this to come to its first block, or through one, hangs."""


@dataclass(frozen=True, slots=True)
class Case:
    """How one script is measured."""

    package: str
    """What it needs."""
    times: int
    """How often each batch multiplies two matrices of 256 x 256, which takes about 0.3 ms."""
    epoch: int
    """Batches in an epoch."""
    block: int
    """Epochs in a block."""
    first: int = 6
    """Epochs before the first block."""
    blocks: int = 14
    options: tuple[str, ...] = ()
    """Further arguments of the script."""

    @property
    def epochs(self) -> int:
        """All that are needed, with a block in which calls are counted."""
        return self.first + self.block * (self.blocks + 1) + 1


CASES = {
    "everyday.py": Case("torch", times=14, epoch=8, block=2, first=10, options=("mean",)),
    "gan.py": Case("torch", times=15, epoch=10, block=2),
    "accelerated.py": Case("accelerate", times=3, epoch=16, block=4),
    "lightning_fit.py": Case("lightning", times=6, epoch=8, block=2, options=("best=0",)),
    "hugging_face.py": Case("transformers", times=8, epoch=40, block=1, first=2, blocks=8),
}


class Run:
    """A script that runs, block by block."""

    def __init__(self, door: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._door = door
        self._connection: socket.socket | None = None

    def block(self, word: bytes = b"go") -> float:
        """Have the script run a block; returns what it says of it."""
        if self._connection is None:
            self._door.settimeout(START_S)
            self._connection = self._door.accept()[0]
            self._connection.settimeout(BLOCK_S)
        self._connection.sendall(word)
        return float(self._connection.recv(64))

    def finish(self) -> None:
        """Let the script run to its end."""
        if self._connection is not None:
            self._connection.close()
        self.process.wait(BLOCK_S)


@contextlib.contextmanager
def running(script: str, *, auto: bool) -> Iterator[Run]:
    """Start a script plainly or under `--auto`; it is ended with the context."""
    case = CASES[script]
    with (
        tempfile.TemporaryDirectory(prefix="swell-frameworks-") as root,
        socket.socket(socket.AF_UNIX) as door,
        (Path(root) / "log").open("w+") as log,
    ):
        output, path = Path(root) / "out", f"{root}/blocks"
        output.mkdir()
        door.bind(path)
        door.listen()
        arguments = [str(SCRIPTS / script), str(case.epochs), "0", str(output), *case.options]
        under = ["-m", "swell", "run", "--auto", "--workers", "1", "--threads", "1"] if auto else []
        env = {k: v for k, v in os.environ.items() if not k.startswith("SWELL_")}
        env |= {"OMP_NUM_THREADS": "1", "SWELL_HOME": root}
        env["PACE_BLOCKS"] = f"{case.first * case.epoch},{case.block * case.epoch},{case.times},{path}"
        process = subprocess.Popen([sys.executable, *under, *arguments], env=env, stdout=log, stderr=log)
        try:
            yield Run(door, process)
        except (OSError, ValueError) as error:
            log.seek(0)
            said = log.read()[-2000:]
            raise SystemExit(f"{script}{' --auto' if auto else ''}: {error!r}\n{said}") from error
        finally:
            process.terminate()
            process.wait()


def one_round(script: str) -> tuple[list[float], list[float], float]:
    """Seconds of a batch alone and under `--auto`, by pairs, and calls of swell's functions in a batch."""
    case = CASES[script]
    batches = case.block * case.epoch
    plain, auto = [], []
    with running(script, auto=False) as alone, running(script, auto=True) as shared:
        for number in range(case.blocks):  # which of them goes first alternates
            for run in (alone, shared) if number % 2 else (shared, alone):
                (plain if run is alone else auto).append(run.block() / batches)
        calls = shared.block(b"count") / batches
        for run in (alone, shared):
            run.finish()
    return plain, auto, calls


def interval(values: list[float]) -> tuple[float, float]:
    """An interval that has the median of what `values` were drawn from, with about 95% probability."""
    ordered, n = sorted(values), len(values)
    reach = math.ceil(0.98 * math.sqrt(n))  # half of 1.96 standard deviations of a binomial distribution
    return ordered[max(n // 2 - reach, 0)], ordered[min((n - 1) // 2 + reach, n - 1)]


def figures(rounds: list[tuple[list[float], list[float], float]]) -> dict[str, Any]:
    """What the rounds say."""
    ratios = [statistics.median(b / a for a, b in zip(plain, auto)) for plain, auto, _ in rounds]
    added = [statistics.median(b - a for a, b in zip(plain, auto)) for plain, auto, _ in rounds]
    low, high = interval(ratios)
    return {
        "plain_ms": round(statistics.median(time_s for plain, _, _ in rounds for time_s in plain) * 1e3, 3),
        "added_ms": round(statistics.median(added) * 1e3, 3),
        "swell_calls": round(rounds[-1][2], 1),
        "ratio": round(statistics.median(ratios), 3),
        "interval": [round(low, 3), round(high, 3)],
        "rounds": [round(ratio, 3) for ratio in ratios],
        "verdict": "held" if high <= GOAL else "missed" if low > GOAL else "unclear",
    }


def main() -> None:
    """Measure, and print a line for each script; the status is 1 if one misses the goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=8, help="how often both processes are started")
    parser.add_argument("--only", choices=sorted(CASES))
    parser.add_argument("--json", action="store_true", help="print one JSON object with all scripts")
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for script, case in CASES.items():
        if importlib.util.find_spec(case.package) is None or options.only not in (None, script):
            continue
        rounds = [one_round(script) for _ in range(options.rounds)]
        found[script] = out = figures(rounds)
        if not options.json:
            low, high = out["interval"]
            print(
                f"{script:18} {out['plain_ms']:7.2f} ms a batch alone, {out['added_ms']:+.3f} ms with --auto "
                f"({out['swell_calls']:g} calls): ratio {out['ratio']:.3f} ({low:.3f} to {high:.3f}, "
                f"{options.rounds} rounds): {out['verdict']}",
                flush=True,
            )
    if options.json:
        print(json.dumps({"goal": GOAL, "scripts": found}, indent=1))
    if any(out["verdict"] == "missed" for out in found.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
