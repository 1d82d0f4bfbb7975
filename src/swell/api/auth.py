"""Who may do what: bearer tokens, three roles, and owners of jobs.

A token is `swell_` and 32 random bytes. The store keeps only its SHA-256 digest, so a stolen database lets
nobody in; a token is shown once, when it is made. A random token cannot be guessed, so its digest needs no
slow hash.

A *user* sees and changes only jobs of their own; the jobs of other users do not exist for them (404, never
403, so that ids cannot be probed). An *admin* sees and changes everything, and is the only one who may drain
nodes, switch the policy, replay and manage tokens. A *viewer* sees all jobs and changes nothing: it is for a
screen on a wall.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import hmac
import json
import math
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from swell.api.home import token_file, write_private
from swell.api.refusals import Forbidden, NotAuthenticated
from swell.control.errors import NotFound
from swell.control.store import Store
from swell.domain import InputError

PREFIX = "swell_"
USER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@-]{0,63}")
"""Names that users may have."""


class Role(StrEnum):
    """What a token lets its holder do."""

    USER = "user"
    """May submit jobs, and see and change their own."""
    VIEWER = "viewer"
    """May see all jobs, and change nothing."""
    ADMIN = "admin"
    """May do everything."""


@dataclass(frozen=True, slots=True)
class Principal:
    """The user who made a request."""

    user: str
    role: Role

    @property
    def scope(self) -> str | None:
        """The owner whose jobs the principal may see; None for all owners."""
        return self.user if self.role is Role.USER else None

    def sees(self, owner: str) -> bool:
        """Whether the principal may see jobs of this owner."""
        return self.role is not Role.USER or owner == self.user


@dataclass(frozen=True, slots=True)
class Token:
    """A token as it is stored, without its secret."""

    digest: str
    user: str
    role: Role
    expires_s: float | None
    """Unix time at which the token expires; None for never."""

    @property
    def token_id(self) -> str:
        """Short name of the token, for listing and revoking."""
        return self.digest[:12]


class TokenBook:
    """All tokens, in memory and in the store.

    The server's process is the only writer while it runs, so a request is checked without reading the store,
    and a token that is revoked through the book is refused from that moment on.
    """

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self.revoked: Callable[[], None] = lambda: None
        """Called after a token was revoked."""
        self._lock = threading.Lock()
        self._tokens = {
            digest: Token(digest, user, Role(role), expires_s)
            for digest, user, role, expires_s in store.tokens()
        }

    def create(
        self, user: str, role: str = Role.USER, *, ttl_s: float | None = None, secret: str | None = None
    ) -> tuple[str, Token]:
        """Make a token and return it with its description. It cannot be read again later.

        `secret`: accept this token, which was made earlier, instead of a fresh one.
        """
        if not USER_NAME.fullmatch(user):
            raise InputError(
                f"user must be 1 to 64 letters, digits or any of . _ @ -, starting with a letter, digit or _,"
                f" got {user!r}",
                field="user",
            )
        if role not in list(Role):
            raise InputError(f"role must be 'user', 'viewer' or 'admin', got {role!r}", field="role")
        if ttl_s is not None and not (ttl_s > 0 and math.isfinite(ttl_s)):
            raise InputError(f"ttl_s must be a positive number of seconds, got {ttl_s!r}", field="ttl_s")
        secret = secret or new_secret()
        expires_s = None if ttl_s is None else self._clock() + ttl_s
        token = Token(_digest(secret), user, Role(role), expires_s)
        self._store.add_token(token.digest, user, token.role.value, expires_s)
        with self._lock:
            self._tokens[token.digest] = token
        return secret, token

    def list(self) -> list[Token]:
        """All tokens, by user; expired ones included."""
        with self._lock:
            return sorted(self._tokens.values(), key=lambda token: (token.user, token.token_id))

    def revoke(self, token_id: str) -> Token:
        """Refuse a token from now on."""
        with self._lock:
            found = [token for token in self._tokens.values() if token.token_id == token_id]
        if not found:
            raise NotFound(f"there is no token '{token_id}'; 'swell token list' shows the tokens")
        self._store.drop_token(found[0].digest)
        with self._lock:
            self._tokens.pop(found[0].digest, None)
        self.revoked()
        return found[0]

    def authenticate(self, authorization: str | None) -> Principal:
        """The user whose token is in an `Authorization` header; raises NotAuthenticated."""
        if not authorization:
            raise NotAuthenticated("a token is needed: send the header 'Authorization: Bearer swell_...'")
        scheme, _, secret = authorization.partition(" ")
        secret = secret.strip()
        if scheme.lower() != "bearer" or not secret.startswith(PREFIX):
            raise NotAuthenticated("the Authorization header must be 'Bearer swell_...'")
        digest = _digest(secret)
        token = self._tokens.get(digest)
        # The look-up uses the digest of what was sent, so its timing reveals nothing about a real token.
        if token is None or not hmac.compare_digest(token.digest, digest):
            raise NotAuthenticated(
                "this token is not known here; it may have been revoked: ask an administrator for a new one"
            )
        if token.expires_s is not None and self._clock() >= token.expires_s:
            raise NotAuthenticated("this token has expired; ask an administrator for a new one")
        return Principal(token.user, token.role)


def ensure_tokens(book: TokenBook, home: Path) -> list[Path]:
    """At the first start, make a token for the administrator and one for the default user.

    If the store has tokens already, nothing is made, so that a token file that was deleted on purpose does
    not come back. Returns the files written.
    """
    if book.list():
        return []
    written = []
    for role, user in ((Role.ADMIN, "admin"), (Role.USER, default_user())):
        path = token_file(home, role)
        # A token that is there already stays good: the store may be empty by mistake.
        secret = _existing(path)
        if secret is None:
            secret = new_secret()
            write_private(path, secret + "\n")
            written.append(path)
        book.create(user, role, secret=secret)
    return written


def new_secret() -> str:
    """A fresh token."""
    return PREFIX + secrets.token_urlsafe(32)


def _existing(path: Path) -> str | None:
    """The token in a file; None if there is none."""
    try:
        text = path.read_text().strip()
    except (OSError, ValueError):
        return None
    return text if text.startswith(PREFIX) and len(text) >= len(PREFIX) + 32 else None


def default_user() -> str:
    """The name of the account that runs this process, as a valid user name."""
    try:
        name = re.sub(r"[^A-Za-z0-9._@-]", "_", getpass.getuser())[:64]
    except (OSError, KeyError):
        return "user"
    return name if USER_NAME.fullmatch(name) and name != "admin" else "user"


def require_admin(principal: Principal, verb: str) -> None:
    """Raise Forbidden unless the principal is an administrator."""
    if principal.role is not Role.ADMIN:
        raise Forbidden(f"only an administrator may {verb}: use an administrator's token, or ask one")


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


# The audit log: who asked for what change, and who was refused. One JSON object per line, in audit.log.
#
# Requests that only read are not in it, unless they were refused. Refusals are limited to a few per second:
# callers without a token must not fill the disk.


AUDIT_FILE = "audit.log"
MOST_BYTES = 64 << 20
"""When the file is this large it becomes audit.log.1, in place of an older one."""
REFUSALS_PER_S = 10.0
_LONGEST = 300


class AuditLog:
    """Appends to the file. A full disk costs lines, never requests; `dropped` counts them."""

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        self._path = path
        self._most = most_bytes
        self._left, self._at_s = REFUSALS_PER_S, time.monotonic()
        self.dropped = 0

    def request(self, scope: Mapping[str, Any], status: int) -> None:
        """Write a line about a request that was answered, if it belongs in the log."""
        refused = status in (401, 403)
        if scope["method"] in ("GET", "HEAD", "OPTIONS") and not refused:
            return
        if refused and not self._may_refuse():
            self.dropped += 1
            return
        state = scope.get("state") or {}
        principal = state.get("principal")
        self.write(
            user=None if principal is None else principal.user,
            role=None if principal is None else principal.role.value,
            address=(scope.get("client") or [None])[0],
            method=scope["method"],
            path=scope["path"][:_LONGEST],
            status=status,
            **({"job_id": state["job_id"]} if "job_id" in state else {}),
        )

    def write(self, **entry: Any) -> None:
        """Append an entry with the present moment."""
        line = json.dumps({"time_s": round(time.time(), 3)} | entry) + "\n"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, 0o600)
            try:
                os.write(descriptor, line.encode())
                full = os.fstat(descriptor).st_size > self._most
            finally:
                os.close(descriptor)
        except OSError:
            self.dropped += 1
            return
        if full:
            with contextlib.suppress(OSError):
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))

    def _may_refuse(self) -> bool:
        now_s = time.monotonic()
        self._left = min(self._left + (now_s - self._at_s) * REFUSALS_PER_S, REFUSALS_PER_S)
        self._at_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
