"""The parts of the Ray engine that need no Ray: places of nodes, slots in other hands, what travels."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import subprocess
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.waiting import wait_until

from swell.domain import InputError, JobRequest, SwellError
from swell.engines import Launch
from swell.engines.job_state import JobStage, JobState
from swell.engines.local import LocalSite
from swell.engines.ray import packaging
from swell.engines.ray.claims import Claim, Claims, HolderName, platform
from swell.engines.ray.head import free_port
from swell.engines.ray.holder import sees
from swell.engines.ray.places import (
    PLACES,
    Foreign,
    Place,
    RayNode,
    RentedNodes,
    check_per_gpu,
    dump,
    follow,
    held_slots,
    load,
    nodes_with_gpus,
    read_nodes,
    retired_slots,
    share,
    slot_map,
    slot_resource,
    to_cluster,
)
from swell.engines.ray.site import SETTLE_S, SILENT_S, RayOptions, RaySite, ScoutProcess, SlotBook
from swell.engines.ray.workers import why_not_made
from swell.engines.supervised import SupervisedEngine
from swell.engines.supervised_job import SupervisedJob
from swell.train.agent.polling import readable
from swell.train.agent.protocol import Exited, Lost, Unstartable
from swell.train.agent.wire import Connection
from swell.train.agent.worker_processes import Failed, News

ROOT = Path(__file__).parents[2]


def node(node_id: str, name: str = "host", slots: int = 2, others: int = 0) -> RayNode:
    about = {"node_id": node_id, "name": name, "address": "127.0.0.1", "gpu_type": "cpu"}
    return RayNode(**about, slots=slots, others=others)


def names(places: list[Place]) -> list[tuple[str, bool]]:
    return [(place.name, place.up) for place in places]


def test_a_node_keeps_its_place_when_it_is_lost_and_takes_it_again_when_it_returns() -> None:
    places = follow([], [node("a"), node("b"), node("c", "other", 4)])
    assert names(places) == [("host", True), ("host-2", True), ("other", True)]
    lost = follow(places, [node("b"), node("c", "other", 4)])
    assert names(lost) == [("host", False), ("host-2", True), ("other", True)]
    assert to_cluster(lost).capacity == 6
    back = follow(lost, [node("d"), node("b"), node("c", "other", 4)])
    assert names(back) == [("host", True), ("host-2", True), ("other", True)]
    assert back[0].node_id == "d"
    grown = follow(back, [node("e", "host", 8), node("b"), node("c", "other", 4)])
    assert names(grown) == [("host", False), ("host-2", True), ("other", True), ("host-3", True)], (
        "another size is another node: slot numbers never change their meaning"
    )
    assert names(load(dump(grown))) == [(name, False) for name, _ in names(grown)]


def test_slots_are_gpus_where_there_are_any_and_the_head_without_them_gives_none() -> None:
    found = [
        {"id": "h", "name": "head", "address": "10.0.0.1", "total": {"CPU": 8.0}, "available": {"CPU": 8.0}},
        {
            "id": "g",
            "name": "gpu",
            "address": "10.0.0.2",
            "total": {"CPU": 8.0, "GPU": 4.0, "accelerator_type:A100": 1.0},
            "available": {"CPU": 8.0, "GPU": 2.0},
            "others": {"CPU": 2.0, "GPU": 1.5},
            "holders": [1],
        },
    ]
    assert (nodes_with_gpus(found), nodes_with_gpus(found[:1])) == (["gpu"], [])
    nodes = read_nodes(found, "GPU")
    assert [(n.name, n.slots, n.gpu_type, n.others) for n in nodes] == [("gpu", 4, "a100", 2)]
    assert nodes[0].holders == (1,)
    assert [n.slots for n in read_nodes(found[:1], "CPU")] == [8]
    assert read_nodes(found, "trainer") == []


def test_gpus_that_come_late_are_the_slots_once_no_job_runs_and_from_then_on() -> None:
    assert [slot_resource(None, gpus, busy=busy) for gpus in ([], ["g"]) for busy in (True, False)] == [
        "CPU", "CPU", "GPU", "GPU",
    ]  # fmt: skip
    assert slot_resource("CPU", ["g"], busy=True) == "CPU", "jobs that run have CPUs"
    assert slot_resource("CPU", ["g"], busy=False) == "GPU"
    assert slot_resource("GPU", [], busy=False) == "GPU", "the node may return"


def test_a_node_with_gpus_that_comes_late_changes_the_slots_when_the_jobs_are_over_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    total = {"CPU": 8.0}
    head = {"id": "h", "name": "head", "address": "", "total": total, "available": total}
    both, now_s = [head, _gpu_node(2.0)], iter(range(100))

    def see(book: SlotBook, found: list[dict[str, Any]], *, busy: bool) -> list[tuple[str, int, bool]]:
        at_s = float(next(now_s))
        book.see(found, at_s, busy=busy)
        book.follow([], at_s)
        return [(node.name, node.gpus, node.up) for node in book.cluster().nodes]

    def again(wanted: str | None = None) -> SlotBook:
        return SlotBook(tmp_path / PLACES, wanted, 1, None)

    first = again()
    assert see(first, [head], busy=False) == [("head", 8, True)]
    second = again()
    for book in (first, first, second):
        assert see(book, both, busy=True) == [("head", 8, True), ("gpu", 4, True)], "also after a restart"
    assert caplog.text.count("gpu: there are GPUs now") == 2, "once for each engine"
    assert second.kind.resource == "CPU" and not second.retired
    on_gpus = [("head", 8, False), ("gpu", 4, False), ("gpu-2", 2, True)]
    assert see(second, both, busy=False) == on_gpus
    assert "slots are GPUs from now on (gpu)" in caplog.text
    assert second.kind.resource == "GPU" and second.retired == {8, 9, 10, 11}
    lost = [(name, slots, False) for name, slots, _ in on_gpus]
    for book in (second, again()):
        assert see(book, [head], busy=False) == lost, "jobs for GPUs are not moved to the head's CPUs"
        assert see(book, both, busy=True) == on_gpus
    assert see(again("CPU"), both, busy=False)[:2] == [("head", 8, True), ("gpu", 4, True)]


def _gpu_node(free: float, gpus: float = 2.0) -> dict[str, Any]:
    total, available, others = {"CPU": 4.0, "GPU": gpus}, {"CPU": 4.0, "GPU": free}, {"GPU": gpus - free}
    about = {"id": "g", "name": "gpu", "address": ""}
    return {**about, "total": total, "available": available, "others": others}


def test_a_gpu_is_several_slots_and_what_others_use_of_it_is_rounded_up_to_slots() -> None:
    def used(per_gpu: int, taken: float) -> int:
        (found,) = read_nodes([_gpu_node(2.0 - taken)], "GPU", per_gpu)
        assert (found.slots, found.per_gpu) == (2 * per_gpu, per_gpu)
        return found.others

    assert [used(n, 0.5) for n in (1, 2, 3, 4, 8)] == [1, 1, 2, 2, 4], "another user's half of a GPU"
    assert [used(4, taken) for taken in (0.0, 0.1, 0.25, 0.26, 1.0, 1.5, 2.0)] == [0, 1, 1, 2, 4, 6, 8]
    for n in range(1, 65):
        for workers in range(2 * n + 1):
            assert used(n, workers * share(n)) == workers, "workers of another platform are one slot each"
    places = follow([], read_nodes([_gpu_node(1.0)], "GPU", 4))
    assert [(n.gpus, n.per_gpu, n.real_gpus) for n in to_cluster(places).nodes] == [(8, 4, 2)]
    assert held_slots(places, {"g": 2}, ours=[7, 6]) == {4, 5}


def test_as_many_workers_as_slots_fit_a_gpu_of_rays_books_and_never_one_more() -> None:
    assert [share(n) for n in (1, 2, 3, 4, 6)] == [1.0, 0.5, 0.3333, 0.25, 0.1666]
    for n in range(1, 65):
        counted = round(share(n) * 10_000)  # Ray rounds to ten-thousandths
        assert counted == pytest.approx(share(n) * 10_000) and n * counted <= 10_000 < (n + 1) * counted


def test_a_node_whose_gpus_are_other_slots_than_before_gets_another_place_and_its_old_one_back() -> None:
    whole, shared = (read_nodes([_gpu_node(2.0)], "GPU", n) for n in (1, 2))
    before = follow([], whole)
    after = follow(load(dump(before)), shared)
    assert names(after) == [("gpu", False), ("gpu-2", True)]
    assert {slot: place.per_gpu for slot, place in slot_map(after).items()} == {0: 1, 1: 1} | dict.fromkeys(
        range(2, 6), 2
    )
    assert retired_slots(after) == {0, 1} and not retired_slots(before)
    assert not retired_slots(follow(after, [])), "a lost node's slots are not retired"
    assert follow(load(dump(after)), shared) == after, "although both have the same id of Ray"
    assert names(follow(load(dump(after)), whole)) == [("gpu", True), ("gpu-2", False)]
    assert "per_gpu" not in dump(before)[0], "supervisors of an earlier version cannot read it"


@pytest.mark.parametrize(
    ("per_gpu", "resource", "rents", "said"),
    [
        (0, None, False, "per_gpu: got 0, must be 1 to 64"),
        (65, "GPU", False, "per_gpu: got 65, must be 1 to 64"),
        (2, "CPU", False, "per_gpu: got 2, must be 1, because a slot is one CPU"),
        (2, "GPU", True, r"per_gpu: got 2, must be 1 where nodes are rented \(--autoscale\)"),
    ],
)
def test_a_number_of_slots_of_each_gpu_that_cannot_be_is_refused(
    tmp_path: Path, per_gpu: int, resource: str | None, rents: bool, said: str
) -> None:
    with pytest.raises(InputError, match=said) as refused:
        check_per_gpu(per_gpu, resource, rents=rents)
    assert refused.value.field == "per_gpu"
    rented = RentedNodes(nodes=1, slots=2, gpu_type="gpu") if rents else None
    with pytest.raises(InputError, match=said):
        RaySite(tmp_path, RayOptions(per_gpu=per_gpu, resource=resource, rented=rented))
    for fine in (1, 2, 64):
        check_per_gpu(fine, None, rents=False)
    check_per_gpu(1, "CPU", rents=True)


def test_gpus_of_several_slots_are_refused_where_ray_has_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swell.engines.ray.site.SLOTS_S", 0.0)
    site = RaySite(tmp_path, RayOptions(address="127.0.0.1:1", per_gpu=2))
    for name in ("prepare", "_start_scout"):
        monkeypatch.setattr(site, name, lambda: None)
    total = {"CPU": 8.0}
    cpus = {"id": "c", "name": "cpus", "address": "127.0.0.1", "total": total, "available": total}
    line = {"address": "127.0.0.1:1", "session": "", "nodes": [cpus], "warm": {}}
    site._scout._hear(json.dumps(line).encode())
    with pytest.raises(InputError, match="got 2, must be 1, because no node of the Ray cluster") as refused:
        site.open(lambda: None)
    assert refused.value.field == "per_gpu"


def test_the_type_of_a_node_is_the_one_it_was_given_else_that_of_the_gpus_that_are_its_slots() -> None:
    def kind(resources: dict[str, float], wanted: str | None = None, **labels: str) -> str:
        total = {"CPU": 4.0} | resources
        names = {f"ray.io/{name.replace('_', '-')}": value for name, value in labels.items()}
        found = {"id": "a", "name": "a", "address": "", "total": total, "available": total, "labels": names}
        resource = wanted or slot_resource(None, nodes_with_gpus([found]), busy=False)
        return read_nodes([found], resource)[0].gpu_type

    assert kind({}) == "cpu" and kind({"GPU": 1.0}) == "gpu"
    assert kind({"GPU": 1.0, "accelerator_type:T4": 1.0}) == "t4"
    assert kind({"GPU": 1.0, "accelerator_type:T4": 1.0}, accelerator_type="L40S") == "l40s"
    assert kind({"GPU": 1.0, "accelerator_type:T4": 1.0}, "CPU") == "cpu", "its GPUs are not the slots"
    assert kind({"swell_type:Epyc": 1.0}) == "epyc"
    assert kind({"swell_type:a\x1b[31m b": 1.0}) == "a-31m-b", "it is shown in terminals"


def test_more_in_other_hands_counts_when_it_lasts_and_less_at_once() -> None:
    foreign = Foreign(2.0)
    assert foreign.update([node("a")], 0.0) == {"a": 0}
    assert foreign.update([node("a", others=1)], 1.0) == {"a": 0}, "may be a short task"
    assert foreign.update([node("a")], 2.0) == {"a": 0}
    assert foreign.update([node("a", others=2)], 3.0) == {"a": 0}
    assert foreign.update([node("a", others=2)], 5.5) == {"a": 2}
    assert foreign.update([node("a")], 5.6) == {"a": 0}


def test_the_numbers_in_other_hands_are_those_without_a_job_of_ours() -> None:
    places = follow([], [node("a"), node("b", slots=3)])
    assert held_slots(places, {"a": 1, "b": 2}, ours=[1, 4]) == {0, 2, 3}
    assert held_slots(places, {"b": 3}, ours=[4]) == {2, 3, 4}, "Ray says so: then it is not ours"
    assert held_slots(places, {"b": 3}, ours=[3, 4], sure=[4]) == {2, 3}, "Ray says that we have it"


def _launch(workdir: Path, **fields: Any) -> Launch:
    request = JobRequest(name="a", script="train.py", workdir=str(workdir), **fields)
    return Launch(job_id="a", request=request, job_dir=workdir / "a")


def test_a_directory_that_is_too_large_is_refused_with_its_largest_entries(tmp_path: Path) -> None:
    for name, size in (("train.py", 10), ("big.bin", 3 << 20), ("data/x.bin", 2 << 20), ("c.bin", 1 << 20)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"\0" * size)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "pack").write_bytes(b"\0" * (9 << 20))
    site = RaySite(tmp_path / "home", RayOptions(address="127.0.0.1:1", workdir_bytes=4 << 20))
    launch = _launch(tmp_path)
    with pytest.raises(InputError) as refused:
        site.check(launch)
    said = str(refused.value)
    assert re.search(r"is 6\.0 MiB .* limit is 4\.0 MiB", said) and refused.value.field == "workdir"
    assert re.search(r"big\.bin \(3\.0 MiB\), data \(2\.0 MiB\), c\.bin \(1\.0 MiB\)", said)
    (tmp_path / ".gitignore").write_text("*.bin\n!c.bin\n")
    site.check(launch)


def test_swells_own_directory_stays_behind() -> None:
    assert "/.swell" in packaging.excludes(Path("/w"), Path("/w/.swell"))
    assert "/jobs" in packaging.excludes(Path("/w"), Path("/w"))
    assert set(packaging.excludes(Path("/w"), Path("/home"))) == set(packaging.EXCLUDES)


def test_requirements_are_refused_where_they_cannot_be_installed(tmp_path: Path) -> None:
    launch = _launch(tmp_path, pip=("einops",))
    with pytest.raises(InputError, match="--engine ray"):
        LocalSite(tmp_path, slots=1).check(launch)


def test_a_job_directory_that_is_not_the_supervisors_is_noticed(tmp_path: Path) -> None:
    order = {"env": {"SWELL_JOB_DIR": str(tmp_path), "SWELL_LAUNCH": "abc"}}
    assert not sees(order), "nothing is there"
    (tmp_path / "job.json").write_text('{"launch": "another"}')
    assert not sees(order)
    (tmp_path / "job.json").write_text('{"launch": "abc"}')
    assert sees(order)


def test_nothing_of_ours_ends_processes_by_name() -> None:
    by_name = re.compile(r"\b(pkill|killall|ray[\"', ]+stop)\b")
    files = [
        path
        for folder in ("src", "scripts", "benchmarks", "examples", "deploy")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    ] + [ROOT / "Makefile"]
    assert len(files) > 100
    found = [str(path) for path in files if by_name.search(path.read_text(errors="replace"))]
    assert not found


def test_a_reset_connection_does_not_end_the_lifeline() -> None:
    from swell.engines.ray.workers import _Lifeline

    lifeline = _Lifeline("127.0.0.1")
    host, port, token = lifeline.address
    for sent in (b"", b"wrong", b"\xff"):
        hasty = socket.create_connection((host, port))
        hasty.sendall(sent)
        hasty.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        hasty.close()  # a reset
    with pytest.raises(ConnectionError):
        Connection.open((host, port), "another secret", timeout_s=10)
    holder = Connection.open((host, port), token, timeout_s=10)
    wait_until(lambda: lifeline._lines, 30, "the holder to be taken")
    lifeline.close()
    with pytest.raises(ConnectionError):  # the holder learns that the supervisor has ended
        holder.receive(10)
    holder.close()


class ActorUnavailableError(Exception):
    """As Ray calls it when an actor lives and cannot be reached."""


class _Call:
    """A call of an actor whose future is set by the test."""

    def __init__(self) -> None:
        self._future: Future[dict[str, Any]] = Future()

    def future(self) -> Future[dict[str, Any]]:
        return self._future


def _workers() -> tuple[Any, list[_Call]]:
    """One worker on Ray, and the calls that ask its holder how it ended."""
    from swell.engines.ray import workers as module

    made: Any = object.__new__(module.RayWorkers)
    asked: list[_Call] = []

    class Actor:
        class ended:
            @staticmethod
            def remote() -> _Call:
                asked.append(_Call())
                return asked[-1]

    made._answers, made._unplaced, made._pip, made._ray = module._Answers(), [], False, None
    made._mute = {}
    made._held = {"w0": module._Held(Actor(), 0, 0.0, up=True)}
    return made, asked


def test_a_holder_behind_a_cut_link_is_asked_again_and_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = _workers()
    monkeypatch.setattr("swell.engines.ray.workers.ASK_AGAIN_S", 0.0)
    news: list[News] = []

    def asked_again() -> bool:
        news.extend(made.hear())
        return bool(asked)

    first = _Call()
    made._answers.follow("w0", "ended", first)
    first.future().set_exception(ActorUnavailableError())
    for _ in range(3):  # the link is still cut
        wait_until(asked_again, 30, "the holder to be asked again")
        asked.pop().future().set_exception(ActorUnavailableError())
    wait_until(asked_again, 30, "the holder to be asked again")
    assert not news
    asked.pop().future().set_result({"code": 0, "verdict": "", "warm": True})
    assert readable(made.watched(), 10)
    assert made.hear() == [Exited("w0", 0)] and not made.names()


def test_a_holder_that_is_dead_or_cut_off_for_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, limit_s in ((RuntimeError("dead"), 60.0), (ActorUnavailableError(), -1.0)):
        monkeypatch.setattr("swell.engines.ray.workers.CUT_S", limit_s)
        made, _ = _workers()
        call = _Call()
        made._answers.follow("w0", "ended", call)
        call.future().set_exception(error)
        assert made.hear() == [Lost("w0")] and not made.names()


def test_a_node_whose_holder_does_not_end_when_told_is_not_waited_for_and_one_that_answers_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from swell.engines.ray import workers as module

    for answers in (False, True):
        made, _ = _workers()
        now_s = 1000.0
        monkeypatch.setattr("swell.engines.ray.workers.time.monotonic", lambda: now_s)  # noqa: B023
        actor = SimpleNamespace(end=SimpleNamespace(remote=lambda: None))
        made._held = {"w0": module._Held(actor, 0, 0.0, "n1", "id1", up=True)}
        made.kill("w0")
        made._held["w1"] = module._Held(actor, 0, now_s, "n1", "id1")  # in its place
        made._held["w2"] = module._Held(actor, 1, now_s, "n2", "id2")
        now_s += module.KILL_S + 0.1
        assert made.hear() == [Lost("w0")]
        if answers:
            call = _Call()
            made._answers.follow("w1", "up", call)
            call.future().set_result(None)
            made._held["w3"] = module._Held(actor, 2, now_s, "n1", "id1")
        now_s += module.MUTE_UP_S
        silent = [Unstartable("w1", "n1", "silent", "the node does not answer")]
        assert made.hear() == ([] if answers else silent)
        assert made.names() == (["w1", "w2", "w3"] if answers else ["w2"])


def test_why_a_node_cannot_make_a_holder_is_read_from_rays_error() -> None:
    class Died(Exception):
        actor_init_failed = True

    class RuntimeEnvSetupError(Exception):
        pass

    text = (
        "raised in its creation task, ray::Holder\n  File x\nModuleNotFoundError: No module named 'swell'\n"
    )
    assert why_not_made(Died(text)) == ("software", "ModuleNotFoundError: No module named 'swell'")
    assert why_not_made(Died("x\nTimeoutError: timed out")) == ("link", "TimeoutError: timed out")
    refused = "ConnectionRefusedError: [Errno 111]"
    assert why_not_made(Died(f"x\n{refused}")) == ("link", refused)
    assert why_not_made(RuntimeEnvSetupError("no pip")) == ("software", "no pip")
    assert why_not_made(RuntimeError("the node has died")) is None


def test_a_worker_beyond_its_memory_ends_the_job_and_is_told_as_ended() -> None:
    made, _ = _workers()
    call = _Call()
    made._answers.follow("w0", "ended", call)
    call.future().set_result({"code": -9, "verdict": "it used too much", "warm": False})
    assert made.hear() == [Failed(137, "it used too much", aloud=True), Exited("w0", -9)]


def test_a_slot_is_in_other_hands_only_if_ray_names_its_holder_whatever_jobs_report(tmp_path: Path) -> None:
    """A worker that takes long to get ready reports nothing, and may have followed one that was killed."""
    book, job = SlotBook(tmp_path / PLACES, "CPU", 1, None), SupervisedJob(_launch(tmp_path))
    job.state = JobState(stage=JobStage.RUNNING, told=(0, 1))
    total = {"CPU": 2.0}
    ray = {"id": "a", "name": "host", "address": "", "total": total, "available": {"CPU": 0.0}}

    def held(now_s: float, **claims: Any) -> frozenset[int]:
        book.see([ray | claims], now_s, busy=True)
        book.follow([job], now_s)
        return book.cluster().held

    for now_s in range(0, 500, 5):
        assert not held(float(now_s), others={}, holders=[0])
    taken = {"others": {"CPU": 1.0}, "holders": [0]}
    assert not held(500.0, **taken), "a short task, say"
    assert held(500.0 + SETTLE_S, **taken) == {1}, "the slot without a worker of ours, though a job wants it"
    assert not held(503.0, others={}, holders=[0])


class _State:
    """Ray's tables, as a `Ledger` and `Claims` see them."""

    def __init__(self) -> None:
        self.claims = Claims("here", ["CPU"])
        self.tables: dict[str, list[Claim]] = {"actors": [], "groups": [], "tasks": []}
        self.claims._read = self.tables.__getitem__  # type: ignore[method-assign]

    def holder(self, slot: int, platform: str = "here", on: str = "n") -> Claim:
        name = HolderName(platform, "n", slot, "job", "w0").text()
        return Claim(name, on, {"CPU": 1.0}, name, "swell", "Holder")

    def seen(self, used: float) -> tuple[list[int], float]:
        """The slots of our holders, and what others hold."""
        found = {"id": "n", "total": {"CPU": 4.0}, "available": {"CPU": 4.0 - used}}
        self.claims.note([found])
        return found["holders"], found["others"].get("CPU", 0.0)  # type: ignore[return-value, attr-defined]


