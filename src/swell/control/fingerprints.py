"""Which jobs are of one kind: those with the same script and the same arguments.

What a job taught is kept under the fingerprint of its kind, so the second run of a script starts with the
curve of the first (docs/how/history.md). Jobs with the same script and other arguments are kin: what one
of them taught is good for an estimate of another, and for nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from swell.control.model import JobRequest

MAX_SCRIPT_BYTES = 4 << 20
"""Largest training script. A script is read whenever a job is submitted, while others wait."""


def fingerprints(request: JobRequest) -> tuple[str, str]:
    """The fingerprint of a job's kind, and that of its kin: the same script, whatever the arguments."""
    digest = hashlib.sha256(_content(request, request.script) or request.script.encode())
    how: list[Any] = [list(request.args), request.auto]
    if request.command:
        # What `python train.py` does is in its first argument that is a file.
        inside = (_content(request, word) for word in request.args if not word.startswith("-"))
        digest.update(next((content for content in inside if content), b""))
        how.append("command")
    kin = digest.copy()
    kin.update(json.dumps(["kin", *how[1:]]).encode())
    digest.update(json.dumps(how).encode())
    return digest.hexdigest()[:32], kin.hexdigest()[:32]


def _content(request: JobRequest, path: str) -> bytes:
    """The beginning of a file in a job's working directory; nothing if there is no such file."""
    try:
        with open(Path(request.workdir, path), "rb", opener=_without_waiting) as file:
            return file.read(MAX_SCRIPT_BYTES)
    except (OSError, ValueError):
        return b""


def _without_waiting(path: str, flags: int) -> int:
    """Open a file, but do not wait if it is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)
