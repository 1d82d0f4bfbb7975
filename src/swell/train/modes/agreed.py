"""The batch that all workers of a job agree on, and how they come to a new one.

With the messages of a step the workers exchange how long their last step took and what did not fit into
their memory; rank 0 adds a new plan when it has one. A new plan in the headers holds from the next step on,
and the batch changes at no other moment. After a resize or a death the batch stays as it is, only split over
other workers, because survivors may be in the middle of a step.

All workers record the same times, so that any of them can become rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from swell.perf.goodput import BatchLimits, BatchPlan
from swell.train.modes.adaptive import BatchTuner, Noise

Header = dict[str, Any]


class AgreedBatch:
    """The present batch, and this worker's message to the others about the next one."""

    def __init__(self, limits: BatchLimits, *, decide_every: int = 10) -> None:
        """A new plan is considered every `decide_every` steps, and after each change of the workers."""
        if decide_every < 1:
            raise ValueError(f"decide_every: got {decide_every}, must be at least 1")
        self.limits = limits
        self.tuner = BatchTuner(limits)
        self.batch = limits.init_batch
        """Samples in a step."""
        self.micro_batch = limits.max_local
        """The most samples that one gradient is computed on."""
        self._decide_every = decide_every
        self._decide_soon = True
        self._last: list[float] | None = None
        """This worker's last step: its times, its samples and its micro-batches."""
        self._proposal: BatchPlan | None = None
        self._failed: int | None = None
        """The fewest samples that did not fit here, not yet sent to the others."""

    def header(self) -> Header:
        """This worker's part of the step header."""
        header: Header = {}
        if self._last is not None:
            header["last"] = self._last
        if self._proposal is not None:
            header["plan"] = [self._proposal.local_batch, self._proposal.accumulation]
        if self._failed is not None:
            header["failed"] = self._failed
        return header

    def observe(self, iteration_time_s: float, sync_time_s: float, samples: int, micro_batches: int) -> None:
        """Record this worker's last committed step: its times, its samples and its micro-batches."""
        self._last = [iteration_time_s, sync_time_s, samples, micro_batches] if samples else None

    def out_of_memory(self, local_batch: int) -> int:
        """Record that a number of samples did not fit; returns the size to try. The next header has it."""
        self._failed = min(local_batch, self._failed or local_batch)
        if self._failed <= self.limits.min_local:
            self.tuner.out_of_memory(self._failed)  # raises, because nothing smaller is allowed
        return max(self._failed // 2, self.limits.min_local)

    def commit(self, headers: Sequence[Header], nodes: int, steps: int, noise: Noise) -> None:
        """Adopt the headers of this step (in rank order), and make the next proposal.

        `nodes` are the machines that the workers are on; `steps` counts those committed so far, this one
        included.
        """
        self._learn_times(headers, nodes)
        if (plan := headers[0].get("plan")) is not None:
            adopted = BatchPlan(int(plan[0]), int(plan[1]))
            self.batch, self.micro_batch = adopted.total(len(headers)), adopted.local_batch
        self._proposal = self._last = None
        failed = [int(header["failed"]) for header in headers if header.get("failed")]
        if failed:
            self.tuner.out_of_memory(min(failed))
            self.micro_batch = min(self.micro_batch, self.tuner.max_local)
            self._failed = None
        if failed or self._decide_soon or steps % self._decide_every == 0:
            self._decide_soon = False
            chosen = self.tuner.choose(nodes, len(headers), noise)
            if (chosen.total(len(headers)), chosen.local_batch) != (self.batch, self.micro_batch):
                self._proposal = chosen

    def _learn_times(self, headers: Sequence[Header], nodes: int) -> None:
        """Record the mean times over all workers."""
        last = [header["last"] for header in headers if header.get("last")]
        if len(last) != len(headers):
            return
        samples, micro_batches = int(last[0][2]), int(last[0][3])
        self.tuner.observe(
            nodes=nodes,
            replicas=len(headers),
            local_batch=-(-samples // micro_batches),
            accumulation=micro_batches - 1,
            iteration_time_s=sum(entry[0] for entry in last) / len(last),
            sync_time_s=sum(entry[1] for entry in last) / len(last),
        )

    def membership_changed(self) -> None:
        """Note that the workers have changed: the last step's times do not count, and a new plan is due."""
        self._last = self._proposal = None
        self._decide_soon = True

    def state_dict(self) -> dict[str, Any]:
        """Plain values that `load_state_dict` takes."""
        return {"tuner": self.tuner.state_dict(), "batch": self.batch, "micro_batch": self.micro_batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state written by `state_dict`."""
        self.tuner.load_state_dict(state["tuner"])
        self.batch, self.micro_batch = int(state["batch"]), int(state["micro_batch"])
        self._failed = None
