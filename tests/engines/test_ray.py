"""Jobs on a Ray cluster of four nodes with two slots each: moved, hurt, left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from benchmarks.ray import kills
from benchmarks.ray.cluster import RayCluster
from benchmarks.runtime import netns
from benchmarks.runtime.arena import check_counts
from tests.sharded import SCRIPT, check_every_sample_once, newest
from tests.waiting import wait_until

from swell.domain import JobRequest, SwellError
from swell.engines import EngineReport, Launch, RunState
from swell.engines.local import LocalSite
from swell.engines.nursery import Nursery
from swell.engines.processes import descendants, processes_of
from swell.engines.ray import places
from swell.engines.ray.connection import environment
from swell.engines.ray.site import SETTLE_S, RayOptions, RaySite
from swell.engines.supervised import SupervisedEngine
from swell.train.agent.client import JobClient
from swell.train.agent.jobdir import JobDirectory

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "runtime"
TOY = Path(__file__).with_name("toy.py")


class Ray:
    """Engines on one home and one Ray cluster."""

    def __init__(self, home: Path, cluster: RayCluster) -> None:
        self.home, self.cluster = home, cluster
        self.hurry = home / "hurry"
        """Once this file is there, jobs that were given it do not take their time any more."""
        self.engines: list[SupervisedEngine] = []

    def engine(self, **options: object) -> SupervisedEngine:
        """An engine that has found all eight slots, and no node that an earlier test has added."""
        made = self._started(**options)
        own = {f"n{index}" for index in range(len(self.cluster.nodes))}

        def is_alone() -> bool:
            nonlocal made
            if {node.name for node in made.cluster().nodes} <= own:
                return True
            made.close()  # what an engine has seen stays in its books
            (self.home / places.PLACES).unlink(missing_ok=True)
            made = self._started(**options)
            return False

        until(is_alone)
        self.engines.append(made)
        until(lambda: made.cluster().capacity == 8)
        return made

    def _started(self, **options: object) -> SupervisedEngine:
        made = SupervisedEngine(RaySite(self.home, RayOptions(address=self.cluster.address, **options)))  # type: ignore[arg-type]
        made.start(lambda: None)
        return made

    def launch(self, job_id: str, script: Path, *args: object, **options: object) -> Launch:
        """A job; its directory outlives it."""
        fields: dict[str, Any] = {"workdir": str(script.parent), "checkpoint_s": 5.0} | options
        request = JobRequest(name=job_id, script=str(script), args=tuple(map(str, args)), **fields)
        return Launch(job_id=job_id, request=request, job_dir=self.home / "jobs" / job_id, max_workers=8)

    def client(self, job_id: str) -> JobClient:
        """Speaks to the job's coordinator."""
        runs = self.home / "jobs" / job_id / "runs"
        until(lambda: any(runs.glob("*")))
        run = sorted(runs.iterdir())[-1]
        return JobClient(JobDirectory(run), wait_s=60.0)

    def output(self, job_id: str) -> str:
        """What its workers printed."""
        path = self.home / "jobs" / job_id / "output.log"
        return path.read_text() if path.exists() else ""


def until(condition: Callable[[], object], timeout_s: float = 90.0) -> None:
    """Wait for `condition`."""
    wait_until(condition, timeout_s, "the cluster or a job of it")


def state(engine: SupervisedEngine, job_id: str) -> RunState | None:
    """How the engine sees a job."""
    seen = engine.observe().get(job_id)
    return None if seen is None else seen.state


@pytest.fixture
def ray(tmp_path: Path, ray_cluster: RayCluster, nursery: Nursery) -> Iterator[Ray]:
    """A home for engines; what still runs at the end is ended."""
    made = Ray(tmp_path, ray_cluster)
    yield made
    for engine in made.engines:
        for job_id in list(engine.observe()):
            engine.end(job_id)
    until(lambda: not any(processes_of(folder) for folder in (tmp_path / "jobs").glob("*")), 60)
    for engine in made.engines:
        engine.close()


