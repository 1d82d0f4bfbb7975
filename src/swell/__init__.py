"""swell: elastic deep-learning training, and the simulator that runs the very same policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swell.api.client import AsyncClient, Client
    from swell.train.job import Job, elastic

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "Job", "__version__", "elastic"]


def __getattr__(name: str) -> Any:
    """`swell.elastic` and `swell.Job` bring torch in, `swell.Client` HTTP, only when they are asked for."""
    if name in ("elastic", "Job"):
        from swell.train import job

        return getattr(job, name)
    if name in ("Client", "AsyncClient"):
        from swell.api import client

        return getattr(client, name)
    raise AttributeError(f"module 'swell' has no attribute {name!r}")
