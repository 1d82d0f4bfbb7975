"""The workers of a job on Ray: each has a `WorkerHolder` actor on the node of its slot.

The job's launcher runs in its supervisor, which is a Ray driver: the holders end when it ends.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swell.engines.order import JobOrder
from swell.engines.processes import MARK
from swell.engines.ray import packaging, places
from swell.engines.ray.claims import HolderName
from swell.engines.ray.connection import connect, is_loopback, own_address
from swell.engines.ray.holder import WorkerHolder
from swell.train.agent.protocol import Exited, Lost, Unstartable
from swell.train.agent.run_config import PER_GPU, RunConfig
from swell.train.agent.wire import MOST_STRANGERS, Connection, WireError, new_secret
from swell.train.agent.worker_processes import Failed, News

OUT_OF_MEMORY = 137
UP_S = 60.0
"""A holder that Ray has not started after this long is given up: another user may have the slot."""
UP_WITH_PIP_S = 900.0
"""The same for a job with requirements, which Ray installs first."""
KILL_S = 2.0
"""If a worker has not ended this long after it was told to, its holder is killed."""
MUTE_S = 30.0
"""For this long after a holder did not answer, its node is taken for one that may be dead."""
MUTE_UP_S = 5.0
"""On such a node a holder that is not up after this long is given up: Ray may take minutes to notice."""
ASK_AGAIN_S = 1.0
_ERROR = re.compile(r"[\w.]*(Error|Exception|Timeout|timeout)\b")
"""The line of a traceback that names the error."""
_LINK = re.compile(
    r"[\w.]*(Connection\w*Error|TimeoutError|timeout|WireError|OSError|gaierror|BrokenPipeError)\b"
)
"""The errors of a holder that does not reach the job's supervisor."""
_PROOF_S = 5.0
"""How long a holder may take to prove that it belongs to the job."""
CUT_S = 60.0
"""A holder that Ray cannot reach, though its node counts as alive, is given up after this long. Its worker
may train on meanwhile: whether it does is the coordinator's business."""


@dataclass(slots=True)
class _Held:
    actor: Any
    slot: int
    asked_s: float
    node: str = ""
    """The name of the slot's node."""
    node_id: str = ""
    up: bool = False
    kill_by_s: float | None = None
    ask_again_s: float | None = None
    """When the holder is asked again how its worker ended, because the link to it was cut."""
    cut_s: float = 0.0
    """Since when the link to it has been cut."""
    failed_s: float = float("-inf")
    """When the last call failed because of that."""