@pytest.mark.long
def test_growing_across_nodes_and_shrinking_gives_the_very_weights_of_a_local_run(
    ray: Ray, tmp_path: Path
) -> None:
    alone = SupervisedEngine(LocalSite(tmp_path, slots=1))
    alone.start(lambda: None)
    ray.engines.append(alone)
    local = _identity(ray, "local", 0.0)
    alone.apply(local, (0,))
    engine, launch = ray.engine(), _identity(ray, "ray", 0.4)
    for move in [(0,), (0, 2, 4, 6), (2, 5)]:
        engine.apply(launch, move)
        _trains_on(ray, "ray", move)
    ray.hurry.touch()
    until(lambda: state(engine, "ray") is RunState.FINISHED)
    until(lambda: state(alone, "local") is RunState.FINISHED)
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("local", "ray")]
    assert results[0] == results[1]


def _identity(ray: Ray, name: str, pace_s: float) -> Launch:
    out = ray.home / name
    out.mkdir()
    args = ("--epochs", 8, "--out", out, "--pace", pace_s, "--hurry", ray.hurry)
    return ray.launch(name, SCRIPTS / "identity_script.py", *args)


def _trains_on(ray: Ray, job_id: str, slots: tuple[int, ...]) -> None:
    """Wait until the job has done some steps with workers on exactly these slots."""
    with ray.client(job_id) as client:
        there = client.wait_for(
            lambda s: s["step"] > 0 and sorted(s["slots"][m] for m in s["members"]) == list(slots), 90
        )
        client.wait_for(lambda s: s["step"] > there["step"] + 2, 90)


def test_a_replica_spans_two_nodes_and_another_one_joins_it(ray: Ray, tmp_path: Path) -> None:
    out, script = tmp_path / "out", tmp_path / "code" / "sharded.py"
    for folder in (out, script.parent):
        folder.mkdir()
    script.write_text(SCRIPT)
    engine, launch = ray.engine(), ray.launch("a", script, out, 12, workers_per_replica=2)
    for move in [(0, 2), (0, 2, 4, 6)]:
        engine.apply(launch, move)
        _trains_on(ray, "a", move)
    (out / "hurry").touch()
    until(lambda: state(engine, "a") is RunState.FINISHED)
    check_every_sample_once(newest(out), 12)


def test_a_killed_and_a_frozen_node_cost_seconds_and_no_sample(ray: Ray, tmp_path: Path) -> None:
    cluster, engine, out = ray.cluster, ray.engine(), tmp_path / "counts.json"
    samples, batch = 2000, 16
    args = ("--out", out, "--samples", samples, "--epochs", 2, "--pace", 0.4, "--hurry", ray.hurry)
    launch = ray.launch("a", SCRIPTS / "counting.py", *args)
    names = [node.name for node in engine.cluster().nodes]
    first = {int(name.removeprefix("n")): 2 * names.index(name) for name in names}  # node -> its first slot
    engine.apply(launch, tuple(sorted(first.values()))[:4])
    with ray.client("a") as client:
        client.wait_for(lambda s: len(s["members"]) == 4 and s["step"] > 3, 90)

        killed = cluster.nodes[1]
        killed.signal_raylet(signal.SIGKILL)
        left = [slot for node, slot in first.items() if node != 1]
        went_on_s = _goes_on(client, left)
        assert went_on_s < 20, "seconds, not a restart"
        lost = {n.name for n in engine.cluster().nodes if not n.up}
        until(lambda: engine.cluster().capacity == 6, 30)
        assert not lost - {"n1"}
        engine.apply(launch, tuple(sorted(left)))

        frozen = [cluster.nodes[2].raylet, *descendants(cluster.nodes[2].raylet)]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        left = [slot for node, slot in first.items() if node not in (1, 2)]
        assert _goes_on(client, left) < 25
        until(lambda: engine.cluster().capacity == 4, 30)
        engine.apply(launch, tuple(sorted(left)))
        for pid in frozen:
            _thaw(pid)

        for index in (1, 2):
            cluster.nodes[index].stop()
            cluster.nodes[index].start()
        for index in (1, 2):
            cluster.nodes[index].wait_up()
        until(lambda: engine.cluster().capacity == 8, 60)
        assert [node.name for node in engine.cluster().nodes] == names, "back in their old places"
        engine.apply(launch, tuple(sorted(first.values())))
        client.wait_for(lambda s: len(s["members"]) == 4, 90)
    ray.hurry.touch()
    until(lambda: state(engine, "a") is RunState.FINISHED, 90)
    assert check_counts(json.loads(out.read_text())["weight"], samples, batch) is None
    assert len(list((tmp_path / "jobs" / "a" / "runs").iterdir())) == 1, "it never began anew"