def test_what_is_used_on_a_node_belongs_to_those_that_ray_names() -> None:
    state = _State()
    ours, coming = state.holder(1), state.holder(2, on="")
    state.tables["actors"] = [ours, coming]
    assert state.seen(2.0) == ([1, 2], 0.0), "one of them is only about to be there"
    state.tables["actors"] = [ours, state.holder(0, "another home's platform")]
    assert state.seen(3.0) == ([1], 1.0), "the other holder of ours has ended, and the figures lag behind"
    state.tables["actors"] = [ours, Claim("x", "n", {"CPU": 2.0}, "x", "theirs", "Holder")]
    assert state.seen(3.0) == ([1], 2.0)
    assert state.seen(4.0) == ([1], 2.0), "used, and nobody's"
    state.tables["tasks"] = [Claim("t", "elsewhere", {"CPU": 1.0})]
    assert state.seen(4.0) == ([1], 2.0)
    state.tables["tasks"] = [Claim("t", "n", {"CPU": 1.0})]
    assert state.seen(4.0) == ([1], 3.0)
    state.tables |= {"groups": [Claim("g", "n", {"CPU": 1.0})], "actors": [ours], "tasks": []}
    assert state.seen(2.0) == ([1], 1.0)
    state.tables["actors"] = [Claim("old", "n", {"CPU": 1.0}, "", "swell", "Holder")]
    state.tables["groups"] = []
    assert state.seen(1.0) == ([], 0.0), "a holder that an earlier version of swell started has no name"


