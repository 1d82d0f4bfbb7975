"""The SDK.

    with swell.Client() as client:
        job = client.submit("train.py", within_s=7200)
        for text in client.logs(job, follow=True):
            print(text, end="")
        print(client.wait(job).phase)

Without arguments it talks to the server of this machine's state directory, with the token made there at the
first start. `AsyncClient` has the same methods as coroutines and asynchronous iterators.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from swell.api.schemas import (
    AutoscalerView,
    Collected,
    EventPage,
    EventView,
    Health,
    JobPage,
    JobView,
    LanesView,
    NewToken,
    NodeList,
    NodeView,
    PolicyView,
    PromiseView,
    ReservationList,
    ReservationView,
    SeriesView,
    TeamList,
    TeamView,
    TokenList,
    TokenView,
    WhoView,
)
from swell.api.transport import (
    AsyncTransport,
    BlockingTransport,
    Call,
    EventParser,
    Sender,
    Target,
    Transport,
    find_server,
)
from swell.control.model import Phase
from swell.domain import InputError, JobOptions
from swell.domain.request import name_from

# Every call of the SDK, written once; `client` makes a blocking and an asynchronous client of it.
#
# A call that loses its connection is sent again unchanged. A submission carries a key, so that the server
# takes its job in only once; all other calls that are repeated do no harm when they arrive twice. Streams
# go on where they broke off.


_LONG_POLL_S = 20.0
_BEAT_S = 45.0
"""Silence after which a stream is opened again; the server sends something every 15 s."""


class Calls:
    """The API of a server, as coroutines over a transport."""

    def __init__(self, transport: Transport, locate: Callable[[], Target], *, retry_s: float = 20.0) -> None:
        self._server = Sender(transport, locate, retry_s)

    # -- jobs --------------------------------------------------------------------------------------------

    async def submit(
        self,
        script: str | os.PathLike[str],
        *,
        idempotency_key: str | None = None,
        **options: Unpack[JobOptions],
    ) -> JobView:
        """Hand a job in. It is on the server's disk when this returns; look at `phase` and `promise`."""
        headers = {"Idempotency-Key": idempotency_key or secrets.token_hex(16)}
        body = submission(script, options)
        return await self._server.get(JobView, Call("POST", "/v1/jobs", body=body, headers=headers))

    async def quote(self, script: str | os.PathLike[str], **options: Unpack[JobOptions]) -> PromiseView:
        """The promise that submitting this job would give, without submitting it."""
        call = Call("POST", "/v1/quote", body=submission(script, options))
        return await self._server.get(PromiseView, call)

    async def job(self, job: str | JobView) -> JobView:
        return await self._server.get(JobView, Call("GET", _job(job)))

    async def jobs(self, *, phase: Phase | str | None = None, limit: int | None = None) -> list[JobView]:
        """Jobs, newest first: all of them, or at most `limit`."""
        found: list[JobView] = []
        query: dict[str, str | int] = {} if phase is None else {"phase": str(phase)}
        while limit is None or len(found) < limit:
            query["limit"] = 1000 if limit is None else min(limit - len(found), 1000)
            page = await self._server.get(JobPage, Call("GET", "/v1/jobs", query))
            found += page.jobs
            if page.next is None:
                break
            query["after"] = page.next
        return found

    async def wait(self, job: str | JobView, *, timeout_s: float | None = None) -> JobView:
        """Wait until a job is over, and return it; TimeoutError if that takes too long."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = _LONG_POLL_S if until_s is None else max(until_s - time.monotonic(), 0.0)
            wait_s = min(left_s, _LONG_POLL_S)
            call = Call("GET", _job(job), {"wait_s": round(wait_s, 3)}, timeout_s=wait_s + 30.0)
            seen = await self._server.get(JobView, call)
            if seen.over:
                return seen
            if until_s is not None and time.monotonic() >= until_s:
                raise TimeoutError(f"job '{seen.job_id}' is still {seen.phase.value} after {timeout_s:g} s")

    async def cancel(self, job: str | JobView) -> JobView:
        """End a job for good."""
        return await self._server.get(JobView, Call("POST", _job(job, "cancel")))

    async def pause(self, job: str | JobView) -> JobView:
        """Pause a job: it saves its state and gives its slots back until it is resumed."""
        return await self._server.get(JobView, Call("POST", _job(job, "pause")))

    async def resume(self, job: str | JobView) -> JobView:
        """Let a paused job go on."""
        return await self._server.get(JobView, Call("POST", _job(job, "resume")))

    async def scale(
        self, job: str | JobView, min_workers: int = 1, max_workers: int | None = None
    ) -> JobView:
        """Bound a job's workers by hand."""
        body = {"min_workers": min_workers, "max_workers": max_workers}
        return await self._server.get(JobView, Call("POST", _job(job, "scale"), body=body))

    async def explain(self, job: str | JobView) -> dict[str, Any]:
        """Why a job runs or waits, when it will be done, and the slots it has had."""
        reply = await self._server.send(Call("GET", _job(job, "explain")))
        return dict(json.loads(reply.content))

    async def story(self, job: str | JobView) -> list[str]:
        """The last decisions of the state machines of a job, a line for each."""
        reply = await self._server.send(Call("GET", _job(job, "story")))
        return [str(line) for line in json.loads(reply.content)]

    async def series(self, job: str | JobView) -> SeriesView:
        """A job's curves over time (progress, loss, metrics, slots), and its starts, resizes and losses."""
        return await self._server.get(SeriesView, Call("GET", _job(job, "series")))

    async def logs(
        self, job: str | JobView, *, offset: int = 0, follow: bool = False
    ) -> AsyncGenerator[str, None]:
        """A job's output so far, in pieces; with `follow` also what comes until the job is over."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = self._follow_logs(job, offset) if follow else self._read_logs(job, offset)
        async with aclosing(pieces):
            async for piece in pieces:
                if text := decoder.decode(piece):
                    yield text
        if rest := decoder.decode(b"", True):
            yield rest

    async def _read_logs(self, job: str | JobView, offset: int) -> AsyncGenerator[bytes, None]:
        while True:
            call = Call("GET", _job(job, "logs"), {"offset": offset, "limit": 1 << 20})
            reply = await self._server.send(call)
            if not reply.content:
                return
            yield reply.content
            offset = int(reply.headers.get("x-next-offset", offset + len(reply.content)))

    async def _follow_logs(self, job: str | JobView, offset: int) -> AsyncGenerator[bytes, None]:
        def call() -> Call:
            return Call("GET", _job(job, "logs"), {"offset": offset, "follow": "true"}, timeout_s=_BEAT_S)

        over = False
        while not over:
            async with aclosing(self._server.stream(call)) as pieces:
                async for piece in pieces:
                    offset += len(piece)
                    yield piece
            # A server that ends also ends its streams; so go on with the next one unless the job is over.
            over = (await self.job(job)).over
            if not over:
                await self._server.sleep(0.2)
        async with aclosing(self._read_logs(job, offset)) as rest:
            async for piece in rest:
                yield piece

    # -- events, nodes, policy ---------------------------------------------------------------------------

    async def events(
        self, job: str | JobView | None = None, *, since: int | None = None, follow: bool = True
    ) -> AsyncGenerator[EventView, None]:
        """Events after number `since` (default: from now on); without `follow` only those so far."""
        query: dict[str, str | int] = {} if job is None else {"job": _id(job)}
        if not follow:
            async with aclosing(self._past(query | {"since": since or 0, "limit": 1000})) as past:
                async for event in past:
                    yield event
            return
        if since is not None:
            query["since"] = since
        parser = EventParser()

        def call() -> Call:
            headers = {} if parser.last_id is None else {"Last-Event-ID": parser.last_id}
            return Call("GET", "/v1/events/stream", query, headers=headers, timeout_s=_BEAT_S)

        async with aclosing(self._server.stream(call, endless=True, again=parser.reset)) as pieces:
            async for piece in pieces:
                for data in parser.feed(piece):
                    yield EventView.model_validate_json(data)

    async def _past(self, query: dict[str, str | int]) -> AsyncGenerator[EventView, None]:
        while True:
            page = await self._server.get(EventPage, Call("GET", "/v1/events", query))
            if not page.events:
                return
            for event in page.events:
                yield event
            query["since"] = page.next

    async def nodes(self) -> list[NodeView]:
        """The nodes, their slots, and how many are in use."""
        return (await self._server.get(NodeList, Call("GET", "/v1/nodes"))).nodes

    async def autoscaler(self) -> AutoscalerView | None:
        """How many nodes are rented, how many should be, and why; None if no nodes are rented."""
        return (await self._server.get(NodeList, Call("GET", "/v1/nodes"))).autoscaler

    async def lanes(self, *, since_s: float = 0.0) -> LanesView:
        """How many slots each job had and when, and how many there were, from a moment on."""
        return await self._server.get(LanesView, Call("GET", "/v1/lanes", {"since_s": since_s}))

    async def drain(self, node: str) -> list[NodeView]:
        """Move all jobs off a node and give it none until it is undrained (administrators only)."""
        return (await self._server.get(NodeList, Call("POST", f"/v1/nodes/{_safe(node)}/drain"))).nodes

    async def undrain(self, node: str) -> list[NodeView]:
        """Use a drained node again (administrators only)."""
        return (await self._server.get(NodeList, Call("POST", f"/v1/nodes/{_safe(node)}/undrain"))).nodes

    async def reservations(self) -> list[ReservationView]:
        """The reservations of services, and the slots that they have now."""
        return (await self._server.get(ReservationList, Call("GET", "/v1/reservations"))).reservations

    async def reserve(
        self,
        name: str,
        *,
        gpus: int = 0,
        nodes: Sequence[str] = (),
        start_s: float | None = None,
        end_s: float | None = None,
        every_s: float | None = None,
        most: int | None = None,
        owner: str = "",
        force: bool = False,
    ) -> ReservationView:
        """Keep slots for a service, or change what is kept (administrators only).

        Raises Conflict if that would break a promise to a job, unless `force` is given.
        """
        body = {"gpus": gpus, "nodes": list(nodes), "start_s": start_s, "end_s": end_s, "every_s": every_s}
        body |= {"most": most, "owner": owner, "force": force}
        return await self._server.get(ReservationView, Call("PUT", _reservation(name), body=body))

    async def unreserve(self, name: str) -> ReservationView:
        """Remove a reservation (administrators only)."""
        return await self._server.get(ReservationView, Call("DELETE", _reservation(name)), retry=False)

    async def demand(self, name: str, gpus: int) -> ReservationView:
        """Say how many slots the service behind a reservation wants now (its owner, administrators)."""
        call = Call("PUT", f"{_reservation(name)}/demand", body={"gpus": gpus})
        return await self._server.get(ReservationView, call)

    async def teams(self) -> list[TeamView]:
        """The teams, and the slots that they have and borrow now."""
        return (await self._server.get(TeamList, Call("GET", "/v1/teams"))).teams

    async def set_team(
        self, name: str, *, slots: int, users: Sequence[str] | None = None, force: bool = False
    ) -> TeamView:
        """Make a team, or change it (administrators only); without `users` it keeps those it has.

        Raises Conflict if that would break a promise.
        """
        body = {"slots": slots, "users": None if users is None else list(users), "force": force}
        return await self._server.get(TeamView, Call("PUT", f"/v1/teams/{_safe(name)}", body=body))

    async def remove_team(self, name: str, *, force: bool = False) -> TeamView:
        """Remove a team (administrators only); its users are in no team then."""
        call = Call("DELETE", f"/v1/teams/{_safe(name)}" + ("?force=true" if force else ""))
        return await self._server.get(TeamView, call, retry=False)

    async def me(self) -> WhoView:
        """The user whose token is used, and what it allows."""
        return await self._server.get(WhoView, Call("GET", "/v1/me"))

    async def policy(self) -> str:
        """The policy that decides how many slots each job gets."""
        return (await self._server.get(PolicyView, Call("GET", "/v1/policy"))).policy

    async def set_policy(self, policy: str) -> str:
        """Decide by another policy from now on (administrators only)."""
        return (await self._server.get(PolicyView, Call("PUT", "/v1/policy", body={"policy": policy}))).policy

    async def replay(self, policies: Sequence[str] = (), *, cluster: str | None = None) -> dict[str, Any]:
        """Replay the platform's history under other policies or on another cluster (administrators only)."""
        body = {"policies": list(policies), "cluster": cluster}
        reply = await self._server.send(Call("POST", "/v1/replay", body=body, timeout_s=600.0))
        return dict(json.loads(reply.content))

    async def collect(
        self, *, keep_s: float | None = None, keep_bytes: int | None = None, dry: bool = True
    ) -> Collected:
        """Delete what need not be kept of jobs that are over; `dry` only says what (administrators only)."""
        body = {"keep_s": keep_s, "keep_bytes": keep_bytes, "dry": dry}
        return await self._server.get(Collected, Call("POST", "/v1/gc", body=body, timeout_s=600.0))

    # -- tokens and the server itself --------------------------------------------------------------------

    async def tokens(self) -> list[TokenView]:
        """All tokens, without their secrets (administrators only)."""
        return (await self._server.get(TokenList, Call("GET", "/v1/tokens"))).tokens

    async def create_token(self, user: str, *, role: str = "user", ttl_s: float | None = None) -> NewToken:
        """Make a token (administrators only). Its secret is shown only now."""
        body = {"user": user, "role": role, "ttl_s": ttl_s}
        # Never sent again, because each call that arrives makes another token.
        return await self._server.get(NewToken, Call("POST", "/v1/tokens", body=body), retry=False)

    async def revoke_token(self, token_id: str) -> TokenView:
        """Revoke a token (administrators only)."""
        return await self._server.get(TokenView, Call("DELETE", f"/v1/tokens/{_safe(token_id)}"), retry=False)

    async def health(self) -> Health:
        """Whether the server is up and its store answers."""
        return await self._server.get(Health, Call("GET", "/healthz"))

    async def close(self) -> None:
        await self._server.close()


