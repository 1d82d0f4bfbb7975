"""The control plane of this machine as one process: how it is put together, started, found and stopped.

A home directory has one control plane. It holds `up.lock` as long as it lives, so a second one is refused,
and one that was killed leaves nothing to clean up. Jobs are processes of their own and outlive it. Several on
one home come last in this file.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from swell.domain import InputError, SwellError

if TYPE_CHECKING:
    from swell.api.front import Front
    from swell.api.listener import Listener
    from swell.api.schemas import ReplayRequest
    from swell.cloud import Rentable
    from swell.control.lease import Tenure
    from swell.control.plane import ControlPlane
    from swell.control.renting import Renting
    from swell.control.store import Store
    from swell.engines import Launch
    from swell.engines.ray.site import RayOptions
    from swell.engines.supervised import SupervisedEngine


LOCK = "up.lock"
STORE_ID = "store.id"
"""File of a home with the id of its store."""
_PR_SET_DUMPABLE = 4
LOG = "server.log"
STARTED_S = 60.0
"""How long a control plane in the background may take to come up."""
STOPPED_S = 40.0
MOST_SLOTS = 100_000
"""More slots than any cluster has: a job of any engine that is only to be stopped may be on any of them."""
SAVED_S = 75.0
"""How long jobs may take to save their state and stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of `swell up`."""

    home: Path
    nodes: str | None = None
    slots: int | None = None
    per_gpu: int | None = None
    """How many workers share a GPU."""
    policy: str | None = None
    """None for the policy that was chosen last, or for the default at the first start."""
    store: str | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    """None for the default port, or for any free port if that is taken."""
    cert: Path | None = None
    key: Path | None = None
    insecure: bool = False
    engine: str = "local"
    address: str | None = None
    """Address of the Ray cluster; None to start a Ray for swell alone."""
    ray_resource: str | None = None
    spares: bool = True
    encrypt: bool = True
    spare_memory: int = 1 << 30
    workdir_limit: int = 200 << 20
    autoscale: str | None = None
    """Nodes to rent, and on which terms; None if no nodes are rented."""
    provider: str | None = None
    """Who provides rented nodes: 'local' or 'ray'."""
    interval_s: float = 5.0
    round_s: float | None = None
    """Length of the policy's rounds; None for the policy's default."""
    pass_env: tuple[str, ...] = ()
    """Variables of the platform's environment that jobs get besides those that programs need."""
    run_as: str | None = None
    """The account that jobs run as, 'submitter' for that of each job's owner."""
    wall: bool = True
    """Whether jobs of the local engine are kept from the home and from each other, where the machine can."""
    end_unknown: bool = False
    jobs_per_user: int | None = None
    running_per_user: int | None = None
    slots_per_user: int | None = None
    submissions_per_minute: int | None = None
    time_limit_s: float | None = None
    """The longest that a job may run."""
    keep_s: float = 30 * 86_400.0
    """How long records, events and directories of ended jobs are kept."""
    keep_bytes: int | None = None
    """How much the directories of ended jobs may use; None for no limit."""
    ha: bool = False
    """One of several control planes on one Postgres store."""


def prepare(home: Path, *, pass_through: bool = False) -> None:
    """Make the home directory, for its owner only.

    With `pass_through` jobs of other accounts can get to their own directories in it, and see no others.
    """
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        home.chmod(0o711 if pass_through else 0o700)
        if pass_through:
            (home / "jobs").mkdir(exist_ok=True)
            (home / "jobs").chmod(0o711)
    except OSError as error:
        raise InputError(
            f"home '{home}' cannot be used: {error.strerror}; give another with --home"
        ) from error


def only_one(home: Path, *, shared: bool = False) -> TextIO:
    """Take the lock of this home's one control plane, until the result is closed; refuse if it is held.

    `shared`: together with others that share it.
    """
    lock = (home / LOCK).open("a+")
    for attempt in range(10):
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if attempt < 9:
                time.sleep(0.05)  # a process that only looks whether the lock is held holds it for a moment
    else:
        lock.close()
        raise SwellError(
            f"a control plane is running for {home} already (process {running_pid(home)}):"
            " 'swell top' shows it, 'swell down' stops it, --home names another home; several need --ha each"
        )
    if shared:
        return lock
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def running_pid(home: Path) -> int | None:
    """The process of this home's control plane on this machine (of several the leader); None if none is."""
    from swell.engines.processes import lock_holder

    alone = lock_holder(home / LOCK)
    if alone is not None or not (home / "planes").is_dir():
        return alone

    return next((running_pid(folder) for folder in plane_folders(home)), None)