def test_a_platform_has_one_name_in_rays_state_and_another_home_another(tmp_path: Path) -> None:
    one, other = (platform(tmp_path / home) for home in "ab")
    assert one != other and platform(tmp_path / "a") == one and HolderName.read("a/b") is None
    name = HolderName(one, "node", 3, "job-1", "w2")
    assert HolderName.read(name.text()) == name and name.text() != name.text()


def test_jobs_of_an_earlier_run_of_the_cluster_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, sent = RaySite(tmp_path, RayOptions(address="127.0.0.1:1")), list[signal.Signals]()
    monkeypatch.setattr(SupervisedJob, "has_processes", lambda job: True)
    monkeypatch.setattr(SupervisedJob, "send_signal", lambda job, number: sent.append(number))
    monkeypatch.setattr(site, "cluster", lambda: to_cluster(follow([], [node("a")])))
    engine, job = SupervisedEngine(site), SupervisedJob(_launch(tmp_path))
    job.directory.mkdir()
    for ran_in, runs_now, ended in [("s1", "s1", []), ("s1", "s2", [signal.SIGKILL]), ("", "s2", [])]:
        site._session = ran_in
        job.write_order((0,), 1, site.order_extras())
        site._session = runs_now
        engine._tend(job)
        assert sent == ended
        sent.clear()


