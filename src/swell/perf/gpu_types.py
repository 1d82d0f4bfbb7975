"""Speed on one GPU type carried over from another, by a ratio learned from jobs that ran on both.

After Sia (SOSP'23), which projects the speed on a type that a job has not run on by the ratio of one-GPU
runs. We take the ratio of the time of a gradient at the same local batch, of the same kind of job where that
has run on both types, else the geometric mean over the other kinds. Synchronising depends on the network more
than on the GPU, so a ratio of its own is learned for it where both types have been seen synchronising.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from swell.perf.belief import JobBelief
from swell.perf.throughput import SMALLEST, ThroughputParams, step_times


class Ratio(NamedTuple):
    """How many times as long the same thing takes on another GPU type."""

    compute: float = 1.0
    sync: float = 1.0


class Seen(NamedTuple):
    """Measured speed of one kind of job on one GPU type."""

    kind: str
    """The kind of job: its model, or the script that it runs."""
    gpu_type: str
    params: ThroughputParams
    local_batch: int
    """A batch per GPU that it was seen at, where times are compared."""
    synchronised: bool
    """Whether it was seen on several GPUs, so that `params` contains how long synchronising takes."""

    def to_json(self) -> list[Any]:
        """As plain values."""
        return [
            self.kind,
            self.gpu_type,
            self.params.as_array().tolist(),
            self.local_batch,
            self.synchronised,
        ]

    @classmethod
    def from_json(cls, content: Sequence[Any]) -> Seen:
        """From plain values; raises ValueError, TypeError or KeyError if they make no sense."""
        kind, gpu_type, params, local_batch, synchronised = content
        made = ThroughputParams(*(float(value) for value in params))
        return cls(str(kind), str(gpu_type), made, int(local_batch), bool(synchronised))


@dataclass(frozen=True)
class TypeRatios:
    """Ratios between GPU types, by kind of job and over all kinds."""

    by_kind: Mapping[tuple[str, str, str], Ratio]
    """(kind, from type, to type) -> ratio."""
    overall: Mapping[tuple[str, str], Ratio]

    def between(self, kind: str, known: str, other: str) -> Ratio:
        """The ratio from the known type to the other one; 1 if no job has run on both."""
        return self.by_kind.get((kind, known, other)) or self.overall.get((known, other)) or Ratio()

    def has(self, known: str, other: str) -> bool:
        """Whether some job has run on both types."""
        return (known, other) in self.overall


class RatioLedger:
    """Measured speed of each kind of job on each GPU type, and the ratios between types learned from it."""

    def __init__(self, seen: Iterable[Seen] = (), most_kinds: int | None = None) -> None:
        """`most_kinds`: how many kinds of jobs are kept; those that showed something last."""
        self._seen = {(one.kind, one.gpu_type): one for one in seen}
        self._most_kinds = most_kinds
        self.ratios = learn_ratios(self._seen.values())

    @property
    def seen(self) -> list[Seen]:
        """All measurements, the latest last."""
        return list(self._seen.values())

    def note(self, kind: str, gpu_type: str, belief: JobBelief) -> bool:
        """Take in what a job has shown on a type; True if that is news. `learn` then computes the ratios."""
        batch, params = belief.local_batch, belief.params
        if batch is None or params is None:
            return False
        before = self._seen.get((kind, gpu_type))
        if before is not None and before.synchronised and not belief.synchronised:
            return False  # an older job of this kind has shown more
        seen = Seen(kind, gpu_type, params, batch, belief.synchronised)
        if seen == before:
            return False
        self._seen[kind, gpu_type] = seen
        return True

    def relative_speed(self, gpu_type: str) -> float:
        """How fast jobs usually are on a type, compared with one of the types that were seen."""
        first = min((known for known, _ in self.ratios.overall), default=gpu_type)
        return 1.0 / self.ratios.between("", first, gpu_type).compute

    def learn(self) -> None:
        """Compute the ratios from all that was noted."""
        if self._most_kinds is not None:
            latest = list(dict.fromkeys(kind for kind, _ in reversed(self._seen)))[: self._most_kinds]
            self._seen = {key: one for key, one in self._seen.items() if key[0] in latest}
        self.ratios = learn_ratios(self._seen.values())


def learn_ratios(history: Iterable[Seen]) -> TypeRatios:
    """Measured ratios between types. The last measurement of a kind on a type counts."""
    last: dict[str, dict[str, Seen]] = {}
    for seen in history:
        last.setdefault(seen.kind, {})[seen.gpu_type] = seen
    by_kind: dict[tuple[str, str, str], Ratio] = {}
    logs: dict[tuple[str, str], list[tuple[float, float | None]]] = {}
    measured: list[tuple[str, str, str, float, float | None]] = []
    for kind, types in last.items():
        for known, a in types.items():
            for other, b in types.items():
                if known != other:
                    compute, sync = _logs(a, b)
                    logs.setdefault((known, other), []).append((compute, sync))
                    measured.append((kind, known, other, compute, sync))
    overall: dict[tuple[str, str], Ratio] = {}
    for pair, found in logs.items():
        compute = sum(c for c, _ in found) / len(found)
        syncs = [s for _, s in found if s is not None]
        common = sum(syncs) / len(syncs) if syncs else compute
        overall[pair] = Ratio(math.exp(compute), math.exp(common))
    for kind, known, other, compute, sync in measured:
        seldom = overall[known, other].sync
        by_kind[kind, known, other] = Ratio(math.exp(compute), seldom if sync is None else math.exp(sync))
    return TypeRatios(by_kind, overall)


def carried_over(params: ThroughputParams, ratio: Ratio) -> ThroughputParams:
    """The model of a job on another GPU type."""
    return replace(
        params,
        alpha_c=max(params.alpha_c * ratio.compute, SMALLEST),
        beta_c=max(params.beta_c * ratio.compute, SMALLEST),
        alpha_n=max(params.alpha_n * ratio.sync, SMALLEST),
        beta_n=max(params.beta_n * ratio.sync, SMALLEST),
        alpha_r=max(params.alpha_r * ratio.sync, SMALLEST),
        beta_r=max(params.beta_r * ratio.sync, SMALLEST),
    )


def carried_belief(known: JobBelief, ratio: Ratio) -> JobBelief:
    """The belief about a job on a type that it has not run on, from what is known on another type.

    The job has shown how it scales on the known type only as far as it grew there, so it may not grow
    further at once on this one either.
    """
    assert known.params is not None
    made = JobBelief(known.limits, known.fixed_batch, prior=carried_over(known.params, ratio))
    made.most_gpus, made.explores = known.most_gpus, known.explores
    if known.noise_known:
        made.observe_gradients(known.sqr, known.var)
    return made


def _logs(a: Seen, b: Seen) -> tuple[float, float | None]:
    """Logarithms of the ratios from a to b: of a gradient, and of synchronising if both show it."""
    batch = min(a.local_batch, b.local_batch)
    grad_a, grad_b = (float(step_times(seen.params, 1, 1, batch)[0]) for seen in (a, b))
    sync = None
    if a.synchronised and b.synchronised:
        times = [(s.params.alpha_n, s.params.alpha_r) for s in (a, b)]
        both = [math.log(y / x) for x, y in zip(*times) if min(x, y) > 2 * SMALLEST]
        sync = sum(both) / len(both) if both else None
    return math.log(grad_b / grad_a), sync
