"""The platform under load, small enough for every run. `benchmarks/platform_load.py` is the whole of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from benchmarks.platform_load import server, submit_many
from tests.api.conftest import Platform, start
from tests.waiting import wait_until

import swell


def test_three_hundred_submissions_of_twenty_clients_are_neither_lost_nor_doubled() -> None:
    with server() as running:
        result = asyncio.run(submit_many(running, 300, 20, twice=0.2))
        there = Counter(job.job_id for job in running.client().jobs())
    print(result)
    assert result.doubled == []
    assert len(result.keys) == 300
    assert there == Counter(result.keys.values())
    # A bound for a machine that does other things too; the benchmark has the real one.
    assert result.p99_ms < 20_000


def test_clients_of_the_sdk_that_share_keys_share_jobs(busy_platform: Platform) -> None:
    """Twenty clients, ten keys, everybody submits everything: ten jobs."""
    token = busy_platform.token("alice")

    async def one() -> list[str]:
        async with swell.AsyncClient(busy_platform.server.url, token) as client:
            jobs = [
                await client.submit("train.py", workdir=busy_platform.home, idempotency_key=f"key-{i}")
                for i in range(10)
            ]
            return [job.job_id for job in jobs]

    async def everybody() -> list[list[str]]:
        return await asyncio.gather(*(one() for _ in range(20)))

    answers = asyncio.run(everybody())
    assert all(answer == answers[0] for answer in answers)
    assert sorted(job.job_id for job in busy_platform.plane.jobs.find()) == sorted(answers[0])


def test_forty_listeners_hear_everything_in_order(tmp_path: Path) -> None:
    platform = start(tmp_path, duration_s=0.01, slots="2x8")
    try:
        token, jobs = platform.token("alice"), 30

        async def listen() -> list[int]:
            async with swell.AsyncClient(platform.server.url, token) as client:
                numbers, ended = [], 0
                async for event in client.events(since=0):
                    numbers.append(event.seq)
                    ended += event.kind == "finished"
                    if ended == jobs:
                        return numbers
            raise AssertionError("unreachable")

        async def everybody() -> list[list[int]]:
            listeners = [asyncio.create_task(listen()) for _ in range(40)]
            async with swell.AsyncClient(platform.server.url, token) as client:
                for _ in range(jobs):
                    await client.submit("train.py", workdir=tmp_path)
            async with asyncio.timeout(60):
                return list(await asyncio.gather(*listeners))

        heard = asyncio.run(everybody())
        everything = [seq for seq, _ in platform.plane.events(0, None, 10_000)]
        for numbers in heard:
            assert numbers == everything[: len(numbers)]
        context = platform.server.app.state.context
        wait_until(lambda: context.streams == 0, 30, "listeners who left to be no longer counted")
    finally:
        platform.stop()


@pytest.mark.slow
def test_memory_does_not_follow_the_number_of_jobs() -> None:
    sizes = []
    with server(duration_s=0.0, slots="4x16", policy="afs-l") as running:
        client = running.client()

        def nobody_waits_or_runs() -> bool:
            return not any(client.jobs(phase=phase, limit=1) for phase in ("queued", "running"))

        for _ in range(4):
            asyncio.run(submit_many(running, 100, 10))
            wait_until(nobody_waits_or_runs, 120, "all jobs to end", poll_s=0.1)
            sizes.append(running.rss_bytes)
        assert len(client.jobs(phase="finished")) == 400
    print("MiB:", np.round(np.array(sizes) / 2**20, 1))
    # What 200 jobs may add after 200 have filled the caches: far less than their records would take.
    assert sizes[-1] - sizes[1] < 4 * 2**20
