"""What the trace readers and the generator need of the performance profiles: what can run, and how fast."""

from __future__ import annotations

from dataclasses import dataclass

from swell.domain import ANY_GPU, InputError, nearest, packed_shape
from swell.perf.profiles import Profile, ProfileSet

Menu = list[tuple[str, list[tuple[int, float]]]]
"""Models by name, each with its (batch size, rate) pairs."""


@dataclass(frozen=True, slots=True)
class Models:
    """The profiles as seen from one kind of cluster."""

    profiles: ProfileSet
    gpu_type: str
    gpus_per_node: int

    def measured(self, profile: Profile) -> bool:
        """Whether the profile was measured on the cluster's GPU type."""
        return self.gpu_type == ANY_GPU or self.gpu_type in profile.gpu_types

    def rate(self, profile: Profile, batch_size: int, gpus: int) -> float:
        """Iterations per second on packed GPUs; 0 if the job cannot run there."""
        return profile.rate(packed_shape(gpus, self.gpus_per_node), batch_size, self.gpu_type)

    def runs(self, profile: Profile, batch_size: int) -> bool:
        """Whether a job can run at that batch size on some number of GPUs up to 1,024."""
        return any(self.rate(profile, batch_size, 2**i) > 0 for i in range(11))

    def batch_sizes(self, profile: Profile, gpus: int) -> list[tuple[int, float]]:
        """The usual (batch size, rate) pairs on `gpus` GPUs: the initial batch and its doublings that run."""
        limits, found = profile.limits, []
        batch_size = limits.init_batch
        while batch_size <= limits.max_batch:
            rate = self.rate(profile, batch_size, gpus)
            if rate > 0:
                found.append((batch_size, rate))
            batch_size *= 2
        return found

    def menu(self, gpus: int) -> Menu:
        """The models that run on `gpus` GPUs, each with its batch sizes and rates."""
        known = ((name, self.profiles.get(name)) for name in self.profiles.names)
        offers = ((name, self.batch_sizes(p, gpus)) for name, p in known if self.measured(p))
        return [(name, batches) for name, batches in offers if batches]


def known_gpu_type(profiles: ProfileSet, given: str) -> str:
    """A GPU type as the profiles spell it; case does not matter."""
    for kind in profiles.gpu_types:
        if kind.lower() == given.lower():
            return kind
    known = list(profiles.gpu_types)
    raise InputError(
        f"GPU type '{given}' is not in {profiles.source}.{nearest(given, known)} Known: {', '.join(known)}",
        field="gpu-type",
    )
