"""A Ray cluster as a site: jobs run as on one machine, but their workers are on the nodes of the cluster.

Slots belong to nodes, and Ray accounts for workers by node. The `scout` reports the nodes as they come and
go, and the `SlotBook` keeps their slots. Slots that other users of the cluster hold are not given away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swell.domain import Cluster, InputError, Placement, SwellError
from swell.engines.accounts import Account
from swell.engines.base import Launch
from swell.engines.order import started
from swell.engines.processes import sweep
from swell.engines.ray import claims, connection, head, packaging, places, slot_book, tls, warm
from swell.engines.ray.places import RentedNodes
from swell.engines.ray.scout_process import Bundles, ScoutProcess
from swell.engines.ray.slot_book import SlotBook
from swell.engines.supervised_job import SupervisedJob
from swell.engines.supervisor import is_locked
from swell.engines.wall import Setting
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
        self._book = SlotBook(home / slot_book.FILE, wanted, per_gpu, rented)
        self._key = warm.key(self.options.spare_bytes)
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
        Setting(walled=False, why_not="jobs run on Ray, as the account of its nodes").write(self.home)
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
        """Start the supervisor, which is to connect to Ray."""
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
        """What a slot is."""
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
