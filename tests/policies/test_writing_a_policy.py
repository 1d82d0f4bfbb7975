"""The policy in docs/guides/writing-a-policy.md, taken out of the page and plugged in as a reader would."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swell.api.schemas import PolicyList
from swell.cli._common import line
from swell.control.model import JobRequest
from swell.control.plane import ControlPlane
from swell.control.store import Store, connect
from swell.domain import Cluster, EventKind, InputError
from swell.engines.null import NullEngine
from swell.policies import DEFAULT, described, make_policy, policy_names
from swell.policies.base import gives_promises
from swell.policies.tide import Tide

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "writing-a-policy.md"


def block(language: str) -> str:
    """The page's code block in that language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return str(found)


def install(folder: Path) -> None:
    """What `pip install` leaves behind: the module, and metadata with the entry points."""
    import tomllib

    project = tomllib.loads(block("toml"))["project"]
    (group,) = project["entry-points"]
    (folder / "hesrpt.py").write_text(block("python"))
    info = folder / "swell_hesrpt-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1.0\n")
    points = "".join(f"{name} = {target}\n" for name, target in project["entry-points"][group].items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{points}")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path
    sys.modules.pop("hesrpt", None)


def test_the_page_keeps_its_word_on_the_length() -> None:
    assert len([line for line in block("python").splitlines() if line.strip()]) <= 40


def test_the_policy_is_found_by_its_entry_point(installed: Path, make_snapshot: Any) -> None:
    assert "hesrpt" in policy_names()
    snapshot = make_snapshot(2, cluster="4x4", left=[100.0, 10.0])
    # Of 16 GPUs the longer of two jobs has (1/2) ** (1 / (1 - p)): a quarter for p = 1/2, half for p = 0.
    assert make_policy("hesrpt").allocate(snapshot).gpus.tolist() == [4, 12]
    assert make_policy("hesrpt:p=0").allocate(snapshot).gpus.tolist() == [8, 8]
    with pytest.raises(InputError, match="p must be"):
        make_policy("hesrpt:p=1")


def test_the_policy_runs_from_the_command_line(installed: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    commands = [line for line in block("sh").splitlines() if line.startswith("swell ")]
    assert len(commands) == 3
    for command in commands:
        words = command.split()[1:]
        if words[0] == "simulate":
            words += ["--json", "figures.json"]
        done = subprocess.run(
            [sys.executable, "-c", "from swell.cli import main; main()", *words],
            cwd=installed,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        if words == ["policies"]:
            assert "hesrpt" in done.stdout
    ours, theirs = json.loads((installed / "figures.json").read_text())
    assert ours["policy"].startswith("hesrpt")
    assert ours["finished"] == ours["jobs"] == theirs["jobs"] == 100
    assert np.isfinite(ours["avg_jct_s"])


PLUGIN = """
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from swell.policies import Admission, Decision, Policy


@dataclass(kw_only=True)
class Odd(Policy):
    name: ClassVar[str] = "odd"
    paper: ClassVar[str] = "none"
    goal: ClassVar[str] = "to fail"
    after: int = 0
    asked: ClassVar[int] = 0

    def allocate(self, snapshot):
        type(self).asked += 1
        gpus = np.minimum(np.ones(len(snapshot), dtype=np.int64), snapshot.capacity)
        if type(self).asked > self.after:
            ANSWER
        return Decision(gpus)
"""


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Installs a policy `odd`: its source, as another package has it."""

    def install(source: str) -> None:
        (tmp_path / "odd_policy.py").write_text(source)
        info = tmp_path / "swell_odd-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: swell-odd\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[swell.policies]\nodd = odd_policy:Odd\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()

    yield install
    sys.modules.pop("odd_policy", None)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (PLUGIN.replace('    paper: ClassVar[str] = "none"\n', ""), "must have a text `paper`"),
        (PLUGIN.replace("after: int = 0", "after: int"), "the option `after` must have a default"),
        (PLUGIN.replace("@dataclass(kw_only=True)\n", ""), "must be a dataclass"),
        (PLUGIN.replace("def allocate", "def alocate"), "must have a method allocate"),
        (PLUGIN.replace("after: int = 0", 'knows: ClassVar[str] = "all"'), "`knows` must be one of nothing"),
        (PLUGIN.replace("after: int = 0", "interval_s: ClassVar = 0"), "`interval_s` must be None or"),
        ("import nowhere_to_be_found\n", "cannot be loaded from odd_policy:Odd"),
        ("Odd = 3\n", "must be a subclass of swell.policies.Policy"),
    ],
)
def test_a_policy_that_says_too_little_of_itself_is_refused_and_listed_with_the_reason(
    plug_in: Callable[[str], None], source: str, expected: str
) -> None:
    plug_in(source)
    with pytest.raises(InputError, match=re.escape(expected)) as refused:
        make_policy("odd")
    assert "policy 'odd'" in str(refused.value)
    listed = {row["name"]: row for row in described()}
    assert expected in listed["odd"]["error"] and "error" not in listed["tide"]
    PolicyList.model_validate({"policies": described()})


@pytest.mark.parametrize("default", [None, 2, "two", (1, 2)])
def test_the_default_of_an_option_is_listed_as_json_can_say_it(
    plug_in: Callable[[str], None], default: object
) -> None:
    plug_in(PLUGIN.replace("after: int = 0", f"after: object = {default!r}"))
    (listed,) = [row for row in described() if row["name"] == "odd"]
    said = [option["default"] for option in listed["options"]]
    assert said == [str(default) if isinstance(default, tuple) else default]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("return Decision(gpus[:-1])", "one number of GPUs for each of 3 jobs, got the shape (2,)"),
        ("return Decision(gpus[:, None])", "got the shape (3, 1)"),
        ("return Decision(gpus + 0.5)", "job 'job-0' must have a whole number of GPUs, got 1.5"),
        ("return Decision(gpus * np.nan)", "job 'job-0' must have a whole number of GPUs, got nan"),
        ("return Decision(gpus - [0, 3, 0])", "job 'job-1' may have 0, or from 1 to 8 GPUs, got -2"),
        ("return Decision(gpus + [0, 0, 8])", "job 'job-2' may have 0, or from 1 to 8 GPUs, got 9"),
        ("return Decision(gpus * 3)", "all jobs together may have 8 GPUs, got 9"),
        ("return gpus", "allocate must return a Decision, got array"),
        ("return Decision(gpus, per_node=gpus)", "per_node must be whole numbers of GPUs, 3 jobs by 2 nodes"),
        (
            "return Decision(gpus, per_node=np.zeros((3, 2), int))",
            "job 'job-0' has 1 GPUs but 0 on the nodes",
        ),
        ("return Decision(gpus, order=np.array([0, 0, 1]))", "order must have each index below 3 once"),
        ("return Decision(gpus, lent=gpus * 2)", "lent must be a whole number from 0 to its GPUs"),
        ("return Decision(gpus, gpu_types=('x9',) * 3)", "gpu_types must be one of"),
        ("return Decision(gpus, stay=gpus)", "stay must be True or False for each of 3 jobs"),
    ],
)
def test_a_decision_that_cannot_be_carried_out_names_policy_job_and_what_is_allowed(
    plug_in: Callable[[str], None], make_snapshot: Any, answer: str, expected: str
) -> None:
    plug_in(PLUGIN.replace("ANSWER", answer))
    with pytest.raises(InputError, match=re.escape(expected)) as refused:
        make_policy("odd").allocate(make_snapshot(3, cluster="2x4"))
    assert "policy 'odd'" in str(refused.value)


def test_whole_numbers_of_any_type_are_taken_and_our_own_policies_are_asked_as_they_are(
    plug_in: Callable[[str], None], make_snapshot: Any
) -> None:
    plug_in(PLUGIN.replace("ANSWER", "return Decision((gpus * 2.0).tolist())"))
    made = make_policy("odd:after=1")
    snapshot = make_snapshot(3, cluster="2x4")
    assert made.allocate(snapshot).gpus.tolist() == [1, 1, 1]
    assert made.allocate(snapshot).gpus.tolist() == [2, 2, 2]
    assert not gives_promises(made)
    assert type(make_policy("tide")) is Tide, "a check would cost each decision time"


@pytest.mark.parametrize(
    "answer", ["return Decision(gpus[:-1])", "return Decision(gpus / 2)", "raise KeyError(7)"]
)
def test_a_live_platform_goes_on_with_the_default_policy_and_says_so(
    plug_in: Callable[[str], None], tmp_path: Path, answer: str
) -> None:
    plug_in(PLUGIN.replace("ANSWER", answer))
    (tmp_path / "train.py").write_text("# nothing to train\n")
    store = Store(connect(str(tmp_path / "store.db")))
    plane = ControlPlane(store, NullEngine(Cluster.parse("1x4")), home=tmp_path, policy="odd:after=1")
    plane.come_up()
    request = JobRequest(name="job", script="train.py", workdir=str(tmp_path))
    plane.jobs.submit(request, "ann")
    plane.turn()
    assert plane.policy() == "odd:after=1" and plane.failed_policy is None
    second = plane.jobs.submit(replace(request, deadline_s=time.time() + 3600), "ann")
    plane.turn()
    plane.turn()
    assert plane.policy() == DEFAULT
    assert all(plane.jobs.get(job.job_id).wanted for job in plane.jobs.find()), "both have slots by now"
    (event,) = [event for _, event in plane.events() if event.kind is EventKind.POLICY_REPLACED]
    assert (event.data["policy"], event.data["by"]) == ("odd:after=1", DEFAULT)
    assert plane.failed_policy == event.data
    assert "failed and is replaced by 'tide'" in line(event.time_s, event.kind, "odd", event.data)
    plane.set_policy("fifo")
    assert plane.failed_policy is None and plane.jobs.get(second.job_id).phase is not None
    store.close()


def test_a_stored_policy_that_is_gone_does_not_keep_a_platform_from_starting(tmp_path: Path) -> None:
    store = Store(connect(str(tmp_path / "store.db")))
    store.set_setting("policy", "was-uninstalled:p=1")
    plane = ControlPlane(store, NullEngine(Cluster.parse("1x4")), home=tmp_path)
    plane.come_up()
    assert plane.policy() == DEFAULT and plane.failed_policy is not None
    assert "unknown policy 'was-uninstalled'" in plane.failed_policy["reason"]
    store.close()
