"""Scripts made for torchrun under `--auto`: one process as it is, and N processes whose batches are one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swell.domain.launch_line import PROCESSES

SCRIPT = Path(__file__).parents[1] / "plain_scripts" / "for_torchrun.py"

ONE_MEMBER = """
    import copy, os, torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    assert [os.environ[n] for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["0", "1", "0"]
    assert os.environ.get("MASTER_ADDR") == "here" and "RANK" in os.environ
    assert os.environ["MASTER_PORT"].isdigit() and os.getenv("LOCAL_WORLD_SIZE") == "1"
    dist.init_process_group("nccl")
    assert dist.get_backend() == "nccl" and (dist.get_rank(), dist.get_world_size()) == (0, 1)
    other = dist.new_group([0], backend="gloo")
    numbers = torch.tensor([1.5, 2.0])
    dist.all_reduce(numbers, group=other)
    work = dist.all_reduce(numbers, op=dist.ReduceOp.AVG, async_op=True)
    work.wait()
    every = [torch.zeros(2)]
    dist.all_gather(every, numbers)
    into = torch.zeros(2)
    dist.all_gather_into_tensor(into, numbers)
    part = torch.zeros(2)
    dist.reduce_scatter_tensor(part, numbers)
    assert every[0].tolist() == into.tolist() == part.tolist() == [1.5, 2.0]
    dist.broadcast(numbers, 0), dist.reduce(numbers, 0), dist.barrier(device_ids=[0])
    objects = [None]
    dist.all_gather_object(objects, {"a": 1})
    dist.gather_object([3], objects, dst=0)
    received = [None]
    dist.scatter_object_list(received, ["mine"], src=0)
    assert objects == [[3]] and received == ["mine"] and numbers.tolist() == [1.5, 2.0]

    torch.manual_seed(0)
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 1), static_graph=True)
    model = copy.deepcopy(wrapped)
    assert sorted(model.state_dict()) == ["module.bias", "module.weight"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(20, 2), torch.randn(20, 1))
    for a, b in DataLoader(data, batch_size=5):
        with model.no_sync():
            nn.functional.mse_loss(model(a), b).backward()
        with model.join():
            optimizer.step()
    dist.destroy_process_group()
    assert not dist.is_initialized()
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:1?rank=0&world_size=1")
    dist.destroy_process_group()
    print("all is as with one process")
"""


def test_a_process_group_of_one_costs_nothing_and_confines_nothing(stage: Any) -> None:
    env = {"MASTER_ADDR": "here"}
    job = stage.run(ONE_MEMBER, workers=1, settings={"auto": True}, env=env)
    assert job.wait() == 0, job.output()
    assert "all is as with one process" in job.output()
    assert not job.events("confined")


def _torchrun(*arguments: str) -> None:
    """Run the script as four real processes; gloo may abort one that ends while others hang up."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    subprocess.run([*line, str(SCRIPT), *arguments], check=False, timeout=120)


def _weights(path: Path) -> Any:
    return pytest.approx(json.loads(path.read_text())["weights"], rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("form", ["sync-norm", pytest.param("sync-norm-compiled", marks=pytest.mark.long)])
def test_sync_batch_norm_has_the_statistics_of_the_whole_batch(stage: Any, tmp_path: Path, form: str) -> None:
    """On one process batch norm has them; SyncBatchNorm of torch has no CPU form."""
    output = tmp_path / "printed"
    pid = stage.prepared.plain(
        SCRIPT, "plain-norm", str(tmp_path / "plain.json"), "40", output=output, cwd=tmp_path, env={}
    )
    assert stage.prepared.wait(pid, 60.0) == 0, output.read_text()
    job = stage.run(
        SCRIPT.read_text(), form, str(tmp_path / "job.json"), "40", workers=3, settings={"auto": True}
    )
    job.members(3)
    assert job.wait() == 0, job.output()
    found, plain = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("job", "plain"))
    assert found["weights"] == _weights(tmp_path / "plain.json")
    assert found["steps"] == plain["steps"] and not job.events("confined"), job.output()


@pytest.mark.long  # torchrun starts four processes, which takes it 10 s
@pytest.mark.gallery
def test_four_processes_are_trained_as_torchrun_does(stage: Any, tmp_path: Path) -> None:
    _torchrun("mean", str(tmp_path / "plain.json"), "200")
    job = stage.run(
        SCRIPT.read_text(),
        *("mean", str(tmp_path / "job.json"), "200"),
        **{"workers": 1, "settings": {"auto": True}, "env": {PROCESSES: "4"}},
    )
    job.members(1)
    job.resize(3)
    job.members(3)
    assert job.wait() == 0, job.output()
    found, plain = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("job", "plain"))
    assert found["weights"] == _weights(tmp_path / "plain.json")
    for name in ("world", "steps", "length", "rates", "counts", "means", "ranks"):
        assert found[name] == pytest.approx(plain[name], rel=1e-9), name
    assert job.output().count("4 processes were asked for: each step trains on the batches of all 4") == 1


HEAD = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, IterableDataset, TensorDataset
    from torch.utils.data.distributed import DistributedSampler
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(40, 2), torch.randn(40, 1))
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
STEP = """
        loss = nn.functional.mse_loss(model(a), b)
        loss.backward()
        optimizer.step()
        print("trained a smaller batch")
"""
REFUSED = {
    "draws its batches by hand": """
    for _ in range(3):
        chosen = torch.randint(40, (5,))
        a, b = data.tensors[0][chosen], data.tensors[1][chosen]"""
    + STEP,
    "sampler is a RandomSampler": "for a, b in DataLoader(data, batch_size=5, shuffle=True):" + STEP,
    "data set is iterable": """
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(data)
    for a, b in DataLoader(Stream(), batch_size=5):"""
    + STEP,
    "gathers numbers of all of them": """
    for a, b in DataLoader(data, batch_size=5, sampler=DistributedSampler(data)):
        if dist.is_initialized() and optimizer.state_dict()["state"] is not None:
            out = model(a)
            every = [torch.zeros_like(out) for _ in range(dist.get_world_size())]
            if steps:
                dist.all_gather(every, out.detach())
        steps += 1
        out.sum().backward()
        optimizer.step()
""",
    "before the second step": """
    for a, b in DataLoader(data, batch_size=5, sampler=DistributedSampler(data)):
        nn.functional.mse_loss(model(a), b).backward()
        optimizer.step()
    for a, b in DataLoader(data, batch_size=5):"""
    + STEP,
}


@pytest.mark.parametrize("why", REFUSED)
def test_several_processes_are_refused_where_their_batches_are_not_one(stage: Any, why: str) -> None:
    job = stage.run(
        HEAD + "    steps = 0\n    " + REFUSED[why].lstrip(),
        **{"workers": 1, "settings": {"auto": True}, "env": {PROCESSES: "4"}},
    )
    assert job.wait() == 2, job.output()
    said = why if why != "before the second step" else "sampler is a SequentialSampler"
    assert said in job.output() and "trained a smaller batch" not in job.output()
    assert "Traceback" not in job.output()
