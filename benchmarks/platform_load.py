"""The platform under load: submissions, listeners, and memory over many job lives.

    python -m benchmarks.platform_load              # everything, about five minutes
    python -m benchmarks.platform_load submit       # 2,000 submissions from 50 clients, 1,000 jobs queued
    python -m benchmarks.platform_load listen       # 200 event subscribers
    python -m benchmarks.platform_load memory       # 10,000 job life cycles

A real server in a process of its own, a real store on this disk; only the engine pretends to train. The
clients write HTTP by hand over plain sockets: they share this machine's processors with the server, and what
is to be measured is the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

import swell
from swell.policies import DEFAULT

P99_MS = 250.0
GROWTH_BYTES_PER_JOB = 1024.0


# -- the server ------------------------------------------------------------------------------------------


def serve(home: Path, slots: str, duration_s: float, policy: str) -> None:
    """A server until it is told to end. Runs in a process of its own."""
    from swell.api.server import Server
    from swell.cli._platform import warm_up
    from swell.control.plane import ControlPlane
    from swell.control.store import Store, connect
    from swell.domain import Cluster
    from swell.engines.null import NullEngine

    store = Store(connect(str(home / "store.db")))
    engine = NullEngine(Cluster.parse(slots), duration_s=duration_s)
    plane = ControlPlane(store, engine, home=home, policy=policy)
    warm_up(policy)  # as `swell up` does
    plane.start()
    Server(plane, store, home=home, port=0).run()
    plane.stop()
    store.close()


@dataclass(frozen=True)
class Running:
    """A server in another process."""

    home: Path
    pid: int
    url: str
    token: str

    def client(self) -> swell.Client:
        """The SDK."""
        return swell.Client(home=self.home)

    @property
    def rss_bytes(self) -> int:
        """Memory of the server's process."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("no VmRSS")

    @property
    def cpu_s(self) -> float:
        """Processor time the server's process has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def server(slots: str = "2x4", duration_s: float = 1e6, policy: str = DEFAULT) -> Iterator[Running]:
    """A server of its own in a fresh directory."""
    with tempfile.TemporaryDirectory(prefix="swell-load-") as directory:
        home = Path(directory)
        (home / "train.py").write_text("# nothing to train\n")
        command = [sys.executable, "-m", "benchmarks.platform_load", "serve", "--home", directory]
        command += ["--slots", slots, "--duration", str(duration_s), "--policy", policy]
        process = subprocess.Popen(command, cwd=Path(__file__).parents[1])
        try:
            until_s = time.monotonic() + 60
            while not (home / "server.json").exists():
                if process.poll() is not None or time.monotonic() > until_s:
                    raise RuntimeError("the server did not come up")
                time.sleep(0.05)
            url = json.loads((home / "server.json").read_text())["url"]
            token = (home / "tokens" / "user").read_text().strip()
            running = Running(home, process.pid, url, token)
            running.client().health()
            yield running
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


# -- lean clients ----------------------------------------------------------------------------------------


class Wire:
    """One connection, kept open; requests as plain as they can be."""

    def __init__(self, running: Running) -> None:
        self._where = urlsplit(running.url)
        self._token = running.token

    async def __aenter__(self) -> Wire:
        self._in, self._out = await asyncio.open_connection(self._where.hostname, self._where.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._out.close()

    async def post(self, path: str, body: bytes, key: str) -> tuple[int, Any]:
        """Send a request; its status and answer."""
        self._out.write(
            f"POST {path} HTTP/1.1\r\nHost: swell\r\nAuthorization: Bearer {self._token}\r\n"
            f"Idempotency-Key: {key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        head = (await self._in.readuntil(b"\r\n\r\n")).lower()
        size = int(head.split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0])
        return int(head.split(b" ", 2)[1]), json.loads(await self._in.readexactly(size))

    async def events(self, since: int) -> AsyncIterator[dict[str, Any]]:
        """Live events."""
        self._out.write(
            f"GET /v1/events/stream?since={since} HTTP/1.1\r\nHost: swell\r\n"
            f"Authorization: Bearer {self._token}\r\n\r\n".encode()
        )
        head = await self._in.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode())
        while True:
            line = await self._in.readline()
            if not line:
                return
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


@dataclass(frozen=True)
class Submitted:
    """What came of many submissions."""

    keys: dict[str, str]
    """Id of the job that each key got."""
    doubled: list[str]
    """Keys that got two different jobs."""
    latencies_ms: np.ndarray
    seconds: float

    def __str__(self) -> str:
        p50, p95, p99 = np.percentile(self.latencies_ms, [50, 95, 99])
        rate = len(self.latencies_ms) / self.seconds
        return (
            f"{len(self.latencies_ms)} requests in {self.seconds:.1f} s ({rate:.0f}/s): "
            f"p50 {p50:.0f} ms, p95 {p95:.0f} ms, p99 {p99:.0f} ms, max {self.latencies_ms.max():.0f} ms"
        )

    @property
    def p99_ms(self) -> float:
        """The slowest of the fastest 99%."""
        return float(np.percentile(self.latencies_ms, 99))


async def submit_many(running: Running, count: int, clients: int, twice: float = 0.0) -> Submitted:
    """Submit from many connections at once; some are sent again under their key, as after a lost answer."""
    body = json.dumps({"name": "load", "script": "train.py", "workdir": str(running.home)}).encode()
    keys: dict[str, str] = {}
    doubled: list[str] = []
    latencies: list[float] = []
    todo = iter(range(count))

    async def one(number: int) -> None:
        async with Wire(running) as wire:
            for i in todo:
                key = uuid.uuid4().hex
                for _ in range(2 if i % 10 < twice * 10 else 1):
                    began_s = time.perf_counter()
                    status, answer = await wire.post("/v1/jobs", body, key)
                    latencies.append(1e3 * (time.perf_counter() - began_s))
                    if status != 201:
                        raise RuntimeError(f"client {number}: {status} {answer}")
                    if keys.setdefault(key, answer["job_id"]) != answer["job_id"]:
                        doubled.append(key)

    began_s = time.perf_counter()
    await asyncio.gather(*(one(i) for i in range(clients)))
    return Submitted(keys, doubled, np.array(latencies), time.perf_counter() - began_s)


# -- the three questions ---------------------------------------------------------------------------------


def bench_submit(count: int = 2000, clients: int = 50, queued: int = 1000) -> bool:
    """None lost, none doubled, and the 99th percentile under its bound while jobs are queued."""
    with server() as running:
        before = asyncio.run(submit_many(running, queued, 20))
        time.sleep(2.0)
        cpu_s = running.cpu_s
        result = asyncio.run(submit_many(running, count, clients, twice=0.1))
        cpu_s = running.cpu_s - cpu_s
        there = Counter(job.job_id for job in running.client().jobs())
    wanted = set(before.keys.values()) | set(result.keys.values())
    lost, extra = wanted - set(there), set(there) - wanted
    held = [job_id for job_id, times in there.items() if times > 1]
    print(f"submit, {clients} clients, {queued} queued: {result}")
    print(f"  server's processor time {1e3 * cpu_s / len(result.latencies_ms):.2f} ms per request")
    print(f"  lost {len(lost)}, doubled {len(result.doubled) + len(extra) + len(held)} of {len(wanted)}")
    good = not (lost or extra or held or result.doubled) and len(wanted) == count + queued
    return _verdict("submit", good and result.p99_ms < P99_MS)


def bench_listen(listeners: int = 200, jobs: int = 300) -> bool:
    """Every listener hears everything in order; how late they hear it."""

    async def listen() -> tuple[int, np.ndarray, Submitted]:
        delays: list[float] = []
        complete = 0
        ready = asyncio.Semaphore(0)

        async def one() -> None:
            nonlocal complete
            async with Wire(running) as wire:
                ready.release()
                last, ended = 0, 0
                async for event in wire.events(0):
                    if event["seq"] <= last:
                        raise RuntimeError(f"event {event['seq']} came after {last}")
                    last = event["seq"]
                    delays.append(time.time() - event["time_s"])
                    ended += event["kind"] == "finished"
                    if ended == jobs:
                        complete += 1
                        return

        tasks = [asyncio.create_task(one()) for _ in range(listeners)]
        for _ in tasks:
            await ready.acquire()
        await asyncio.sleep(1.0)
        result = await submit_many(running, jobs, 10)
        async with asyncio.timeout(300):
            await asyncio.gather(*tasks)
        return complete, np.array(delays), result

    with server(duration_s=0.05, slots="2x8") as running:
        complete, delays, result = asyncio.run(listen())
    p50, p99 = np.percentile(delays, [50, 99])
    print(f"listen, {listeners} listeners, {jobs} jobs: {complete} heard everything in order")
    print(f"  {len(delays)} deliveries, p50 {1e3 * p50:.0f} ms, p99 {1e3 * p99:.0f} ms after the event")
    print(f"  submissions meanwhile: {result}")
    return _verdict("listen", complete == listeners)


def bench_memory(jobs: int = 10_000, rounds: int = 10, clients: int = 10) -> bool:
    """Job after job from submission to its end; memory must not follow their number."""
    sizes: list[int] = []
    with server(duration_s=0.0, slots="4x16", policy="afs-l") as running:
        client = running.client()
        began_s = time.perf_counter()
        for _ in range(rounds):
            asyncio.run(submit_many(running, jobs // rounds, clients))
            until_s = time.monotonic() + 120
            while client.jobs(phase="queued", limit=1) or client.jobs(phase="running", limit=1):
                if time.monotonic() > until_s:
                    raise RuntimeError("jobs do not end")
                time.sleep(0.1)
            sizes.append(running.rss_bytes)
        seconds = time.perf_counter() - began_s
        ended = len(client.jobs(phase="finished"))
    # The first half fills caches and the allocator's pools.
    half = rounds // 2
    per_job = (sizes[-1] - sizes[half - 1]) / ((rounds - half) * (jobs // rounds))
    mib = ", ".join(f"{size / 2**20:.0f}" for size in sizes)
    print(f"memory, {ended} job lives in {seconds:.0f} s ({ended / seconds:.0f}/s): {mib} MiB")
    print(f"  growth over the second half: {per_job:.0f} bytes per job")
    return _verdict("memory", ended == jobs and per_job < GROWTH_BYTES_PER_JOB)


def _verdict(name: str, good: bool) -> bool:
    print(f"  {name}: {'ok' if good else 'FAILED'}", flush=True)
    return good


def main() -> int:
    """Run what was asked for; exit code 1 if a bound was not kept."""
    parser = argparse.ArgumentParser(description="The platform under load.")
    parser.add_argument("what", nargs="*", default=["submit", "listen", "memory"])
    parser.add_argument("--home", type=Path)
    parser.add_argument("--slots", default="2x4")
    parser.add_argument("--duration", type=float, default=1.0)
    parser.add_argument("--policy", default=DEFAULT)
    options = parser.parse_args()
    if options.what == ["serve"]:
        serve(options.home, options.slots, options.duration, options.policy)
        return 0
    parts = {"submit": bench_submit, "listen": bench_listen, "memory": bench_memory}
    unknown = set(options.what) - set(parts)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    verdicts = [parts[name]() for name in options.what]
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
