"""A Ray cluster as a site: jobs run as on one machine, but their workers are on the nodes of the cluster.

Slots belong to nodes, and Ray accounts for workers by node. The `scout` reports the nodes as they come and
go, and the `SlotBook` keeps their slots. Slots that other users of the cluster hold are not given away.
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from swell.cloud import NodeOffer, Supply
from swell.domain import Cluster, InputError, Placement, SwellError
from swell.engines.accounts import Account
from swell.engines.base import Launch
from swell.engines.order import started
from swell.engines.processes import sweep, write_json
from swell.engines.ray import claims, connection, head, holder, packaging, places, raylet, tls
from swell.engines.ray.places import Foreign, Place, RayNode, RentedNodes
from swell.engines.supervised_job import SupervisedJob
from swell.engines.supervisor import is_locked
from swell.engines.wall import WallSetting
from swell.train.agent.children import Child

log = logging.getLogger(__name__)

FIRST_SIGHT_S = 45.0
"""How long the first look at the cluster may take."""
SLOTS_S = 3.0
"""How long a cluster without slots may take to get some: a node that just joined may not be listed yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """The options of `swell up --engine ray`."""

    address: str | None = None
    """Address of a Ray cluster; None to start a Ray for swell alone."""
    resource: str | None = None
    """What a slot is; None for GPUs if there are any, else CPUs (`places.slot_resource`)."""
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


