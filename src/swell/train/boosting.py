"""Elastic XGBoost: data-parallel boosting whose workers come, go and die between two rounds.

Each generation has a collective of XGBoost's own (rabit), with its tracker in the leader. At the end of every
round all members exchange one small message over swell's mesh: whether a candidate is ready. If all name the
same one, they leave the collective together and enter the next generation with the model that they hold in
memory; newcomers get it from a member. If a member dies, the survivors' round fails, they agree on the newest
completed round, and go on from its model. Each worker then loads its new part of the data.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import xgboost
from xgboost import collective
from xgboost.core import XGBoostError
from xgboost.tracker import RabitTracker

from swell.train.agent.errors import LEFT, PeerLost, UsageError
from swell.train.agent.jobdir import JobDirectory, own_host
from swell.train.agent.lines import Pace
from swell.train.agent.regular import replace_synced
from swell.train.sync.control import STOP, Link
from swell.train.sync.mesh import ENTER, READY, STATE, Mesh, solo

log = logging.getLogger(__name__)

Load = Callable[[int, int], xgboost.DMatrix]
"""Loads one worker's part of the data, given its rank and the number of workers."""

CHECKPOINT = "xgboost.ubj"
BOOTSTRAP_S = 60
"""Longest that the members of a generation may take to form XGBoost's collective."""
NEWS_S = 3.0
"""After a round failed: how long the death of a member that explains it may take to be seen."""
FINISHED = 0
"""In place of a candidate's number: all rounds are done."""


def train(
    params: Mapping[str, Any],
    load: Load,
    num_boost_round: int = 10,
    *,
    evals: Mapping[str, Load] | None = None,
    early_stopping_rounds: int | None = None,
    maximize: bool = False,
    verbose_eval: int = 0,
    obj: Any = None,
    custom_metric: Any = None,
) -> xgboost.Booster:
    """Train as `xgboost.train` does, on as many workers as the job has; what follows runs once.

    `load(rank, size)` returns this worker's part of the data; it is called again whenever the workers change.
    `evals`: further such functions by name, whose metrics are reported; the last one decides early stopping.
    `verbose_eval`: print the metrics after every so many rounds. Only the leader returns from this function.
    """
    if num_boost_round < 1:
        raise UsageError(f"num_boost_round: got {num_boost_round}, must be at least 1")
    if early_stopping_rounds is not None and not evals:
        raise UsageError("early_stopping_rounds: needs evals, such as evals={'valid': load_valid}")
    extra = {"obj": obj, "feval": custom_metric, "patience": early_stopping_rounds, "maximize": maximize}
    return _Training(dict(params), load, num_boost_round, dict(evals or {}), verbose_eval, extra).run()


