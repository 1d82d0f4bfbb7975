"""Say a thing once, although several workers of a job find it out."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def first_to_say(directory: Path, what: str) -> bool:
    """Whether no worker of this run of the job in `directory` has said this before."""
    try:
        name = hashlib.sha256(what.encode(errors="replace")).hexdigest()[:16]
        os.close(os.open(directory / "logs" / f".said-{name}", os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return False
    except OSError:  # a full disk, say: better twice than never
        return True
    return True
