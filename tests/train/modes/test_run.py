"""Adaptive mode, streams and checkpoints in real jobs whose workers come, go and die."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from swell.train.state.checkpoint import list_checkpoints, verify

ADAPTIVE = """
    import hashlib, json, sys, time
    import torch, swell
    from torch import nn
    from torch.utils.data import TensorDataset

    torch.manual_seed(0)
    x = torch.randn(1200, 16)
    y = (x @ torch.randn(16, 4)).argmax(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[sys.argv[1]]
    optimizer = make(model.parameters(), lr=0.05 if sys.argv[1] == "sgd" else 2e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10_000)
    job = swell.elastic(
        model, optimizer, scheduler=scheduler, step_scheduler="step", mode="adaptive", max_batch=240,
        checkpoint_every_s=None,
    )
    loader = job.loader(TensorDataset(x, y), batch_size=24)
    epochs = float(sys.argv[2])
    batches = set()
    for epoch in job.epochs(int(epochs)):
        for a, b in loader:
            time.sleep(0.004)
            if job.step(nn.functional.cross_entropy(model(a), b)):
                batches.add(loader.batch_size)
    state = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    digest = float(int(hashlib.sha256(state).hexdigest()[:12], 16))
    world = job.reduce(one=1.0)["one"]
    same = job.reduce(digest=digest)["digest"] == digest * world
    if job.is_leader:
        with torch.no_grad():
            accuracy = float((model(x).argmax(1) == y).float().mean())
        print("RESULT", json.dumps({
            "steps": job.steps, "accuracy": accuracy, "same_everywhere": same, "largest_batch": max(batches),
            "worth": job.adaptive.epochs_worth, "ticks": scheduler.last_epoch, "progress":
            job.adaptive.steps_worth, "lr": optimizer.param_groups[0]["lr"],
        }), flush=True)
"""


def _result(job: Any) -> dict[str, Any]:
    lines = [line for line in job.output().splitlines() if "RESULT" in line]
    assert len(lines) == 1, job.output()
    found: dict[str, Any] = json.loads(lines[0].split("RESULT", 1)[1])
    return found


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_adaptive_workers_hold_one_model_through_joins_leaves_and_deaths(stage: Any, optimizer: str) -> None:
    epochs = 60
    job = stage.run(ADAPTIVE, optimizer, str(epochs), workers=1)
    job.members(1)
    job.resize(3)
    job.members(3)
    dead = job.kill(0)
    job.wait_for(lambda s: len(s["members"]) >= 2 and dead not in s["members"])
    job.resize(2)
    assert job.wait(120) == 0
    result = _result(job)
    assert result["same_everywhere"]
    assert result["accuracy"] > 0.9
    assert result["largest_batch"] > 24, "the batch grew"
    assert result["steps"] < epochs * 50, "fewer steps than at the tuned batch"
    assert result["worth"] == pytest.approx(epochs, abs=0.5), "as much training as was asked for"
    assert result["ticks"] == int(result["progress"] + 1e-6), "the schedule follows progress, not steps"
    assert result["lr"] == (0.05 if optimizer == "sgd" else 2e-3), "users see the rate they tuned"


def test_reports_of_an_adaptive_job_carry_its_statistics(stage: Any) -> None:
    job = stage.run(ADAPTIVE, "sgd", "40", workers=2)
    status = job.wait_for(
        lambda s: any((r.get("adaptive") or {}).get("noise_scale") for r in s["reports"].values())
    )
    report = next(r["adaptive"] for r in status["reports"].values() if r.get("adaptive"))
    assert report["grad_var"] > 0
    assert report["init_batch"] == 24
    assert not report["noise_biased"]
    assert any(r.get("sqr", 0) > 0 and r.get("var", 0) > 0 for r in status["reports"].values())


STREAM = """
    import json, sys, time
    import torch, swell
    from torch import nn

    N, EPOCHS = 300, int(sys.argv[1])
    shards = [range(a, min(a + 17, N)) for a in range(0, N, 17)] + [range(0)]

    def read(shard):
        for i in shard:
            yield torch.tensor(i)

    class Count(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(EPOCHS, N))

        def forward(self, epoch, x):
            return self.weight[epoch][x]

    model = Count()
    job = swell.elastic(
        model, torch.optim.SGD(model.parameters(), lr=1.0), checkpoint_every_s=None,
        checkpoint_every_steps=10,
    )
    loader = job.stream(shards, read, batch_size=24)
    for epoch in job.epochs(EPOCHS):
        for x in loader:
            time.sleep(0.01)
            job.step(-model(epoch, x).mean())
    if job.is_leader:
        w = model.weight.detach()
        print("RESULT", json.dumps({
            "steps": job.steps, "unused": int((w <= 0).sum()), "total": float(w.sum()),
            "per_epoch": [float(row.sum()) for row in w],
            "largest": float(w.max()), "smallest": float(w.min()),
        }), flush=True)
"""


def _check_stream(result: dict[str, Any]) -> None:
    assert result["unused"] == 0, "every sample of every epoch is in a committed step"
    # A step adds 1 in all, 1/n for each of its n samples (1 to 24 of them).
    assert result["total"] == pytest.approx(result["steps"], rel=1e-4)
    assert result["smallest"] == pytest.approx(1 / 24, rel=0.3)


def test_a_stream_goes_through_joins_leaves_and_deaths(stage: Any) -> None:
    job = stage.run(STREAM, "12", workers=1)
    job.members(1)
    job.resize(3)
    job.members(3)
    dead = job.kill(1)
    job.wait_for(lambda s: len(s["members"]) >= 2 and dead not in s["members"])
    job.resize(2)
    assert job.wait(120) == 0
    _check_stream(_result(job))


def test_a_stream_resumes_after_everybody_died(stage: Any) -> None:
    job = stage.run(STREAM, "6", workers=2)
    status = job.wait_for(lambda s: s["step"] > 25)
    for pid in status["pids"].values():
        _kill(pid)
    assert job.wait(120) == 0
    _check_stream(_result(job))
    assert any(e["step"] > 0 for e in job.events("generation")[1:]), "it did not begin from nothing"


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_a_job_started_again_goes_on_from_its_directory(stage: Any, tmp_path: Path) -> None:
    """The launcher itself is killed; the next `swell run` with that directory resumes."""
    directory = tmp_path / "job"
    job = stage.run(STREAM, "6", workers=2, directory=directory)
    job.wait_for(lambda s: s["step"] > 25)
    _kill(job.pid)
    stage.end_jobs()
    job.leaves_nothing()
    again = stage.run(STREAM, "6", workers=2, directory=directory)
    assert again.wait(120) == 0
    _check_stream(_result(again))
    assert any(e["step"] > 0 for e in again.events("generation"))


def test_a_truncated_newest_checkpoint_falls_back_and_says_so(stage: Any, tmp_path: Path) -> None:
    directory = tmp_path / "job"
    job = stage.run(STREAM, "6", workers=2, directory=directory)
    checkpoints = directory / "checkpoints"
    job.wait_for(lambda s: len(list_checkpoints(checkpoints)) >= 2)
    _kill(job.pid)
    stage.end_jobs()
    job.leaves_nothing()
    before, newest = list_checkpoints(checkpoints)[-2:]
    data = next(newest.glob("*.distcp"))
    os.truncate(data, data.stat().st_size // 2)
    again = stage.run(STREAM, "6", workers=2, directory=directory)
    assert again.wait(120) == 0
    _check_stream(_result(again))
    assert f"{newest.name} cannot be used" in again.output()
    assert "falling back to the one before" in again.output()
    assert f"resumed from {before}" in again.output()


FULL_DISK = """
    import resource, time
    import torch, swell
    from torch import nn
    from torch.utils.data import TensorDataset

    model = nn.Linear(100, 1000)
    job = swell.elastic(
        model, torch.optim.SGD(model.parameters(), lr=0.01), checkpoint_every_s=None, checkpoint_every_steps=5
    )
    loader = job.loader(TensorDataset(torch.randn(80, 100)), batch_size=4)
    for epoch in job.epochs(2):
        for (x,) in loader:
            time.sleep(0.02)
            job.step(model(x).square().mean())
            if job.steps == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
            if job.steps == 20:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if job.is_leader:
        job.save(wait=True)
        print("RESULT", '{"steps": %d}' % job.steps, flush=True)
"""


def test_a_disk_that_takes_no_more_costs_checkpoints_not_training(stage: Any) -> None:
    job = stage.run(FULL_DISK, workers=2)
    assert job.wait(120) == 0
    assert _result(job)["steps"] == 40
    assert "not saved, training goes on" in job.output()
    saved = list_checkpoints(job.directory.path / "checkpoints")
    assert [verify(path) for path in saved][-1] > 20, "once there is room again, checkpoints are saved again"


def test_a_death_after_somebody_left_is_not_taken_for_an_early_end(stage: Any) -> None:
    """A leaver's loop ends too, but training goes on without it, and newcomers still may join."""
    job = stage.run(STREAM, "12", workers=3)
    job.members(3)
    job.resize(2)
    job.members(2)
    dead = job.kill(1)
    job.wait_for(lambda s: s["members"] and dead not in s["members"])
    assert job.wait(120) == 0
    _check_stream(_result(job))
