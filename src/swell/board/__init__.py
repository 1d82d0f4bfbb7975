"""The books of a cluster: who is active, who holds what, and how a decision is carried out.

One code for the simulator and for the control plane, so that a live cluster does what the simulator says.
"""

from swell.board.board import Board, Move
from swell.board.rhythm import Rhythm

__all__ = ["Board", "Move", "Rhythm"]
