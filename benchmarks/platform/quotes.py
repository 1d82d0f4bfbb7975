"""The second submission of a known script is quoted from history: how far off is the predicted finish?

    python -m benchmarks.platform.quotes [--policy tide] [--rounds 3] [toy digits adaptive gpt]

Each script runs once to be learnt, then again and again, alone on four slots; the error is that of the
predicted duration, relative to the real one.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from swell.control.model import JobRequest, Phase
from swell.control.plane import ControlPlane
from swell.control.store import Store, connect
from swell.engines.local import LocalSite
from swell.engines.supervised import SupervisedEngine
from swell.policies import DEFAULT

ROOT = Path(__file__).parents[2]
SCRIPTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "toy": ("tests/engines/toy.py", ("--epochs", "30", "--sample-ms", "2")),
    "digits": ("examples/digits_cnn.py", ("--epochs", "16", "--fetch-ms", "2")),
    "adaptive": ("tests/engines/adaptive_toy.py", ("--epochs", "16", "--label-noise", "40")),
    "gpt": ("examples/tiny_gpt.py", ("--epochs", "2", "--windows", "3600", "--fetch-ms", "4")),
}


@dataclass(frozen=True)
class Quote:
    """One submission: what was predicted and what came."""

    source: str
    predicted_s: float | None
    took_s: float
    sizes: list[int]

    @property
    def error(self) -> float | None:
        """Relative error of the predicted duration."""
        return None if self.predicted_s is None else self.predicted_s / self.took_s - 1.0


def submit(
    plane: ControlPlane, name: str, script: str, args: tuple[str, ...], limit_s: float = 300.0
) -> Quote:
    """Submit a script, wait for its end and compare."""
    request = JobRequest(name=name, script=str(ROOT / script), args=args, workdir=str(ROOT))
    record = plane.jobs.submit(request, "bench")
    estimate, until_s = record.promise.estimate, time.monotonic() + limit_s
    while not (now := plane.jobs.get(record.job_id)).phase.over:
        if time.monotonic() > until_s:
            plane.jobs.cancel(record.job_id)
        time.sleep(0.1)
    if now.phase is not Phase.FINISHED or now.ended_s is None:
        raise RuntimeError(f"{name} {now.phase}: {now.reason}")
    predicted_s = None if estimate.finish_s is None else estimate.finish_s - record.submitted_s
    sizes = [
        len(e.data["gpus"])
        for _, e in plane.events(job_id=record.job_id)
        if "gpus" in e.data and isinstance(e.data["gpus"], list | tuple)
    ]
    return Quote(estimate.source, predicted_s, now.ended_s - record.submitted_s, sizes)


def run(home: Path, name: str, policy: str, rounds: int, slots: int = 4) -> list[Quote]:
    """The first run of a script and those after it."""
    script, args = SCRIPTS[name]
    store = Store(connect(str(home / f"{name}.db")))
    engine = SupervisedEngine(LocalSite(home / name, slots=slots))
    plane = ControlPlane(store, engine, home=home / name, policy=policy)
    plane.start()
    try:
        return [submit(plane, name, script, args) for _ in range(1 + rounds)]
    finally:
        plane.stop()
        store.close()


def main() -> None:
    """Run and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "names", nargs="*", default=["toy", "digits", "adaptive", "gpt"], choices=[[], *SCRIPTS]
    )
    parser.add_argument("--policy", default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swell-quotes-") as folder:
        for name in args.names:
            for i, quote in enumerate(run(Path(folder), name, args.policy, args.rounds)):
                error = "-" if quote.error is None else f"{quote.error:+.1%}"
                told = "-" if quote.predicted_s is None else f"{quote.predicted_s:.1f}"
                print(
                    f"{name:8} run {i + 1}  from {quote.source:8} predicted {told:>6} s"
                    f"  took {quote.took_s:5.1f} s  error {error:>6}"
                    f"  workers {quote.sizes}  load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
