"""The job behind an unmodified script.

`Job` runs the loop and calls the optimizer. Here the script does both, and `auto` tells the job what the
script did. The crew, generations, recovery, state and checkpoints are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from swell.train import checks, reporting
from swell.train.agent.errors import OutOfStep, PeerLost
from swell.train.auto.giving_way import LASTING_STEPS, stayed
from swell.train.data import plan
from swell.train.data.plan import Tree
from swell.train.learner import Learner
from swell.train.member import Stage
from swell.train.options import Options
from swell.train.progress import Progress
from swell.train.replicas.group import Replica
from swell.train.state.keeper import Keeper
from swell.train.sync.flat import FlatModel
from swell.train.sync.level import Optimized
from swell.train.sync.link import Link
from swell.train.sync.mesh import Header
from swell.train.sync.reducer import Reduced
from swell.train.sync.transfer import _cloned as cloned
from swell.train.travelling import TrainingState
from swell.train.worker import Worker, keeper_of

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
        checks.optimizer(model, optimizer)
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
            try:
                reduced = self._crew.all_reduce(header, together, doing="a batch that all have")
            except (PeerLost, OutOfStep) as error:
                header["candidate"] = 0  # the offer belonged to the generation that broke
                if not self._member.recover(error):
                    flat.take_back(header["unused"])
                    if gradients:
                        torch._foreach_mul_(gradients, 1.0 / factor)
                    continue
                assert self._crew.reducer.result is not None
                reduced = self._crew.reducer.result
                reduced.headers = [{**h, "candidate": 0} for h in reduced.headers]
            break
        self._learner.adopt(reduced.headers)
        self._crew.completed()
        return reduced

    def share(self, header: Header, check: Callable[[list[Header]], None]) -> list[Header]:
        """Tell all members a few facts; returns what each told. Members that are lost are left out."""
        while self.world > 1:
            try:
                headers = self._crew.share(header, doing="share")
            except (PeerLost, OutOfStep) as error:
                if not self._member.recover(error):
                    continue
                headers = self._crew.held_headers()
            self._crew.completed()
            check(headers)
            return headers
        self._crew.completed()
        return [header]

    def gather(
        self, header: Header, mine: list[Tensor], check: Callable[[list[Header]], None]
    ) -> list[list[Tensor]]:
        """Give all members these tensors; returns those of each, in the order of `members`."""
        try:
            parts = self._crew.gather(header, mine, check)
        except (PeerLost, OutOfStep) as error:
            if not self._member.recover(error):
                if self.world == 1:
                    self._crew.completed()
                raise MembersChangedError from None
            parts = self._crew.held_parts()
        self._crew.completed()
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
            try:
                headers = self._crew.all_reduce(header, lambda headers: None).headers
            except (PeerLost, OutOfStep) as error:
                if not self._member.recover(error):
                    continue
                assert self._crew.reducer.result is not None
                headers = self._crew.reducer.result.headers
            self._crew.completed()
            return bool(headers[0]["at"] == header["at"])
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