class RayWorkers:
    """Starts and ends workers through Ray (see `swell.train.agent.worker_processes.Workers`)."""

    def __init__(self, config: RunConfig, order: JobOrder) -> None:
        """Connect to Ray, and tell the job's settings where its coordinator can be reached."""
        settings, request = order.extras["ray"], order.launch.request
        self._ray = connect(settings["address"], _runtime_env(order))
        self._settings, self._job_id = settings, order.launch.job_id
        self._pip = bool(request.pip)
        self._additions = {
            "script": _script_path(config.path, order.launch.workdir),
            "memory_bytes": request.memory_bytes,
            "visible": {MARK: str(order.launch.job_dir.resolve())},
            "warm": None if self._pip or config.command else settings["warm"],
        }
        here = self._ray.util.get_node_ip_address()
        self._host = "127.0.0.1" if is_loopback(here) else here
        if settings["address"].startswith("ray://"):
            self._host = own_address()
        config.settings |= {"host": self._host, "encrypt": settings.get("encrypt", True)}
        self._holder = self._ray.remote(max_restarts=0, max_concurrency=4)(WorkerHolder)
        self._held: dict[str, _Held] = {}
        self._lifeline: _Lifeline | None = None
        self._answers = _Answers()
        self._mute: dict[str, float] = {}
        """By id of a node: when a holder there did not end in time although it was told to."""
        self._unplaced: list[str] = []
        """Workers whose slot is on no node that is up, since the last news."""

    def start(self, config: RunConfig, logs: Path) -> None:
        """Open the line that holders connect to."""
        self._lifeline = _Lifeline(self._host)

    def names(self) -> list[str]:
        """The workers that were started and have not ended."""
        return [*self._held, *self._unplaced]

    def spawn(self, order: dict[str, Any], slot: int | None) -> None:
        """Have Ray start a holder on the node of the slot, and the holder the worker."""
        worker, place = order["spawn"], self._place(slot)
        if place is None or slot is None:
            self._unplaced.append(worker)
            self._answers.wake()
            return
        assert self._lifeline is not None
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        resource = self._settings["resource"]
        amount = 1 if place.per_gpu == 1 else places.share(place.per_gpu)
        options: dict[str, Any] = {"num_cpus": 0}
        if resource == "CPU":
            options["num_cpus"] = amount
        elif resource == "GPU":
            options["num_gpus"] = amount
        else:
            options["resources"] = {resource: amount}
        order["env"]["SWELL_HOST"] = "127.0.0.1" if is_loopback(place.address) else place.address
        if place.per_gpu > 1:
            order["env"][PER_GPU] = str(place.per_gpu)
        order |= self._additions | {"shares_gpu": place.per_gpu > 1}
        platform = self._settings.get("platform")  # jobs that an earlier version started have none
        if platform is not None:
            options["name"] = HolderName(platform, place.node_id, slot, self._job_id, worker).text()
        actor = self._holder.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(place.node_id, soft=False), **options
        ).remote(self._lifeline.address)
        self._held[worker] = _Held(actor, slot, time.monotonic(), place.name, place.node_id)
        self._answers.follow(worker, "up", actor.__ray_ready__.remote())
        self._answers.follow(worker, "ended", actor.run.remote(order))

    def kill(self, worker: str) -> None:
        """Tell a worker's holder to end it."""
        held = self._held.get(worker)
        if held is not None and held.kill_by_s is None:
            held.kill_by_s = time.monotonic() + KILL_S
            if held.up:
                held.actor.end.remote()
            else:
                held.kill_by_s = 0.0
                self._answers.wake()

    def kill_all(self) -> None:
        """Tell all holders to end their workers."""
        for worker in list(self._held):
            self.kill(worker)

    def watched(self) -> list[Any]:
        """What can be read from when a holder has answered."""
        return [self._answers]

    def hear(self) -> list[News]:
        """Hear what holders answered, and give up those that take too long."""
        unplaced, self._unplaced = self._unplaced, []
        news: list[News] = [Lost(worker) for worker in unplaced]
        for worker, what, answer in self._answers.taken():
            news += self._hear_holder(worker, what, answer)
        now_s = time.monotonic()
        patience_s = UP_WITH_PIP_S if self._pip else UP_S
        for worker, held in list(self._held.items()):
            if held.ask_again_s is not None and now_s > held.ask_again_s:
                held.ask_again_s = None
                self._answers.follow(worker, "ended", held.actor.ended.remote())
            late = not held.up and now_s - held.asked_s > patience_s
            ignored = held.kill_by_s is not None and now_s > held.kill_by_s
            if ignored and held.up:
                self._mute[held.node_id] = now_s
            if late or ignored:
                news.append(self._give_up(worker))
            elif not held.up and now_s - held.asked_s > MUTE_UP_S and self._is_mute(held.node_id, now_s):
                news.append(self._unstartable(worker, "silent", "the node does not answer"))
        return news

    def child_ended(self, pid: int, code: int, *, again: bool) -> list[News]:
        """Nothing: no worker is a child of this process."""
        return []

    def close(self) -> None:
        """End the holders that are left, and the connection to Ray."""
        for held in self._held.values():
            self._drop(held)
        if self._lifeline is not None:
            self._lifeline.close()
        with contextlib.suppress(Exception):
            self._ray.shutdown()

    # ------------------------------------------------------------------ holders

    def _place(self, slot: int | None) -> places.Place | None:
        """The node of a slot, as the engine last saw it."""
        try:
            content = json.loads(Path(self._settings["places"]).read_text())
        except (OSError, ValueError):
            return None
        found = [places.Place(**entry) for entry in content["places"]]
        place = places.slot_map(found).get(-1 if slot is None else slot)
        return place if place is not None and place.up else None

    def _hear_holder(self, worker: str, what: str, answer: Any) -> list[News]:
        held = self._held.get(worker)
        if held is None:
            return []
        now_s = time.monotonic()
        if what in ("up", "cut up"):
            held.up = True
            if what == "up":
                self._mute.pop(held.node_id, None)
        elif what == "cut ended":
            if now_s - held.failed_s > CUT_S / 2:  # it was reached in between
                held.cut_s = now_s
            held.failed_s, held.ask_again_s = now_s, now_s + ASK_AGAIN_S
            if now_s - held.cut_s > CUT_S:
                return [self._give_up(worker)]
        elif what == "gone":
            why = None if held.up else why_not_made(answer)
            return [self._give_up(worker) if why is None else self._unstartable(worker, *why)]
        elif "cause" in answer:
            return [self._unstartable(worker, str(answer["cause"]), str(answer["reason"]))]
        else:
            self._drop(self._held.pop(worker))
            verdict = str(answer["verdict"])
            over = [Failed(OUT_OF_MEMORY, verdict, aloud=True)] if verdict else []
            return [*over, Exited(worker, int(answer["code"]))]
        return []

    def _is_mute(self, node_id: str, now_s: float) -> bool:
        """Whether a holder on this node was silent a moment ago, and none has answered since."""
        return now_s - self._mute.get(node_id, float("-inf")) < MUTE_S

    def _unstartable(self, worker: str, cause: str, reason: str) -> Unstartable:
        """Drop a worker that cannot be started on its node."""
        held = self._held.pop(worker)
        self._drop(held)
        return Unstartable(worker, held.node, cause, reason)

    def _give_up(self, worker: str) -> Lost:
        """Drop a worker whose holder or node Ray has lost; the worker itself may still be running."""
        self._drop(self._held.pop(worker))
        return Lost(worker)

    def _drop(self, held: _Held) -> None:
        with contextlib.suppress(Exception):
            self._ray.kill(held.actor)


