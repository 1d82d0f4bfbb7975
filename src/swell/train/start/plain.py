"""Recognise a plain training script that was started without `--auto`, at its first step.

Such a script would train to its end in every worker, each for itself, and the job would be marked failed only
then, because no worker ever spoke to the coordinator. So the first step of an optimizer is watched: if the
script has no elastic job by then, and neither its file nor a module beside it speaks of swell, the job ends
with a line that says what to type.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swell.train.agent.saying import first_to_say


def advice(script: Path) -> str:
    """The problem with a plain script, and the command to type instead."""
    return (
        f"{script.name} trains by itself, without swell.elastic, so its workers would all do the same work. "
        f"Put --auto before the script, which makes it elastic as it is: swell run --auto {script.name} "
        f"(or swell submit --auto {script.name}); or change it as docs/guides/training.md says"
    )


@contextlib.contextmanager
def recognised(script: Path, directory: Path) -> Iterator[None]:
    """Within this context a script that trains without swell is ended at its first step, with advice."""
    if not _uses_torch(script):
        yield
        return
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def first_step(*_: Any) -> None:
        hook.remove()
        # A script may have come to its elastic job by ways that its text does not show (runpy, say).
        if not _has_job() and not _speaks_of_swell(script, before):
            _end(advice(script), directory)

    before = set(sys.modules)
    hook = register_optimizer_step_pre_hook(first_step)
    try:
        yield
    finally:
        hook.remove()


def _uses_torch(script: Path) -> bool:
    """Whether torch is there already, or the script is about to import it: importing it takes seconds."""
    return "torch" in sys.modules or b"torch" in _content(script)


def _has_job() -> bool:
    """Whether the script has called `swell.elastic`."""
    entry = sys.modules.get("swell.train.job")
    return entry is not None and bool(entry.taken)


def _speaks_of_swell(script: Path, before: set[str]) -> bool:
    """Whether the script or a module that it imported (of its own, not of a library) names swell.

    `before`: the modules that were there when the script began.
    """
    ours = f"{Path(__file__).resolve().parents[2]}{os.sep}"
    stdlib = f"{sysconfig.get_paths()['stdlib']}{os.sep}"
    came = [module for name, module in list(sys.modules.items()) if name not in before]
    files = {str(getattr(module, "__file__", None) or "") for module in came}
    own = {
        file
        for file in files
        if file.startswith(os.sep)  # some modules of torch have made-up names
        and file.endswith(".py")
        and "-packages" not in file
        and not file.startswith((ours, stdlib))
    }
    return any(b"swell" in _content(Path(file)) for file in {str(script), *own})


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b"torch swell"  # nobody can say, so the script gets the benefit of the doubt


def _end(line: str, directory: Path) -> None:
    target = os.environ.get("SWELL_ERROR_FILE")
    if target:
        Path(target).write_text(f"{line}\n")
    if first_to_say(directory, line):
        sys.stderr.write(f"{line}\n")
    raise SystemExit(2)
