"""Checkpoints: complete or absent, checked, readable by others, and never in the way of training."""

import json
import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.waiting import wait_until

from swell.train.state import checkpoint
from swell.train.state.checkpoint import Checkpointer, CheckpointError, list_checkpoints, load, verify
from swell.train.state.statetree import UnsupportedState


def _state(value: float = 1.0, size: int = 1000) -> dict[str, Any]:
    return {
        "model": {
            "0.weight": torch.full((size, 10), value),
            "0.bias": torch.arange(3),
            "empty": torch.empty(0, 4),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(value)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
        },
        "half": torch.ones(4, dtype=torch.bfloat16),
        "strided": torch.arange(12.0).reshape(3, 4).t(),
        "cursor": {"epoch": 3, "sample": 12345},
    }


def _assert_same(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b) and a.dtype == b.dtype
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key, value in a.items():
            _assert_same(value, b[key])
    else:
        assert a == b


def test_a_saved_state_comes_back_whole(tmp_path: Path) -> None:
    saver = Checkpointer(tmp_path)
    assert saver.save(7, _state(), wait=True)
    loaded = Checkpointer(tmp_path).load_newest()
    assert loaded is not None
    assert loaded.step == 7
    _assert_same(loaded.state, _state())
    assert saver.last_saved_step == 7
    assert saver.last_error is None


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert Checkpointer(tmp_path / "never" / "made").load_newest() is None


def test_plain_torch_reads_it_without_swell(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
    torch.nn.init.constant_(model[0].weight, 0.25)
    Checkpointer(tmp_path).save(1, {"model": model.state_dict(), "note": "x"}, wait=True)
    script = """
        import sys, warnings, torch
        import torch.distributed.checkpoint as dcp
        warnings.simplefilter("ignore")
        model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=sys.argv[1])
        model.load_state_dict(state["model"])
        assert (model[0].weight == 0.25).all()
        assert "swell" not in sys.modules
        """
    path = list_checkpoints(tmp_path)[0]
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(path)], check=True, timeout=60)


def test_works_inside_a_process_group_without_talking_to_it(tmp_path: Path) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        saver = Checkpointer(tmp_path)
        saver.save(1, _state(), wait=True)
        assert saver.last_error is None
        loaded = saver.load_newest()
    finally:
        torch.distributed.destroy_process_group()
    assert loaded is not None
    _assert_same(loaded.state, _state())


def test_the_snapshot_is_taken_before_save_returns_and_its_memory_is_reused(tmp_path: Path) -> None:
    saver = Checkpointer(tmp_path)
    state = _state(1.0, size=100_000)
    saver.save(1, state)
    state["model"]["0.weight"].fill_(2.0)  # training goes on while the thread writes
    pointers = {key: tensor.data_ptr() for key, tensor in saver._host.items()}
    assert saver.wait(30)
    saver.save(2, state, wait=True)
    assert {key: tensor.data_ptr() for key, tensor in saver._host.items()} == pointers
    first, second = (load(path) for path in list_checkpoints(tmp_path))
    assert float(first.state["model"]["0.weight"].mean()) == 1.0
    assert float(second.state["model"]["0.weight"].mean()) == 2.0


def test_a_save_during_a_save_is_skipped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    real = checkpoint._write_tensors

    def slow(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        gate.wait(30)
        real(path, tensors)

    monkeypatch.setattr(checkpoint, "_write_tensors", slow)
    saver = Checkpointer(tmp_path)
    assert saver.save(1, _state())
    assert saver.saving
    assert not saver.save(2, _state())
    assert not saver.wait(0.01)
    gate.set()
    assert saver.wait(30)
    assert saver.skipped == 1
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000000000001"]


def test_only_the_last_n_are_kept(tmp_path: Path) -> None:
    saver = Checkpointer(tmp_path, keep=2)
    for step in (5, 50, 500, 5000):
        saver.save(step, _state(float(step)), wait=True)
    assert [load(path).step for path in list_checkpoints(tmp_path)] == [500, 5000]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000000500", "step-000000005000"]


def test_the_same_step_again_keeps_a_sound_one_and_replaces_a_damaged_one(tmp_path: Path) -> None:
    saver = Checkpointer(tmp_path)
    values = []
    for value in (1.0, 2.0, 3.0):
        if value == 3.0:
            _truncate(tmp_path / "step-000000000004" / "state.json")
        saver.save(4, _state(value), wait=True)
        values.append(float(load(tmp_path / "step-000000000004").state["model"]["0.weight"][0, 0]))
    assert values == [1.0, 1.0, 3.0]
    assert saver.last_error is None
    assert not list(tmp_path.glob(".writing-*"))


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "state.json", "manifest.json"])
@pytest.mark.parametrize("harm", [_truncate, _flip, Path.unlink])
def test_a_damaged_newest_falls_back_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, harm: Any
) -> None:
    saver = Checkpointer(tmp_path)
    for step in (1, 2):
        saver.save(step, _state(float(step)), wait=True)
    harm(tmp_path / "step-000000000002" / file)
    with caplog.at_level(logging.ERROR):
        loaded = Checkpointer(tmp_path).load_newest()
    assert loaded is not None
    assert loaded.step == 1
    assert "step-000000000002 cannot be used" in caplog.text
    assert file in caplog.text
    assert "falling back to the one before" in caplog.text
    saver.save(2, _state(2.0), wait=True)
    again = saver.load_newest()
    assert again is not None
    assert again.step == 2, "the step's name is free again"


