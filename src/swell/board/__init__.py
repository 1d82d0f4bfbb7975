"""The books of a cluster: which jobs are active, which GPUs they hold, and how a decision is carried out.

One code for the simulator and for the control plane, so that a live cluster does what was simulated.
"""

from swell.board.board import Board, DecisionRhythm, Held, Move, held_events, hold, with_reasons

__all__ = ["Board", "DecisionRhythm", "Held", "Move", "held_events", "hold", "with_reasons"]
