"""`swell simulate` through a real process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import wait_until

from swell.domain import EventKind, read_events

Swell = Callable[..., "subprocess.CompletedProcess[str]"]

FIELDS = [
    "trace",
    "policy",
    "cluster",
    "jobs",
    "finished",
    "rejected",
    "avg_jct_s",
    "p50_jct_s",
    "p99_jct_s",
    "makespan_s",
    "deadline_jobs",
    "deadline_met",
    "deadline_ratio",
    "avg_rho",
    "max_rho",
    "gpu_utilisation",
    "resizes",
    "decisions",
    "decision_ms_mean",
    "decision_ms_p99",
    "cpu_s",
]

COMMAND = [sys.executable, "-c", "from swell.cli import main; main(prog_name='swell')"]
HEADER = "job_id,submit_s,model,batch_size,gpus,work,deadline_s\n"
GOOD = "a,0,cifar10,128,1,1000,\n"


def records(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    out: list[dict[str, Any]] = json.loads(done.stdout)
    return out


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one line a refused command prints."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    return done.stderr.strip()


def test_one_row_per_trace_and_policy_and_a_record_for_each(
    swell: Swell, workload: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.csv"
    other.write_text(HEADER + GOOD)
    done = swell(
        *("simulate", workload, other, "--cluster", "2x4", "--policy", "fifo", "--policy", "max-min"),
        *("--json", "out.json"),
    )
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    assert [(r["trace"], r["policy"]) for r in written] == [
        ("jobs", "fifo"),
        ("jobs", "max-min"),
        ("other", "fifo"),
        ("other", "max-min"),
    ]
    for record in written:
        assert set(FIELDS) <= set(record)
        assert record["cluster"] == "2x4"
        assert record["finished"] == record["jobs"]
    assert [r["jobs"] for r in written] == [30, 30, 1, 1]
    assert [r["deadline_jobs"] for r in written] == [15, 15, 0, 0]
    rows = [line for line in done.stdout.splitlines() if "fifo" in line or "max-min" in line]
    assert len(rows) == 4
    assert "avg JCT s" in done.stdout
    assert "jobs: 30 jobs (swell), profiles: built-in" in done.stderr


def test_json_on_standard_output_is_clean(swell: Swell, workload: Path) -> None:
    done = swell("simulate", workload, "--cluster", "2x4", "--policy", "fifo", "--json", "-")
    (record,) = records(done)
    assert record["policy"] == "fifo"
    assert "avg JCT s" in done.stderr


def test_the_same_seed_gives_the_same_result_however_many_processes(swell: Swell, workload: Path) -> None:
    words = ("simulate", workload, "--cluster", "2x4", "--json", "-", "--resize-cost", "5", "--seed", "7")
    policies = ("--policy", "afs-p", "--policy", "tiresias", "--policy", "optimus")
    measured = {"cpu_s", "decision_ms_mean", "decision_ms_p99"}
    results = [
        [
            {k: v for k, v in r.items() if k not in measured}
            for r in records(swell(*words, *policies, "-j", n))
        ]
        for n in (1, 3)
    ]
    assert results[0] == results[1]


def test_events_of_a_run_can_be_read_back(swell: Swell, workload: Path, tmp_path: Path) -> None:
    done = swell("simulate", workload, "--cluster", "2x4", "--policy", "fifo", "--events", "log.jsonl")
    assert done.returncode == 0, done.stderr
    with (tmp_path / "log.jsonl").open() as file:
        kinds = [event.kind for event in read_events(file)]
    assert kinds.count(EventKind.SUBMITTED) == 30
    assert kinds.count(EventKind.FINISHED) == 30
    assert not list(tmp_path.glob("*.part"))


def test_events_of_several_runs_get_a_file_each(swell: Swell, workload: Path, tmp_path: Path) -> None:
    done = swell(
        *("simulate", workload, "--cluster", "2x4", "--policy", "fifo", "--policy", "fifo:backfill=true"),
        *("--events", "log.jsonl"),
    )
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in tmp_path.glob("log*"))
    assert names == ["log.jobs.fifo-backfill=true.jsonl", "log.jobs.fifo.jsonl"]


def test_bad_rows_are_skipped_on_request_and_counted(swell: Swell, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(HEADER + GOOD + "b,-1,cifar10,128,1,1000,\nc,5,cifar10,128,1,1000,\n")
    done = swell("simulate", trace, "--cluster", "1x1", "--policy", "fifo", "--skip-bad-rows", "--json", "-")
    (record,) = records(done)
    assert (record["jobs"], record["skipped_rows"]) == (2, 1)
    assert f"skipped 1 bad row, the first: {trace}:3: submit_s" in done.stderr


def test_limit_and_gpu_type(swell: Swell, workload: Path) -> None:
    words = ("simulate", workload, "--cluster", "2x4", "--policy", "fifo", "--limit", 5, "--json", "-")
    (fast,) = records(swell(*words, "--gpu-type", "a100"))
    (slow,) = records(swell(*words, "--gpu-type", "T4"))
    assert (fast["jobs"], fast["gpu_type"], slow["gpu_type"]) == (5, "A100", "T4")
    assert fast["avg_jct_s"] < slow["avg_jct_s"]


def test_small_jobs_share_a_gpu(swell: Swell, tmp_path: Path) -> None:
    rows = "".join(f"{name},0,cifar10,128,1,1000,,0.2\n" for name in "abcd")
    (tmp_path / "small.csv").write_text(HEADER.strip() + ",fill\n" + rows)
    words = (
        "simulate",
        "small.csv",
        "--cluster",
        "1x1",
        "--policy",
        "fifo",
        "--resize-cost",
        0,
        "--json",
        "-",
    )
    (one,) = records(swell(*words))
    (four,) = records(swell(*words, "--per-gpu", 4))
    assert (one["per_gpu"], four["per_gpu"], four["cluster"]) == (1, 4, "1x1")
    assert one["makespan_s"] / four["makespan_s"] == pytest.approx(3.47, abs=0.01)
    assert "0 is not in the range x>=1" in swell(*words, "--per-gpu", 0).stderr


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("", "is empty"),
        ("job_id,submit_s,model\na,1,cifar10\n", ":1: missing column 'batch_size'"),
        (
            "timestamp,duration,num_gpus,cluster\n2017-10-09 07:01:55,-3,1,a\n",
            ":2: duration: must be a positive",
        ),
        (HEADER + "a,0,cifar100,128,1,1000,\n", "Did you mean 'cifar10'?"),
        (
            HEADER + GOOD + "b,50,cifar10,128,1,1000,40\n",
            ":3: deadline_s: the deadline must be after the subm",
        ),
        (HEADER + "a,0,cifar10,128,1,many,\n", ":2: work: must be a positive number"),
        (HEADER + "a,0,cifar10\n", ":2: batch_size: the row has 3 values"),
        ("\0\1\2\3", "not the header of a trace"),
    ],
)
def test_a_bad_trace_is_refused_in_one_line(swell: Swell, tmp_path: Path, rows: str, expected: str) -> None:
    trace = tmp_path / "bad.csv"
    trace.write_text(rows)
    line = refused(swell("simulate", trace, "--cluster", "1x4", "--policy", "fifo"))
    assert line.startswith(f"swell: {trace}")
    assert expected in line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--cluster", "0x4", "--policy", "fifo"), "cluster '0x4': need NODESxGPUS"),
        (("--cluster", "four", "--policy", "fifo"), "cluster 'four': need NODESxGPUS"),
        (("--cluster", "1x4", "--policy", "polux"), "unknown policy 'polux'. Did you mean 'pollux'?"),
        (("--cluster", "1x4", "--policy", "pollux:q=1"), "policy 'pollux' has no option 'q'"),
        (("--cluster", "1x4", "--policy", "fifo", "--resize-cost", "-1"), "resize cost must be seconds"),
        (
            ("--cluster", "1x4", "--policy", "fifo", "--gpu-type", "T40"),
            "GPU type 'T40' is not in",
        ),
        (("--cluster", "1x4:x9", "--policy", "fifo"), "GPU type 'x9' is not in"),
        (("--cluster", "1x4", "--policy", "fifo", "--cluster-id", "a"), "only philly traces have one"),
        (("--cluster", "1x4", "--policy", "fifo", "--profiles", "nowhere"), "'nowhere' do not exist"),
        (("--cluster", "1x4", "--policy", "fifo", "--json", "no/out.json"), "there is no directory 'no'"),
        (("--cluster", "1x4", "--policy", "fifo", "--events", "."), "is a directory"),
    ],
)
def test_a_bad_option_is_refused_in_one_line(
    swell: Swell, tmp_path: Path, words: tuple[str, ...], expected: str
) -> None:
    (tmp_path / "good.csv").write_text(HEADER + GOOD)
    assert expected in refused(swell("simulate", "good.csv", *words))


def test_an_interval_needs_a_unit(swell: Swell, workload: Path) -> None:
    words = ("simulate", workload, "--cluster", "1x4", "--policy", "fifo", "--interval")
    done = swell(*words, "60")
    assert done.returncode == 2 and "'60' has no unit; write 60s" in done.stderr
    assert swell(*words, "0").returncode == swell(*words, "60s").returncode == 0


def test_a_directory_and_a_missing_file_are_refused_in_one_line(swell: Swell, tmp_path: Path) -> None:
    words = ("--cluster", "1x4", "--policy", "fifo")
    assert "is a directory" in refused(swell("simulate", tmp_path, *words))
    assert "no such file" in refused(swell("simulate", "nowhere.csv", *words))


@pytest.fixture
def long_run(swell: Swell, tmp_path: Path) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    """Start a simulation that takes a while, on so many processes, and wait until it is under way."""
    started: list[subprocess.Popen[str]] = []

    def start(processes: int) -> subprocess.Popen[str]:
        done = swell("generate", "--jobs", 5000, "--hours", 100, "-o", "long.csv")
        assert done.returncode == 0, done.stderr
        process = subprocess.Popen(
            [
                *(*COMMAND, "simulate", "long.csv", "--cluster", "64x8", "--policy", "optimus"),
                *("--policy", "max-min", "--events", "log.jsonl", "-j", str(processes)),
            ],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # Where the tests run in the background, interrupts are ignored, and that is inherited.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)

        def under_way() -> bool:
            assert process.poll() is None, "it ended before it was under way"
            return len(list(tmp_path.glob("*.part"))) == processes

        wait_until(under_way, 90, "the simulation to be under way")
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def nobody_is_left(process: subprocess.Popen[str]) -> bool:
    """Wait until the whole group of a process is gone."""

    def gone() -> bool:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    return wait_until(gone, 30, "the end of its processes")


@pytest.mark.parametrize("processes", [1, 2])
def test_interrupting_ends_it_all_without_a_traceback(
    long_run: Callable[[int], subprocess.Popen[str]], tmp_path: Path, processes: int
) -> None:
    process = long_run(processes)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to everybody
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert out == ""
    assert not list(tmp_path.glob("log*"))
    assert nobody_is_left(process)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the workers by /proc")
def test_a_worker_that_is_killed_is_reported_and_not_waited_for(
    long_run: Callable[[int], subprocess.Popen[str]],
) -> None:
    process = long_run(2)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(workers[0]), signal.SIGKILL)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "was killed by signal 9; out of memory? Try fewer at once with --jobs 1" in err
    assert "Traceback" not in err
    assert nobody_is_left(process)
