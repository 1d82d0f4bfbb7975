"""The Ray engine: jobs run as in the local engine, but their workers are on the nodes of a Ray cluster.

Slots belong to nodes, and Ray accounts for workers by node. The
`scout` reports the nodes as they come and go. Slots that other users of the cluster hold are not given away.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swell.domain import Cluster, InputError, Placement, SwellError
from swell.engines.base import NOTHING_HELD, Held, Launch
from swell.engines.files import write_json
from swell.engines.ray import connection, head, packaging, places, warm
from swell.engines.ray.places import Foreign, Place, RayNode, RentedNodes
from swell.engines.supervised import SupervisedEngine
from swell.engines.supervised_job import SupervisedJob

log = logging.getLogger(__name__)

PLACES = "ray-places.json"
FIRST_SIGHT_S = 45.0
"""How long the first look at the cluster may take."""
SLOTS_S = 3.0
"""How long a cluster without slots may take to get some: a node that just joined may not be listed yet."""
BLIND_S = 15.0
"""Without news of the cluster for this long, all of its nodes count as down."""
SETTLE_S = 2.0
"""Slots count as held by other users only after this long, because Ray's figures lag behind processes that
ended."""
PENDING_S = 90.0
"""If a job's worker has not reported this long after the job was told, its slot counts as held by another
user."""
SCOUT_AGAIN_S = 1.0
"""Least time between two starts of a scout."""
SILENT_S = 5.0
"""A scout that says nothing for this long hangs because Ray is gone, and is replaced."""
SCOUT_UP_S = 40.0
"""How long a new scout may take to say anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """The options of `swell up --engine ray`."""

    address: str | None = None
    """Address of a Ray cluster; None to start a Ray for swell alone."""
    resource: str | None = None
    """What a slot is; None for GPUs if there are any, else CPUs."""
    per_gpu: int = 1
    """How many slots each GPU is; with more than 1 only GPUs are slots."""
    spares: bool = True
    encrypt: bool = True
    """Whether what a job sends from host to host is encrypted."""
    spare_bytes: int = 1 << 30
    """Most memory that a prepared process may use."""
    workdir_bytes: int = 200 << 20
    """Largest working directory that is sent to the nodes with a job."""
    rented: RentedNodes | None = None
    """Nodes that may be rented; a Ray for swell alone then has no slots of its own."""


