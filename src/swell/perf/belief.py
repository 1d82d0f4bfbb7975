"""What a scheduler believes of one job's performance."""

from __future__ import annotations


class JobBelief:
    """Placeholder until the fitted model lands."""
