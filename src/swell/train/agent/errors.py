"""What can go wrong inside a job.

TrainError
  UsageError        the script uses the runtime in a way that cannot work; the message says what to change
  PeerLost          a member of the generation is gone; the survivors re-form (never seen by users)
  OutOfStep         members called different operations at the same point
  Misfit            this worker cannot go on with the others; a new process takes its place
  Refused           a message is malformed, or asks for what cannot be done; it has changed nothing
"""

from __future__ import annotations


class TrainError(RuntimeError):
    """Any failure of the elastic runtime."""


class UsageError(TrainError, ValueError):
    """The script uses the runtime in a way that cannot work."""


class PeerLost(TrainError):
    """A member of the current generation is gone, or the generation was given up."""


class OutOfStep(TrainError):
    """Members of one generation called different operations at the same point of the script."""


class Misfit(TrainError):
    """This worker stands at another point of the script than the other members of its new generation."""


class Refused(TrainError, ValueError):
    """A message is malformed, or asks for what cannot be done. It has changed nothing."""


LEFT = 0
"""Exit status of a worker that left on request."""

RESPAWN = 75
"""Exit status of a worker that asks to be replaced by a new process (EX_TEMPFAIL)."""

FENCED = 76
"""Exit status of a worker that finds out that the job has gone on without it."""

BROKEN = 70
"""Exit status of a coordinator that met an error of its own: the next one goes on with the saved state."""
