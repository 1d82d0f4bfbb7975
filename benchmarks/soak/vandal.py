"""A job that owns every byte of its directory, and means harm: what it puts there instead of its files.

`vandalise` does to a directory, drawn from a seed, what the code of a job could do to its own: it rewrites,
links, nests, forges and locks files of every name that a reader may look for. It writes nothing outside.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

NAMES = (
    *("start.json", "exit.json", "lock", "output.log", "supervisor.log", "fence.json", "account"),
    *("runs", "runs/0000", "runs/0001", "runs/9999", "runs/zzzz", "runs/0000/logs", "runs/0000/logs/w0.log"),
    *("runs/0000/job.json", "runs/0000/coordinator.json", "runs/0000/state.json", "runs/0000/events.jsonl"),
    *("runs/0000/generation.json", "runs/0000/logs/w0.error", "runs/0000/launcher.lock"),
    *("checkpoints", "checkpoints/step-000000000001", "checkpoints/step-000000000009", "checkpoints/step-x"),
    *("checkpoints/step-000000000001/state.json", "checkpoints/step-000000000001/manifest.json"),
    *("checkpoints/model.ubj", "checkpoints/.writing-step-000000000002-1", "files", "trackers", "private"),
)
"""What readers of a job's directory look for, or once looked for."""
ODD_NAMES = (
    "new\nline",
    "-rf",
    "...",
    " ",
    "\udcff\udcfe",
    "x" * 255,
    "*",
    "$(touch x)",
    "\u202egnp.sh",
    "~",
)
DEEPEST = 60
"""Folders inside each other; a test of its own has more."""
LARGEST = 1 << 20
HOLE_BYTES = 1 << 42
MOST_HARMS = 6