def why_not_made(error: object) -> tuple[str, str] | None:
    """Why a node cannot make a holder, as cause and reason; None if the node or the holder has ended."""
    kind = type(error).__name__
    if kind != "RuntimeEnvSetupError" and not getattr(error, "actor_init_failed", False):
        return None
    lines = [line.strip() for line in str(error).splitlines()]
    reason = next((line for line in reversed(lines) if _ERROR.match(line)), lines[-1])[:300]
    return "link" if _LINK.match(reason) else "software", reason


class _Answers:
    """What holders answered to calls, gathered by threads of Ray; readable when there is something."""

    def __init__(self) -> None:
        self._queue: deque[tuple[str, str, Any]] = deque()
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        """The descriptor that shows an answer."""
        return self._read.fileno()

    def wake(self) -> None:
        """Have the reader look, from any thread."""
        with contextlib.suppress(OSError):
            self._write.send(b"!")

    def follow(self, worker: str, what: str, ref: Any) -> None:
        """Take the answer to a call of a worker's holder once it arrives, also if it is an error."""

        def done(future: Any) -> None:
            error = future.exception()
            if error is not None:
                # Ray says that the actor lives and cannot be reached now: the link to its node is cut.
                cut = type(error).__name__ == "ActorUnavailableError"
                self._queue.append((worker, f"cut {what}" if cut else "gone", error))
            else:
                self._queue.append((worker, what, future.result()))
            self.wake()

        ref.future().add_done_callback(done)

    def taken(self) -> Iterator[tuple[str, str, Any]]:
        """The answers since the last call: worker, what it was asked, and the answer."""
        with contextlib.suppress(BlockingIOError):
            self._read.recv(4096)
        while self._queue:
            yield self._queue.popleft()


class _Lifeline:
    """A socket that every holder connects to, so that holders learn at once when this process has ended."""

    def __init__(self, host: str) -> None:
        self._token = new_secret()
        self._listener = socket.create_server((host, 0), backlog=64)
        self._lines: list[Connection] = []
        self._strangers = threading.Semaphore(MOST_STRANGERS)
        self._closed = False
        threading.Thread(target=self._accept, name="swell-lifeline", daemon=True).start()

    @property
    def address(self) -> tuple[str, int, str]:
        """Host, port, and the secret that a holder must prove to have; it is never sent over this line."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port), self._token

    def _accept(self) -> None:
        while not self._closed:
            try:
                line, _ = self._listener.accept()
            except OSError:
                time.sleep(0.05)  # a connection was reset before it was taken, or no descriptor is free
                continue
            if self._strangers.acquire(blocking=False):
                threading.Thread(target=self._take, args=(line,), name="swell-holder", daemon=True).start()
            else:
                line.close()

    def _take(self, line: socket.socket) -> None:
        try:
            self._lines.append(Connection(line, self._token, server=True, timeout_s=_PROOF_S))
        except (OSError, WireError):  # late, reset, or a stranger: this connection's own fault
            line.close()
        finally:
            self._strangers.release()

    def close(self) -> None:
        """Close all connections, so that the holders end."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for line in self._lines:
            line.close()


def _runtime_env(order: JobOrder) -> dict[str, Any]:
    """Ray's runtime environment for the job: its working directory and its requirements."""
    workdir, pip = order.launch.workdir, order.launch.request.pip
    env: dict[str, Any] = {
        "working_dir": str(workdir),
        "excludes": packaging.excludes(workdir, Path(order.extras["ray"]["home"])),
    }
    if pip:
        env["pip"] = list(pip)
    return env


def _script_path(path: Path, workdir: Path) -> str:
    """The script's path on any node: relative if it is inside the working directory, else absolute."""
    return str(path.relative_to(workdir)) if path.is_relative_to(workdir) else str(path)
