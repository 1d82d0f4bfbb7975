"""swell: elastic deep-learning training, and the simulator that runs the very same policies."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swell.api.client import AsyncClient, Client
    from swell.train.job import Job, elastic
    from swell.train.replicas.group import replica_mesh

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "Job", "__version__", "elastic", "replica_mesh"]

_DOORS = {
    "elastic": "swell.train.job",
    "Job": "swell.train.job",
    "replica_mesh": "swell.train.replicas.group",
    "Client": "swell.api.client",
    "AsyncClient": "swell.api.client",
}


def __getattr__(name: str) -> Any:
    """`swell.elastic` and `swell.Job` bring torch in, `swell.Client` HTTP, only when they are asked for."""
    if name in _DOORS:
        try:
            return getattr(import_module(_DOORS[name]), name)
        except ModuleNotFoundError as error:
            from swell.extras import missing_extra

            raise missing_extra(error, f"swell.{name}") or error from None
    raise AttributeError(f"module 'swell' has no attribute {name!r}")