def _goes_on(client: JobClient, slots: list[int]) -> float:
    """How long until only workers on these slots are left and a further step is done."""
    began_s = time.monotonic()
    there = client.wait_for(lambda s: {s["slots"].get(m) for m in s["members"]} == set(slots), 60)
    client.wait_for(lambda s: s["step"] > there["step"] + 1, 60)
    return time.monotonic() - began_s


def _thaw(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return


def test_another_engine_finds_the_workers_and_none_restarts(ray: Ray) -> None:
    engine = ray.engine()
    launch = ray.launch("a", TOY, "--epochs", 200, "--sample-ms", 2)
    engine.apply(launch, (1, 4))
    until(lambda: " of 2" in ray.output("a"))
    with ray.client("a") as client:
        before = client.status()["pids"]
    assert len(before) == 2
    engine.close()
    ray.engines.remove(engine)
    steps = ray.output("a").count("| step ")
    until(lambda: ray.output("a").count("| step ") > steps + 5)
    adopted = ray.engine()
    assert adopted.observe()["a"].target == (1, 4)
    with ray.client("a") as client:
        assert client.status()["pids"] == before
        adopted.apply(launch, (1, 4, 7))
        client.wait_for(lambda s: len(s["members"]) == 3, 90)
        assert client.status()["pids"].items() >= before.items()
    adopted.end("a")
    until(lambda: not processes_of(ray.home / "jobs" / "a"), 60)


def test_no_job_stops_when_workers_that_take_long_to_get_ready_are_killed() -> None:
    """A short form of `python -m benchmarks.ray.kills`, in which the head is away once, too."""
    if why := netns.why_not():
        pytest.skip(why)
    found = kills.measure(kills=2, minutes=0.2, ready_s=3.0, slow_s=4.0, aways=1)
    assert found["holds"], found
    assert found["kills"] == 2 and found["times_the_head_was_away"] == 1 and found["slow_starts"], found


TASKS = """
import sys, time, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
node = next(n["NodeID"] for n in ray.nodes() if n["NodeName"] == sys.argv[2])

@ray.remote(num_cpus=1, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
def work():
    time.sleep(0.5)

group = ray.util.placement_group([{"CPU": 1}], strategy="STRICT_PACK")
ray.get(group.ready())
while True:
    ray.get(work.remote())
"""


def test_tasks_and_placement_groups_of_others_hold_slots_and_what_has_no_owner_does_not(
    ray: Ray, tmp_path: Path
) -> None:
    engine = ray.engine()
    with (tmp_path / "foreign.log").open("wb") as log:
        foreign = subprocess.Popen(
            [sys.executable, "-c", TASKS, ray.cluster.address, "n2"],
            stdout=log, stderr=log, env=environment(ray.cluster.address, {}),
        )  # fmt: skip
    try:
        until(lambda: engine.cluster().capacity == 6, 60)
    finally:
        foreign.terminate()
        foreign.wait(15)
    until(lambda: not engine.cluster().held, 60)


FOREIGN = """
import sys, time, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
node = next(n["NodeID"] for n in ray.nodes() if n["NodeName"] == sys.argv[2])

@ray.remote(num_cpus=1, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
class Busy:
    def beat(self):
        return time.time()

both = [Busy.remote() for _ in range(2)]
while True:
    ray.get([one.beat.remote() for one in both])
    print(time.time(), flush=True)
    time.sleep(0.1)
"""


def test_slots_of_another_ray_user_are_left_alone_and_used_once_free(ray: Ray, tmp_path: Path) -> None:
    engine = ray.engine()
    env = environment(ray.cluster.address, {})
    with (tmp_path / "foreign.log").open("wb") as log:
        foreign = subprocess.Popen(
            [sys.executable, "-c", FOREIGN, ray.cluster.address, "n1"], stdout=log, stderr=log, env=env
        )
    try:
        until(lambda: engine.cluster().capacity == 6, 30)
        cluster = engine.cluster()
        theirs = {slot for slot in range(8) if cluster.nodes[int(cluster.node_of_gpu[slot])].name == "n1"}
        assert cluster.held == theirs
        free = tuple(slot for slot in range(8) if slot not in theirs)
        launch = ray.launch("a", TOY, "--epochs", 200, "--sample-ms", 2)
        engine.apply(launch, free[:2])
        until(lambda: " of 2" in ray.output("a"))
        # Our own workers must not be taken for somebody else's by what the engine hears of them later.
        all_there_s = time.monotonic()
        assert isinstance(engine.site, RaySite)
        scout = engine.site._scout
        until(lambda: scout.heard_s > all_there_s + SETTLE_S + 0.5)
        assert engine.cluster().held == theirs
    finally:
        foreign.terminate()
        foreign.wait(15)
    beats = [float(line) for line in (tmp_path / "foreign.log").read_text().splitlines() if line[0].isdigit()]
    assert max(b - a for a, b in pairwise(beats)) < 15, "the other's actors were disturbed"
    until(lambda: not engine.cluster().held, 60)
    engine.apply(launch, (*free[:2], *theirs))
    until(lambda: " of 4" in ray.output("a"))
    assert not engine.cluster().held


@pytest.mark.skipif(os.geteuid() != 0, reason="hiding a directory from a node needs root")
def test_a_job_goes_on_without_a_node_on_which_its_worker_cannot_be_started(ray: Ray, tmp_path: Path) -> None:
    engine = ray.engine(spares=False)
    script = tmp_path / "scripts" / "toy.py"  # outside the working directory, so that it does not travel
    script.parent.mkdir()
    script.write_text(TOY.read_text())
    fields: dict[str, Any] = {"workdir": str(TOY.parent)}
    launch = ray.launch("a", script, "--epochs", 400, "--sample-ms", 2, **fields)
    engine.apply(launch, (1, 4))
    _trains_on(ray, "a", (1, 4))
    missing = [
        ("home", tmp_path, "home", "swell's home (swell up --home) must be on storage that all nodes share"),
        ("swell", Path(places.__file__).parents[2], "software", "No module named 'swell"),
        ("script", script.parent, "process", "No such file or directory"),
    ]
    nodes = [ray.cluster.start(f"without-{name}", 1, hidden=[hidden]) for name, hidden, *_ in missing]
    try:
        for node in nodes:
            node.wait_up()
        until(lambda: engine.cluster().capacity == 8 + len(nodes))
        with ray.client("a") as client:
            before = client.status()["pids"]
        cluster = engine.cluster()
        slots = {cluster.nodes[int(node)].name: slot for slot, node in enumerate(cluster.node_of_gpu)}
        for name, _, cause, said in missing:
            slot = slots[f"without-{name}"]
            reports: list[EngineReport] = []

            def reported(reports: list[EngineReport] = reports) -> bool:
                reports.extend(engine.reports())
                return any(report.kind == "unstartable" for report in reports)

            engine.apply(launch, (1, 4, slot))
            until(reported)
            (told,) = [report.data for report in reports if report.kind == "unstartable"]
            assert told == {"slot": slot, "cause": cause}
            texts = [str(report.data["text"]) for report in reports if report.kind == "noticed"]
            assert any(f"cannot be started on node without-{name}" in t and said in t for t in texts), texts
            with ray.client("a") as client:
                step = client.status()["step"]
                after = client.wait_for(lambda s, step=step: s["step"] > step + 3, 90)
                assert after["pids"] == before and sorted(after["slots"].values()) == [1, 4]
        engine.apply(launch, (1, 4, 6))
        _trains_on(ray, "a", (1, 4, 6))
    finally:
        engine.end("a")
        until(lambda: not processes_of(ray.home / "jobs" / "a"), 60)
        for node in nodes:
            node.stop()


NODES = """
import sys
from ray._raylet import GcsClient
for node in GcsClient(address=sys.argv[1]).get_all_node_info().values():
    if node.state == 0:
        print(node.node_name)
"""
"""Prints the nodes that Ray believes to live."""


def test_a_node_keeps_environments_in_a_folder_of_its_own_and_signs_off_when_it_ends(
    ray_cluster: RayCluster,
) -> None:
    def living() -> set[str]:
        words = [sys.executable, "-c", NODES, ray_cluster.address]
        env = environment(ray_cluster.address, {})
        return set(subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout.split())

    def folders() -> set[str]:
        found = Path(ray_cluster.head.scratch).glob("session_latest/runtime_resources/*")
        return {path.name.rpartition("-")[0] for path in found}

    guest = ray_cluster.join("guest", 1)
    try:
        assert {"n0", "n1", "n2", "n3", "guest"} <= living() & folders()
    finally:
        guest.stop()
    assert "guest" not in living() | folders()


def test_a_job_beyond_its_memory_one_that_breaks_and_one_with_output(ray: Ray) -> None:
    engine = ray.engine()
    engine.apply(ray.launch("broken", TOY, "--fail-at", 3), (0, 3))
    hoard = ray.launch(
        "hoard", TOY, "--epochs", 50, "--hoard-mb", 700, "--sample-ms", 3, memory_bytes=600 << 20
    )
    engine.apply(hoard, (4,))
    until(lambda: state(engine, "broken") is RunState.FAILED)
    assert engine.observe()["broken"].reason.startswith("RuntimeError: the toy broke (toy.py, line ")
    assert "Traceback" in ray.output("broken")
    until(lambda: state(engine, "hoard") is RunState.FAILED)
    seen = engine.observe()["hoard"]
    assert seen.exit_code == 137 and "limit is 600 MiB" in seen.reason


def _sees_gpus(ray: Ray, job_id: str, expected: list[str]) -> None:
    """Wait until as many workers have said which GPUs they see, and compare."""

    def seen() -> list[str]:
        return sorted(line.split()[2] for line in ray.output(job_id).splitlines() if "| device " in line)

    until(lambda: len(seen()) >= len(expected))
    assert seen() == expected


def test_where_there_are_gpus_they_are_the_slots_and_each_worker_sees_the_one_that_ray_gave_it(
    ray: Ray,
) -> None:
    node = ray.cluster.join("gpus", 1, gpus=2)
    try:
        engine = SupervisedEngine(RaySite(ray.home, RayOptions(address=ray.cluster.address, spares=False)))
        engine.start(lambda: None)
        ray.engines.append(engine)
        assert [(n.name, n.gpus, n.gpu_type) for n in engine.cluster().nodes] == [("gpus", 2, "gpu")]
        launch = ray.launch("a", TOY, "--epochs", 80, "--sample-ms", 5, "--hurry", ray.hurry)
        engine.apply(launch, (0, 1))
        _sees_gpus(ray, "a", ["0", "1"])
        ray.hurry.touch()
        until(lambda: state(engine, "a") is RunState.FINISHED)
    finally:
        node.stop()


def test_a_job_is_left_alone_when_gpus_join_and_they_are_the_slots_once_it_is_over(ray: Ray) -> None:
    engine = ray.engine(spares=False)
    launch = ray.launch("a", TOY, "--epochs", 80, "--sample-ms", 5, "--hurry", ray.hurry)
    engine.apply(launch, (0, 2))
    _trains_on(ray, "a", (0, 2))
    node = ray.cluster.join("gpus", 1, gpus=2)
    try:
        until(lambda: engine.cluster().capacity == 9)  # with the CPU of the new node
        engine.apply(launch, (0, 2, 4))
        _trains_on(ray, "a", (0, 2, 4))
        ray.hurry.touch()
        until(lambda: state(engine, "a") is RunState.FINISHED)
        until(lambda: [(n.name, n.gpus) for n in engine.cluster().nodes if n.up] == [("gpus-2", 2)])
        assert len(list((launch.job_dir / "runs").iterdir())) == 1, "it never began anew"
        hurry = ray.home / "hurry-b"
        launch = ray.launch("b", TOY, "--epochs", 80, "--sample-ms", 5, "--hurry", hurry)
        engine.apply(launch, (9, 10))
        _sees_gpus(ray, "b", ["0", "1"])
        hurry.touch()
        until(lambda: state(engine, "b") is RunState.FINISHED)
    finally:
        node.stop()


def test_two_jobs_share_a_gpu_that_ray_chose_and_rays_books_show_half_of_it_for_each(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    free: list[float] = []
    read_nodes = places.read_nodes

    def read(found: list[dict[str, Any]], *args: Any) -> Any:
        free[:] = [node["available"].get("GPU", 0.0) for node in found if node["name"] == "gpus"]
        return read_nodes(found, *args)

    monkeypatch.setattr(places, "read_nodes", read)
    node = ray.cluster.join("gpus", 1, gpus=2)
    try:
        engine = SupervisedEngine(
            RaySite(ray.home, RayOptions(address=ray.cluster.address, per_gpu=2, spares=False))
        )
        engine.start(lambda: None)
        ray.engines.append(engine)
        assert [(n.name, n.gpus, n.per_gpu) for n in engine.cluster().nodes] == [("gpus", 4, 2)]
        toy = ("--epochs", 80, "--sample-ms", 5, "--hurry", ray.hurry)
        said = []
        for name, slot, left in (("a", 0, 1.5), ("b", 2, 1.0)):
            engine.apply(ray.launch(name, TOY, *toy), (slot,))
            until(lambda name=name: "| step " in ray.output(name))
            until(lambda left=left: free == [left])
            (line,) = [line for line in ray.output(name).splitlines() if "| device " in line]
            said.append(line.split("| device ")[1].split())
        (gpu, *first), (other, *second) = said
        assert gpu == other and gpu in ("0", "1") and first[:2] == second[:2] == ["per_gpu", "2"]
        assert not engine.cluster().held
        ray.hurry.touch()
        until(lambda: {state(engine, name) for name in ("a", "b")} == {RunState.FINISHED})
        until(lambda: free == [2.0])
    finally:
        node.stop()


def test_a_job_goes_on_when_the_gpus_that_it_fills_become_several_slots_each(ray: Ray) -> None:
    node = ray.cluster.join("gpus", 1, gpus=2)
    try:
        launch = ray.launch("a", TOY, "--epochs", 80, "--sample-ms", 5, "--hurry", ray.hurry)
        for per_gpu, slots in ((1, (0, 1)), (2, (2, 3))):
            options = RayOptions(address=ray.cluster.address, resource="GPU", per_gpu=per_gpu, spares=False)
            engine = SupervisedEngine(RaySite(ray.home, options))
            engine.start(lambda: None)
            ray.engines.append(engine)
            engine.apply(launch, slots)
            # No GPU has room for its new workers beside the old ones, so the job saves its state and stops.
            until(lambda runs=per_gpu: len(list((launch.job_dir / "runs").glob("*"))) == runs)
            _trains_on(ray, "a", slots)
            if per_gpu == 1:
                engine.close()
                ray.engines.remove(engine)
        assert [(n.name, n.gpus, n.up) for n in engine.cluster().nodes] == [
            ("gpus", 2, False),
            ("gpus-2", 4, True),
        ]
        steps = [int(line.split()[2]) for line in ray.output("a").splitlines() if "| step " in line]
        assert steps == sorted(steps), "it went on from its state"
    finally:
        node.stop()


def test_a_cluster_that_cannot_be_used_is_refused_at_once(
    tmp_path: Path, ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    began_s = time.monotonic()
    with pytest.raises(SwellError, match="nothing listens"):
        SupervisedEngine(RaySite(tmp_path, RayOptions(address="127.0.0.1:1"))).start(lambda: None)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another-token-than-the-one-of-this-cluster")
    with pytest.raises(SwellError, match="RAY_AUTH_TOKEN"):
        SupervisedEngine(RaySite(tmp_path, RayOptions(address=ray_cluster.address))).start(lambda: None)
    assert time.monotonic() - began_s < 45
