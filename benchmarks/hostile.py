"""The platform while somebody means it harm: answers to honest requests, and jobs that go on.

    python -m benchmarks.hostile                # both, about two minutes
    python -m benchmarks.hostile reports        # malformed messages of a job, malformed frames of a stranger
    python -m benchmarks.hostile connections    # 1,500 idle connections, 1,000 event streams, ulimit -n 4096

A real `swell up` in a home of its own, on loopback, with real jobs on CPU slots. Everything it starts ends
with it.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

MESSAGES = 10_000
IDLE, STREAMS = 1_500, 1_000
DESCRIPTORS = 4096
P99_LIST_MS, P99_SUBMIT_MS = 250.0, 500.0

HONEST = """
import swell, time, torch
model = torch.nn.Linear(4, 1)
job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=0.01))
loader = job.loader(torch.utils.data.TensorDataset(torch.randn(100_000, 4)), batch_size=4)
for _ in job.epochs(1):
    for (x,) in loader:
        time.sleep(0.05)
        job.step(model(x).sum())
"""
HOSTILE = (
    HONEST.replace("for _ in job.epochs", "said = 0\nfor _ in job.epochs")
    + f"""
        for _ in range(500):
            if said < {MESSAGES}:
                said += 1
                bad = [[1], "many", {{"done": float("nan")}}, {{"step_s": -1, "local_batch": 1}}][said % 4]
                job._link.line.send({{"type": "beat", "step": 0, "report": bad}})
                job._link.line.send({{"type": "event", "name": "generation", "fields": {{"members": bad}}}})
                if said == {MESSAGES}:
                    print("said it all", flush=True)
