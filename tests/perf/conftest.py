"""The public data, where it is present."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data() -> Path:
    """The directory of public traces and profiles; the test is skipped without it."""
    given = os.environ.get("SWELL_DATA")
    path = Path(given) if given else Path(__file__).parents[3] / "shared" / "data"
    if not path.is_dir():
        pytest.skip("the public data is not here: set SWELL_DATA to its directory")
    return path