class RaySite:
    """Workers on a Ray cluster."""

    name = "ray"

    def __init__(
        self, home: Path, options: RayOptions | None = None, *, pass_env: tuple[str, ...] = ()
    ) -> None:
        """`pass_env`: variables of the platform's environment that jobs get besides those on the list."""
        self.home = home
        self.options = options or RayOptions()
        self._pass_env = pass_env
        per_gpu, rented = self.options.per_gpu, self.options.rented
        places.check_per_gpu(per_gpu, self.options.resource, rents=rented is not None)
        wanted = self.options.resource or ("GPU" if per_gpu > 1 else None)
        self._book = SlotBook(home / places.PLACES, wanted, per_gpu, rented)
        self._key = holder.key(self.options.spare_bytes)
        self._platform = claims.platform(home)
        self._scout = ScoutProcess(home / "scout.log")
        self._address = ""
        self._session = ""
        """Ray's name for this run of the cluster; it changes when the cluster's head is started again."""
        self.spares: dict[str, dict[str, Any]] = {}
        """By node name: the state of the node's prepared process."""

    def prepare(self) -> None:
        """Connect the scout to Ray (start one if no address was given); it takes seconds to see the nodes."""
        if self.options.address is None:
            head.ensure(self.home, slots=self.options.rented is None)
        if not self._scout.runs:
            self._scout.expect_first()
            self._start_scout()

    def open(self, poke: Callable[[], None]) -> None:
        """Wait until the nodes of the Ray cluster are known."""
        self._scout.heard = poke
        WallSetting(walled=False, why_not="jobs run on Ray, as the account of its nodes").write(self.home)
        # The scout of a control plane that stood by may have lost the cluster meanwhile. Such a plane must
        # not lead, blind, for as long as its link is cut: another one may see the cluster.
        self._scout.end_silent(time.monotonic())
        self.prepare()
        try:
            trouble = self._scout.wait_first(FIRST_SIGHT_S)
            if trouble:
                raise SwellError(trouble)
            self._wait_for_slots()
        except SwellError:
            self._scout.stop()
            raise
        if tls.in_clear(self._book.addresses, self.access()):
            log.warning("%s", tls.ADVICE)

    def close(self) -> None:
        """Stop watching the cluster. Jobs and Ray go on."""
        self._scout.stop()

    def look(self, jobs: Sequence[SupervisedJob], now_s: float) -> bool:
        """Follow the nodes, as the scout sees them; replace a scout that has ended or hangs."""
        return self._follow(jobs, now_s, busy=any(job.state.up for job in jobs))

    # -- the slots ---------------------------------------------------------------------------------------

    def cluster(self) -> Cluster:
        """The nodes that Ray has or has had, with the slots that other users hold."""
        return self._book.cluster()

    def usable(self, slots: Placement) -> Placement:
        """Those of the slots whose nodes are up."""
        return self._book.usable(slots)

    def retired(self) -> frozenset[int]:
        """Slots of places whose nodes are alive with other slots."""
        return self._book.retired

    # -- the jobs ----------------------------------------------------------------------------------------

    def check(self, launch: Launch) -> None:
        """Refuse jobs whose working directory is too large to be sent to the nodes."""
        packaging.check(launch.workdir.resolve(), self.options.workdir_bytes)

    def account(self, owner: str) -> Account | None:
        """The platform's own: Ray runs all workers as the user of the nodes."""
        return None

    def may_start(self, job: SupervisedJob) -> bool:
        """Whether the cluster was seen a moment ago."""
        return self._book.in_sight(time.monotonic())

    def order_extras(self) -> dict[str, Any]:
        """How to reach the cluster, and what a slot is."""
        return {
            "ray": {
                "address": self._address,
                "session": self._session,
                "resource": self._book.kind.resource,
                "places": str(self._book.file),
                "home": str(self.home.resolve()),
                "warm": self._key if self.options.spares else None,
                "platform": self._platform,
                "encrypt": self.options.encrypt,
            },
        }

    def start_supervisor(self, job: SupervisedJob) -> Child:
        base = connection.environment(self._address, self._access(), self._pass_env)
        return job.spawn_supervisor(job.environment(base))

    def abandoned(self, job: SupervisedJob) -> bool:
        """Whether the cluster was restarted since the job was started. Its supervisor would wait for the
        cluster that it knew for a minute."""
        session = "" if job.order is None else str(job.order.extras.get("ray", {}).get("session", ""))
        return session not in ("", self._session)

    def sweep(self, job: SupervisedJob) -> bool:
        """Kill what is left on this machine of a job whose supervisor has ended."""
        return sweep(job.directory)

    # -- rented nodes ------------------------------------------------------------------------------------

    @property
    def rented_names(self) -> tuple[str, ...]:
        """The names of the nodes that may be rented."""
        return self._book.rented_names

    @property
    def address(self) -> str:
        """The address of the Ray cluster; empty until it has been seen."""
        return self._address

    @property
    def resource(self) -> str:
        return self._book.kind.resource

    def access(self) -> dict[str, str]:
        """The environment of a process of the platform that connects to Ray."""
        return connection.environment(self._address, self._access())

    def request_bundles(self, bundles: Bundles) -> None:
        """Ask Ray's own autoscaler to have room for these resources, until it is asked for others."""
        self._scout.request(bundles)

    # -- following the cluster ---------------------------------------------------------------------------

    def _wait_for_slots(self) -> None:
        """Raise SwellError if there are none after a moment."""
        busy = any(map(is_locked, started(self.home)))  # jobs that an earlier engine has started
        give_up_s = time.monotonic() + SLOTS_S
        self._follow((), time.monotonic(), busy=busy)
        while self._book.empty and time.monotonic() < give_up_s:
            time.sleep(0.1)
            self._follow((), time.monotonic(), busy=busy)
        if not self._book.empty:
            if not self.cluster().capacity and self.options.rented is None:
                log.warning("slots are %ss, and no node of the Ray cluster has one now", self.resource)
            return
        per_gpu = self.options.per_gpu
        if per_gpu > 1:
            raise InputError(
                f"per_gpu: got {per_gpu}, must be 1, because no node of the Ray cluster has a GPU",
                field="per_gpu",
            )
        what = self.options.resource or "GPUs and no CPUs"
        raise SwellError(f"no node of the Ray cluster has {what}: add a node, or name another --ray-resource")

    def _follow(self, jobs: Sequence[SupervisedJob], now_s: float, *, busy: bool) -> bool:
        if self._scout.is_due(now_s):
            if self.options.address is None:  # if swell's own Ray died, start it again
                head.begin(self.home, slots=self.options.rented is None)
            self._start_scout()
        line = self._scout.take_line()
        if line is not None:
            self._address, self._session = str(line["address"]), str(line["session"])
            self._book.see(line["nodes"], now_s, busy=busy)
        changed = self._book.follow(jobs, now_s)
        if line is not None:
            self.spares = self._book.by_name(line["warm"])
        return changed

    def _start_scout(self) -> None:
        options, wanted = self.options, self._book.kind.wanted
        address = options.address or head.address(self.home)
        asked = {
            "address": address,
            "key": self._key,
            "warm": options.spares,
            "warm_bytes": options.spare_bytes,
            "platform": self._platform,
            "resources": [wanted] if wanted else ["GPU", "CPU"],
        }
        self._scout.start(asked, connection.environment(address, self._access()))

    def _access(self) -> dict[str, str]:
        if self.options.address is None:
            return head.environment(self.home)
        return {"RAY_NUM_REDIS_GET_RETRIES": "6"}  # notice within seconds that Ray refuses the connection


# The `scout` as its site sees it: a process that is started, heard, and replaced if it falls silent.


