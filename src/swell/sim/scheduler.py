"""Asks a simulated policy: shows it the active jobs, and takes down how long it thinks."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from swell.board import Board
from swell.perf.curves import Curves
from swell.policies import Admission, Decision, Policy, Snapshot
from swell.policies.base import gives_promises
from swell.policies.by_user import ByUser
from swell.sim.beliefs import Beliefs
from swell.sim.cloud import Cloud


class Scheduler:
    """The policy of a run, and what it is shown."""

    def __init__(
        self,
        policy: Policy,
        board: Board,
        beliefs: Beliefs,
        costs_s: tuple[float, float],
        cloud: Cloud | None,
    ) -> None:
        """`costs_s`: of a resize and of a start, as the policy plans with them."""
        self.policy = policy
        self.admits = gives_promises(policy)
        """Whether the policy decides which jobs are admitted."""
        self.decision_s: list[float] = []
        """How long each decision took, in real time."""
        self._board, self._costs_s, self._cloud = board, costs_s, cloud
        self._curves: Callable[[], Curves] = beliefs.promised_curves if self.admits else beliefs.curves

    def _snapshot(self, now_s: float) -> Snapshot:
        """The active jobs."""
        return self._board.snapshot(now_s, self._curves, *self._costs_s)

    def _promising(self, now_s: float) -> Snapshot:
        """The active jobs, with all nodes in service that may be rented."""
        snapshot, cloud = self._snapshot(now_s), self._cloud
        if cloud is None:
            return snapshot
        resize_s, start_s = self._costs_s
        costs_s = (resize_s, start_s + cloud.provider.offer.start_s)
        table, rows, numbers = self._board.table, snapshot.rows, snapshot.numbers
        return Snapshot(now_s, cloud.within_budget, table, rows, self._curves, *costs_s, numbers)

    def worth_nodes(self, now_s: float) -> Snapshot:
        """The jobs that the autoscaler looks at: those that may run."""
        snapshot = self._promising(now_s)
        return self.policy.shown(snapshot).part if isinstance(self.policy, ByUser) else snapshot

    def admit(self, now_s: float) -> Admission:
        """Ask whether the youngest job may come in, and by when it will be done."""
        snapshot, index = self._promising(now_s), len(self._board.active) - 1
        answer = self.policy.admit(snapshot, index)
        if answer.admitted:
            self.policy.accepted(snapshot, index, answer)
        return answer

    def decide(self, now_s: float) -> tuple[Snapshot, Decision]:
        """Ask how many GPUs each job has from now on; returns what the policy was shown, and its decision."""
        snapshot = self._snapshot(now_s)
        started = time.perf_counter()
        if self._cloud is not None and not snapshot.capacity:
            decision = Decision(np.zeros(len(snapshot), dtype=np.int64))
        else:
            decision = self.policy.allocate(snapshot)
        self.decision_s.append(time.perf_counter() - started)
        return snapshot, decision
