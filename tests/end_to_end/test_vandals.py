"""Jobs that own every byte of their directories, while others train and the control plane is restarted."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.soak.vandal import Vandal, remove
from tests.control.conftest import make_record

from swell.cli._platform import jobs_alive
from swell.cli.doctor import examine
from swell.cli.safekeeping import bring_back, save
from swell.control.model import Phase
from swell.control.retention import DAY_S
from swell.engines.local import LocalSite
from swell.engines.processes import workers_of
from swell.engines.supervised import SupervisedEngine
from swell.train.state.checkpoint import list_checkpoints, verify

from .conftest import Platform

VARIANTS = 100
"""So many directories of jobs that are over, and of jobs that wait; `make soak` has thousands."""
EPOCHS = 40


@pytest.fixture
def sentinel() -> Iterator[subprocess.Popen[bytes]]:
    """A process of somebody else, which forged files name."""
    process = subprocess.Popen(["sleep", "900"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Platform]:
    """A platform with three slots on this machine, in memory if possible: folders come and go."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="swell-", dir=memory if memory.is_dir() else tmp_path) as folder:
        yield from _platform(Path(folder))


def _platform(home: Path) -> Iterator[Platform]:
    made = Platform(home, lambda: SupervisedEngine(LocalSite(home, nodes="1x3")), "afs-l")
    yield made
    for record in made.plane.jobs.find():
        if not record.phase.over:
            made.plane.jobs.cancel(record.job_id)
    made.wait_over(*(record.job_id for record in made.plane.jobs.find()))
    made.close()
    remove(home / "jobs")


def contents(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """What is in a folder, so that a test that fails says what has changed there."""
    found = {}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        found[str(path)] = about.st_mode, about.st_uid, path.read_bytes() if path.is_file() else b""
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_a_job_that_owns_every_byte_of_its_directory_costs_nobody_else_anything(
    local: Platform, sentinel: subprocess.Popen[bytes], tmp_path: Path, seed: int
) -> None:
    hurry, home, decoy = tmp_path / "hurry", local.home, tmp_path / "decoy" / "checkpoints"
    toy = ("--epochs", EPOCHS, "--sample-ms", 2, "--hurry", hurry)
    options = {"max_workers": 1, "checkpoint_s": 0.5}
    good = local.submit("good", *toy, **options).job_id
    bad = [local.submit(f"bad-{i}", *toy, **options).job_id for i in range(2)]
    for job in (good, *bad):
        local.wait(job, lambda record: local.steps(record.job_id) > 2)
    mine = home / "jobs" / good
    local.wait(good, lambda _: list_checkpoints(mine / "checkpoints"))
    (decoy / "step-000000000001").mkdir(parents=True)
    (decoy / "step-000000000001" / "state.json").write_text("mine")
    outside = contents(decoy.parent)
    # The job trains on, so that some of its files go while they are copied.
    subprocess.run(["cp", "-r", home / "jobs" / bad[0], tmp_path / "job"], check=False, capture_output=True)
    (tmp_path / "job" / "runs" / "0000" / "lifeline").unlink()
    over, waiting = ([f"{name}-{i}" for i in range(VARIANTS)] for name in ("over", "wait"))
    for name in (*over, *waiting):
        phase = Phase.FINISHED if name in over else Phase.PAUSED
        ended_s = time.time() - 40 * DAY_S if phase.over else None
        local.plane.store.accept(make_record(name, phase, ended_s=ended_s, owner="eve"), None, [])
        shutil.copytree(tmp_path / "job", home / "jobs" / name)
    vandal = Vandal(seed, [mine, decoy.parent], sentinel.pid)
    done = {name: vandal.vandalise(home / "jobs" / name) for name in (*over, *waiting)}
    # Processes of jobs that run, which no wall is around here, save through their own links: to this folder.
    lure = tmp_path / "lure"
    shutil.copytree(decoy, lure / "kept")
    near, kept = Vandal(seed, [lure], sentinel.pid), contents(lure / "kept")
    done |= {name: near.vandalise(home / "jobs" / name) for name in bad}
    workers, before = workers_of(mine), local.steps(good)

    local.restart()

    local.wait(good, lambda record: local.steps(record.job_id) > before and record.phase is Phase.RUNNING)
    assert local.plane.trouble == "" and workers_of(mine) == workers
    assert all(part.failures == 0 for part in local.plane._parts())
    for record in local.plane.jobs.find():
        local.plane.jobs.logs(record.job_id)
        local.plane.jobs.explain(record.job_id)
    assert mine in jobs_alive(home)
    assert [
        one.note for one in examine(home, None) if one.about in ("store", "tokens") and "Errno" in one.note
    ] == []

    saved = save(home, tmp_path / "backup.tar")
    assert good not in saved.left_out and set(saved.left_out) <= {*waiting, *bad}, saved.left_out
    new = tmp_path / "new"
    bring_back(new, tmp_path / "backup.tar", paused=False, new_tokens=False, force=False)
    assert verify(list_checkpoints(new / "jobs" / good / "checkpoints")[-1]) > 0

    collected = local.plane.collect(None, None, dry=False)
    assert set(collected.forgotten) == set(over), {
        name: done[name] for name in set(over) - {*collected.forgotten}
    }
    assert not any((home / "jobs" / name).exists() for name in over)

    for name in bad:  # the same while the platform looks at the job all the time
        for _ in range(10):
            near.vandalise(home / "jobs" / name)
        local.plane.jobs.cancel(name)
    hurry.touch()
    records = local.wait_over(good, *bad)
    assert records[0].phase is Phase.FINISHED, records[0].reason
    assert all(record.phase.over for record in records[1:])
    steps = [int(line.split()[2]) for line in local.output(good).splitlines() if "| step " in line]
    assert steps == list(range(1, 16 * EPOCHS + 1)), "each step once, in one go"
    assert sentinel.poll() is None and os.path.lexists(mine)
    assert contents(decoy.parent) == outside and contents(lure / "kept") == kept
    assert local.plane.trouble == "" and all(part.failures == 0 for part in local.plane._parts())