AGAIN_S = 1.0
"""Least time between two starts of a scout."""
SILENT_S = 5.0
"""A scout that says nothing for this long hangs because Ray is gone, and is replaced."""
UP_S = 40.0
"""How long a new scout may take to say anything."""

Bundles = list[dict[str, int]]


class ScoutProcess:
    """The present scout, if there is one, and the last that was heard of it."""

    def __init__(self, log_file: Path) -> None:
        self._log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None
        self._expected: subprocess.Popen[bytes] | None = None
        """The scout that `wait_first` waits for, once it has been started."""
        self._started_s = float("-inf")
        self.heard_s = float("-inf")
        """When a scout last said anything."""
        self._first = threading.Event()
        """Set once a scout has said anything, or has ended."""
        self._line: dict[str, Any] | None = None
        """The newest line that was not taken yet."""
        self._trouble = ""
        """Why the scout cannot see the cluster; empty if it can."""
        self._bundles: Bundles | None = None
        """What Ray's own autoscaler is asked to have room for; None if it is not asked for anything."""
        self.heard: Callable[[], None] = lambda: None
        """Called, from a thread of its own, when a scout has said something."""

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, asked: Mapping[str, Any], env: Mapping[str, str]) -> None:
        """Start a scout with this argument (see `scout`) and environment, and listen to it."""
        self._started_s = time.monotonic()
        words = json.dumps({**asked, "bundles": self._bundles})
        with self._log_file.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "swell.engines.ray.scout", words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env=env,
            )
        self._expected = self._process
        threading.Thread(target=self._listen, args=(self._process,), name="swell-scout", daemon=True).start()

    def is_due(self, now_s: float) -> bool:
        """Whether another scout is to be started now. Kills one that has been silent for too long."""
        age_s = now_s - self._started_s
        heard = self.heard_s > self._started_s
        silent = now_s - self.heard_s > SILENT_S if heard else age_s > UP_S
        if self._process is None:
            return True
        if silent:
            self._process.kill()
        return self._process.poll() is not None and age_s > AGAIN_S

    def end_silent(self, now_s: float) -> None:
        """End a scout that has fallen silent, and forget its last line: it is not how the cluster is now."""
        if self._process is not None and now_s - self.heard_s > SILENT_S and self._first.is_set():
            self._process.kill()
            self._process.wait(5.0)
            self._line = None

    def expect_first(self) -> None:
        """Forget this scout: `wait_first` waits for the next one, and does not see the end of this one."""
        self._expected = None
        self._first.clear()

    def wait_first(self, timeout_s: float) -> str:
        """Wait until the scout has said anything; returns why it cannot see the cluster, empty if it can."""
        if self._first.wait(timeout_s):
            return self._trouble
        return self._trouble or f"Ray did not list its nodes within {timeout_s:g} s; see {self._log_file}"

    def take_line(self) -> dict[str, Any] | None:
        """The newest line of the scout, once; None if there is no newer one."""
        line, self._line = self._line, None
        return line

    def request(self, bundles: Bundles) -> None:
        """Have Ray's own autoscaler asked for room for these resources, until it is asked for others."""
        self._bundles = bundles
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # a scout that has ended: the next one asks
                process.stdin.write(json.dumps({"bundles": bundles}).encode() + b"\n")
                process.stdin.flush()

    def stop(self) -> None:
        """End the scout, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5.0)

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for raw in process.stdout:
            self._hear(raw)
        process.wait()
        if process is self._expected and not self._first.is_set():
            self._trouble = f"swell's Ray watcher stopped unexpectedly; see {self._log_file}"
            self._first.set()

    def _hear(self, raw: bytes) -> None:
        try:
            line = json.loads(raw)
        except ValueError:
            return
        if "error" in line:
            self._trouble = str(line["error"])
        else:
            self._line, self._trouble = line, ""
        self.heard_s = time.monotonic()
        self._first.set()
        self.heard()


# Who provides the nodes that a platform on Ray rents: this machine, or the autoscaler of the Ray cluster.


class LocalProvider:
    """Starts and ends Ray nodes on this machine, for tests and to try it. They outlive the control plane."""

    def __init__(self, site: RaySite, offer: NodeOffer) -> None:
        self._site, self._offer, self._home = site, offer, site.home
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        """By name: the processes that this one has started."""
        self._ending: set[str] = set()
        """Nodes that were told to end and still live."""

    @property
    def offer(self) -> NodeOffer:
        """Equal nodes of this machine."""
        return self._offer

    def supply(self) -> Supply:
        """The nodes that have joined Ray, and how many are starting."""
        ready, coming = self._look()
        return Supply(tuple(ready), len(coming))

    def request(self, nodes: int, spare: Sequence[str] = ()) -> None:
        """Start or end nodes, so that there are so many."""
        ready, coming = self._look()
        surplus = len(ready) + len(coming) - nodes
        there = {*ready, *coming}
        for name in [one for one in [*reversed(coming), *spare] if one in there][: max(surplus, 0)]:
            self._end(name)
        taken = there | self._ending
        free = [name for name in self._site.rented_names if name not in taken]
        for name in free[: max(-surplus, 0)]:
            self._start(name)

    def _look(self) -> tuple[list[str], list[str]]:
        """The nodes that are up, and those that are starting; nodes that are ending are in neither."""
        living, address = raylet.running(self._home), self._site.address
        for name, process in list(self._started.items()):
            if process.poll() is not None:
                del self._started[name]
                if process.returncode and name not in self._ending:
                    log.error("node %s ended; see %s", name, self._home / raylet.FOLDER / f"{name}.log")
        self._ending &= living.keys() | self._started.keys()
        ready, coming = list[str](), list[str]()
        for name in sorted(living.keys() | self._started.keys(), key=lambda name: (len(name), name)):
            joined = raylet.address_of(self._home, name, living[name]) if name in living else None
            if joined is not None and address and joined != address and name not in self._ending:
                self._end(name)  # it belongs to an earlier run of Ray, and can never be used again
            if name not in self._ending:
                (coming if joined is None else ready).append(name)
        return ready, coming

    def _start(self, name: str) -> None:
        address = self._site.address
        if not address:
            return  # Ray has not been seen yet: the nodes are requested again at the next look
        asked: dict[str, str | int] = {"home": str(self._home.resolve()), "name": name, "address": address}
        asked |= {"resource": self._site.resource, "slots": self._offer.gpus_per_node}
        folder = self._home / raylet.FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        with (folder / f"{name}.log").open("wb") as errors:
            self._started[name] = subprocess.Popen(
                [sys.executable, "-m", "swell.engines.ray.raylet", json.dumps(asked)],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
                cwd="/",
                env=self._site.access() | {"RAY_USAGE_STATS_ENABLED": "0"},
            )

    def _end(self, name: str) -> None:
        self._ending.add(name)
        if not raylet.ask_to_stop(self._home, name) and name in self._started:
            self._started[name].terminate()  # it does not hold its lock yet


class RayProvider:
    """Has the autoscaler of a Ray cluster add nodes, and end nodes that are idle, by what it is asked to fit.

    Ray itself chooses the nodes that it ends: those that have been idle for as long as its own settings say.
    So a node that was let go is paid for until then.
    """

    def __init__(self, site: RaySite, offer: NodeOffer) -> None:
        self._site, self._offer = site, offer
        self._requested: int | None = None

    @property
    def offer(self) -> NodeOffer:
        """What the nodes are, as the platform was told."""
        return self._offer

    def supply(self) -> Supply:
        """The nodes of the right size that Ray has, and how many are missing of those requested."""
        mine = set(self._site.rented_names)
        ready = tuple(n.name for n in self._site.cluster().nodes if n.up and n.name in mine)
        return Supply(ready, max((self._requested or 0) - len(ready), 0))

    def request(self, nodes: int, spare: Sequence[str] = ()) -> None:
        """Ask Ray to have room for so many whole nodes; which ones it ends is its own choice."""
        if nodes != self._requested:
            self._requested = nodes
            self._site.request_bundles([{self._site.resource: self._offer.gpus_per_node}] * nodes)


# The book of a Ray cluster's slots: which node each is on, whether that is up, and which others hold.
#
# It is kept in the home (ray-places.json), so that slot numbers keep their meaning when the control plane is
# started again, and because the supervisors of jobs look there for the nodes of their slots.


T = TypeVar("T")

BLIND_S = 15.0
"""Without news of the cluster for this long, all of its nodes count as down."""
SETTLE_S = 2.0
"""Slots count as held by other users only after this long, because tasks come and go."""


class SlotKind:
    """What a slot is: the resource of Ray that a worker takes one of."""

    def __init__(self, wanted: str | None, before: str | None) -> None:
        """`wanted`: the resource that was asked for; None for GPUs if there are any, else CPUs. `before`: the
        one that an earlier engine counted."""
        self.wanted = wanted
        self._resource = wanted or before
        self._gpus_wait = False
        """Whether there are GPUs, and slots are CPUs until no job runs."""

    @property
    def resource(self) -> str:
        return self._resource or "CPU"

    def see(self, found: Sequence[Mapping[str, Any]], *, busy: bool) -> None:
        """Decide anew for the nodes of a scout's line, and say in the log if it changes."""
        if self.wanted is not None:
            return
        before, gpus = self._resource, places.nodes_with_gpus(found)
        self._resource = places.slot_resource(before, gpus, busy=busy)
        wait = bool(gpus) and self._resource == "CPU"
        if wait and not self._gpus_wait:
            log.warning(
                "%s: there are GPUs now; slots stay CPUs while jobs run, and will be GPUs once none does "
                "(sooner by 'swell down' and 'swell up': jobs save their state, and go on with GPUs)",
                ", ".join(gpus),
            )
        if before == "CPU" and self._resource == "GPU":
            log.warning("slots are GPUs from now on (%s), and CPUs no longer", ", ".join(gpus))
        self._gpus_wait = wait


