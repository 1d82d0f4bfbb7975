"""swell: elastic deep-learning training, and the simulator that runs the very same policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swell.train.job import Job, elastic

__version__ = "0.1.0"
__all__ = ["Job", "__version__", "elastic"]


def __getattr__(name: str) -> Any:
    """`swell.elastic` and `swell.Job` bring torch in only when they are asked for."""
    if name in ("elastic", "Job"):
        from swell.train import job

        return getattr(job, name)
    raise AttributeError(f"module 'swell' has no attribute {name!r}")