def submission(script: str | os.PathLike[str], options: JobOptions) -> dict[str, Any]:
    """The body of a submission or a quote."""
    body: dict[str, Any] = {
        name: list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        for name, value in options.items()
    }
    within_s = body.pop("within_s", None)
    if within_s is not None:
        if body.get("deadline_s") is not None:
            raise InputError("give either deadline_s or within_s, not both", field="within_s")
        body["deadline_s"] = time.time() + within_s
    body["script"] = os.fspath(script)
    body["workdir"] = os.fspath(body.get("workdir") or Path.cwd())
    if not body.get("name"):
        body["name"] = name_from(script)
    return body


def _id(job: str | JobView) -> str:
    return job.job_id if isinstance(job, JobView) else job


def _job(job: str | JobView, verb: str = "") -> str:
    return f"/v1/jobs/{_safe(_id(job))}" + (f"/{verb}" if verb else "")


def _reservation(name: str) -> str:
    return f"/v1/reservations/{_safe(name)}"


def _safe(name: str) -> str:
    """A name as part of a URL's path; raises InputError if it cannot be one."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", name):
        raise InputError(
            f"'{name}' is not an id: it must have up to 128 letters, digits, '.', '_' or '-'", field="id"
        )
    return name


P = ParamSpec("P")
T = TypeVar("T")


class AsyncClient(Calls):
    """A server's API for asyncio."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        home: str | os.PathLike[str] | None = None,
        *,
        role: str = "user",
        ca: str | None = None,
        retry_s: float = 20.0,
    ) -> None:
        """Make a client; nothing is sent yet.

        Args:
            url: URL of the server; by default $SWELL_URL, else the server that runs in `home`. Of several
                control planes, the URL of any, or of all with commas between them.
            token: Bearer token; by default $SWELL_TOKEN, else the token in `home` for `role`.
            home: State directory; by default $SWELL_HOME, else ~/.swell.
            role: 'user' or 'admin': which of the tokens in `home` to use.
            ca: Certificate to trust, for a server with a self-signed one; by default $SWELL_CA.
            retry_s: How long to go on trying when the connection is lost.
        """
        super().__init__(AsyncTransport(), partial(find_server, url, token, home, role, ca), retry_s=retry_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, such as any call over a blocking transport."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    coroutine.close()
    raise RuntimeError("a blocking call tried to wait for an event loop")


def _blocking(
    method: Callable[Concatenate[Calls, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    @wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(method(self._calls, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[Calls, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[Client, P], Iterator[T]]:
    @wraps(method)
    def iterate(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        source = method(self._calls, *args, **kwargs)
        try:
            while True:
                try:
                    item: T = run(anext(source))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            run(source.aclose())

    return iterate


class Client:
    """A server's API for plain functions and threads."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        home: str | os.PathLike[str] | None = None,
        *,
        role: str = "user",
        ca: str | None = None,
        retry_s: float = 20.0,
    ) -> None:
        """Make a client; nothing is sent yet. The arguments are those of `AsyncClient`."""
        locate = partial(find_server, url, token, home, role, ca)
        self._calls = Calls(BlockingTransport(), locate, retry_s=retry_s)

    submit = _blocking(Calls.submit)
    quote = _blocking(Calls.quote)
    job = _blocking(Calls.job)
    jobs = _blocking(Calls.jobs)
    wait = _blocking(Calls.wait)
    cancel = _blocking(Calls.cancel)
    pause = _blocking(Calls.pause)
    resume = _blocking(Calls.resume)
    scale = _blocking(Calls.scale)
    explain = _blocking(Calls.explain)
    story = _blocking(Calls.story)
    series = _blocking(Calls.series)
    logs = _iterating(Calls.logs)
    events = _iterating(Calls.events)
    nodes = _blocking(Calls.nodes)
    autoscaler = _blocking(Calls.autoscaler)
    lanes = _blocking(Calls.lanes)
    drain = _blocking(Calls.drain)
    undrain = _blocking(Calls.undrain)
    reservations = _blocking(Calls.reservations)
    reserve = _blocking(Calls.reserve)
    unreserve = _blocking(Calls.unreserve)
    teams = _blocking(Calls.teams)
    set_team = _blocking(Calls.set_team)
    remove_team = _blocking(Calls.remove_team)
    demand = _blocking(Calls.demand)
    me = _blocking(Calls.me)
    policy = _blocking(Calls.policy)
    set_policy = _blocking(Calls.set_policy)
    replay = _blocking(Calls.replay)
    collect = _blocking(Calls.collect)
    tokens = _blocking(Calls.tokens)
    create_token = _blocking(Calls.create_token)
    revoke_token = _blocking(Calls.revoke_token)
    health = _blocking(Calls.health)
    close = _blocking(Calls.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


__all__ = ["AsyncClient", "Client"]
