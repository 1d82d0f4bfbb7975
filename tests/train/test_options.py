"""The options of `swell.elastic`: one set of names for scripts, small groups inside."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn

import swell
from swell.train.agent.errors import UsageError
from swell.train.options import AdaptiveOptions, CheckpointOptions, Options


def test_options_go_to_the_group_that_they_are_for(tmp_path: Path) -> None:
    made = Options.of({"mode": "adaptive", "max_batch": 64, "checkpoint_dir": tmp_path, "seed": 3})
    assert (made.mode, made.seed) == ("adaptive", 3)
    assert made.adaptive == AdaptiveOptions(max_batch=64)
    assert made.checkpoints == CheckpointOptions(checkpoint_dir=tmp_path)
    assert Options.of({}) == Options()


def test_no_two_groups_have_a_name_in_common() -> None:
    names = [f.name for group in (Options, AdaptiveOptions, CheckpointOptions) for f in fields(group)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"chekpoint_dir": "x"}, "chekpoint_dir: swell.elastic has no such option; there are checkpoint_dir"),
        ({"mode": "elastic"}, "mode: got 'elastic', must be one of fixed, adaptive, consistent"),
        ({"logical_ranks": 0}, "logical_ranks: got 0, must be at least 1"),
        ({"step_scheduler": "often"}, "step_scheduler: got 'often', must be epoch, step or never"),
        ({"checkpoint_every_s": -1.0}, "checkpoint_every_s: got -1.0, must be positive"),
        ({"adaptive": AdaptiveOptions()}, "adaptive: swell.elastic has no such option"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(given: dict[str, object], said: str) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(UsageError) as refused:
        swell.elastic(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)
    assert said in str(refused.value)
