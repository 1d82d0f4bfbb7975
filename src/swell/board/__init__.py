"""The books of a cluster: which jobs are active, which GPUs they hold, and how a decision is carried out.

One code for the simulator and for the control plane, so that a live cluster does what the simulator says.
"""

from swell.board.board import Board, Move, with_reasons
from swell.board.holding import Held, held_events, hold
from swell.board.rhythm import Rhythm

__all__ = ["Board", "Held", "Move", "Rhythm", "held_events", "hold", "with_reasons"]
