"""A script for the other of the two ways, by `--auto` or by `swell.elastic`, is told which one is its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from swell.train import job
from swell.train.start import plain


@pytest.mark.parametrize(
    "elastic", [False, True], ids=["plain", "elastic by ways that its text does not show"]
)
def test_a_script_is_ended_at_its_first_step_only_if_it_has_no_elastic_job(
    elastic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch")
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(job, "taken", {str(tmp_path)} if elastic else set())
    monkeypatch.delenv("SWELL_ERROR_FILE", raising=False)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with plain.recognised(script, tmp_path):
        if elastic:
            optimizer.step()
        else:
            with pytest.raises(SystemExit):
                optimizer.step()
    assert ("--auto" in capsys.readouterr().err) is not elastic


ELASTIC = """
    import swell, torch
    model = torch.nn.Linear(2, 1)
    job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in job.loop(3):
        job.step(model(torch.ones(4, 2)).mean())
"""


def test_an_elastic_script_under_auto_ends_at_once_and_names_the_option_to_leave_out(stage: Any) -> None:
    job = stage.run(ELASTIC, settings={"auto": True}, workers=1)
    assert job.wait() != 0
    assert "this script is elastic by itself; start it without --auto" in job.output()
