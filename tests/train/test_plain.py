"""A plain script without `--auto` is recognised at its first step; one that has an elastic job is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swell.train import entry
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
    monkeypatch.setattr(entry, "taken", {str(tmp_path)} if elastic else set())
    monkeypatch.delenv("SWELL_ERROR_FILE", raising=False)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with plain.recognised(script, tmp_path):
        if elastic:
            optimizer.step()
        else:
            with pytest.raises(SystemExit):
                optimizer.step()
    assert ("--auto" in capsys.readouterr().err) is not elastic
