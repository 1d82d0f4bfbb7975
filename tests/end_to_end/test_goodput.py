"""Live `pollux` allocates by goodput: real adaptive jobs whose gradient noise differs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.end_to_end.conftest import Platform

from swell.control.model import JobRequest, Phase
from swell.engines.local import LocalSite
from swell.engines.supervised import SupervisedEngine
from swell.perf.goodput import best_goodput

SCRIPT = Path(__file__).parent.parent / "engines" / "adaptive_toy.py"
SLOTS = 5
NOISY = ("--label-noise", 40)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Platform]:
    """A platform under pollux with rounds of two seconds."""
    platform = Platform(
        tmp_path, lambda: SupervisedEngine(LocalSite(tmp_path, slots=SLOTS)), "pollux", round_s=2.0
    )
    yield platform
    for record in platform.plane.jobs.find():
        if not record.phase.over:
            platform.plane.jobs.cancel(record.job_id)
    platform.wait_over(*(record.job_id for record in platform.plane.jobs.find()))
    platform.close()


def _request(name: str, *args: object, **options: object) -> JobRequest:
    return JobRequest(
        name=name, script=str(SCRIPT), args=tuple(map(str, args)), workdir=str(SCRIPT.parent), **options
    )  # type: ignore[arg-type]


def test_the_job_whose_noise_rewards_a_larger_batch_gets_the_larger_share(here: Platform) -> None:
    clean = here.plane.jobs.submit(_request("clean", "--epochs", 200, "--max-batch", 1024), "ann").job_id
    noisy = here.plane.jobs.submit(
        _request("noisy", "--epochs", 200, "--max-batch", 1024, *NOISY), "ann"
    ).job_id
    seen: list[tuple[int, int]] = []

    def decided() -> bool:
        seen.append((len(here.plane.jobs.get(clean).wanted), len(here.plane.jobs.get(noisy).wanted)))
        return len(seen) > 20 and all(0 < a < b for a, b in seen[-20:])

    until_s = time.monotonic() + 120
    while not decided():
        assert time.monotonic() < until_s, (seen[-20:], here.plane.trouble)
        time.sleep(0.2)
    book = here.plane._conductor.scheduler.book
    for job_id in (clean, noisy):
        knowledge = book.known[job_id]
        belief = knowledge.speed.belief
        assert belief is not None and belief.params is not None and knowledge.mode == "adaptive"
        assert (belief.limits.init_batch, belief.limits.max_batch) == (32, 1024)
        gpus = np.arange(SLOTS + 1)
        expected = best_goodput(belief.params, belief.sqr, belief.var, belief.limits, 1, gpus)[0]
        assert knowledge.speed.curve(SLOTS, SLOTS) == pytest.approx(expected)
    progress = here.plane.jobs.series(noisy)
    assert max(v for v in progress["curves"]["batch_size"] if v) > 32, "its batch follows its noise"
    assert progress["curves"]["noise_scale"][-1] > 300


@pytest.mark.long
def test_the_second_run_of_an_adaptive_job_is_quoted_from_the_first(here: Platform) -> None:
    # How near it comes on a quiet machine is measured by benchmarks/platform/quotes.py.
    request = _request("job", "--epochs", 2, *NOISY, max_workers=2)
    first = here.plane.jobs.submit(request, "ann").job_id
    assert here.wait_over(first, timeout_s=180)[0].phase is Phase.FINISHED
    quoted_s = here.plane.jobs.quote(request, "ann").estimate.finish_s
    asked_s = time.time()
    second = here.plane.jobs.submit(request, "ann").job_id
    (record,) = here.wait_over(second, timeout_s=180)
    assert record.phase is Phase.FINISHED and record.ended_s is not None and quoted_s is not None
    took_s, expected_s = record.ended_s - asked_s, quoted_s - asked_s
    assert 0.25 < took_s / expected_s < 4.0, (
        took_s,
        expected_s,
    )  # a machine may be busier in one of the runs
