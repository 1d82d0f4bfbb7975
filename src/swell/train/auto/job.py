"""The job behind an unmodified script.

`Job` runs the loop and calls the optimizer. Here the script does both, and `auto` tells the job what the
script did. The crew, generations, recovery, state and checkpoints are the same.
"""

from __future__ import annotations

import contextlib
import enum
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from swell.train import reporting
from swell.train.agent.client import JobClient
from swell.train.agent.errors import LEFT, RESPAWN
from swell.train.agent.saying import first_to_say
from swell.train.auto import held
from swell.train.auto.randomness import Randomness
from swell.train.data import plan
from swell.train.data.plan import Tree
from swell.train.job import refuse_strangers
from swell.train.learner import Learner
from swell.train.options import Options
from swell.train.replicas.group import Replica
from swell.train.reporting import Progress
from swell.train.state.keeper import Keeper
from swell.train.sync.control import STOP, Link
from swell.train.sync.level import Optimized
from swell.train.sync.memory import FlatModel
from swell.train.sync.memory import _cloned as cloned
from swell.train.sync.mesh import Header
from swell.train.sync.reducer import Reduced
from swell.train.worker import Stage, TrainingState, Worker, keeper_of

TRIES = 3
"""After so many workers in a row that could not follow, the job goes on with those it has."""
LASTING_STEPS = 50
"""A worker that has made so many steps with the others could follow."""


def give_way(
    link: Link, why: str, *, steps: int = 0, error: BaseException | None = None, counts: bool = True
) -> NoReturn:
    """End this worker, which cannot follow the others because `why`, `steps` steps into the job.

    Without `counts` another worker will be able to follow, so this one does not count.
    """
    where = _line_of(error.__traceback__) if error is not None else _present_line()
    at = f" ({where})" if where else ""
    if counts:
        say(f"worker {link.name} could not follow the others: {why}{at}")
    tries = _count(link) if counts else 0
    link.event("could_not_follow", step=steps, why=why, where=where, tries=tries)
    if tries >= TRIES:
        _confine(link, why)
    link.flush()
    os._exit(RESPAWN)


def say(line: str) -> None:
    """Tell people, past the script's own output, which only the leader's reaches."""
    with contextlib.suppress(OSError, ValueError):
        sys.__stderr__.write(f"--auto: {line}\n")  # type: ignore[union-attr]
        sys.__stderr__.flush()  # type: ignore[union-attr]


def what_ended(error: BaseException) -> str:
    """The exception with which a script ended, in one line."""
    if isinstance(error, SystemExit):
        return f"its script ended with {error.code}"
    return f"{type(error).__name__}: {error}".splitlines()[0]


def stayed(link: Link) -> None:
    """A newcomer has trained with the others for a while: those before it that could not do not count."""
    with contextlib.suppress(OSError):
        _note(link).unlink()


def _count(link: Link) -> int:
    """How many workers in a row could not follow, with this one."""
    note = _note(link)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        with note.open("a") as file:
            file.write(f"{link.name}\n")
        return len(note.read_text().splitlines())
    except OSError:
        return 1


def _confine(link: Link, why: str) -> None:
    """Have the job go on with the workers that it has."""
    with contextlib.suppress(Exception), JobClient(link.directory, wait_s=5.0) as client:
        workers = max(len([m for m in client.status()["members"] if m != link.name]), 1)
        reason = f"{TRIES} workers in a row could not follow it ({why})"
        say(f"the job goes on with {workers} {'worker' if workers == 1 else 'workers'}: {reason}")
        link.event("confined", workers=workers, reason=reason)  # may end this worker


