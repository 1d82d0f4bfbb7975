"""Traces in: what each format means, and that nothing bad gets in."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swell.domain import InputError, JobSpec, packed_shape
from swell.perf.goodput import BatchLimits
from swell.perf.profiles import ModelProfile, ProfileSet, Training
from swell.perf.throughput import ThroughputParams
from swell.sim.traces import Trace, fitting_gpu_type, load_trace, sibling_profiles, trace_format, write_jobs

DATA = Path(os.environ.get("SWELL_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no public traces at {DATA}")


def model(name: str, kinds: tuple[str, ...] = ("T4", "A100"), *, trains: bool = True) -> ModelProfile:
    speed = ThroughputParams(0.02, 0.002, 0.05, 0.002, 0.01, 0.001, 1.5)
    return ModelProfile(
        name,
        dict.fromkeys(kinds, speed),
        BatchLimits(init_batch=32, max_batch=512, min_local=2, max_local=128),
        1e8,
        Training(4, 500.0, ((0.0, 100.0), (1.0, 1000.0))) if trains else None,
    )


PROFILES = ProfileSet(
    [model("resnet"), model("bert"), model("speech", ("A100",)), model("bare", trains=False)]
)

POLLUX = "name,time,application,num_replicas,batch_size\n"
FLOW = "job_id,submission_time,num_iteration,model_name,deadline,batch_size,num_gpu,duration\n"
FLOW_2 = (
    "job_id,submit_time,real_iteration,model_name,ddl,batch_size,num_gpu,real_duration,duration,iteration\n"
)
PHILLY = "timestamp,duration,num_gpus,gpu_time,cluster\n"
OWN = "job_id,submit_s,model,batch_size,gpus,work,deadline_s,min_gpus,max_gpus\n"


def read(folder: Path, text: str, **options: object) -> Trace:
    path = folder / "trace.csv"
    path.write_text(text)
    return load_trace(path, PROFILES, **options)  # type: ignore[arg-type]


def refusal(folder: Path, text: str, **options: object) -> str:
    with pytest.raises(InputError) as caught:
        read(folder, text, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(folder / "trace.csv"), "FILE")


# --- what the formats mean -------------------------------------------------------------------------------


def test_pollux_jobs_run_their_profiles_whole_length(tmp_path: Path) -> None:
    trace = read(tmp_path, POLLUX + "r-0,107,resnet,6,256\nb-1,110.5,bert,1,32\n")
    assert (trace.name, trace.format, trace.skipped) == ("trace", "pollux", 0)
    assert trace.jobs == [
        JobSpec(job_id="r-0", submit_s=107.0, model="resnet", batch_size=256, gpus=6),
        JobSpec(job_id="b-1", submit_s=110.5, model="bert", batch_size=32, gpus=1),
    ]


@pytest.mark.parametrize(
    "text",
    [
        FLOW + "x,5100,2000,bert,5300,64,2,150\ny,5000,300,resnet,5900,32,1,1000\n",
        FLOW_2 + "x,5100,1,bert,5300,64,2,150,150,2000\ny,5000,1,resnet,5900,32,1,1000,1000,300\n",
    ],
)
def test_elasticflow_time_starts_at_the_first_submission(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text).jobs == [
        JobSpec(job_id="y", submit_s=0, model="resnet", batch_size=32, gpus=1, work=300, deadline_s=900),
        JobSpec(job_id="x", submit_s=100, model="bert", batch_size=64, gpus=2, work=2000, deadline_s=300),
    ]


def test_philly_work_is_the_duration_at_the_rate_of_its_gpus(tmp_path: Path) -> None:
    text = PHILLY + "2017-10-09 07:01:55,66.0,8,528.0,aa\n2017-10-09 06:00:00,300,1,300,bb\n"
    trace = read(tmp_path, text, gpus_per_node=8, gpu_type="T4")
    assert [(job.job_id, job.submit_s, job.gpus) for job in trace.jobs] == [
        ("philly-1", 0.0, 1),
        ("philly-0", 3715.0, 8),
    ]
    for job, seconds in zip(trace.jobs, (300, 66)):
        rate = PROFILES.get(job.model).rate(packed_shape(job.gpus, 8), job.batch_size, "T4")
        assert job.work == pytest.approx(seconds * rate)
        assert job.model != "speech"  # it was not measured on a T4


def test_philly_models_depend_on_seed_and_row_but_not_on_the_filter(tmp_path: Path) -> None:
    rows = [f"2017-10-09 {i // 60:02}:{i % 60:02}:00,{60 + i},1,1,{'ab'[i % 2]}" for i in range(200)]
    text = PHILLY + "\n".join(rows) + "\n"
    everything = {job.job_id: job for job in read(tmp_path, text).jobs}
    half = read(tmp_path, text, cluster_id="b")
    assert half.name == "trace/b"
    assert len(half.jobs) == 100
    for job in half.jobs:
        same = everything[job.job_id]
        assert (job.model, job.batch_size, job.work) == (same.model, same.batch_size, same.work)
    other = {job.job_id: job for job in read(tmp_path, text, seed=1).jobs}
    changed = sum(other[i].model != everything[i].model for i in everything)
    assert 100 < changed < 200
    models = [job.model for job in everything.values()]
    assert all(30 < models.count(name) < 70 for name in PROFILES.names)


def test_a_philly_job_gets_only_models_that_run_on_its_gpus(tmp_path: Path) -> None:
    rows = [f"2017-10-09 07:00:00,60,{gpus},1,a" for gpus in (1, 2, 64, 256) for _ in range(20)]
    for job in read(tmp_path, PHILLY + "\n".join(rows)).jobs:
        assert job.batch_size >= 2 * job.gpus
    assert refusal(tmp_path, PHILLY + "2017-10-09 07:00:00,60,1024,1,a") == (
        "FILE:2: num_gpus: must be a number of GPUs on which one of the profiles can run, got '1024'"
    )


def test_our_own_format_needs_only_four_columns(tmp_path: Path) -> None:
    trace = read(tmp_path, "model,batch_size,job_id,submit_s\nbert,32,a,5\n")
    assert trace.format == "swell"
    assert trace.jobs == [JobSpec(job_id="a", submit_s=5, model="bert", batch_size=32)]


def test_a_fill_is_a_part_of_a_gpu(tmp_path: Path) -> None:
    text = "job_id,submit_s,model,batch_size,fill\na,0,bert,32,0.25\nb,0,bert,32,\nc,0,bert,32,1\n"
    assert [job.fill for job in read(tmp_path, text).jobs] == [0.25, 1.0, 1.0]
    for bad in ("0", "-0.5", "1.01", "some", "nan"):
        assert refusal(tmp_path, text + f"d,0,bert,32,{bad}\n") == (
            f"FILE:5: fill: must be more than 0 and at most 1, or empty, got '{bad}'"
        )


def test_a_limit_keeps_the_first_jobs_by_submission(tmp_path: Path) -> None:
    text = OWN + "".join(f"j{i},{100 - i},bert,32,,,,,\n" for i in range(10))
    assert [job.job_id for job in read(tmp_path, text, limit=3).jobs] == ["j9", "j8", "j7"]


times = st.floats(0, 1e7, allow_nan=False)


@given(
    st.lists(
        st.builds(
            lambda at, gpus, work, slack, least, more, user, fill: {
                "submit_s": at,
                "gpus": gpus,
                "work": work,
                "deadline_s": None if slack is None else at + slack,
                "min_gpus": least,
                "max_gpus": None if more is None else least + more,
                "user": user,
                "fill": fill,
            },
            times,
            st.integers(1, 64),
            st.none() | st.floats(1e-3, 1e9),
            st.none() | st.floats(0.01, 1e6),
            st.integers(1, 4),
            st.none() | st.integers(0, 60),
            st.sampled_from(["", "ann", "ben, too"]),
            st.just(1.0) | st.floats(0.001, 1.0),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_what_is_written_in_our_format_is_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, columns: list[dict[str, Any]]
) -> None:
    jobs = [
        JobSpec(job_id=f"job, {i}", model="bert", batch_size=32, **values) for i, values in enumerate(columns)
    ]
    file = io.StringIO()
    write_jobs(jobs, file)
    path = tmp_path_factory.mktemp("own") / "jobs.csv"
    path.write_text(file.getvalue())
    assert load_trace(path, PROFILES).jobs == sorted(jobs, key=lambda job: job.submit_s)


# --- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (POLLUX + "a,5,resnet,1\n", "FILE:2: batch_size: the row has 4 values, the header names 5 columns"),
        (
            POLLUX + "a,5,resnet,,64\n",
            "FILE:2: num_replicas: must be a whole number of at least 1, got nothing",
        ),
        (
            POLLUX + "a,5,resnet,1.5,64\n",
            "FILE:2: num_replicas: must be a whole number of at least 1, got '1.5'",
        ),
        (POLLUX + "a,-5,resnet,1,64\n", "FILE:2: time: must be a time of at least 0 s, got '-5'"),
        (POLLUX + "a,nan,resnet,1,64\n", "FILE:2: time: must be a time of at least 0 s, got 'nan'"),
        (POLLUX + "a,soon,resnet,1,64\n", "FILE:2: time: must be a time of at least 0 s, got 'soon'"),
        (POLLUX + "a,5,resnet,1,64\n\na,6,resnet,1,64\n", "FILE:4: name: 'a' is already the job on line 2"),
        (POLLUX + "a,5,resnet,1,4096\n", "FILE:2: batch_size: 'resnet' cannot run at a batch size of 4096"),
        (POLLUX + "a,5,bare,1,64\n", "FILE:2: application: the profile of 'bare' gives no length in epochs"),
        (
            FLOW + "a,50,10,bert,70,64,1,-3\n",
            "FILE:2: duration: must be a positive number of seconds, got '-3'",
        ),
        (FLOW + "a,50,0,bert,70,64,1,3\n", "FILE:2: num_iteration: must be a positive number of iterations"),
        (FLOW + "a,50,9,bert,,64,1,3\n", "FILE:2: deadline: must be a time in seconds, got nothing"),
        (
            FLOW + "a,50,9,bert,50,64,1,3\n",
            "FILE:2: deadline: the deadline must be after the submission at 50 s",
        ),
        (
            PHILLY + "2017-10-09 07:01:55,-66,1,1,a\n",
            "FILE:2: duration: must be a positive number of seconds",
        ),
        (PHILLY + "yesterday,66,1,1,a\n", "FILE:2: timestamp: must be a moment such as 2017-10-09 07:01:55"),
        (
            PHILLY + ",66,1,1,a\n",
            "FILE:2: timestamp: must be a moment such as 2017-10-09 07:01:55, got nothing",
        ),
        (
            OWN + "a,1,bert,64,,,0.5,,\n",
            "FILE:2: deadline_s: the deadline must be after the submission at 1 s",
        ),
        (OWN + "a,1,bert,64,,-1,,,\n", "FILE:2: work: must be a positive number of iterations, or empty"),
        (OWN + "a,1,bert,64,,,,4,2\n", "FILE:2: max_gpus: must be at least min_gpus, got '2'"),
        (OWN + ",1,bert,64,,,,,\n", "FILE:2: job_id: must be given, got nothing"),
    ],
)
def test_a_bad_row_is_refused_by_file_line_and_field(tmp_path: Path, text: str, expected: str) -> None:
    assert refusal(tmp_path, text).startswith(expected)


def test_an_unknown_model_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    message = refusal(tmp_path, POLLUX + "a,5,resnett,1,64\n")
    assert message.startswith("FILE:2: application: ")
    assert "Did you mean 'resnet'?" in message


def test_a_model_not_measured_on_the_gpu_type_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, POLLUX + "a,5,speech,1,64\n", gpu_type="T4")
    assert message == "FILE:2: application: 'speech' was not measured on GPU type 'T4', only on A100"


def test_the_first_bad_line_is_the_one_reported(tmp_path: Path) -> None:
    text = POLLUX + "a,5,resnet,1,64\nb,5,nope,1,64\nc,-5,resnet,1,64\n"
    assert refusal(tmp_path, text).startswith("FILE:3: application")


def test_bad_rows_can_be_skipped_and_are_counted(tmp_path: Path) -> None:
    text = POLLUX + "a,5,resnet,1,64\nb,5,nope,1,64\nc,-5,resnet,1,64\nd,9,bert,1,64,7\ne,8,bert,1,32\n"
    trace = read(tmp_path, text, skip_bad_rows=True)
    assert [job.job_id for job in trace.jobs] == ["a", "e"]
    assert trace.skipped == 3
    assert ":3: application: " in trace.first_skipped


def test_bad_rows_of_other_clusters_do_not_matter(tmp_path: Path) -> None:
    text = PHILLY + "2017-10-09 07:01:55,-66,1,1,a\n2017-10-09 07:01:55,66,1,1,b\n"
    trace = read(tmp_path, text, cluster_id="b")
    assert (len(trace.jobs), trace.skipped) == (1, 0)


def test_skipping_every_row_leaves_nothing_and_says_so(tmp_path: Path) -> None:
    message = refusal(tmp_path, POLLUX + "a,-5,resnet,1,64\n", skip_bad_rows=True)
    assert message.startswith("FILE: no job is left; all 1 rows are bad: FILE:2: time:")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "FILE: is empty"),
        ("\n\n", "FILE: is empty"),
        (POLLUX, "FILE: has a header but no rows"),
        (
            "name,time,application,batch_size\na,1,bert,3\n",
            "FILE:1: missing column 'num_replicas'; a pollux trace",
        ),
        ("timestamp,num_gpus,cluster\n", "FILE:1: missing column 'duration'; a philly trace"),
        (
            "x,y\n1,2\n",
            "FILE:1: not the header of a trace: 'x,y'; known formats are pollux, elasticflow, philly",
        ),
        (
            "job_id,submit_s,model,batch_size,deadline\n1,2,bert,4,9\n",
            "FILE:1: unknown column 'deadline'. Did you",
        ),
        ("job_id,job_id,model\n", "FILE:1: column 'job_id' appears twice"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    assert refusal(tmp_path, text).startswith(expected)


def test_a_directory_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a directory"):
        load_trace(tmp_path, PROFILES)
    with pytest.raises(InputError, match="no such file"):
        load_trace(tmp_path / "nope.csv", PROFILES)


@pytest.mark.parametrize(
    "junk", [bytes(range(256)) * 40, b"\x00" * 1000, b"\xff\xfe\x00", b'name,"' + b"x" * 200_000]
)
def test_binary_junk_is_refused(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "junk.csv"
    path.write_bytes(junk)
    with pytest.raises(InputError) as caught:
        load_trace(path, PROFILES)
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=300))
def test_any_bytes_after_a_header_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes
) -> None:
    path = tmp_path_factory.mktemp("junk") / "junk.csv"
    path.write_bytes(POLLUX.encode() + junk)
    try:
        load_trace(path, PROFILES)
    except InputError as error:
        assert "\n" not in str(error)


def test_a_cluster_id_is_only_for_philly_and_must_exist(tmp_path: Path) -> None:
    assert "only philly traces" in refusal(tmp_path, POLLUX + "a,5,resnet,1,64\n", cluster_id="a")
    message = refusal(tmp_path, PHILLY + "2017-10-09 07:01:55,66,1,1,b436b2\n", cluster_id="b436b3")
    assert message == "FILE: no cluster 'b436b3'. Did you mean 'b436b2'? There are: b436b2"


# --- which profiles --------------------------------------------------------------------------------------


def test_the_gpu_type_is_the_first_on_which_all_jobs_run(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(POLLUX + "a,5,resnet,1,64\n")
    assert fitting_gpu_type(path, PROFILES) == "T4"
    path.write_text(POLLUX + "a,5,resnet,1,64\nb,5,speech,1,64\n")
    assert fitting_gpu_type(path, PROFILES) == "A100"


def test_profiles_published_beside_a_trace_are_found(tmp_path: Path) -> None:
    trace = tmp_path / "workloads" / "w.csv"
    trace.parent.mkdir()
    trace.write_text(POLLUX + "a,5,resnet,1,64\n")
    assert sibling_profiles(trace) is None
    (tmp_path / "profiles" / "resnet").mkdir(parents=True)
    (tmp_path / "profiles" / "resnet" / "placements.csv").touch()
    assert sibling_profiles(trace) == tmp_path / "profiles"

    trace = tmp_path / "flow" / "t.csv"
    (tmp_path / "flow" / "throughputs_T4").mkdir(parents=True)
    (tmp_path / "flow" / "throughputs_T4" / "bert.csv").touch()
    trace.write_text(FLOW)
    assert sibling_profiles(trace) == tmp_path / "flow"


# --- the public traces -----------------------------------------------------------------------------------


@needs_data
@pytest.mark.parametrize(
    ("name", "kind", "gpu_type", "jobs", "gpu_count"),
    [
        ("pollux/workloads/workload-1.csv", "pollux", "T4", 160, 1),
        ("pollux/workloads/realistic-1.csv", "pollux", "T4", 160, 1),
        ("elasticflow/195job.csv", "elasticflow", "A100", 195, 118),
        ("elasticflow/cluster01.csv", "elasticflow", "A100", 1595, 1530),
        ("elasticflow/cluster10.csv", "elasticflow", "A100", 260, 193),
        ("elasticflow/elasticVpollux_e.csv", "elasticflow", "T4", 195, 118),
        ("elasticflow/philly_103959.csv", "elasticflow", "A100", 876, 513),
    ],
)
def test_the_public_traces_are_read_whole(
    name: str, kind: str, gpu_type: str, jobs: int, gpu_count: int
) -> None:
    path = DATA / name
    profiles = ProfileSet.load(sibling_profiles(path))
    assert fitting_gpu_type(path, profiles) == gpu_type
    trace = load_trace(path, profiles, gpu_type=gpu_type)
    assert (trace.format, len(trace.jobs), trace.skipped) == (kind, jobs, 0)
    if kind == "elasticflow":
        assert trace.jobs[0].submit_s == 0
        assert sum(job.gpus == 1 for job in trace.jobs) == gpu_count


@needs_data
def test_all_of_philly_is_read_within_a_second() -> None:
    path = DATA / "philly" / "philly.csv"
    assert trace_format(path) == "philly"
    load_trace(path, PROFILES, limit=1)
    started = time.process_time()
    trace = load_trace(path, PROFILES)
    took_s = time.process_time() - started
    assert (len(trace.jobs), trace.skipped) == (82_247, 0)
    assert trace.jobs == sorted(trace.jobs, key=lambda job: job.submit_s)
    assert took_s < 1.0
    assert len(load_trace(path, PROFILES, cluster_id="b436b2").jobs) == 7_423


def test_the_example_in_the_documentation_is_a_trace(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "simulator.md").read_text()
    block = page[page.index("    job_id,submit_s,") :].split("\n\n")[0]
    path = tmp_path / "example.csv"
    path.write_text("\n".join(line.strip() for line in block.splitlines()))
    assert [job.job_id for job in load_trace(path, ProfileSet.load(None)).jobs] == ["nightly-bert", "try-17"]
