"""Replicas for real: FSDP2 on CPUs, with processes that join, leave and die."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.sharded import MOST_EPOCHS, SCRIPT, check_every_sample_once, newest
from tests.train.conftest import Stage
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from swell.train.agent.errors import UsageError
from swell.train.job import Job
from swell.train.options import Options
from swell.train.replicas import group
from swell.train.replicas.group import Replica
from swell.train.replicas.sharded import form_of
from swell.train.state.checkpoint import Checkpointer, list_checkpoints, load
from swell.train.sync.memory import local


def plain(folder: Path, epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the script here, as one worker with the whole model."""
    script = folder.with_suffix(".py")
    script.write_text(SCRIPT)
    folder.mkdir(exist_ok=True)
    (folder / "hurry").touch()
    monkeypatch.setattr(sys, "argv", [str(script), str(folder), str(epochs), "plain"])
    runpy.run_path(str(script))


def test_replicas_grow_shrink_and_die_and_nothing_of_it_is_in_the_model(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    epochs = MOST_EPOCHS - 1
    settings = {"workers_per_replica": 2}
    job = stage.run(SCRIPT, str(folder), str(epochs), workers=2, minimum=2, settings=settings)
    assert job.members(2)["members"] == ["w0", "w1"]
    job.resize(4)
    assert job.members(4)["members"] == ["w0", "w1", "w2", "w3"]
    assert job.kill(1) == "w1"
    job.wait_for(lambda s: s["members"] == ["w2", "w3", "w4", "w5"])
    job.resize(2)
    assert job.members(2)["members"] == ["w2", "w3"]
    (folder / "hurry").touch()
    assert job.wait() == 0, job.output()
    recovery = [e for e in job.events("candidate") if e["recovery"]]
    assert [e["members"] for e in recovery[:1]] == [["w2", "w3"]], "the dead one's replica went with it"

    found = newest(folder)
    check_every_sample_once(found, epochs)

    undisturbed = tmp_path / "undisturbed"
    plain(undisturbed, epochs, monkeypatch)
    expected = newest(undisturbed)
    assert found["steps"] == expected["steps"] == epochs * 5
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    for name, value in expected["model"].items():
        assert torch.allclose(found["model"][name], value, atol=1e-5), name

    plain(folder, MOST_EPOCHS, monkeypatch)  # the replicas' checkpoint goes on as one worker
    plain(undisturbed, MOST_EPOCHS, monkeypatch)
    again, expected = newest(folder), newest(undisturbed)
    assert again["steps"] == expected["steps"] == MOST_EPOCHS * 5
    assert torch.allclose(again["model"]["net.0.weight"], expected["model"]["net.0.weight"], atol=1e-5)


@pytest.mark.long
def test_leader_and_coordinator_die_and_a_replica_of_four_goes_on_from_the_checkpoint(
    stage: Stage, tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    sizes = {"minimum": 2, "maximum": 6, "settings": {"workers_per_replica": 2}}
    job = stage.run(SCRIPT, str(folder), "8", workers=2, **sizes)
    job.members(2)
    job.resize(6)
    job.members(6)
    assert job.kill(0) == "w0"
    job.kill_coordinator()
    job.wait_for(lambda s: len(s["members"]) == 6 and not {"w0", "w1"} & set(s["members"]))
    (folder / "hurry").touch()
    assert job.wait() == 0, job.output()
    check_every_sample_once(newest(folder), 8)

    four = stage.run(SCRIPT, str(folder), "10", workers=4, minimum=4, settings={"workers_per_replica": 4})
    assert four.wait() == 0, four.output()
    state = newest(folder)
    assert state["steps"] == 10 * 5
    check_every_sample_once(state, 10)


def test_the_example_trains_the_whole_model_outside_of_a_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = Path(__file__).parents[3] / "examples" / "sharded_gpt.py"
    brief = ["--epochs", "1", "--windows", "320", "--width", "16", "--layers", "1", "--batch-size", "16"]
    monkeypatch.setattr(sys, "argv", [str(example), *brief])
    monkeypatch.syspath_prepend(str(example.parent))
    monkeypatch.setattr(group._Made, "mesh", None)
    try:
        runpy.run_path(str(example), run_name="__main__")
    finally:
        dist.destroy_process_group()
    assert 2.0 < float(capsys.readouterr().out.split()[-1]) < 4.6


@pytest.fixture
def four() -> Iterator[Any]:
    """Makes this process one of four workers that never talk."""

    def become(position: int) -> Any:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=position, world_size=4)
        return init_device_mesh("cpu", (4,))

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(("position", "rows"), [(0, 9), (1, 11), (3, 10)])  # torch caches cuts by shape
def test_each_of_four_workers_reads_its_own_part_of_a_checkpoint(
    four: Any, tmp_path: Path, position: int, rows: int
) -> None:
    whole = nn.Linear(3, rows)
    adam = torch.optim.AdamW(whole.parameters(), lr=0.1)
    whole(torch.randn(2, 3)).sum().backward()
    adam.step()
    Checkpointer(tmp_path).save(1, {"model": whole.state_dict(), "optimizer": adam.state_dict()}, wait=True)
    model = nn.Linear(3, rows)
    fully_shard(model, mesh=four(position))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    form = form_of(model, optimizer, Replica(4, position), "fixed", None)
    state = form.local(load(list_checkpoints(tmp_path)[0], form.targets).state)
    optimizer.load_state_dict(form.for_optimizer(state["optimizer"]))
    mine = slice(3 * position, 3 * position + 3)  # ceil(rows / 4) rows for each, as far as they go
    assert torch.equal(state["model"]["weight"], whole.weight[mine])
    average = optimizer.state[model.weight]["exp_avg"]
    assert average.shape == whole.weight.shape
    assert torch.equal(local(average), adam.state[whole.weight]["exp_avg"][mine])


def test_what_cannot_work_with_a_sharded_model_is_refused(four: Any) -> None:
    model = nn.Linear(3, 8)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"weight is not sharded, but 4 workers .* fully_shard"):
        form_of(model, sgd, Replica(4, 0), "fixed", None)
    fully_shard(model, mesh=four(0))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="over the 2 workers of the replica"):
        form_of(model, sgd, Replica(2, 0), "fixed", None)
    with pytest.raises(UsageError, match="mode: got 'adaptive'"):
        Job(model, sgd, Options(mode="adaptive"))
    with pytest.raises(UsageError, match="scaler"):
        form_of(model, sgd, Replica(4, 0), "fixed", torch.amp.GradScaler("cpu"))


def test_a_job_file_says_how_many_workers_share_a_replica() -> None:
    from swell.domain import InputError, JobRequest

    request = JobRequest(name="big", script="train.py", workers_per_replica=4)
    assert (request.min_workers, request.workers) == (4, 4)
    assert json.loads(json.dumps(request.for_runtime()))["workers_per_replica"] == 4
    with pytest.raises(InputError, match=r"max_workers must be a multiple of workers_per_replica \(4\)"):
        JobRequest(name="big", script="train.py", workers_per_replica=4, max_workers=6)
    with pytest.raises(InputError, match="workers_per_replica must be 1 for a job with auto"):
        JobRequest(name="big", script="train.py", workers_per_replica=2, auto=True)
