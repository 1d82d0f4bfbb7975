"""Scripts that cannot be shared among workers: they run on one, are told why, and are never given more."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from swell.train import reporting
from swell.train.agent.saying import first_to_say
from swell.train.auto.job import ScriptJob
from swell.train.auto.run import ScriptRun, ScriptStage
from swell.train.sync.link import Link

HAND = "it draws its batches by hand, and nobody can say how far its loops or its iterators have come"
STREAM_AHEAD = "it reads batches of an iterable data set ahead of the one that it computes"
CYCLE = "it repeats its first pass with itertools.cycle, which keeps every batch of it"
CLOSURE = "it gives optimizer.step() a closure, which runs the model several times"
DISTRIBUTED = "it sets up torch.distributed with other processes by itself"
BY_HAND = "it changes its parameters by hand, without an optimizer of torch.optim"
SHARDED = "it divides its model or its optimizer among processes (FSDP, ZeroRedundancyOptimizer)"
UNDIVIDED = "what its model computes of a batch is not made of what it computes of parts of it"
SPARSE = "its gradients are sparse, and workers exchange dense ones"
NO_CALL = "it computes its batches without calling a model (an nn.Module) that could be divided"

NEXT = {
    HAND: "step in loops over ranges or lists, or with `while`, or draw batches with a DataLoader",
    STREAM_AHEAD: "draw each batch when it is computed, or use job.stream (docs/guides/streams.md)",
    CYCLE: "write `while True: yield from loader`, which also shuffles every pass anew",
    CLOSURE: "another optimizer than LBFGS can be shared",
    DISTRIBUTED: "leave ranks and world size to the variables that swell sets, as torchrun does",
    BY_HAND: "use an optimizer of torch.optim, SGD for example",
    UNDIVIDED: "let the model treat every sample by itself, along the first dimension of what it is given",
    SHARDED: "wrap the model with DistributedDataParallel, or see docs/guides/gpus.md",
    SPARSE: "take out sparse=True",
    NO_CALL: "let the forward method of an nn.Module compute the batch",
}


class Count:
    """Counts the steps of a script that runs as it is, and reports them: nobody else knows its progress."""

    def __init__(self) -> None:
        self._steps = 0
        self._pace = reporting.Pace()
        self._last_s: float | None = None

    def step(self, link: Link) -> None:
        """Report one step more."""
        now_s = time.perf_counter()
        self._steps += 1
        if self._last_s is not None:
            self._pace.add((1,), now_s - self._last_s, 0.0)
        self._last_s = now_s
        # One piece that cannot be cut: there is room for one worker.
        timing = reporting.timing(self._pace, 1, None, 1, 1)
        del timing["batch_size"]  # which is the script's own affair
        link.step = self._steps
        link.report = {"step": self._steps, "done": self._steps, "rank": 0, "world": 1, **timing}


def confine(run: ScriptRun, job: ScriptJob, reason: str) -> None:
    """Keep the job on one worker, with its checkpoints and its position as for any other."""
    job.confined = reason
    if run.leads():
        _say(run.link, reason)


def run_alone(run: ScriptRun, reason: str) -> None:
    """Go on as a plain script, on one worker; nobody but the script itself can save its state."""
    if run.job is not None:
        fail(f"{_cannot(reason)}; run it without --auto")
    if run.processes > 1:
        fail(
            f"--auto: {run.processes} processes were asked for, and their batches cannot be trained on "
            f"together, because {reason}; ask for one process, or run the script without --auto"
        )
    run.stage = ScriptStage.ALONE
    _say(run.link, reason, "; if it is interrupted it begins again, or from its own checkpoint")
    be_the_only_one(run.link)


def be_the_only_one(link: Link) -> None:
    """Become the job's single worker; the coordinator ends the others."""
    epoch = link.welcome().epoch
    while True:
        link.announce_ready(epoch)
        found = link.wait_join()
        if isinstance(found, int):
            epoch = found
        elif found.size == 1:
            link.entered(found, 0, epoch)
            return


def fail(line: str) -> NoReturn:
    """End the job with `line` as its reason, without a traceback."""
    target = os.environ.get("SWELL_ERROR_FILE")
    if target:
        Path(target).write_text(f"{line}\n")
    sys.__stderr__.write(f"{line}\n")  # type: ignore[union-attr]
    raise SystemExit(2)


def _cannot(reason: str) -> str:
    return f"--auto: this script cannot be shared among workers, because {reason}"


def _say(link: Link, reason: str, more: str = "") -> None:
    if int(link.config["minimum"]) > 1:
        fail(f"{_cannot(reason)}; run it with --workers 1, or {NEXT[reason]}")
    if first_to_say(link.directory.path, reason):  # a worker before this one may have died
        sys.__stderr__.write(f"{_cannot(reason)}; it runs on one worker{more}. To share it: {NEXT[reason]}\n")  # type: ignore[union-attr]
    link.event("confined", workers=1, reason=f"{reason}{more}")