def serve(
    settings: Settings,
    ready: Callable[[str, ControlPlane, list[Path]], None],
    standby: Callable[[str, str], None] = lambda *_: None,
) -> None:
    """Run the control plane until SIGTERM or SIGINT. `ready` is called just before requests are answered;
    `standby`, for one of several control planes, with its URL and name before it tries to lead."""
    from swell.api.server import Server
    from swell.control.store import Store, connect
    from swell.policies import DEFAULT, make_policy

    keep_from_debuggers()
    if settings.run_as is not None:
        from swell.engines import accounts

        accounts.check(settings.run_as)
    prepare(settings.home, pass_through=settings.run_as is not None)
    if settings.ha:
        serve_beside_others(settings, ready, standby)
        return
    with only_one(settings.home) as lock:
        # This descriptor is never closed, so the lock is free only once the process has ended.
        os.dup(lock.fileno())
    with contextlib.ExitStack() as stack:
        store = Store(connect(settings.store or str(settings.home / "store.db")))
        stack.callback(store.close)
        check_store(settings.home, store)
        if settings.policy is not None:
            make_policy(settings.policy)
            store.set_setting("policy", settings.policy)
        plane = make_plane(settings, store, make_engine(settings))
        server = listen(partial(Server, plane, store), settings, home=settings.home, replay=replayer(plane))
        warm_up(store.setting("policy") or DEFAULT)
        plane.start()
        stack.callback(plane.stop)
        ready(server.url, plane, server.new_tokens)
        server.run()


def make_plane(settings: Settings, store: Store, engine: SupervisedEngine) -> ControlPlane:
    from swell.control.limits import OwnerLimits
    from swell.control.plane import ControlPlane
    from swell.control.retention import Keep
    from swell.engines.order import LeaderFence

    engine.may_act = lambda: store.leads
    if store.fence:
        engine.fence = LeaderFence(store.identity, store.fence)
    return ControlPlane(
        store,
        engine,
        home=settings.home,
        interval_s=settings.interval_s,
        round_s=settings.round_s,
        limits=OwnerLimits(
            jobs=settings.jobs_per_user,
            running=settings.running_per_user,
            slots=settings.slots_per_user,
            submissions_per_minute=settings.submissions_per_minute,
            run_s=settings.time_limit_s,
        ),
        keep=Keep(for_s=settings.keep_s, most_bytes=settings.keep_bytes),
        end_unknown=settings.end_unknown,
        renting=make_renting(settings.autoscale, settings.provider, engine),
    )


def check_store(home: Path, store: Store) -> None:
    """Refuse a store that is not this home's: the jobs that run here would be strangers to it."""
    from swell.api.home import write_private

    path, mine = home / STORE_ID, store.identity
    known = path.read_text().strip() if path.exists() else ""
    if known and known != mine:
        raise InputError(
            f"store: this home ({home}) belongs to the store with the id {known}, and this one has the id"
            f" {mine}; give the right --store, or bring a backup back with 'swell restore'. To use this store"
            f" from now on, remove {path}: jobs that run here and are not in it are then left alone",
            field="store",
        )
    if not known:
        write_private(path, mine + "\n")