class RayEngine(SupervisedEngine):
    """Workers on a Ray cluster."""

    name = "ray"

    def __init__(self, home: Path, options: RayOptions | None = None) -> None:
        super().__init__(home)
        self.options = options or RayOptions()
        per_gpu, rents = self.options.per_gpu, self.options.rented is not None
        places.check_per_gpu(per_gpu, self.options.resource, rents=rents)
        self._wanted = self.options.resource or ("GPU" if per_gpu > 1 else None)
        """What a slot is, if that does not depend on what the nodes have."""
        self._key = warm.key(self.options.spare_bytes)
        self._places, self.rented_names = places.with_rented(self._remembered(), self.options.rented)
        self._bundles: list[dict[str, int]] | None = None
        """What Ray's own autoscaler is asked to have room for; None if it is not asked for anything."""
        self._nodes: list[RayNode] = []
        self._resource = self._wanted or "CPU"
        self._address = ""
        self._session = ""
        """Ray's name for this run of the cluster; it changes when the cluster's head is started again."""
        self._foreign = Foreign(SETTLE_S)
        self._held: frozenset[int] = frozenset()
        self._retired: frozenset[int] = frozenset()
        """Slots of places whose nodes are alive with other slots."""
        self._seen_s = float("-inf")
        self._line: dict[str, Any] | None = None
        self._trouble = ""
        self._scout: subprocess.Popen[bytes] | None = None
        self._scout_s = float("-inf")
        self._heard_s = float("-inf")
        """When a scout last said anything."""
        self._first = threading.Event()
        """Set once a scout has said anything, or has ended."""
        self.spares: dict[str, dict[str, Any]] = {}
        """By node name: the state of the node's prepared process."""

    # -- the interface -----------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Connect the scout to Ray (start one if no address was given); it takes seconds to see the nodes."""
        if self.options.address is None:
            head.ensure(self._home, slots=self.options.rented is None)
        if self._scout is None or self._scout.poll() is not None:
            self._first.clear()
            self._start_scout()

    def start(self, wake: Callable[[], None], held: Held = NOTHING_HELD) -> None:
        """Wait until the nodes of the Ray cluster are known, and find running jobs."""
        self.prepare()
        if not self._first.wait(FIRST_SIGHT_S):
            self._stop_scout()
            trouble = f"Ray did not list its nodes within {FIRST_SIGHT_S:g} s; see {self._home / 'scout.log'}"
            raise SwellError(self._trouble or trouble)
        if self._trouble:
            self._stop_scout()
            raise SwellError(self._trouble)
        per_gpu, give_up_s = self.options.per_gpu, time.monotonic() + SLOTS_S
        self._tick(time.monotonic())
        while not self._has_slots() and time.monotonic() < give_up_s:
            time.sleep(0.1)
            self._tick(time.monotonic())
        if per_gpu > 1 and not self._has_slots():
            self._stop_scout()
            raise InputError(
                f"per_gpu: got {per_gpu}, must be 1, because no node of the Ray cluster has a GPU",
                field="per_gpu",
            )
        if not self._places:
            self._stop_scout()
            what = self.options.resource or "GPUs and no CPUs"
            raise SwellError(
                f"no node of the Ray cluster has {what}: add a node, or name another --ray-resource"
            )
        super().start(wake, held)
        self._end_orphans()

    def close(self) -> None:
        """Stop watching the cluster. Jobs and Ray go on."""
        super().close()
        self._stop_scout()

    def cluster(self) -> Cluster:
        """The nodes that Ray has or has had, with the slots that other users hold."""
        with self._lock:
            return places.to_cluster(self._places, self._held)

    def check(self, launch: Launch) -> None:
        """Refuse jobs whose working directory is too large to be sent to the nodes."""
        packaging.check(launch.workdir.resolve(), self.options.workdir_bytes)

    # -- rented nodes ------------------------------------------------------------------------------------

    @property
    def home(self) -> Path:
        """The platform's home."""
        return self._home

    @property
    def address(self) -> str:
        """The address of the Ray cluster; empty until it has been seen."""
        return self._address

    @property
    def resource(self) -> str:
        """What a slot is."""
        return self._resource

    def access(self) -> dict[str, str]:
        """The environment of a process of the platform that connects to Ray."""
        return connection.environment(self._address, self._access())

    def request_bundles(self, bundles: list[dict[str, int]]) -> None:
        """Ask Ray's own autoscaler to have room for these resources, until it is asked for others."""
        self._bundles = bundles
        scout = self._scout
        if scout is not None and scout.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # a scout that has ended: the next one asks
                scout.stdin.write(json.dumps({"bundles": bundles}).encode() + b"\n")
                scout.stdin.flush()

    # -- slots -------------------------------------------------------------------------------------------

    def _has_slots(self) -> bool:
        """Whether any node, there or lost, has slots of the kind that was asked for."""
        per_gpu = self.options.per_gpu
        return bool(self._places) if per_gpu == 1 else any(p.per_gpu == per_gpu for p in self._places)

    def _usable(self, slots: Placement) -> Placement:
        with self._lock:
            where = places.slot_map(self._places)
        return tuple(slot for slot in slots if slot in where and where[slot].up)

    def _closed_slots(self) -> frozenset[int]:
        return self._reserved | self._retired

    def _may_start(self, job: SupervisedJob) -> bool:
        return time.monotonic() - self._seen_s <= BLIND_S

    def _order_extras(self, job: SupervisedJob) -> dict[str, Any]:
        return {
            "ray": {
                "address": self._address,
                "session": self._session,
                "resource": self._resource,
                "places": str(self._home / PLACES),
                "home": str(self._home.resolve()),
                "warm": self._key if self.options.spares else None,
                "encrypt": self.options.encrypt,
            },
        }

    def _environment(self) -> dict[str, str]:
        return connection.environment(self._address, self._access(), self.pass_env)

    def _access(self) -> dict[str, str]:
        if self.options.address is None:
            return head.environment(self._home)
        return {"RAY_NUM_REDIS_GET_RETRIES": "6"}  # notice within seconds that Ray refuses the connection

    # -- following the cluster ---------------------------------------------------------------------------

    def _tick(self, now_s: float) -> None:
        age_s = now_s - self._scout_s
        heard = self._heard_s > self._scout_s
        silent = now_s - self._heard_s > SILENT_S if heard else age_s > SCOUT_UP_S
        if self._scout is not None and silent:
            self._scout.kill()
        if self._scout is None or (self._scout.poll() is not None and age_s > SCOUT_AGAIN_S):
            if self.options.address is None:
                head.begin(
                    self._home, slots=self.options.rented is None
                )  # if swell's own Ray died, start it again
            self._start_scout()
        line, self._line = self._line, None
        if line is not None:
            self._seen_s = now_s
            self._address = str(line["address"])
            self._resource, self._nodes = places.read_nodes(line["nodes"], self._wanted, self.options.per_gpu)
            if line["session"] != self._session:
                self._session = str(line["session"])
                self._end_orphans()
        nodes = self._nodes if now_s - self._seen_s <= BLIND_S else []
        self._follow(nodes, line["warm"] if line is not None else None, now_s)

    def _end_orphans(self) -> None:
        """End jobs of an earlier run of the cluster, whose supervisors would wait for it for a minute."""
        for job in list(self._jobs.values()):
            if job.state.up and _session_of(job) not in ("", self._session):
                log.warning("job %s: the Ray cluster that it ran on was restarted", job.job_id)
                self._signal(job, signal.SIGKILL)

    def _follow(self, nodes: list[RayNode], spares: dict[str, Any] | None, now_s: float) -> None:
        with self._lock:
            after = places.follow(self._places, nodes)
            ours, slots = self._ours(after, now_s)
            foreign = self._foreign.update(nodes, ours, now_s)
            held = frozenset(places.held_slots(after, foreign, slots))
            moved = after != self._places
            changed = moved or held != self._held
            self._places, self._held = after, held
            self._retired = frozenset(places.retired_slots(after))
            if spares is not None:
                names = {place.node_id: place.name for place in after if place.up}
                self.spares = {names[n]: state for n, state in spares.items() if n in names}
        if moved:
            write_json(self._home / PLACES, {"places": places.dump(after)})
        if changed:
            self._wake()

    def _ours(self, after: list[Place], now_s: float) -> tuple[dict[str, int], set[int]]:
        """By node id, how many of its used slots may be swell's; and all slots that swell's jobs are on."""
        where, counts, slots = places.slot_map(after), dict[str, int](), set[int]()
        for job in self._jobs.values():
            # Workers of any program never say that they are ready; those that were started count.
            workers = job.state.workers
            mine = set(workers.slots(workers.live if job.runs_any_command else workers.ready))
            slots |= mine
            if job.state.up and now_s - job.state.told_s < PENDING_S:
                mine |= job.state.slots(now_s)
            for slot in mine:
                if slot in where:
                    counts[where[slot].node_id] = counts.get(where[slot].node_id, 0) + 1
            slots |= mine
        return counts, slots

    def _remembered(self) -> list[Place]:
        try:
            return places.load(json.loads((self._home / PLACES).read_text())["places"])
        except (OSError, ValueError, KeyError, TypeError):
            return []

    # -- the scout ---------------------------------------------------------------------------------------

    def _start_scout(self) -> None:
        options = self.options
        address = options.address or head.address(self._home)
        asked = {
            "address": address,
            "key": self._key,
            "warm": options.spares,
            "warm_bytes": options.spare_bytes,
            "resources": [self._wanted] if self._wanted else ["GPU", "CPU"],
            "bundles": self._bundles,
        }
        self._scout_s = time.monotonic()
        with (self._home / "scout.log").open("wb") as errors:
            self._scout = subprocess.Popen(
                [sys.executable, "-m", "swell.engines.ray.scout", json.dumps(asked)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env=connection.environment(address, self._access()),
            )
        threading.Thread(target=self._listen, args=(self._scout,), name="swell-scout", daemon=True).start()

    def _listen(self, scout: subprocess.Popen[bytes]) -> None:
        assert scout.stdout is not None
        for raw in scout.stdout:
            try:
                line = json.loads(raw)
            except ValueError:
                continue
            if "error" in line:
                self._trouble = str(line["error"])
            else:
                self._line, self._trouble = line, ""
            self._heard_s = time.monotonic()
            self._first.set()
            self._poke()
        scout.wait()
        if not self._first.is_set():
            self._trouble = f"swell's Ray watcher stopped unexpectedly; see {self._home / 'scout.log'}"
            self._first.set()

    def _stop_scout(self) -> None:
        scout, self._scout = self._scout, None
        if scout is None:
            return
        assert scout.stdin is not None
        scout.stdin.close()
        try:
            scout.wait(5.0)
        except subprocess.TimeoutExpired:
            scout.kill()
            scout.wait(5.0)


def _session_of(job: SupervisedJob) -> str:
    """Ray's name for the run of the cluster that a job was started in; empty if unknown."""
    return "" if job.order is None else str(job.order.extras.get("ray", {}).get("session", ""))
