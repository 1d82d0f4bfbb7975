"""`swell submit --auto -- torchrun ...`: a line that people have, taken as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from swell.cli import main
from swell.cli.submit import launched, script_and_options
from swell.domain import InputError
from swell.domain.launch_line import PROCESSES


def _handed_in(folder: Path, *words: str, **flags: Any) -> tuple[str, Any]:
    given = {"auto": True, "workdir": str(folder), "env": (), **flags}
    return script_and_options(**launched({**given, "script": words[0], "arguments": words[1:]}))


def test_a_job_of_a_line_is_its_script_for_so_many_processes(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    script, options = _handed_in(tmp_path, "torchrun", "--nproc-per-node", "8", "train.py", "--lr", "1")
    assert script == str(tmp_path / "train.py") and options["args"] == ["--lr", "1"]
    assert options["env"] == {PROCESSES: "8"} and options["auto"] is True
    script, options = _handed_in(tmp_path, "torchrun", "train.py", env=("SEED=1",))
    assert options["env"] == {"SEED": "1"} and "args" not in options


def test_a_script_called_torchrun_is_a_script(tmp_path: Path) -> None:
    (tmp_path / "torchrun").touch()
    assert _handed_in(tmp_path, "torchrun", "--nproc-per-node", "8")[1]["args"] == ["--nproc-per-node", "8"]


def test_a_line_without_auto_is_told_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'--auto -- torchrun train.py'.*--command"):
        _handed_in(tmp_path, "torchrun", "train.py", auto=False)
    done = CliRunner().invoke(main, ["run", "torchrun", "--nproc-per-node", "2", "train.py"])
    assert done.exit_code == 2 and "give --auto before it" in done.output


TRAIN = """
import os, sys
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
data = TensorDataset(torch.arange(24.0).view(24, 1))
loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for (a,) in loader:
    model(a).mean().backward()
    optimizer.step()
print(sys.argv[1:], len(loader), len(a), a.flatten().int().tolist(), dist.get_world_size())
"""


@pytest.mark.slow  # it starts a job
def test_swell_run_takes_the_line_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setenv("SWELL_HOME", str(tmp_path))
    (tmp_path / "train.py").write_text(TRAIN)
    line = ["torchrun", "--standalone", "--nproc-per-node", "4", str(tmp_path / "train.py"), "--lr", "1"]
    done = CliRunner().invoke(main, ["run", "--workers", "1", "--name", "line", "--auto", "--", *line])
    assert done.exit_code == 0, done.output
    assert "['--lr', '1'] 3 8 [16, 20, 17, 21, 18, 22, 19, 23] 4" in done.output
    assert "4 processes were asked for" in done.output
