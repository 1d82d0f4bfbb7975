"""Jobs on few slots: all finish, slots are never used twice, promises are kept, the models are right."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
import time
from collections.abc import Callable

import pytest
from benchmarks.platform.audit import ProcessWatch, most_slots_held

from swell.control.model import Phase
from swell.policies import DEFAULT

from .conftest import TOY, Platform, finished


def alone(*args: str) -> float:
    """The toy's final loss without swell around it."""
    said, before = io.StringIO(), sys.argv
    sys.argv = [str(TOY), *args, "--sample-ms", "0"]
    try:
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            runpy.run_path(str(TOY), run_name="__main__")
    finally:
        sys.argv = before
    return float(said.getvalue().split()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "policy"),
    [
        ("local", DEFAULT),
        pytest.param("local", "pollux", marks=pytest.mark.long),
        pytest.param("ray", DEFAULT, marks=pytest.mark.long),
    ],
    indirect=["engine"],
)
def test_jobs_share_few_slots(platform: Callable[..., Platform], policy: str) -> None:
    here = platform(policy, round_s=None if policy == DEFAULT else 2.0)
    count = (
        6 if here.slots == 4 else 4
    )  # on Ray each worker takes a process of Ray's too, and a core for a second
    with ProcessWatch(here.home, every_s=0.4) as watch:
        jobs = {}
        for i in range(count):
            options: dict[str, object] = {} if i % 2 else {"deadline_s": time.time() + 150 + 10 * i}
            if here.slots > 4:
                options["max_workers"] = 2
            # The first trains longer than it takes to profile it, on a busy machine too: it gets a promise.
            args = ("--epochs", str(3 if i else 12), "--seed", str(i))
            job_id = here.submit(f"toy{i}", *args, "--sample-ms", 2.5, **options).job_id
            jobs[job_id] = (args, options)
            if i == 0:
                here.wait(job_id, lambda r: r.wanted)  # the others come when it is there already
        records = here.wait_over(*jobs, timeout_s=240)
    assert [r.phase for r in records] == [Phase.FINISHED] * count, [r.reason for r in records]
    assert 4 <= most_slots_held(here.events(), here.slots) <= here.slots
    assert 2 <= watch.most_workers <= here.slots, f"{watch.seen[-1]} after {watch.looks} looks"
    promised = [r for r in records if r.promise.guaranteed_s is not None]
    assert bool(promised) == (policy == DEFAULT)  # pollux promises nothing
    assert all(r.ended_s is not None and r.ended_s <= r.promise.guaranteed_s for r in promised)  # type: ignore[operator]
    with_deadline = [r for r in records if r.request.deadline_s is not None]
    assert not any(r.promise.pending for r in with_deadline)
    assert all(r.ended_s <= r.request.deadline_s for r in with_deadline)  # type: ignore[operator]
    for record in records:
        assert finished(record)
        assert here.loss(record.job_id) == pytest.approx(alone(*jobs[record.job_id][0]), rel=2e-3)
