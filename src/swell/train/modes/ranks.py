"""Logical ranks for *consistent* mode, after EasyScale: the same bits on any number of workers.

Each of N logical ranks has its own part of every batch, its own random numbers (drawn again for every step
from a key of seed, step and rank, so there is no generator state to carry around) and its own buffers. A
worker that holds several ranks goes through them one after the other and sums their gradients along the
canonical tree of `plan`; neighbours in the tree are summed by autograd itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from swell.train.agent.errors import UsageError
from swell.train.data.plan import FOLD
from swell.train.data.samples import key, seed_all


class LogicalRanks:
    """Buffers, random numbers and partial sums of the logical ranks."""

    def __init__(self, model: nn.Module, logical: int, seed: int) -> None:
        self.logical = logical
        self._seed = seed
        self._model = model
        self.live = dict(model.named_buffers())
        self.buffers: list[dict[str, Tensor]] = [
            {name: buffer.detach().clone() for name, buffer in self.live.items()} for _ in range(logical)
        ]
        """The ranks' buffers as of the last commit."""
        self._fresh: dict[int, dict[str, Tensor]] = {}
        """The ranks' buffers as changed by the present step; dropped if that step begins again."""

    def named(self) -> dict[str, Tensor]:
        """All ranks' buffers by a name of their own, for the flat layout."""
        return {f"{rank}/{n}": b for rank, of_rank in enumerate(self.buffers) for n, b in of_rank.items()}

    def begin(self, rank: int, step: int) -> None:
        """Load the buffers and random numbers of `rank`, before the script computes for it."""
        self._load(rank)
        seed_all(key(self._seed, step, rank))

    @torch.no_grad()
    def end(self, rank: int) -> None:
        """Keep the buffers of `rank`, after the script has computed for it."""
        if self.live:
            fresh = self._fresh.setdefault(rank, {n: torch.empty_like(b) for n, b in self.live.items()})
            torch._foreach_copy_(list(fresh.values()), list(self.live.values()))

    def after_step(self, block: range, computed: list[int]) -> dict[str, Tensor]:
        """The buffers of a block of ranks after this step, by their name in the flat layout.

        A rank that had no sample in this step keeps its buffers.
        """
        of_rank = {r: self._fresh[r] if r in computed and self.live else self.buffers[r] for r in block}
        return {f"{r}/{n}": b for r, buffers in of_rank.items() for n, b in buffers.items()}

    @torch.no_grad()
    def commit(self, ranks: list[int]) -> None:
        """Keep the buffers of these ranks for good, after a single worker's step took effect."""
        for rank in ranks if self.live else ():
            torch._foreach_copy_(list(self.buffers[rank].values()), list(self._fresh[rank].values()))

    def between(self, step: int) -> None:
        """Give the model rank 0's buffers between steps, and the generators a state common to all workers."""
        self._load(0)
        seed_all(key(self._seed, step, "between"))

    @torch.no_grad()
    def _load(self, rank: int) -> None:
        if self.live:
            torch._foreach_copy_(list(self.live.values()), list(self.buffers[rank].values()))

    @torch.no_grad()
    def restore(self, saved: list[dict[str, Tensor]]) -> None:
        """Load the buffers of all ranks."""
        for mine, theirs in zip(self.buffers, saved, strict=True):
            for name, tensor in mine.items():
                tensor.copy_(theirs[name])


class PartialSums:
    """A stack of flat gradients that follows a worker's part of the canonical tree.

    The bottom of the stack is where the worker's total ends up (its input segment); deeper levels are private
    and allocated once, because fresh memory for every partial sum would cost more than the sums.
    """

    def __init__(self, parameters: list[Tensor], bottom: list[Tensor]) -> None:
        self._parameters = parameters
        self._levels = [bottom]
        self._depth = 0
        self._program: list[int] = []
        self._paired = False
        self._finished: set[int] = set()
        """Parameters for which `finish` did what `after` has to do for the last rank."""

    def forget(self) -> None:
        """Drop every gradient, because the step begins again."""
        self._finished = set()
        self._clear()

    def start(self, program: list[int]) -> None:
        """Begin a step whose work is `program`: logical ranks and folds, in order."""
        self._depth, self._paired, self._program = 0, False, list(program)
        self._finished = set()

    @torch.no_grad()
    def finish(self, index: int) -> None:
        """In the last rank's backward: put the sum of one parameter's gradients where the total ends up.

        These are the additions that `after` makes for all parameters, in the same order.
        """
        if index in self._finished:
            raise UsageError(
                "model: backward computed the gradient of a parameter twice, which consistent mode does not "
                "support in only some of the steps; use non-reentrant checkpoints (use_reentrant=False)"
            )
        self._finished.add(index)
        parameter, depth = self._parameters[index], self._depth
        folds = len(self._program) - 1 - self._paired
        gradient = parameter.grad
        if folds:
            folds -= 1
            if gradient is not None:
                self._levels[depth - 1][index].add_(gradient)
        else:
            place = self._levels[depth][index]
            place.zero_() if gradient is None else place.copy_(gradient)
            depth += 1
        for _ in range(folds):
            depth -= 1
            self._levels[depth - 1][index].add_(self._levels[depth][index])
        parameter.grad = None

    @torch.no_grad()
    def after(self, rank: int) -> None:
        """Rank `rank` has run backward: keep, push or fold, by the program."""
        program = self._program
        if program[0] != rank:
            raise AssertionError("logical ranks run in the order of the tree")
        if self._finished:
            for index in range(len(self._parameters)):
                if index not in self._finished:
                    self.finish(index)
            self.start([])
            return
        program.pop(0)
        if len(program) >= 2 and program[0] != FOLD and program[1] == FOLD and not self._paired:
            self._paired = True  # the next rank is this one's sibling: autograd adds it
            return
        if self._paired:
            program.pop(0)
            self._paired = False
        if program and program[0] == FOLD:
            program.pop(0)
            self._add(self._levels[self._depth - 1])
        else:
            self._push()
        while program and program[0] == FOLD:
            program.pop(0)
            self._depth -= 1
            torch._foreach_add_(self._levels[self._depth - 1], self._levels[self._depth])

    def _push(self) -> None:
        if self._depth == len(self._levels):
            self._levels.append([torch.empty_like(place) for place in self._levels[0]])
        places, gradients = self._present(self._levels[self._depth], zero=True)
        torch._foreach_copy_(places, gradients)
        self._depth += 1
        self._clear()

    def _add(self, level: list[Tensor]) -> None:
        places, gradients = self._present(level, zero=False)
        torch._foreach_add_(places, gradients)
        self._clear()

    def _present(self, level: list[Tensor], zero: bool) -> tuple[list[Tensor], list[Tensor]]:
        places, gradients = [], []
        for place, parameter in zip(level, self._parameters):
            if parameter.grad is not None:
                places.append(place)
                gradients.append(parameter.grad)
            elif zero:
                place.zero_()
        return places, gradients

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
