"""The state directory: where it is, and how a server and its clients on one machine find each other there.

<home>/server.json     url, pid and, with TLS, the certificate to trust; there while a server runs
<home>/tokens/admin    bearer tokens of the administrator and of the default user, readable by the owner only
<home>/tokens/user
"""

from __future__ import annotations

import ipaddress
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from swell.domain import InputError


def home_dir(given: str | os.PathLike[str] | None = None) -> Path:
    """The state directory: the one given, else $SWELL_HOME, else ~/.swell."""
    try:
        path = Path(given or os.environ.get("SWELL_HOME") or Path.home() / ".swell").expanduser()
    except RuntimeError:  # neither $HOME nor an entry among the machine's accounts
        raise InputError(
            f"this account (uid {os.getuid()}) has no home directory: name one with --home or SWELL_HOME",
            field="home",
        ) from None
    return path.absolute()


def token_file(home: Path, role: str) -> Path:
    """The file with the token for a role that was made at the first start."""
    return home / "tokens" / role


@dataclass(frozen=True, slots=True)
class ServerFile:
    """The content of server.json: where a running server is."""

    url: str
    pid: int
    ca: str | None = None
    """Certificate that clients on this machine may trust, if the server speaks TLS."""
    here: str = ""
    """The URL on the loopback, for a server that listens on all addresses: its host name may not resolve."""

    @property
    def nearest(self) -> str:
        """The URL at which a process of this machine looks whether the server answers."""
        return self.here or self.url

    def write(self, home: Path) -> None:
        """Write the file, so that clients on this machine find the server."""
        write_private(home / "server.json", json.dumps(asdict(self)) + "\n")

    @staticmethod
    def read(home: Path) -> ServerFile | None:
        """The file of this home; None if there is none or it cannot be read."""
        try:
            raw = json.loads((home / "server.json").read_text())
            ca = raw.get("ca")
            here = str(raw.get("here", ""))
            return ServerFile(str(raw["url"]), int(raw["pid"]), None if ca is None else str(ca), here)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    @staticmethod
    def remove(home: Path, pid: int) -> None:
        """Remove the file, unless another server has written its own since."""
        found = ServerFile.read(home)
        if found is not None and found.pid == pid:
            (home / "server.json").unlink(missing_ok=True)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach this address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def write_private(path: Path, text: str) -> None:
    """Write a file atomically; at no moment can anybody but its owner read it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
