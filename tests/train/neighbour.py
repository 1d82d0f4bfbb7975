"""A job on a shared GPU, without the GPU: computing is a sleep, slower while others compute.

    python neighbour.py GPU_FILE STEP_MS CROWDED

Each line of the output is the time at which a step ended and whether another job computed meanwhile, or the
verdict of a trial. CROWDED: a job's speed while others compute too, relative to alone.
"""

import os
import sys
import time
from pathlib import Path

from swell.train.turns import Turns, Verdict

file, step_ms, crowded = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
presence = file.parent / "computing"
presence.mkdir(exist_ok=True)
own = presence / str(os.getpid())


def compute(work_s: float) -> bool:
    met = False
    own.touch()
    while work_s > 0:
        begin_s = time.monotonic()
        time.sleep(0.001)
        others = any(path != own for path in presence.iterdir())
        met |= others
        work_s -= (time.monotonic() - begin_s) * (crowded if others else 1.0)
    own.unlink(missing_ok=True)
    return met


def say(verdict: Verdict) -> None:
    print("verdict", verdict.in_turns, verdict.worth, flush=True)


turns = Turns(file, lambda: None, say)
while True:
    turns.before_step()
    met = compute(step_ms / 1000)
    turns.after_step([{"gpu": file.name}], 8, leads=True)
    print(f"{time.monotonic():.4f} {int(met)}", flush=True)
