"""Which files of a job's working directory are sent to the nodes, and how large they are.

Ray packs the directory and unpacks it on every node, without the files that `.gitignore` and `.rayignore`
name and without the directories in EXCLUDES. A directory that is too large is refused when the job is handed
in.

    python -m swell.engines.ray.packaging DIRECTORY      prints its size as Ray would pack it, as JSON
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

from swell.domain import InputError
from swell.train.agent.regular import folder, walk

EXCLUDES = (".git", ".venv", "venv", "__pycache__", "node_modules")
MEASURE_S = 60.0


def total_bytes(root: Path, stop_bytes: int | None = None) -> int:
    """Bytes of all files in a directory outside EXCLUDES; stops counting beyond `stop_bytes`."""
    total = 0
    with contextlib.suppress(OSError), folder(root) as top:
        for met in walk(top, failed=lambda error: None, enter=lambda name, _: name not in EXCLUDES):
            if not met.is_folder:
                total += met.facts.st_size
            if stop_bytes is not None and total > stop_bytes:
                break
    return total


def check(root: Path, limit_bytes: int) -> None:
    """Refuse a directory that is too large to be sent to the nodes."""
    if total_bytes(root, limit_bytes) <= limit_bytes:
        return
    found = _packed(root)
    total = sum(found.values())
    if total <= limit_bytes:
        return
    largest = sorted(found.items(), key=lambda item: -item[1])[:3]
    named = ", ".join(f"{name} ({_mib(size)})" for name, size in largest)
    raise InputError(
        f"workdir: {root} is {_mib(total)} and is sent to every node; the limit is {_mib(limit_bytes)}. "
        f"Largest: {named}. Name what is not needed in .gitignore or .rayignore, keep data "
        "elsewhere, or raise --workdir-limit",
        field="workdir",
    )


def _mib(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"


def _packed(root: Path) -> dict[str, int]:
    """Bytes of each entry of a directory as Ray would pack it; another process asks Ray for them."""
    asked = subprocess.run(
        [sys.executable, "-m", "swell.engines.ray.packaging", str(root)],
        capture_output=True,
        text=True,
        timeout=MEASURE_S,
        check=False,
    )
    if asked.returncode != 0:
        raise InputError(
            f"workdir: the size of {root} cannot be measured: {asked.stderr[-300:]}", field="workdir"
        )
    found: dict[str, int] = json.loads(asked.stdout.splitlines()[-1])
    return found


def measure(root: Path) -> dict[str, int]:
    """Bytes of each entry of a directory, without the files that Ray leaves out."""
    from ray._private.runtime_env import packaging

    found: dict[str, int] = {}

    def count(path: Path) -> None:
        if path.is_file() and not path.is_symlink():
            name = path.relative_to(root).parts[0]
            found[name] = found.get(name, 0) + path.stat().st_size

    excludes = [packaging._get_excludes(root, list(EXCLUDES))]
    packaging._dir_travel(root, excludes, count, include_gitignore=True)
    return found


def excludes(workdir: Path, home: Path) -> list[str]:
    """Patterns of files that are left out; swell's home is among them if it is inside the directory."""
    inside = []
    if home.is_relative_to(workdir):
        relative = home.relative_to(workdir)
        inside = [f"/{relative}"] if relative.parts else ["/jobs", "/store.db*", "/*.lock", "/*.log"]
    return [*EXCLUDES, *inside]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(Path(sys.argv[1]).resolve())) + "\n")
