"""Where workers live: each engine behind one small interface."""

from swell.engines.base import Engine, Launch, Observed, Report, RunState

__all__ = ["Engine", "Launch", "Observed", "Report", "RunState"]
