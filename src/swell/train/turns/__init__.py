"""Jobs that share a GPU: side by side where that pays, else in turns (docs/gpu.md)."""

from swell.train.turns.taking import Turns, Verdict

__all__ = ["Turns", "Verdict"]
