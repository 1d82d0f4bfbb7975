"""Packages that only the anchors need, in a folder of their own: never in swell's environment.

`make bench-runtime` installs them once. By hand: `python -m benchmarks.runtime.anchors.packages`. They
are installed without their dependencies, of which swell's environment has those that are needed; so
nothing with CUDA comes in.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

PINS = ("torchft==0.2.0", "pandas==3.1.1", "pyarrow==26.0.1")
FOLDER = Path(os.environ.get("SWELL_ANCHORS", Path(__file__).parents[3] / "build" / "anchors"))
"""SWELL_ANCHORS names another one, say for a machine without a package index."""
LIMIT_S = 240.0
"""How long pip may take for some 70 MB."""
IMPORTS = "import torchft, pandas, pyarrow, ray.train.torch"


class Unavailable(Exception):
    """The packages are not there; the message says why."""


def folder(root: Path = FOLDER) -> Path:
    """Where the packages are; raises `Unavailable` if they could not be installed or nobody tried."""
    if _stamp(root) == _wanted():
        return root / "lib"
    why = root / "failed.txt"
    raise Unavailable(
        why.read_text() if why.exists() else "run `python -m benchmarks.runtime.anchors.packages` first"
    )


def prepare(say: Callable[[str], None], root: Path = FOLDER, pins: tuple[str, ...] = PINS) -> bool:
    """Install the packages unless they are there; False if that failed, and then `folder` says why."""
    if _stamp(root) == _wanted(pins):
        return True
    say(f"installing {', '.join(pins)} into {root} (once)")
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    problem = _problem(_pip(root, pins)) or _problem([sys.executable, "-c", IMPORTS], root / "lib")
    if problem is None:
        (root / "installed.txt").write_text(_wanted(pins))
        return True
    (root / "failed.txt").write_text(problem)
    say(f"not installed: {problem}")
    return False


def _pip(root: Path, pins: tuple[str, ...]) -> list[str]:
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--retries", "1"]
    return [sys.executable, "-m", "pip", "install", *options, "--target", str(root / "lib"), *pins]


def _problem(command: list[str], library: Path | None = None) -> str | None:
    """Run a command and show what it says; why it failed, if it did."""
    env = {**os.environ, **({"PYTHONPATH": str(library)} if library else {})}
    last = "it said nothing"
    with subprocess.Popen(
        ["timeout", str(LIMIT_S), *command],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"          {line.rstrip()}", flush=True)
            last = line.strip() or last
    if process.returncode == 0:
        return None
    if process.returncode == 124:
        return f"pip took longer than {LIMIT_S:.0f} s"
    return last[:300]


def _wanted(pins: tuple[str, ...] = PINS) -> str:
    return "\n".join([sys.version.split()[0], *pins])


def _stamp(root: Path) -> str:
    path = root / "installed.txt"
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    sys.exit(0 if prepare(print) else 1)