def keep_from_debuggers() -> None:
    """Have the system keep this process's memory and environment from others of its account, such as jobs."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def make_engine(settings: Settings) -> SupervisedEngine:
    from swell.engines.supervised import SupervisedEngine

    if settings.engine == "local":
        from swell.engines.local import LocalSite

        local = LocalSite(
            settings.home,
            nodes=settings.nodes,
            slots=settings.slots,
            per_gpu=settings.per_gpu or 1,
            walled=settings.wall,
            run_as=settings.run_as,
            pass_env=settings.pass_env,
        )
        return SupervisedEngine(local)
    need_ray()
    from swell.engines.ray.site import RayOptions, RaySite

    options = RayOptions(
        address=settings.address,
        resource=settings.ray_resource,
        per_gpu=settings.per_gpu or 1,
        spares=settings.spares,
        encrypt=settings.encrypt,
        spare_bytes=settings.spare_memory,
        workdir_bytes=settings.workdir_limit,
    )
    if settings.autoscale is not None:
        options = with_rented(options, settings.autoscale, settings.provider)
    return SupervisedEngine(RaySite(settings.home, options, pass_env=settings.pass_env))


def need_ray() -> None:
    """Refuse if Ray is not installed. Looks for Ray without importing it."""
    from importlib.util import find_spec

    if find_spec("ray") is None:
        raise SwellError("Ray is not installed: pip install 'swell[ray]'")


def warm_up(policy: str) -> None:
    """Compile the policy's inner loops and the fit of the speed model now, so that no job waits for that.

    The compiled code is kept on disk, so only the first start on a machine takes long.
    """
    import numpy as np

    from swell.domain import ANY_GPU, Cluster, JobSpec
    from swell.perf.belief import JobBelief
    from swell.perf.goodput import BatchLimits
    from swell.perf.profiles import MeasuredCounts, ProfileSet
    from swell.sim import simulate

    belief = JobBelief(BatchLimits(64, 64, 1, 64), fixed_batch=64)
    for workers in (1, 2, 4):
        belief.observe(1, workers, 64 // workers, 0.1 / workers + 0.01, 0.01)
    curve = belief.curve(4, 4)
    profile = MeasuredCounts("job", {ANY_GPU: (np.arange(1.0, 5.0), {1: curve[1:]})}, 1e6)
    jobs = [
        JobSpec(job_id=str(i), submit_s=float(i), model="job", batch_size=1, work=100.0, deadline_s=by_s)
        for i, by_s in enumerate([None, 60.0, 2.5, None])
    ]
    simulate(jobs, ProfileSet([profile]), Cluster.parse("1x4"), policy, interval_s=1.0, resize_cost=0.1)


def listen(serve: Callable[..., Any], settings: Settings, **options: Any) -> Any:
    """A listener on the port of the settings; without one, on the default port, or on any free one."""
    from swell.api.listener import DEFAULT_PORT

    options |= {"host": settings.host, "cert": settings.cert, "key": settings.key}
    options |= {"insecure": settings.insecure}
    if settings.port is not None:
        return serve(port=settings.port, **options)
    try:
        return serve(port=DEFAULT_PORT, **options)
    except InputError as error:
        if error.field != "port":
            raise
        return serve(port=0, **options)


def replayer(plane: ControlPlane) -> Callable[[ReplayRequest], dict[str, Any]]:
    """Answers replays of a control plane's history."""

    def answer(request: ReplayRequest) -> dict[str, Any]:
        from swell.domain import Cluster
        from swell.sim.replay import replay

        cluster = None if request.cluster is None else Cluster.parse(request.cluster)
        events = [event for _, event in plane.events(limit=1_000_000)]
        return {"runs": replay(events, request.policies or [plane.policy()], cluster)}

    return answer


