"""Compares what should run with what does run, and says what to do about each difference.

Nothing here acts. The conductor asks once in every turn; doing the same thing twice does no harm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from swell.control import lifecycle
from swell.control.model import JobRecord, Phase
from swell.engines import Observed, RunState

LOST_AFTER_S = 3.0
"""A job that should run counts as vanished once the engine has not known it for this long."""
UNHEARD_S = 3.0
"""A job that has run for this long without a word of its start counts as started: the report was lost with a
failed write, or the record is from an older version."""
BEHIND_S = 30.0
"""If a job has had another number of workers than wanted for this long, the engine is asked again."""


@dataclass(frozen=True, slots=True)
class EndStray:
    """The engine runs a job that is over, or that the store does not know: have it ended."""

    job_id: str


@dataclass(frozen=True, slots=True)
class AskAgain:
    """The job does not run as it should: ask the engine again. It was never asked, or has not done it yet."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Feed:
    """Feed this input to the job's state machine."""

    job_id: str
    given: lifecycle.Input


Difference = EndStray | AskAgain | Feed


@dataclass(slots=True)
class Reconciler:
    """Finds the differences, and remembers since when jobs are missing."""

    _unconfirmed: set[str] = field(default_factory=set)
    """Jobs from the store that have not been compared since the control plane came up."""
    _missing_since_s: dict[str, float] = field(default_factory=dict)
    _behind_since_s: dict[str, float] = field(default_factory=dict)
    """Since when jobs have not had as many workers as they should."""
    _unheard_since_s: dict[str, float] = field(default_factory=dict)
    """Since when jobs have run though their records do not say on which slots."""

    def came_up(self, job_id: str) -> None:
        """Note a job that was in the store when the control plane came up."""
        self._unconfirmed.add(job_id)

    def forget(self, job_id: str) -> None:
        """Forget what was remembered of a job."""
        self._unconfirmed.discard(job_id)
        self._missing_since_s.pop(job_id, None)
        self._behind_since_s.pop(job_id, None)
        self._unheard_since_s.pop(job_id, None)

    def behind_s(self, job_id: str, now_s: float) -> float:
        """For how long a job has not had as many workers as it should; 0 if it has."""
        return now_s - self._behind_since_s.get(job_id, now_s)

    def differences(
        self, records: Mapping[str, JobRecord], observed: Mapping[str, Observed], now_s: float
    ) -> Iterator[Difference]:
        """The present differences. The caller may change `records` while it iterates."""
        for job_id, seen in observed.items():
            yield Feed(job_id, lifecycle.Seen(seen)) if job_id in records else EndStray(job_id)
        for job_id in list(records):
            record = records.get(job_id)
            if record is None:
                continue
            if record.phase is not Phase.RUNNING:
                self.forget(job_id)
            elif job_id in observed:
                self._unconfirmed.discard(job_id)
                self._missing_since_s.pop(job_id, None)
                seen = observed[job_id]
                if record.held or seen.state is not RunState.RUNNING or not seen.placement:
                    self._unheard_since_s.pop(job_id, None)
                elif now_s - self._unheard_since_s.setdefault(job_id, now_s) >= UNHEARD_S:
                    yield Feed(job_id, lifecycle.Started(seen.placement, 0.0))
                if len(seen.placement) == len(record.wanted):
                    self._behind_since_s.pop(job_id, None)
                elif now_s - self._behind_since_s.setdefault(job_id, now_s) >= BEHIND_S:
                    yield AskAgain(job_id)
            elif job_id in self._unconfirmed:
                self._unconfirmed.discard(job_id)
                yield AskAgain(job_id)  # the control plane that decided it was killed before it could say so
            elif now_s - self._missing_since_s.setdefault(job_id, now_s) >= LOST_AFTER_S:
                del self._missing_since_s[job_id]
                yield Feed(job_id, lifecycle.Vanished())