"""
)


class Platform:
    """A control plane in a home of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.swell("up", "-d", "--slots", "2", "--policy", "afs-l", "--port", "0")
        server = json.loads((home / "server.json").read_text())
        self.pid = int(server["pid"])
        self.host, port = server["url"].removeprefix("http://").split(":")
        self.port = int(port)
        self.token = (home / "tokens" / "user").read_text().strip()

    def swell(self, *words: str) -> None:
        """Run a command."""
        command = [sys.executable, "-m", "swell", words[0], "--home", str(self.home), *words[1:]]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def ask(
        self, line: http.client.HTTPConnection, method: str, path: str, body: object = None
    ) -> dict[str, object]:
        """One request on a connection that is kept."""
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        line.request(method, path, None if body is None else json.dumps(body), headers)
        answer = line.getresponse()
        text = answer.read()
        if answer.status >= 400:
            raise RuntimeError(f"{method} {path}: {answer.status} {text[:200]!r}")
        return dict(json.loads(text))

    def line(self) -> http.client.HTTPConnection:
        """A connection."""
        return http.client.HTTPConnection(self.host, self.port, timeout=30)

    def submit(self, line: http.client.HTTPConnection, name: str, script: str) -> str:
        """Hand a script in; returns the job's id."""
        path = self.home / f"{name}.py"
        path.write_text(script)
        body = {"name": name, "script": str(path), "workdir": str(self.home), "max_workers": 1}
        return str(self.ask(line, "POST", "/v1/jobs", body)["job_id"])

    def done(self, line: http.client.HTTPConnection, job_id: str) -> float:
        """Steps that a job has reported."""
        return float(str(self.ask(line, "GET", f"/v1/jobs/{job_id}")["done"]))

    @property
    def rss_mib(self) -> float:
        """Memory of the control plane."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024


@contextlib.contextmanager
def platform() -> Iterator[Platform]:
    """A platform that is taken down at the end, with its jobs."""
    with tempfile.TemporaryDirectory(prefix="swell-hostile-") as folder:
        made = Platform(Path(folder))
        try:
            yield made
        finally:
            made.swell("down")


def wait(condition: Callable[[], object], what: str, limit_s: float = 60.0) -> None:
    """Until `condition` holds."""
    give_up_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > give_up_s:
            raise RuntimeError(f"waited {limit_s:g} s for {what}")
        time.sleep(0.1)


def timed(ask: Callable[[], object], until: Callable[[], bool], least: int) -> list[float]:
    """Milliseconds of honest requests, one after the other."""
    took = []
    while len(took) < least or not until():
        began_s = time.perf_counter()
        ask()
        took.append((time.perf_counter() - began_s) * 1e3)
    return took


def reports() -> bool:
    """A job that says nonsense and a stranger who sends nonsense; others ask for the list of jobs."""
    with platform() as running:
        line = running.line()
        honest = running.submit(line, "honest", HONEST)
        hostile = running.submit(line, "hostile", HOSTILE)
        wait(lambda: running.done(line, honest) > 0, "the honest job to train")
        folder = running.home / "jobs" / hostile
        wait(lambda: list(folder.glob("runs/*/coordinator.json")), "the hostile job's port")
        (address,) = folder.glob("runs/*/coordinator.json")
        port, sent = int(json.loads(address.read_text())["port"]), [0]
        stranger = threading.Thread(target=_send_nonsense, args=(port, sent), daemon=True)
        stranger.start()

        def over() -> bool:
            said = (folder / "output.log").exists() and b"said it all" in (folder / "output.log").read_bytes()
            return said and not stranger.is_alive()

        took = timed(lambda: running.ask(line, "GET", "/v1/jobs"), over, 500)
        before = running.done(line, honest)
        wait(lambda: running.done(line, honest) > before + 10, "the honest job to go on")
        log = (running.home / "server.log").stat().st_size
        p50, p99 = np.percentile(took, [50, 99])
        print(
            f"reports: {2 * MESSAGES} malformed messages of a job and {sent[0]} of a stranger; GET /v1/jobs"
            f" p50 {p50:.1f} ms, p99 {p99:.1f} ms; the other job went on; server.log {log} bytes"
        )
        return bool(p99 <= P99_LIST_MS)


def _send_nonsense(port: int, sent: list[int]) -> None:
    draw = random.Random(1)
    while sent[0] < MESSAGES:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
            body = draw.randbytes(draw.randrange(200))
            length = draw.choice([len(body), draw.randrange(1 << 32)])
            sock.sendall(struct.pack("!I", length) + body)
        sent[0] += 1


def connections() -> bool:
    """Idle connections and streams; honest people submit jobs meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(DESCRIPTORS, hard), hard))
    try:
        with platform() as running:
            line = running.line()
            honest = running.submit(line, "honest", HONEST)
            wait(lambda: running.done(line, honest) > 0, "the honest job to train")
            idle = [socket.create_connection((running.host, running.port)) for _ in range(IDLE)]
            head = "GET /v1/events/stream?since=0 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
            head += f"{running.token}\r\n\r\n"
            streams = [socket.create_connection((running.host, running.port)) for _ in range(STREAMS)]
            for sock in streams:
                sock.sendall(head.encode())
            for sock in streams:
                sock.recv(1)
            before, count = running.done(line, honest), iter(range(1000))
            took = timed(lambda: running.submit(line, f"more-{next(count)}", HONEST), lambda: True, 200)
            wait(lambda: running.done(line, honest) > before, "the honest job to go on")
            p50, p99 = np.percentile(took, [50, 99])
            files = len(list(Path(f"/proc/{running.pid}/fd").iterdir()))
            print(
                f"connections: {IDLE} idle and {STREAMS} streams at ulimit -n {DESCRIPTORS} ({files} open,"
                f" {running.rss_mib:.0f} MiB); submissions p50 {p50:.1f}, p99 {p99:.1f} ms; the job went on"
            )
            for sock in [*idle, *streams]:
                sock.close()
            return bool(p99 <= P99_SUBMIT_MS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def main() -> int:
    """Run what is asked for; the exit code is 1 if an answer took too long."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("which", nargs="?", choices=["reports", "connections"])
    which = parser.parse_args().which
    os.environ.pop("SWELL_URL", None)
    runs = {"reports": reports, "connections": connections}
    return max(int(not run()) for name, run in runs.items() if which in (None, name))


if __name__ == "__main__":
    sys.exit(main())
