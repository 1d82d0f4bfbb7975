"""Where workers live: each engine behind one small interface."""

from swell.engines.base import Engine, EngineReport, Launch, Observed, RunState

__all__ = ["Engine", "EngineReport", "Launch", "Observed", "RunState"]