class _Training:
    """One worker's part in the training."""

    def __init__(
        self,
        params: dict[str, Any],
        load: Load,
        rounds: int,
        evals: dict[str, Load],
        verbose: int,
        extra: dict[str, Any],
    ) -> None:
        self._params, self._load, self._rounds, self._evals = params, load, rounds, evals
        self._verbose, self._extra = verbose, extra
        self._link: Link | None = None
        self._mesh: Mesh = solo()
        self._booster: xgboost.Booster | None = None
        self._raw = b""
        """The model as the present generation began with it; empty before the first round."""
        self._live = False
        """True once this worker holds the job's state."""
        self._pause: tuple[str, float] | None = None
        """The event (switch or recovery) that this worker is in, and when it began."""
        self._every_s, self._saved_s = 60.0, time.monotonic()
        self._state: Path | None = None
        self._pace = Pace()

    # ------------------------------------------------------------------ the story

    def run(self) -> xgboost.Booster:
        """Boost to the last round, through all generations; returns on the leader only."""
        self._join()
        while True:
            try:
                with self._collective():
                    outcome = self._generation()
            except (XGBoostError, PeerLost) as error:
                self._recover(error)
                continue
            if outcome == FINISHED:
                return self._end()
            self._switch(outcome)

    def _generation(self) -> int:
        """Boost with the present members; the number of the candidate they agreed on, STOP, or FINISHED."""
        mesh = self._mesh
        data = self._load(mesh.rank, mesh.size)
        watched = [(part(mesh.rank, mesh.size), name) for name, part in self._evals.items()]
        booster = xgboost.Booster(self._params, [data, *(part for part, _ in watched)])
        if self._raw:
            booster.load_model(bytearray(self._raw))
            booster.set_param(self._params)
        self._booster = booster
        while booster.num_boosted_rounds() < self._rounds:
            begin = time.perf_counter()
            i = booster.num_boosted_rounds()
            booster.update(data, i, fobj=self._extra["obj"])
            metrics = self._evaluate(booster, watched, i)
            offered = self._link.offer(0) if self._link is not None else 0
            headers = mesh.exchange(i + 1, READY, {"what": "round", "candidate": offered})
            self._report(i + 1, time.perf_counter() - begin, metrics)
            over = self._enough(booster, metrics, i)
            if over or i + 1 == self._rounds:
                break
            if offered and all(header["candidate"] == offered for header in headers):
                return offered
            if offered and self._link is not None:
                self._link.release()
            self._save_if_due(booster)
        return FINISHED

    def _evaluate(
        self, booster: xgboost.Booster, watched: Sequence[tuple[xgboost.DMatrix, str]], i: int
    ) -> dict[str, float]:
        if not watched:
            return {}
        line = booster.eval_set(watched, i, feval=self._extra["feval"])
        if self._verbose and self._mesh.rank == 0 and i % self._verbose == 0:
            print(line, flush=True)  # noqa: T201 - as xgboost does
        pairs = (word.rpartition(":") for word in line.split()[1:])
        return {name: float(value) for name, _, value in pairs}

    def _enough(self, booster: xgboost.Booster, metrics: dict[str, float], i: int) -> bool:
        """Early stopping. The best round is kept in the model's attributes, so it travels with the model."""
        patience = self._extra["patience"]
        if patience is None:
            return False
        score = list(metrics.values())[-1]
        best = booster.attr("best_score")
        better = best is None or (score > float(best) if self._extra["maximize"] else score < float(best))
        if better:
            booster.set_attr(best_score=repr(score), best_iteration=str(i))
        return i - int(booster.attr("best_iteration") or i) >= patience

    # ------------------------------------------------------------------ generations

    def _join(self) -> None:
        """Become a member of the job; without swell around it, the script is its only worker."""
        directory, worker = os.environ.get("SWELL_JOB_DIR"), os.environ.get("SWELL_WORKER")
        if not directory or not worker:
            return
        self._link = link = Link(JobDirectory(Path(directory)), worker)
        self._every_s = 60.0 if link.config.checkpoint_s is None else link.config.checkpoint_s
        self._state = Path(link.config.checkpoints or Path(directory, "checkpoints"))
        link.welcome()
        link.announce_ready(0)
        while True:
            mesh = link.wait_join()
            assert isinstance(mesh, Mesh), "a job without epochs never turns"
            try:
                self._enter(mesh)
                return
            except PeerLost:
                mesh.close()
                link.release()

    def _enter(self, mesh: Mesh) -> None:
        """Begin a generation: agree on the newest model, and give it to those who lack it."""
        assert self._link is not None
        if self._booster is not None:
            self._raw = bytes(self._booster.save_raw("ubj"))
        mine = _rounds_in(self._raw) if self._live else -1
        headers = mesh.exchange(0, ENTER, {"what": "enter", "round": mine})
        self._link.hold(mesh.number)
        rounds = [int(header["round"]) for header in headers]
        source = rounds.index(max(rounds))
        if max(rounds) < 0 and mesh.rank == 0:
            self._raw = self._saved()  # nobody holds any state: go on from the disk, or begin
        lacking = [rank for rank, reached in enumerate(rounds) if rank != source and reached < rounds[source]]
        if max(rounds) < 0:
            lacking = list(range(1, mesh.size))
        size = len(self._raw) if mesh.rank == source else 0
        size = int(mesh.exchange(0, STATE, {"what": "size", "bytes": size})[source]["bytes"])
        if size and lacking:
            buffer = bytearray(size)
            payloads = {rank: [memoryview(self._raw)] for rank in lacking} if mesh.rank == source else {}
            sinks = {source: [memoryview(buffer)]} if mesh.rank in lacking else {}
            mesh.exchange(1, STATE, {"what": "model"}, payloads, sinks)
            if mesh.rank in lacking:
                self._raw = bytes(buffer)
        self._mesh.close()
        self._mesh, self._live, self._booster = mesh, True, None
        self._link.entered(mesh, _rounds_in(self._raw), 0)

    def _switch(self, number: int) -> None:
        """Enter the candidate on which all members agreed at the end of a round, or leave."""
        assert self._link is not None
        self._pause = ("switch", time.perf_counter())
        if number == STOP:
            self._stop()
        try:
            mesh = self._link.take(number)
            if mesh is None:
                self._link.leaving(number)
                self._leave()
            self._enter(mesh)
        except PeerLost as error:
            self._recover(error)

    def _recover(self, error: Exception) -> None:
        """Go on with the survivors after a death; raises `error` if nobody died."""
        if self._link is None or not (isinstance(error, PeerLost) or self._somebody_is_gone()):
            raise error
        self._pause = ("recovery", time.perf_counter())
        while True:
            reached = -1 if self._booster is None else self._booster.num_boosted_rounds()
            self._mesh.abandon()
            mesh = self._link.wait_recovery(self._mesh, max(reached, _rounds_in(self._raw)))
            with contextlib.suppress(PeerLost):
                self._enter(mesh)
                return

    def _somebody_is_gone(self) -> bool:
        until_s = time.monotonic() + (NEWS_S if self._mesh.size > 1 else 0.0)
        while time.monotonic() < until_s:
            try:
                self._mesh.look()
            except PeerLost:
                return True
            time.sleep(0.02)
        return False

    @contextlib.contextmanager
    def _collective(self) -> Iterator[None]:
        """XGBoost's own collective among the members; a worker that is alone needs none."""
        mesh, tracker, whole = self._mesh, None, False
        if mesh.size == 1:
            yield
            return
        assert self._link is not None
        given: dict[str, Any] = {}
        try:
            if mesh.rank == 0:
                host = own_host(self._link.config)
                tracker = RabitTracker(mesh.size, host, sortby="task", timeout=BOOTSTRAP_S)
                tracker.start()
                given = dict(tracker.worker_args())
            given = mesh.exchange(2, STATE, {"what": "tracker", "arguments": given})[0]["arguments"]
            # One attempt only: a tracker that does not answer is dead, and swell reports that to the members.
            collective.init(**given, dmlc_retry=1, dmlc_task_id=f"{mesh.rank:08d}")
            yield
            whole = True
        finally:
            with contextlib.suppress(XGBoostError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                collective.finalize()
            if whole:
                with contextlib.suppress(PeerLost):  # the tracker stays until all have taken their leave
                    mesh.exchange(3, STATE, {"what": "over"})
            if tracker is not None:
                with contextlib.suppress(XGBoostError):
                    tracker.free()

    # ------------------------------------------------------------------ reports, checkpoints, ends

    def _report(self, rounds: int, round_s: float, metrics: dict[str, float]) -> None:
        link, mesh = self._link, self._mesh
        if link is None:
            return
        if self._pause is not None and mesh.rank == 0:
            (event, begin_s), self._pause = self._pause, None
            pause_s = max(time.perf_counter() - begin_s - round_s, 0.0)
            link.event(event, step=rounds, world=mesh.size, pause_s=round(pause_s, 6))
        self._pause = None
        link.step = rounds
        figures: dict[str, Any] = {"done": rounds, "of": self._rounds, "metrics": metrics, "step": rounds}
        if metrics:
            figures["loss"] = next(iter(metrics.values()))
        report = self._pace.report(figures, mesh.number, mesh.size, time.monotonic())
        link.report = report | {"rank": mesh.rank, "epoch": 0, "mode": "fixed"}

    def _saved(self) -> bytes:
        """The model of the last checkpoint; nothing if there is none."""
        path = None if self._state is None else self._state / CHECKPOINT
        return path.read_bytes() if path is not None and path.exists() else b""

    def _save_if_due(self, booster: xgboost.Booster) -> None:
        if self._mesh.rank == 0 and time.monotonic() - self._saved_s >= self._every_s:
            self._save(bytes(booster.save_raw("ubj")))

    def _save(self, raw: bytes) -> None:
        if self._state is None or self._link is None:
            return
        self._saved_s, rounds = time.monotonic(), _rounds_in(raw)
        try:
            self._state.mkdir(parents=True, exist_ok=True)
            replace_synced(self._state / CHECKPOINT, raw)
        except (
            OSError
        ) as error:  # a full disk, say: the checkpoint before it stays, and the next one may work
            log.error("checkpoint of round %d not saved, training goes on: %s", rounds, error)
            return
        self._link.event("checkpoint", step=rounds)

    def _stop(self) -> NoReturn:
        """Leave because the job is to stop; the leader saves the model first."""
        assert self._link is not None and self._booster is not None
        if self._mesh.rank == 0:
            self._save(bytes(self._booster.save_raw("ubj")))
            self._link.stopped()
        else:
            self._link.leaving(STOP)
        self._leave()

    def _leave(self) -> NoReturn:
        self._mesh.close()
        sys.exit(LEFT)

    def _end(self) -> xgboost.Booster:
        """All rounds are done: the leader returns the model, the others end here."""
        assert self._booster is not None
        if self._link is not None:
            self._link.done(self._booster.num_boosted_rounds())
            self._link.flush()
            if self._mesh.rank > 0:
                sys.exit(LEFT)
        return self._booster


def _rounds_in(raw: bytes) -> int:
    """How many rounds a stored model consists of."""
    return xgboost.Booster(model_file=bytearray(raw)).num_boosted_rounds() if raw else 0