def test_every_checkpoint_damaged_is_none_not_an_exception(tmp_path: Path) -> None:
    saver = Checkpointer(tmp_path)
    for step in (1, 2, 3):
        saver.save(step, _state(), wait=True)
    for path in list_checkpoints(tmp_path):
        _truncate(path / "__0_0.distcp")
    assert saver.load_newest() is None
    assert len(list(tmp_path.glob("damaged-*"))) == 1, "they do not pile up"


def test_another_formats_manifest_is_refused_by_number(tmp_path: Path) -> None:
    Checkpointer(tmp_path).save(1, _state(), wait=True)
    file = tmp_path / "step-000000000001" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99, this version reads 1"):
        verify(file.parent)


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    saver = Checkpointer(tmp_path)
    with pytest.raises(UnsupportedState, match=r"user\.hook"):
        saver.save(1, {"user": {"hook": print}}, wait=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("field", "call"),
    [("keep", lambda p: Checkpointer(p, keep=0)), ("step", lambda p: Checkpointer(p).save(-1, {}))],
)
def test_bad_arguments_are_refused_by_name(tmp_path: Path, field: str, call: Any) -> None:
    with pytest.raises(ValueError, match=field):
        call(tmp_path)


_LIMITED = """
    import logging, resource, sys, torch
    from swell.train.state.checkpoint import Checkpointer
    logging.basicConfig(level=logging.ERROR)
    saver = Checkpointer(sys.argv[1])
    state = {"w": torch.ones(1_000_000)}
    saver.save(1, state, wait=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    assert saver.save(2, state, wait=True)
    assert saver.last_error and saver.last_saved_step == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    saver.save(3, state, wait=True)
    assert saver.last_error is None and saver.last_saved_step == 3
    """


def test_a_file_size_limit_costs_one_checkpoint_not_the_training(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_LIMITED), str(tmp_path)],
        check=True, timeout=60, capture_output=True, text=True,
    )  # fmt: skip
    assert "checkpoint of step 2 not saved, training goes on" in run.stderr
    assert "ulimit -f" in run.stderr
    assert [verify(path) for path in list_checkpoints(tmp_path)] == [1, 3]
    assert not list(tmp_path.glob(".writing-*"))


_FULL = """
    import logging, sys, torch
    from pathlib import Path
    from swell.train.state.checkpoint import Checkpointer
    logging.basicConfig(level=logging.ERROR)
    saver = Checkpointer(sys.argv[1])
    saver.save(1, {"w": torch.ones(250_000)}, wait=True)
    saver.save(2, {"w": torch.ones(2_000_000)}, wait=True)
    assert saver.last_saved_step == 1, saver.last_saved_step
    assert "no space left" in saver.last_error, saver.last_error
    saver.save(3, {"w": torch.ones(250_000)}, wait=True)
    assert saver.last_saved_step == 3
    assert saver.load_newest().step == 3
    """


def test_a_full_disk_costs_one_checkpoint_not_the_training(tmp_path: Path) -> None:
    """A real full disk: a tmpfs of 4 MB in a mount namespace of its own."""
    train = f"exec {sys.executable} -c '{textwrap.dedent(_FULL)}' {tmp_path}"
    script = f"mount -t tmpfs -o size=4m tmpfs {tmp_path} && {train}"
    probe = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip("no right to mount here; the file size limit above covers the same path")
    run = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], timeout=60, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "no space left" in run.stderr


_ENDLESS = """
    import os, sys, torch
    from swell.train.state.checkpoint import Checkpointer
    for _ in sys.stdin:  # each time another process that saves for ever; torch is imported once
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            continue
        saver = Checkpointer(sys.argv[1], keep=2)
        first = saver.load_newest()
        step = first.step if first else 0
        print(os.getpid(), flush=True)
        while True:
            step += 1
            saver.save(step, {"w": torch.full((200_000,), float(step)), "step": step}, wait=True)
    """


def test_kill_9_at_any_moment_leaves_only_whole_checkpoints(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    rng = random.Random(0)
    newest = 0
    forker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_ENDLESS), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    request.addfinalizer(forker.kill)
    assert forker.stdout is not None and forker.stdin is not None
    for left in reversed(range(8)):
        forker.stdin.write("\n")
        forker.stdin.flush()
        saver = int(forker.stdout.readline())
        time.sleep(rng.uniform(0.02, 0.3))
        if not left:  # however slow the machine is, one of them comes that far
            wait_until(lambda: list_checkpoints(tmp_path), 60, "a checkpoint")
        os.kill(saver, signal.SIGKILL)
        wait_until(lambda pid=saver: not Path(f"/proc/{pid}").exists(), 30, f"process {saver}")
        saved = [load(path) for path in list_checkpoints(tmp_path)]
        for one in saved:
            assert one.state["step"] == one.step
            assert bool((one.state["w"] == float(one.step)).all())
        if saved:
            assert saved[-1].step >= newest, "a published checkpoint never disappears"
            newest = saved[-1].step
    assert newest > 0
    Checkpointer(tmp_path)
    assert not list(tmp_path.glob(".writing-*"))