class SlotBook:
    """All slots that there are or were. `cluster` may be called from any thread."""

    def __init__(self, file: Path, wanted: str | None, per_gpu: int, rented: RentedNodes | None) -> None:
        """`wanted`: what a slot is, None for GPUs if there are any, else CPUs."""
        before, resource = _remembered(file)
        self.file = file
        self.kind, self._per_gpu = SlotKind(wanted, resource), per_gpu
        self._places, self.rented_names = places.with_rented(before, rented)
        self._nodes: list[RayNode] = []
        self._seen_s = float("-inf")
        self._foreign = Foreign(SETTLE_S)
        self._held: frozenset[int] = frozenset()
        self._lock = threading.Lock()
        """Held for every change of `_places` and `_held`, so that they fit each other."""
        self.retired: frozenset[int] = frozenset()
        """Slots of places whose nodes are alive with other slots."""

    def cluster(self) -> Cluster:
        """The nodes that Ray has or has had, with the slots that other users hold."""
        with self._lock:
            return places.to_cluster(self._places, self._held)

    def usable(self, slots: Placement) -> Placement:
        """Those of the slots whose nodes are up."""
        where = places.slot_map(self._places)
        return tuple(slot for slot in slots if slot in where and where[slot].up)

    @property
    def empty(self) -> bool:
        """Whether no node, there or lost, has slots of the size that was asked for."""
        sizes = {place.per_gpu for place in self._places}
        return self._per_gpu not in sizes if self._per_gpu > 1 else not sizes

    @property
    def addresses(self) -> list[str]:
        """The addresses of the nodes that are up."""
        return [place.address for place in self._places if place.up]

    def in_sight(self, now_s: float) -> bool:
        """Whether the cluster was seen a moment ago."""
        return now_s - self._seen_s <= BLIND_S

    def by_name(self, of_nodes: Mapping[str, T]) -> dict[str, T]:
        """What is given by Ray's ids of living nodes, by the names of their places."""
        names = {place.node_id: place.name for place in self._places if place.up}
        return {names[node_id]: one for node_id, one in of_nodes.items() if node_id in names}

    def see(self, found: Sequence[Mapping[str, Any]], now_s: float, *, busy: bool) -> None:
        """Take in the nodes of a scout's line. `busy`: jobs run, as far as is known."""
        self._seen_s = now_s
        self.kind.see(found, busy=busy)
        self._nodes = places.read_nodes(found, self.kind.resource, self._per_gpu)

    def follow(self, jobs: Iterable[SupervisedJob], now_s: float) -> bool:
        """Bring the book up to date; True if the nodes have changed, or which slots other users hold."""
        nodes = self._nodes if self.in_sight(now_s) else []
        after = places.follow(self._places, nodes)
        foreign = self._foreign.update(nodes, now_s)
        told = set[int]().union(*(job.state.slots(now_s) for job in jobs))
        sure = {slot for node in nodes for slot in node.holders}
        held = frozenset(places.held_slots(after, foreign, told, sure))
        moved = after != self._places
        changed = moved or held != self._held
        with self._lock:
            self._places, self._held = after, held
        if moved:
            self.retired = frozenset(places.retired_slots(after))
            write_json(self.file, {"places": places.dump(after), "resource": self.kind.resource})
        return changed


def _remembered(file: Path) -> tuple[list[Place], str | None]:
    """The places of an earlier engine, none of them up, and whether a slot was a GPU or a CPU then."""
    try:
        content = json.loads(file.read_text())
        before = places.load(content["places"])
    except (OSError, ValueError, KeyError, TypeError):
        return [], None
    resource = content.get("resource")
    return before, resource if resource in ("CPU", "GPU") else None