def test_a_standby_whose_scout_has_lost_the_cluster_does_not_lead_by_what_it_saw_long_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, start = RaySite(tmp_path, RayOptions(address=f"127.0.0.1:{free_port()}")), subprocess.Popen
    with monkeypatch.context() as standing_by:
        standing_by.setattr(subprocess, "Popen", lambda words, **options: start(["cat"], **options))
        site.prepare()
        site.request_bundles([])  # which it repeats, and says nothing more
        wait_until(lambda: site._scout.heard_s > 0, 30, "the scout's first line")
    site._scout.heard_s -= SILENT_S + 1.0
    with pytest.raises(SwellError, match="nothing listens at"):
        site.open(lambda: None)


def test_a_scout_that_ends_or_falls_silent_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = subprocess.Popen
    # In place of the scout there is `cat`, which says whatever it is asked.
    monkeypatch.setattr(subprocess, "Popen", lambda words, **options: start(["cat"], **options))
    scout = ScoutProcess(tmp_path / "scout.log")
    assert scout.is_due(time.monotonic()) and not scout.runs
    scout.start({}, os.environ)
    scout.request([{"CPU": 2}])
    assert scout.wait_first(30.0) == "" and scout.runs
    assert scout.take_line() == {"bundles": [{"CPU": 2}]} and scout.take_line() is None
    assert not scout.is_due(scout.heard_s + SILENT_S - 1.0)
    late_s = scout.heard_s + SILENT_S + 1.0
    wait_until(lambda: scout.is_due(late_s), 30, "the silent scout to be killed")
    scout.expect_first()
    scout.start({}, os.environ)
    assert "did not list its nodes within 0 s" in scout.wait_first(0.0)
    scout.stop()
    assert "stopped unexpectedly" in scout.wait_first(30.0) and not scout.runs
