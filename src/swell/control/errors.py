"""What the control plane refuses, and why.

SwellError
+-- InputError           not acceptable as given (422 over HTTP)
+-- NotFound             there is no such job or node (404)
+-- Conflict             the state of the job or node does not allow what is asked (409)
|   +-- Unreadable       what the store has of the job makes no sense, so nothing can be done with it (409)
+-- StoreUnavailable     the store cannot be written or read now; nothing was changed (503)
|   +-- NotLeading       another control plane leads, or none does; nothing was changed (503)
|   +-- StoreLost        the connection to the store broke; what was asked may have been done (503)
+-- TooMany              a limit on what one user may have is reached (429)
"""

from __future__ import annotations

from swell.domain import SwellError


class NotFound(SwellError):
    """There is no such job or node."""


class Conflict(SwellError):
    """The state of the job or node does not allow what is asked."""


class Unreadable(Conflict):
    """What the store has of the job makes no sense, so nothing can be done with it."""

    def __init__(self, message: str, owner: str = "") -> None:
        super().__init__(message)
        self.owner = owner


class StoreUnavailable(SwellError):
    """The store cannot be written or read now; nothing was changed."""


class NotLeading(StoreUnavailable):
    """Another control plane leads, or none does at the moment; nothing was changed."""

    def __init__(
        self, message: str = "this control plane does not lead; nothing was changed: try again"
    ) -> None:
        super().__init__(message)


class StoreLost(StoreUnavailable):
    """The connection to the store broke: what was asked may have been done, and can be repeated."""


class TooMany(SwellError):
    """A limit on what one user may have is reached."""