def start_in_background(words: list[str], home: Path, store: str | None = None) -> tuple[str, int]:
    """Start `swell up` as a process in a session of its own; returns its URL and process once it answers.

    `store` may hold a password, so it is not among the words: every user of the machine can see those.
    """
    from swell.api.home import ServerFile

    prepare(home)
    from swell.train.agent.regular import open_for_append

    with open_for_append(home / LOG) as log:
        log.write(f"-- swell up at {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
        log.flush()
        begins_at = log.tell()
        child = subprocess.Popen(
            [sys.executable, "-m", "swell", "up", "--home", str(home), *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env=os.environ if store is None else {**os.environ, "SWELL_STORE": store},
        )
    give_up_s = time.monotonic() + STARTED_S
    while time.monotonic() < give_up_s:
        homes = [home, *(home / "planes").glob("*")]
        found = next((one for one in map(ServerFile.read, homes) if one and one.pid == child.pid), None)
        if found is not None and healthy(found.nearest, found.ca) is not None:
            return found.url, child.pid
        if child.poll() is not None:
            output = (home / LOG).read_bytes()[begins_at:].decode(errors="replace").strip()
            ended = f"the control plane ended with exit code {child.returncode}; see {home / LOG}"
            raise SwellError(_last_line(output) or ended)
        time.sleep(0.1)
    child.terminate()
    raise SwellError(f"the control plane did not come up within {STARTED_S:g} s; see {home / LOG}")


def _last_line(text: str) -> str:
    return text.splitlines()[-1].removeprefix("swell: ") if text else ""


def healthy(url: str, ca: str | None) -> dict[str, Any] | None:
    """The answer of the health check at this URL; None without one, or if the server is not well."""
    import ssl
    import urllib.error
    import urllib.request

    context = ssl.create_default_context(cafile=ca) if ca is not None else None
    if context is not None:
        # The server is on this machine and was found through its own file: the host name does not matter.
        context.check_hostname = False
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with opener.open(f"{url}/healthz", timeout=5) as answer:
            return dict(json.loads(answer.read()))
    except (OSError, urllib.error.URLError, ValueError):
        return None


def stop(home: Path) -> bool:
    """Stop the control plane of this home; False if none was running. Jobs go on."""
    pid = running_pid(home)
    if pid is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    give_up_s = time.monotonic() + STOPPED_S
    while running_pid(home) is not None:
        if time.monotonic() > give_up_s:
            raise SwellError(
                f"process {pid} did not stop within {STOPPED_S:g} s; 'kill -9 {pid}' loses nothing"
            )
        time.sleep(0.05)
    return True


def stop_jobs(home: Path, say: Callable[[int], None]) -> list[str]:
    """Have all jobs of this home save their state and stop; they go on with the next `swell up`.

    `say` is called with the number of jobs as soon as it is known. Returns the ids of the stopped jobs.
    """
    from swell.engines.local import LocalSite
    from swell.engines.supervised import SupervisedEngine
    from swell.engines.supervisor import is_locked

    with only_one(home):
        directories = jobs_alive(home)
        say(len(directories))
        if not directories:
            return []
        engine = SupervisedEngine(LocalSite(home, slots=MOST_SLOTS))
        engine.start(lambda: None)
        try:
            for directory in directories:
                engine.apply(_stop_only(directory), ())
            give_up_s = time.monotonic() + SAVED_S
            while any(is_locked(directory) for directory in directories):
                if time.monotonic() > give_up_s:
                    raise SwellError(
                        f"some jobs did not stop within {SAVED_S:g} s; 'swell up' finds them again, and"
                        " 'swell logs' may say why"
                    )
                time.sleep(0.1)
        finally:
            engine.close()
    return [directory.name for directory in directories]


def stop_ray(home: Path) -> bool:
    """End the Ray and the nodes that `swell up` started for this home, and no others; False if none runs."""
    from swell.engines.ray import head, raylet

    ended = raylet.stop_all(home)
    return head.stop(home) or ended


def jobs_alive(home: Path) -> list[Path]:
    """The directories of jobs that have a living supervisor on this machine."""
    from swell.engines.order import START, folder_of, started
    from swell.engines.supervisor import is_locked

    jobs = started(home)
    if any(time.time() - (folder_of(job) / START).stat().st_mtime < 3.0 for job in jobs):
        time.sleep(2.0)  # the supervisor of a job that was just started may not hold its lock yet
    return [job for job in jobs if is_locked(job)]


def _stop_only(directory: Path) -> Launch:
    """A launch for a job that the engine is only to stop."""
    from swell.domain import JobRequest
    from swell.engines import Launch

    request = JobRequest(name="any", script="any", workdir=str(directory))
    return Launch(job_id=directory.name, request=request, job_dir=directory)


# `swell up --autoscale`: the rented nodes of a platform on Ray, as its settings ask for them.


_START_S = {"local": 15.0, "ray": 120.0}
"""By provider: how long a node takes to start, if nobody says. Here that is seconds, in a cloud minutes."""
DEFAULT_PROVIDER = "ray"


def check_rented(
    autoscale: str | None, provider: str | None, address: str | None, spares: bool | None
) -> None:
    """Refuse what cannot be rented."""
    if autoscale is None:
        if provider is not None:
            raise InputError("--provider needs --autoscale, such as --autoscale 0:3x1", field="provider")
        return
    _rentable(autoscale, provider)
    if provider == "local":
        if address is not None and address.startswith("ray://"):
            raise InputError(
                "--provider local needs a Ray on this machine: give its address as HOST:PORT", field="address"
            )
    elif address is None:
        raise InputError(
            "--provider ray needs the --address of a Ray cluster that has an autoscaler; to try it on this "
            "machine alone, use --provider local",
            field="provider",
        )
    elif spares:
        raise InputError(
            "--spares cannot be used with --provider ray: Ray never takes a node for idle that has a "
            "prepared process",
            field="spares",
        )


def with_rented(options: RayOptions, autoscale: str, provider: str | None) -> RayOptions:
    """The engine's options with the nodes that may be rented."""
    from swell.engines.ray.places import RentedNodes

    rentable, by_ray = _rentable(autoscale, provider), provider != "local"
    resource = options.resource or ("GPU" if by_ray else "CPU")
    nodes = RentedNodes(
        nodes=rentable.terms.most_nodes,
        slots=rentable.offer.gpus_per_node,
        gpu_type=rentable.gpu_type or ("cpu" if resource == "CPU" else "gpu"),
        any_host=by_ray,
    )
    # Ray never takes a node for idle that has a prepared process, so its autoscaler would keep all nodes.
    return replace(options, rented=nodes, resource=resource, spares=options.spares and not by_ray)


def make_renting(autoscale: str | None, provider: str | None, engine: SupervisedEngine) -> Renting | None:
    """The control plane's part that rents nodes, if it is to rent any."""
    if autoscale is None:
        return None
    from swell.control.renting import Renting
    from swell.engines.ray.site import LocalProvider, RayProvider, RaySite

    site = engine.site
    assert isinstance(site, RaySite)
    rentable = _rentable(autoscale, provider)
    make = LocalProvider if provider == "local" else RayProvider
    return Renting(make(site, rentable.offer), rentable.terms, site.rented_names)


def _rentable(autoscale: str, provider: str | None) -> Rentable:
    from swell.cloud import parse_rentable

    return parse_rentable(autoscale, _START_S[provider or DEFAULT_PROVIDER])


# One of several control planes on one store: `swell up --ha`.
#
# All of them share the home, on one machine or on a shared file system, and the Postgres store. Each has a
# folder of its own in the home, with its lock and its address:
#
#     planes/<name>/up.lock, server.json
#
# The lock of the home itself is shared by them, so that a control plane without --ha is refused while one of
# them runs, and the other way round. `server.json` of the home names the one that leads.


log = logging.getLogger(__name__)

Ready = Callable[[str, "ControlPlane", list[Path]], None]


def enter_beside_others(home: Path) -> tuple[Path, tuple[TextIO, TextIO]]:
    """The folder of a new control plane of this home, and the locks to hold as long as it lives."""
    shared = only_one(home, shared=True)
    for number in itertools.count(1):
        folder = home / "planes" / _name(number)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(SwellError):
            return folder, (shared, only_one(folder))
    raise AssertionError


def _name(number: int) -> str:
    """The name of a control plane of this machine. Names of machines have no underscore."""
    return socket.gethostname() + ("" if number == 1 else f"_{number}")


def check_shared(settings: Settings) -> str:
    """Refuse what cannot have a standby; returns the URL of the store."""
    from swell.control.postgres import is_postgres
    from swell.policies import make_policy

    if settings.store is None or not is_postgres(settings.store):
        raise InputError(
            "store: --ha needs a store that several control planes can reach, postgresql://..., got"
            f" {'none' if settings.store is None else repr(settings.store)} (SQLite has one writer);"
            " set SWELL_STORE, or leave --ha out",
            field="store",
        )
    if settings.policy is not None:
        make_policy(settings.policy)
    make_engine(settings)
    return settings.store


def serve_beside_others(settings: Settings, ready: Ready, standby: Callable[[str, str], None]) -> None:
    """Run a control plane until SIGTERM or SIGINT: as a standby, and as the leader when it is its turn.

    `ready` is called whenever it begins to lead, `standby` with its URL and name once it answers.
    """
    from swell.api.front import Front
    from swell.api.listener import Listener
    from swell.control.lease import LeaseCandidate, LeaseHolder, Succession
    from swell.control.postgres import PostgresLease
    from swell.policies import DEFAULT

    url, host = check_shared(settings), socket.gethostname()
    folder, locks = enter_beside_others(settings.home)
    for lock in locks:
        os.dup(lock.fileno())  # never closed, so that the lock is free only once the process has ended
    table = PostgresLease(url)
    leader = table.leader()
    if settings.engine == "local" and leader is not None and leader.holder.host not in ("", host):
        raise InputError(
            f"engine: with the local engine jobs run on the machine of the control plane, and the one that"
            f" leads is on {leader.holder.host}; start this one there, or use --engine ray",
            field="engine",
        )
    warm_up((settings.policy if leader is None else _policy_in_force(url)) or DEFAULT)
    candidate = LeaseCandidate(table, LeaseHolder(folder.name, "", host))
    ca = None if settings.cert is None else str(settings.cert)
    front = Front(candidate, lambda: _tokens(url), tls=settings.cert is not None, ca=ca)
    listener = listen(partial(Listener, front), settings, home=folder, closing=front.closing)
    candidate.holder = LeaseHolder(folder.name, listener.url, host)
    # A policy that is given counts if no other control plane led at the start; else the one in force goes on.
    policy = settings.policy if leader is None else None
    prepared = [_prepared(settings)]

    def lead(tenure: Tenure) -> Callable[[], None]:
        nonlocal policy
        front.ready.wait(30.0)
        engine = prepared.pop() if prepared else make_engine(settings)
        step_down = _lead(settings, url, policy, tenure, engine, front, listener, ready)
        policy = None

        def prepare_again() -> None:
            step_down()
            if not succession.part.stopping.is_set():
                prepared.append(_prepared(settings))

        return prepare_again

    succession = Succession(candidate, lead, front.turned)
    standby(listener.url, folder.name)
    succession.start()
    try:
        listener.run()
    finally:
        succession.stop()
        for engine in prepared:
            engine.close()
        listener.file.remove(settings.home, os.getpid())


def _prepared(settings: Settings) -> SupervisedEngine:
    """An engine for the time when this control plane leads; what takes long has begun."""
    engine = make_engine(settings)
    try:
        engine.prepare()
    except SwellError as error:
        log.warning("the engine is not ready to lead: %s", error)  # tried again when it is needed
    return engine


def _lead(
    settings: Settings,
    url: str,
    policy: str | None,
    tenure: Tenure,
    engine: SupervisedEngine,
    front: Front,
    listener: Listener,
    ready: Ready,
) -> Callable[[], None]:
    """Bring a control plane up under a tenure; returns how to bring it down. `policy`: decide by this one."""
    from swell.api.auth import AUDIT_FILE, AuditLog, TokenBook, ensure_tokens
    from swell.api.server import create_app
    from swell.control.postgres import PostgresDatabase
    from swell.control.store import Store

    with contextlib.ExitStack() as stack:
        stack.callback(engine.close)
        store = Store(PostgresDatabase(url, tenure))
        stack.callback(store.close)
        check_store(settings.home, store)
        if policy is not None:
            store.set_setting("policy", policy)
        plane = make_plane(settings, store, engine)
        book = TokenBook(store)
        new_tokens = ensure_tokens(book, settings.home)
        audit, tls = AuditLog(settings.home / AUDIT_FILE), settings.cert is not None
        app = create_app(plane, store, book=book, replay=replayer(plane), tls=tls, audit=audit)
        stack.callback(plane.stop)
        plane.start()
        front.lead(app, tenure)
        stack.callback(front.leave)
        listener.file.write(settings.home)
        log.warning("%s leads from now on, with the number %d", listener.url, tenure.number)
        ready(listener.url, plane, new_tokens)
        return stack.pop_all().close


def _reader(url: str) -> Store:
    """The store, for reading only."""
    from swell.control.postgres import PostgresDatabase
    from swell.control.store import Store

    return Store(PostgresDatabase(url, None), migrate=False)


def _tokens(url: str) -> Any:
    from swell.api.auth import TokenBook

    store = _reader(url)
    try:
        return TokenBook(store)
    finally:
        store.close()


def _policy_in_force(url: str) -> str | None:
    store = _reader(url)
    try:
        return store.setting("policy")
    except SwellError:
        return None  # the other one is just making the store
    finally:
        store.close()


def plane_folders(home: Path) -> list[Path]:
    """The folders of the control planes with --ha that run on this machine, that of the leader first."""
    from swell.api.home import ServerFile

    leader, found = ServerFile.read(home), sorted((home / "planes").glob("*"))
    # The lock of one on another machine may be seen here too, with a process id that means nothing here.
    mine = [folder for folder in found if folder.name.split("_")[0] == _name(1)]
    alive = [folder for folder in mine if running_pid(folder) is not None]
    return sorted(alive, key=lambda folder: leader is None or running_pid(folder) != leader.pid)


def stop_planes(home: Path, name: str | None) -> list[str]:
    """Stop the control planes with --ha on this machine, or only that of a name; returns their names."""
    running = plane_folders(home)
    chosen = [folder for folder in running if name is None or folder.name == name]
    if name is not None and not chosen:
        known = ", ".join(folder.name for folder in running) or "none"
        raise InputError(f"plane: no control plane '{name}' runs here; there are: {known}", field="plane")
    for folder in reversed(chosen):  # the standbys first, so that the lead does not go round
        stop(folder)
    return [folder.name for folder in chosen]


def others_run(home: Path) -> bool:
    """Whether a control plane of this home runs, on this machine or, on a shared file system, on another."""
    try:
        with only_one(home):
            return False
    except SwellError:
        return True