def _line_of(trace: TracebackType | None) -> str:
    """The innermost line of the script's own code in a traceback."""
    own = [frame for frame in traceback.extract_tb(trace) if held.is_own("", frame.filename)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


def _present_line() -> str:
    frames = held.script_frames()
    return f"{Path(frames[-1].f_code.co_filename).name}:{frames[-1].f_lineno}" if frames else ""


def _note(link: Link) -> Path:
    return link.directory.path / "private" / "could-not-follow"


# ---------------------------------------------------------------------- one run of the script
# How this worker runs its script: as a part of the job, or as it is.


class ScriptStage(enum.Enum):
    """How a script is run. It begins as WATCHED, and ends as SHARED or ALONE."""

    WATCHED = "watched"
    """None of its optimizers has stepped, so nobody knows what it trains. There is no job yet."""
    FOUNDING = "founding"
    """At its first step. The job is made, and this worker becomes part of it."""
    SHARED = "shared"
    """This worker is part of the job. Its script may still have to catch up: see `ScriptJob.forwarding`."""
    ALONE = "alone"
    """The script can neither be shared among workers nor be followed: it runs as it is, without a job."""


class OpenFiles(Protocol):
    """The files that a script keeps open (`files`)."""

    def positions(self) -> dict[str, int]:
        """How long they are where the script is."""

    def arrive(self, positions: dict[str, int]) -> None:
        """The script has come to where another worker's is, whose files were so long there."""


class ScriptRun:
    """This worker's run of the script, and its job once there is one."""

    def __init__(self, link: Link, *, leads: bool, processes: int = 1) -> None:
        self.link = link
        self.processes = processes
        """For how many processes the script was made (see `processes`)."""
        self.stage = ScriptStage.WATCHED
        self.randomness = Randomness(link.name)
        self.job: ScriptJob | None = None
        """None as long as the script is watched, and if it runs alone."""
        self.left = False
        """True once this worker was told to leave, and ends its script for that."""
        self.files: OpenFiles | None = None
        self._leads = leads
        """Whether this worker's output counts before it has come to its first step."""

    @property
    def forwarding(self) -> bool:
        """Whether the script is catching up with the job."""
        return self.job is not None and self.job.forwarding

    @property
    def behind(self) -> bool:
        """Whether the script has not come to the job's position, or has none yet."""
        return not self.leads() and (self.job is None or self.job.forwarding)

    @property
    def steps(self) -> int:
        """How many steps the job has made."""
        return 0 if self.job is None else self.job.steps

    def leads(self) -> bool:
        """Whether this worker is the leader, whose output and files count."""
        if self.job is not None and self.stage is ScriptStage.SHARED:
            return self.job.is_leader and not self.job.forwarding
        return self._leads or self.stage is ScriptStage.ALONE

    def found(self, job: ScriptJob) -> None:
        """The script has come to its first step, which shows what `job` trains."""
        self.stage, self.job = ScriptStage.FOUNDING, job

    def stop_if_asked(self) -> None:
        """End a script that cannot be followed when the job is paused; it will begin again."""
        if self.link.offer(0) == STOP:
            self.left = True
            self.link.stopped()
            raise SystemExit(LEFT)


# ---------------------------------------------------------------------- the script as a worker of a job


ALONE = Reduced([], 0.0, 0.0)
"""What a step exchanged in a job of one worker."""
REPORT_S = 0.1
"""Reports are made at most so often; heartbeats carry them, and those are rarer."""


class MembersChangedError(Exception):
    """Members were lost in the middle of an exchange: this worker is in a smaller generation now."""


class Script(Protocol):
    """What the job needs to know of the script."""

    def is_at(self, state: dict[str, Any], steps: int) -> bool:
        """Whether the script is where `state` was captured, after that many steps."""

    def capture(self) -> dict[str, Any]:
        """The script's position and variables."""

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `capture` gave."""

    def drawn(self) -> int:
        """How many batches the script has drawn in the loop that it is in, for newcomers."""


class ScriptState(TrainingState):
    """The state of a job, with the script's position and variables in it."""

    def __init__(self, script: Script, learner: Learner, progress: Progress, keeper: Keeper) -> None:
        super().__init__(learner, progress, keeper)
        self._script = script
        self.later: dict[str, Any] | None = None
        """A state that this worker has received and will load once its script has come to its position."""
        self.resumed = False
        """True if this worker has begun from a checkpoint, and not from another worker's state."""

    def all(self) -> dict[str, Any]:
        """The state of any job, plus the script's position and variables."""
        if self.later is not None:
            return self.later
        return super().all() | {"script": self._script.capture()}

    def steady(self) -> dict[str, Tensor]:
        """As for any job, except for a state that is kept until the script arrives: that is freed then."""
        return super().steady() if self.later is None else {}

    def optimized(self) -> Optimized | None:
        """None: every step of the optimizer counts as one of the script's."""
        return None

    def found(self) -> int:
        """Begin without live state: from the newest checkpoint, or from what the script built."""
        self.resumed = True
        return super().found()

    def restore(self, state: dict[str, Any]) -> None:
        """Load a state now, or keep it until the script has come to its position."""
        if self._script.is_at(state["script"], int(state["steps"])):
            self.arrive(state)
        else:
            self.later = cloned(state)
            self._progress.epoch, self._progress.steps = int(state["epoch"]), int(state["steps"])

    def arrive(self, state: dict[str, Any]) -> None:
        """Load the script's part of `state`, now that the script has come to its position."""
        self.later = None
        super().restore(state)
        self._script.restore(state["script"])


class ScriptLearner(Learner):
    """What a script trains; its random numbers are the script's (see `randomness`)."""

    def begin_random(self, steps: int, worker: str | None, generation: int) -> None:
        """Leave the generators as they are."""


def averaged_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Running statistics of batch norm, of each worker's part of a batch: they are averaged.

    All other buffers are the same on all workers, and are compared (see `fingerprint`).
    """
    norms = {name: m for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    found = [(f"{name}.{key}", b) for name, norm in norms.items() for key, b in norm.named_buffers()]
    return {name.removeprefix("."): b for name, b in found if b.is_floating_point()}


class ScriptJob(Worker):
    """A job whose loop is the script's own; its state includes the script's position."""

    def __init__(
        self, script: Script, model: nn.Module, optimizer: torch.optim.Optimizer, link: Link, seed: int
    ) -> None:
        refuse_strangers(model, optimizer)
        options, progress = Options(seed=seed), Progress()
        learner = ScriptLearner(model, optimizer, options, Replica.of(link.config, link.name))
        learner.flat = FlatModel(model, averaged_buffers(model))
        keeper = keeper_of(options.checkpoints, link)
        self.script_state = ScriptState(script, learner, progress, keeper)
        super().__init__(learner, progress, self.script_state, keeper, link)
        self._line = link
        self._script = script
        self.confined = ""
        """Why this job has only one worker, or ''."""
        self.unexchanged: dict[int, tuple[int, list[Tensor]]] = {}
        """By id of an optimizer: how many parameters it has, and those that the workers do not exchange."""
        self._of_layout: tuple[FlatModel, set[int]] | None = None
        self._unreported: tuple[Reduced, int, bool, float] | None = None
        self._reported_s = 0.0
        self._arrived: int | None = None
        """The job's step when this worker came to its position, until it has stayed for a while."""

    @property
    def forwarding(self) -> bool:
        """Whether this worker's script has not yet come to the job's position."""
        return self._member.stage is Stage.REHEARSING or self.script_state.later is not None

    def arrived(self) -> None:
        """The script has come to the job's position."""
        self._arrived = self.steps

    def turn_to(self, epoch: int) -> None:
        """The job is in that pass by now; this worker's script has not come to it."""
        self._progress.epoch = epoch

    def at_epoch(self, epoch: int) -> None:
        """The script has come to a training pass."""
        self._progress.epoch = epoch
        self._line.at_epoch(epoch)

    def trains_with(self, optimizer: torch.optim.Optimizer) -> None:
        """The script has one optimizer more; `optimizer` is all of them as one."""
        self._learner.updater.optimizer = optimizer
        self.unexchanged = {}

    def begin(self) -> bool:
        """Become part of the job; False if it is already training, so that the script must catch up first."""
        welcome = self._line.welcome()
        self._progress.epoch = welcome.epoch
        if welcome.live:
            self._member.stage = Stage.REHEARSING
            return False
        return self.join()

    def join(self) -> bool:
        """Wait to become a member; False if the job is in another pass by now."""
        if self._member.join():
            return True
        self._member.turn()
        return False

    def end(self) -> None:
        """The script has come to its end."""
        self.report()
        self._member.end()

    def average(
        self,
        header: Header,
        scale: Callable[[], int],
        settle: Callable[[], None],
        check: Callable[[list[Header]], None],
        *,
        may_change: bool,
    ) -> Reduced:
        """Average gradients that all members computed of the same batch, each of its part of it (`dividing`).

        The sum is divided by `scale()`. `settle` makes up for members that are lost, before every try;
        `check` sees what all members told before anything is added.
        """
        header["candidate"] = self.offer() if may_change else 0
        flat = self._learner.flat

        def together(headers: list[Header]) -> Tree | None:
            check(headers)
            return plan.balanced(list(range(len(headers))))

        while True:
            settle()
            gradients = [p.grad for p in self.trained() if p.grad is not None]
            factor = 1.0 / scale()
            if gradients:
                torch._foreach_mul_(gradients, factor)
            if self.world == 1:
                self._crew.completed()
                return Reduced([header], 0.0, 0.0)
            header["unused"] = flat.gather(1.0 / self.world)
            generation = self._crew.mesh
            reduced = self._member.survive(
                lambda: self._crew.all_reduce(header, together, doing="a batch that all have"),
                self._crew.held_sum,
            )
            if self._crew.mesh is not generation:  # the offers belonged to the one that broke
                header["candidate"] = 0
                if reduced is not None:
                    reduced.headers = [{**h, "candidate": 0} for h in reduced.headers]
            if reduced is not None:
                break
            flat.take_back(header["unused"])
            if gradients:
                torch._foreach_mul_(gradients, 1.0 / factor)
        self._learner.adopt(reduced.headers)
        self._crew.completed()
        return reduced

    def share(self, header: Header, check: Callable[[list[Header]], None]) -> list[Header]:
        """Tell all members a few facts; returns what each told. Members that are lost are left out."""
        while self.world > 1:
            headers = self._member.survive(
                lambda: self._crew.share(header, doing="share"), self._crew.held_headers
            )
            if headers is not None:
                self._crew.completed()
                check(headers)
                return headers
        self._crew.completed()
        return [header]

    def gather(
        self, header: Header, mine: list[Tensor], check: Callable[[list[Header]], None]
    ) -> list[list[Tensor]]:
        """Give all members these tensors; returns those of each, in the order of `members`."""
        parts = self._member.survive(lambda: self._crew.gather(header, mine, check), self._crew.held_parts)
        if parts is not None or self.world == 1:
            self._crew.completed()
        if parts is None:
            raise MembersChangedError
        return parts

    @property
    def name(self) -> str:
        """This worker's name."""
        return self._line.name

    @property
    def members(self) -> tuple[str, ...]:
        """The workers of the present generation, the leader first."""
        return self._crew.mesh.members

    def trained(self) -> list[Tensor]:
        """Parameters whose gradients count: those that are exchanged, and those that were just unfrozen."""
        found = {id(p): p for p in self.parameters()}
        found |= {id(p): p for g in self.optimizer.param_groups for p in g["params"] if p.requires_grad}
        return list(found.values())

    def offer(self) -> int:
        """The number of the candidate that this worker could switch to after this step, or 0."""
        return self._member.offer()

    def end_together(self, header: Header) -> bool:
        """Whether the leader has come to the end of the script too, or is gone.

        This is a step in which nothing is added, so that members which go on find themselves in the same
        exchanges.
        """
        while self.world > 1:
            reduced = self._member.survive(
                lambda: self._crew.all_reduce(header, lambda headers: None), self._crew.held_sum
            )
            if reduced is not None:
                self._crew.completed()
                return bool(reduced.headers[0]["at"] == header["at"])
        return True

    def add_loss(self, loss: float) -> None:
        """Record the mean loss of one step's batch, for the reports."""
        self._progress.loss.add(loss)

    def stepped(self, reduced: Reduced, batch_size: int, *, divided: bool = True) -> None:
        """Record that one of the script's optimizers has stepped on a batch of that size.

        The time of a step whose batch was not `divided` says nothing about how fast these workers are, so it
        is not reported.
        """
        self._progress.steps += 1
        step_s, size = self._reporter.lap(), max(batch_size, 1)
        self._line.step = self.steps
        if divided:
            self._reporter.pace.add((self._crew.mesh.number, size), step_s, reduced.sync_s)
        self._unreported = reduced, size, divided, step_s
        now_s = time.perf_counter()
        if now_s - self._reported_s >= REPORT_S:
            self._reported_s = now_s
            self.report()

    def report(self) -> None:
        """Make the report of the last step, if there is none yet."""
        if self._unreported is None:
            return
        (reduced, size, divided, step_s), self._unreported = self._unreported, None
        report = self._reporter.report(reduced, None, step_s)
        report |= reporting.timing(self._reporter.pace, size, None, self.world, self._crew.nodes)
        report["drawn"], report["drawn_in"] = self._script.drawn(), self._progress.epoch
        if not divided:
            del report["step_s"]
        report["of"] = None  # only the script knows how long it will train
        if self.confined:  # a smallest part as large as the batch: there is room for one worker
            report["limits"]["min_local"] = size
        self._line.report = report
        if self._arrived is not None and self.world > 1 and self.steps - self._arrived >= LASTING_STEPS:
            self._arrived = None
            stayed(self._line)

    def boundary(self, agreed: int) -> None:
        """Between two steps: save if it is time, and go to another generation if all members agreed to."""
        self._saver.save_if_due([])
        if agreed:
            self._member.switch(agreed)

    def parameters(self) -> list[Tensor]:
        """The parameters that are trained."""
        return list(self._learner.flat.parameters.values())

    def parameters_by_id(self) -> set[int]:
        """The ids of the parameters that are trained: another set whenever they change."""
        if self._of_layout is None or self._of_layout[0] is not self._learner.flat:
            self._of_layout = self._learner.flat, {id(p) for p in self.parameters()}
        return self._of_layout[1]

    def lay_out(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Exchange the gradients of another choice of parameters; only in a generation of one, or none."""
        self.trains_with(optimizer)
        self._learner.model, self._learner.flat = model, FlatModel(model, averaged_buffers(model))
        self._crew.lay_out(self._learner.flat)

    @property
    def is_member(self) -> bool:
        """Whether this worker is, or was, in a generation of the job."""
        return self._crew.live

    @property
    def layout_digest(self) -> str:
        """Says which parameters this worker exchanges."""
        return self._learner.flat.layout.digest


# ---------------------------------------------------------------------- scripts that stay on one worker
# Scripts that cannot be shared among workers: they run on one, are told why, and are never given more.


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
        self._pace = reporting.StepTimes()
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
    if link.config.minimum > 1:
        fail(f"{_cannot(reason)}; run it with --workers 1, or {NEXT[reason]}")
    if first_to_say(link.directory.path, reason):  # a worker before this one may have died
        sys.__stderr__.write(f"{_cannot(reason)}; it runs on one worker{more}. To share it: {NEXT[reason]}\n")  # type: ignore[union-attr]
    link.event("confined", workers=1, reason=f"{reason}{more}")
