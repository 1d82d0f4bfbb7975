"""A newcomer in a loop that counts its batches (see `loops`) draws as often as the job did, and fast.

It draws one small batch again and again, ends passes where the job ended them, and computes no gradients.
While it does so the others train, so it asks how far they are, and waits to join only once it is as far as
they were a moment ago: from then on they wait for it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from swell.train.agent.client import JobClient
from swell.train.auto.job import ScriptJob
from swell.train.auto.passes import Pass
from swell.train.auto.position import Position
from swell.train.sync.link import Link

_TRIES = 3
"""So many times gradients are computed after all, to see what the script uses them for."""
_NEAR = 10
"""A newcomer that is so few batches behind may join."""


class Replay:
    """Draws as often as the job did."""

    def __init__(self, link: Link, position: Position) -> None:
        self._link = link
        self._position = position
        self._target = -1
        """How many batches the job had drawn when it was asked last."""
        self._lag: int | None = None
        """How far this worker was behind then."""
        self._tried = 0
        self._plain = True
        """True if gradients are only those of parameters, and dense."""

    def samples(self, here: Pass) -> list[Any]:
        """A few samples in place of the next batch; ends the pass where the job ended it."""
        if here.order.peek(here.drawn) is None:
            here.over = True
            raise StopIteration
        return here.idle()

    def is_behind(self) -> bool:
        """Whether the job is known to be further, and this worker to come nearer."""
        drawn = self._position.drawn
        if drawn < self._target:
            return True
        lag = self._drawn_by_job() - drawn
        if lag <= _NEAR or (self._lag is not None and lag > self._lag / 2):
            return False
        self._target, self._lag = drawn + lag, lag
        return True

    def _drawn_by_job(self) -> int:
        drawn = self._reported().get("drawn")
        return drawn if isinstance(drawn, int) else 0

    def drawn_in_pass(self, epoch: int) -> int:
        """How many batches the job is known to have drawn in that pass; 0 if it is in another one."""
        report = self._reported()
        drawn = report.get("drawn")
        return drawn if isinstance(drawn, int) and report.get("drawn_in") == epoch else 0

    def _reported(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError), JobClient(self._link.directory, wait_s=10.0) as client:
            return client.status()["last_report"] or {}
        return {}

    def skips(self, roots: Any, job: ScriptJob) -> bool:
        """Whether the gradients of `roots` need not be computed; they are zero then."""
        here = self._position.main()
        if here is None or not here.counted or not self._plain:
            return False
        parameters = job.parameters()
        if self._tried < _TRIES:
            self._tried += 1
            self._plain = _reaches_parameters_only(roots)
            return False
        self._plain = not any(p.grad is not None and p.grad.is_sparse for p in parameters)
        if self._plain:
            for parameter in parameters:  # scripts read them, and gradient scalers want them
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return self._plain


def _reaches_parameters_only(roots: Any) -> bool:
    """Whether only parameters get gradients, and not the inputs (as for adversarial examples)."""
    ahead = [root.grad_fn for root in ((roots,) if isinstance(roots, Tensor) else roots)]
    seen: set[Any] = set()
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if not isinstance(getattr(node, "variable", None), nn.Parameter | None):
            return False
        ahead += [inner for inner, _ in node.next_functions]
    return True
