"""The launcher of a job on Ray: each worker has a `Holder` actor on the node of the worker's slot.

The launcher runs in the job's supervisor, which is a Ray driver: its holders end when it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swell.engines.order import Order
from swell.engines.processes import MARK
from swell.engines.ray import packaging, places
from swell.engines.ray.connection import connect, is_loopback, own_address
from swell.engines.ray.holder import Holder
from swell.train.agent.launcher import Launcher
from swell.train.agent.run_config import RunConfig
from swell.train.agent.slots import PER_GPU
from swell.train.agent.wire import MOST_STRANGERS, Connection, WireError, new_secret

OUT_OF_MEMORY = 137
UP_S = 60.0
"""A holder that Ray has not started after this long is given up: another user may have the slot."""
UP_WITH_PIP_S = 900.0
"""The same for a job with requirements, which Ray installs first."""
KILL_S = 2.0
"""If a worker has not ended this long after it was told to, its holder is killed."""
ASK_AGAIN_S = 1.0
_PROOF_S = 5.0
"""How long a holder may take to prove that it belongs to the job."""
CUT_S = 60.0
"""A holder that Ray cannot reach, though its node counts as alive, is given up after this long. Its worker
may train on meanwhile: whether it does is the coordinator's business."""


@dataclass(slots=True)
class _Held:
    """One worker's holder."""

    actor: Any
    slot: int
    asked_s: float
    up: bool = False
    kill_by_s: float | None = None
    ask_again_s: float | None = None
    """When the holder is asked again how its worker ended, because the link to it was cut."""
    cut_s: float = 0.0
    """Since when the link to it has been cut."""
    failed_s: float = float("-inf")
    """When the last call failed because of that."""


class RayLauncher(Launcher):
    """Starts and ends workers through Ray."""

    def __init__(self, config: RunConfig, say: Callable[[str], None], order: Order) -> None:
        settings, request = order.extras["ray"], order.launch.request
        self._ray = connect(settings["address"], _runtime_env(order))
        self._settings = settings
        self._memory_bytes: int | None = request.memory_bytes
        self._pip = bool(request.pip)
        self._mark = str(order.launch.job_dir.resolve())
        self._script = _script_path(config.path, order.launch.workdir)
        here = self._ray.util.get_node_ip_address()
        self._host = "127.0.0.1" if is_loopback(here) else here
        if settings["address"].startswith("ray://"):
            self._host = own_address()
        config.settings |= {"host": self._host, "encrypt": settings.get("encrypt", True)}
        super().__init__(config, say)
        self._holder = self._ray.remote(max_restarts=0, max_concurrency=4)(Holder)
        self._held: dict[str, _Held] = {}
        self._news: deque[tuple[str, str, Any]] = deque()
        self._lifeline = _Lifeline(self._host)

    # ------------------------------------------------------------------ what differs from local processes

    def _spawn(self, worker: str, slot: int | None = None) -> None:
        self._workers[worker] = 0
        place = self._place(slot)
        if place is None or slot is None:
            self._lost(worker)
            return
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
        order = self._order(worker, slot)
        order["env"]["SWELL_HOST"] = "127.0.0.1" if is_loopback(place.address) else place.address
        if place.per_gpu > 1:
            order["env"][PER_GPU] = str(place.per_gpu)
        order |= {
            "script": self._script,
            "memory_bytes": self._memory_bytes,
            "shares_gpu": place.per_gpu > 1,
            "visible": {MARK: self._mark},
            "warm": None if self._pip or self.config.command else self._settings["warm"],
        }
        actor = self._holder.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(place.node_id, soft=False), **options
        ).remote(self._lifeline.address)
        self._held[worker] = _Held(actor, slot, time.monotonic())
        self._follow(worker, "up", actor.__ray_ready__.remote())
        self._follow(worker, "ended", actor.run.remote(order))

    def _kill(self, worker: str) -> None:
        held = self._held.get(worker)
        if held is not None and held.kill_by_s is None:
            held.kill_by_s = time.monotonic() + KILL_S
            if held.up:
                held.actor.end.remote()
            else:
                held.kill_by_s = 0.0

    def _turn(self, timeout_s: float) -> None:
        super()._turn(timeout_s)
        while self._news:
            self._hear_holder(*self._news.popleft())
        now_s = time.monotonic()
        patience_s = UP_WITH_PIP_S if self._pip else UP_S
        for worker, held in list(self._held.items()):
            if held.ask_again_s is not None and now_s > held.ask_again_s:
                held.ask_again_s = None
                self._follow(worker, "ended", held.actor.ended.remote())
            late = not held.up and now_s - held.asked_s > patience_s
            if late or (held.kill_by_s is not None and now_s > held.kill_by_s):
                self._lost(worker)

    def _end_everything(self) -> None:
        super()._end_everything()
        for held in self._held.values():
            self._drop(held)
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

    def _follow(self, worker: str, what: str, ref: Any) -> None:
        """Put the answer to a call of a holder into `_news` once it arrives, also if it is an error."""

        def done(future: Any) -> None:
            error = future.exception()
            if error is not None:
                # Ray says that the actor lives and cannot be reached now: the link to its node is cut.
                cut = type(error).__name__ == "ActorUnavailableError"
                self._news.append((worker, f"cut {what}" if cut else "gone", error))
            else:
                self._news.append((worker, what, future.result()))
            with contextlib.suppress(OSError):
                os.write(self._wake_w, b"!")

        ref.future().add_done_callback(done)

    def _hear_holder(self, worker: str, what: str, answer: Any) -> None:
        held = self._held.get(worker)
        if held is None:
            return
        now_s = time.monotonic()
        if what in ("up", "cut up"):
            held.up = True
        elif what == "cut ended":
            if now_s - held.failed_s > CUT_S / 2:  # it was reached in between
                held.cut_s = now_s
            held.failed_s, held.ask_again_s = now_s, now_s + ASK_AGAIN_S
            if now_s - held.cut_s > CUT_S:
                self._lost(worker)
        elif what == "gone":
            self._lost(worker)
        elif "blind" in answer:
            self._finish = self._finish or (
                1,
                f"{answer['blind']}: swell's home (swell up --home) must be on storage that all nodes share",
            )
        else:
            if answer["verdict"] and self._finish is None:
                self._finish = (OUT_OF_MEMORY, answer["verdict"])
                self.say(answer["verdict"])
            self._drop(self._held.pop(worker))
            self._workers[worker] = 0  # the process id belongs to another host
            self._exited(worker, int(answer["code"]))

    def _lost(self, worker: str) -> None:
        """Give up a worker whose holder or node Ray has lost; the worker itself may still be running."""
        held = self._held.pop(worker, None)
        if held is not None:
            self._drop(held)
        if self._workers.pop(worker, None) is not None:
            self._tell({"type": "lost", "worker": worker})

    def _drop(self, held: _Held) -> None:
        with contextlib.suppress(Exception):
            self._ray.kill(held.actor)


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


def _runtime_env(order: Order) -> dict[str, Any]:
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
