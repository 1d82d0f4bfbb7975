"""How the SDK reaches a server: where it is, what is sent again, and for how long that is tried."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from swell.api import refusals
from swell.api.home import ServerFile, home_dir, token_file
from swell.api.transport import Call, ConnectionLost, Reply, Silent, Target, Transport
from swell.control.errors import NotLeading, StoreLost
from swell.domain import SwellError

Model = TypeVar("Model", bound=BaseModel)

_FIRST_RETRY_S = 1.0
"""How long a first call waits for a server that may just be starting."""


class Sender:
    """Sends calls over a transport, again if the connection is lost, and to the next server if there are
    several."""

    def __init__(self, transport: Transport, locate: Callable[[], Target], retry_s: float) -> None:
        self.sleep, self.close = transport.sleep, transport.close
        self._transport = transport
        self._locate = locate
        self._retry_s = retry_s
        self._answered = False
        """Whether it is worth waiting for a server that cannot be reached."""
        self._turns = 0
        """How often a server could not be reached; if there are several, the next one is tried."""

    async def get(self, model: type[Model], call: Call, *, retry: bool = True) -> Model:
        """The answer to a call, checked."""
        reply = await self.send(call, retry=retry)
        try:
            return model.model_validate_json(reply.content)
        except ValidationError as error:
            raise refusals.ServerFailed(
                f"this version of swell cannot read the answer to {call.path}; install the server's: {error}"
            ) from error

    async def send(self, call: Call, *, retry: bool = True) -> Reply:
        """The answer to a call. Without `retry`, a call that may have arrived is not sent again."""
        attempt, began_s = 0, time.monotonic()
        while True:
            try:
                reply = await self._transport.request(self._target(), call)
                self._answered = True
                if reply.status >= 400:
                    raise _error(reply)
                return reply
            except NotLeading as error:
                await self._pause(error, attempt, began_s)  # nothing was changed, so any call may be repeated
            except (ConnectionLost, StoreLost) as error:
                if not retry:
                    raise
                await self._pause(error, attempt, began_s)
            attempt += 1

    async def stream(
        self, call: Callable[[], Call], *, endless: bool = False, again: Callable[[], None] | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Parts of a streamed answer. The stream is opened again when it breaks, and if endless when it ends.

        `again` is called before each new connection.
        """
        attempt, began_s = 0, time.monotonic()
        while True:
            try:
                async with aclosing(self._transport.stream(self._target(), call())) as parts:
                    async for part in parts:
                        if not isinstance(part, Reply):
                            attempt, began_s = 0, time.monotonic()
                            yield part
                        else:
                            self._answered = True
                            if part.status >= 400:
                                raise _error(part)
                if not endless:
                    return
                await self.sleep(0.2)
            except Silent:
                began_s = time.monotonic()
            except (ConnectionLost, NotLeading, StoreLost) as error:
                await self._pause(error, attempt, began_s)
                attempt += 1
            if again is not None:
                again()

    def _target(self) -> Target:
        target = self._locate()
        # Of several control planes one takes over from another within seconds: worth waiting for.
        self._answered = self._answered or bool(target.others)
        return target.turned(self._turns)

    async def _pause(self, error: SwellError, attempt: int, began_s: float) -> None:
        """Wait before the next attempt, which goes to the next server if there are several; or give up."""
        self._turns += 1
        patience_s = self._retry_s if self._answered else min(_FIRST_RETRY_S, self._retry_s)
        if time.monotonic() - began_s >= patience_s:
            raise error
        # A random part, so that many clients do not all come back at the same moment.
        delay_s = min(0.1 * 2**attempt, 2.0) * (0.75 + secrets.randbelow(500) / 1000)
        await self.sleep(delay_s)


def find_server(
    url: str | None, token: str | None, home: str | os.PathLike[str] | None, role: str, ca: str | None
) -> Target:
    """The server and token to use: as given, else from the environment, else from the state directory."""
    directory = home_dir(home)
    # If a home is given, its server is meant, whatever the environment says.
    from_env = home is None
    url = url or (os.environ.get("SWELL_URL") if from_env else None)
    ca = ca or (os.environ.get("SWELL_CA") if from_env else None)
    if url is None:
        found = ServerFile.read(directory)
        if found is None:
            raise refusals.Unreachable(
                f"no server runs in {directory}: start one with 'swell up', or set SWELL_URL and SWELL_TOKEN"
            )
        url, ca = ",".join(_addresses(directory, found.url)), ca or found.ca
    token = token or (os.environ.get("SWELL_TOKEN") if from_env else None)
    if token is None:
        path = token_file(directory, role)
        try:
            token = path.read_text().strip()
        except OSError as error:
            raise refusals.NotAuthenticated(
                f"no token: {path} cannot be read ({error.strerror}); give token or set SWELL_TOKEN"
            ) from error
    first, *others = [one.strip() for one in url.split(",") if one.strip()] or [url]
    return Target(first, token, ca, tuple(others))


def _addresses(home: Path, leader: str) -> list[str]:
    """The addresses of a home's control planes, that of the leader first."""
    standbys = [ServerFile.read(folder) for folder in sorted((home / "planes").glob("*"))]
    return list(dict.fromkeys([leader, *(one.url for one in standbys if one is not None)]))


def _error(reply: Reply) -> SwellError:
    """The error to raise for an answer with an error status."""
    body = _decoded(reply.content)
    error = refusals.from_answer(reply.status, body)
    if reply.status == 502 and isinstance(body, dict) and body["error"].get("code") == refusals.LEADER_LOST:
        return ConnectionLost(str(error))
    return error


def _decoded(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None