class Vandal:
    """Draws what is done to directories from a seed. `others`: what else there is, to link to and to name."""

    def __init__(self, seed: int, others: Sequence[Path], pid: int) -> None:
        self.chance = random.Random(seed)
        self.others = list(others)
        self.pid = pid
        """A process that a forged file may name: it must not be harmed."""
        self._deck: list[tuple[str, str]] = []
        """Names and harms that were not drawn yet: each pair comes once before one repeats."""
        self._before = b""
        """The content of the file that is being replaced."""

    def vandalise(self, directory: Path) -> list[str]:
        """Do a few harms to a directory; returns what was done."""
        done = []
        for _ in range(self.chance.randint(1, MOST_HARMS)):
            if not self._deck:
                self._deck = [(name, harm) for name in (*NAMES, *ODD_NAMES) for harm in HARMS]
                self.chance.shuffle(self._deck)
            name, harm = self._deck.pop()
            path = directory / name
            # Where an earlier harm put something else in the way, there is no such place.
            with contextlib.suppress(OSError, ValueError):
                if not _inside(path.parent, directory):
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                self._before = path.read_bytes() if path.is_file() and path.stat().st_size < LARGEST else b""
                if os.path.lexists(path):
                    _away(path)
                getattr(self, f"do_{harm}")(path)
                done.append(f"{harm} {name!r}")
        return done

    # -- what is put in the place of a file --------------------------------------------------------------

    def do_nothing(self, path: Path) -> None:
        """It is gone."""

    def do_empty(self, path: Path) -> None:
        path.touch()

    def do_noise(self, path: Path) -> None:
        path.write_bytes(self.chance.randbytes(self.chance.choice((1, 100, LARGEST))))

    def do_brackets(self, path: Path) -> None:
        """JSON that is nested too deeply for any reader."""
        path.write_text('{"slots": ' + "[" * 200_000)

    def do_forgery(self, path: Path) -> None:
        """JSON with the right names, and values of every kind."""
        path.write_text(json.dumps({name: self._value() for name in FIELDS if self.chance.random() < 0.9}))

    def do_tweak(self, path: Path) -> None:
        """The JSON that was there, with some values replaced."""
        content = json.loads(self._before or b"{}")
        for _ in range(self.chance.randint(1, 3)):
            where = content
            while isinstance(where, dict) and where:
                name = self.chance.choice(sorted(where))
                if not isinstance(where[name], dict) or self.chance.random() < 0.5:
                    where[name] = self._value()
                    break
                where = where[name]
        path.write_text(json.dumps(content))

    def do_deep(self, path: Path) -> None:
        """The JSON that was there, with one value that is nested too deeply."""
        text = (self._before or b"{}").decode(errors="replace").rstrip().removesuffix("}")
        path.write_text(f'{text}, "placement": {"[" * 5000}{"]" * 5000}}}')

    def do_infinity(self, path: Path) -> None:
        path.write_text(
            '{"max_workers": Infinity, "code": -Infinity, "slots": NaN, "port": 1e999, "seq": 1E400}'
        )

    def do_copy(self, path: Path) -> None:
        """The file of another job, as it is: its id, its address, its outcome."""
        mine = next((part for part in (path.name, "job.json", "start.json")), path.name)
        found = [one for other in self.others for one in other.rglob(mine) if one.is_file()]
        if found:
            shutil.copyfile(self.chance.choice(found), path)

    def do_pid(self, path: Path) -> None:
        """The process that must not be harmed."""
        path.write_text(
            self.chance.choice((f"{self.pid}", f"{self.pid} {socket.gethostname()}", "-1", "1", "0"))
        )

    def do_ended(self, path: Path) -> None:
        path.write_text(json.dumps({"code": 0, "reason": "ended", "time_s": 0}))

    def do_link(self, path: Path) -> None:
        """To another job, to the platform, to itself, to nowhere."""
        near = [
            *self.others,
            *(other / path.name for other in self.others),
            path,
            path.parent,
            path.parents[1],
        ]
        path.symlink_to(self.chance.choice((*near, *map(Path, ("/dev/zero", "/nowhere", "..", ".")))))

    def do_names(self, path: Path) -> None:
        """A file with several names."""
        path.write_bytes(b"x" * 4096)
        for i in range(self.chance.choice((1, 50))):
            os.link(path, path.with_name(f"{path.name[:40]}-{i}"))

    def do_pipe(self, path: Path) -> None:
        os.mkfifo(path)

    def do_socket(self, path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as made:
            here = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:  # the path itself may be too long for a socket
                made.bind(f"/proc/self/fd/{here}/{path.name}"[:107])
            finally:
                os.close(here)

    def do_hole(self, path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(HOLE_BYTES)

    def do_large(self, path: Path) -> None:
        path.write_text(json.dumps({"reason": "x" * LARGEST * 5}))

    def do_folder(self, path: Path) -> None:
        path.mkdir()

    def do_crowd(self, path: Path) -> None:
        """A folder with many entries."""
        path.mkdir()
        for i in range(self.chance.choice((10, 500))):
            (path / f"step-{i:012d}").touch()

    def do_nest(self, path: Path) -> None:
        """Folders inside each other."""
        path.mkdir()
        name = self.chance.choice(("d", "x" * 200))
        here = os.open(path, os.O_RDONLY)
        for _ in range(self.chance.randint(2, DEEPEST)):
            os.mkdir(name, dir_fd=here)
            below = os.open(name, os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
        os.close(here)

    def do_locked(self, path: Path) -> None:
        """A folder, or a file, that not even its owner may open."""
        if self.chance.random() < 0.5:
            path.mkdir()
            (path / "inside").touch()
        else:
            path.touch()
        path.chmod(0)

    def _value(self) -> object:
        ids = [other.name for other in self.others] or ["a"]
        return self.chance.choice(
            (
                *(None, True, -1, 0, 2**70, 1e308, float("nan"), float("inf"), "", "x" * 5000, [], {}, [[]]),
                *([0, 1, 2, 3], ["0"], [-1], [10**9] * 3, {"a": {"b": []}}, "\x1b[31m", "../../tokens/admin"),
                *(self.chance.choice(ids), self.pid, str(self.pid)),
            )
        )


FIELDS = (
    *("job_id", "request", "max_workers", "owner", "slots", "placement", "extras", "ray", "gpus", "fence"),
    *("code", "reason", "time_s", "host", "port", "pid", "secret", "encrypt", "number", "members", "command"),
    *("step", "files", "seal", "format", "state", "version", "launch", "checkpoints"),
)
HARMS = tuple(name.removeprefix("do_") for name in vars(Vandal) if name.startswith("do_"))


def _inside(path: Path, directory: Path) -> bool:
    """Whether a place is in a directory: no link may lead the vandal itself to what belongs to others."""
    return path.resolve().is_relative_to(directory.resolve())


def _away(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove(path)
    else:
        path.unlink()


def remove(path: Path) -> None:
    """Remove a vandalised directory, by means other than swell's."""
    subprocess.run(["chmod", "-R", "u+rwX", str(path)], capture_output=True, check=False)
    subprocess.run(["rm", "-rf", str(path)], capture_output=True, check=False)
