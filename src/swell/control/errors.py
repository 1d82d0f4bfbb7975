"""What the control plane refuses, and why.

SwellError
+-- InputError           not acceptable as given (422 over HTTP)
+-- NotFound             there is no such job or node (404)
+-- Conflict             it is there, but not in a state for that (409)
+-- StoreUnavailable     the disk or database does not take it; nothing was changed (503)
"""

from __future__ import annotations

from swell.domain import SwellError


class NotFound(SwellError):
    """There is no such job or node."""


class Conflict(SwellError):
    """The thing is there, but what is asked does not fit its state."""


class StoreUnavailable(SwellError):
    """The store cannot be written or read now; nothing was changed."""
