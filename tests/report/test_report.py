"""Reports: lanes and figures read from events, and a page that runs nothing and needs nothing."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from swell.cli import main
from swell.domain import Event, EventKind, write_events
from swell.report import page as report_page
from swell.report import svg
from swell.report.lanes import lanes
from swell.report.page import grouped, moving, page, sentences
from swell.report.runs import Run

EVIL = "</title><script>alert(1)</script>"


def job(kind: EventKind, time_s: float, job_id: str = "a", **data: object) -> Event:
    return Event(time_s, kind, job_id=job_id, data=data)


def node(kind: EventKind, time_s: float, name: str = "n0", gpus: int = 4) -> Event:
    return Event(time_s, kind, node=name, data={"gpus": gpus})


def two_jobs(name: str = "a") -> list[Event]:
    """On four GPUs: one job alone, both with two each, then the second with all four."""
    return [
        node(EventKind.NODE_JOINED, 0),
        job(EventKind.SUBMITTED, 0, name, name=name, deadline_s=25.0),
        job(EventKind.ALLOCATED, 0, name, gpus=[0, 1, 2, 3], pause_s=1.0),
        job(EventKind.SUBMITTED, 10, "b"),
        job(EventKind.RESIZED, 10, name, gpus=[0, 1], before=[0, 1, 2, 3], pause_s=0.5),
        job(EventKind.ALLOCATED, 10, "b", gpus=[2, 3]),
        job(EventKind.FINISHED, 20, name, jct_s=20.0, met=True),
        job(EventKind.RESIZED, 20, "b", gpus=[0, 1, 2, 3], before=[2, 3], pause_s=0.5),
        job(EventKind.FINISHED, 30, "b", jct_s=20.0, met=None),
    ]


def test_lanes_tell_who_had_how_many_gpus() -> None:
    found = lanes(two_jobs())
    assert found.jobs["a"].changes == [(0, 4), (10, 2), (20, 0)]
    assert found.jobs["b"].held(30) == [(10, 20, 2), (20, 30, 4)]
    assert found.capacity == [(0, 4)]
    assert found.jobs["a"].resizes == 1 and found.jobs["a"].pause_s == 0.5


def test_a_job_that_a_person_cancelled_neither_met_nor_missed_its_deadline() -> None:
    def run(*ends: Event) -> tuple[int, int]:
        come = [job(EventKind.SUBMITTED, 0, name, deadline_s=25.0) for name in "abc"]
        return Run.read("live", [*come, *ends]).deadlines

    met, gone = job(EventKind.FINISHED, 20, "a", met=True), job(EventKind.CANCELLED, 9, "b", by="ann")
    assert run(met, gone) == (1, 1)
    late = job(EventKind.CANCELLED, 9, "b", by="its time limit of 9 s")
    assert run(late, job(EventKind.REJECTED, 1, "c")) == (0, 2)


def test_a_log_that_begins_in_the_middle_knows_what_was_held_before() -> None:
    found = lanes(two_jobs()[4:6], began_s=5.0)
    assert found.jobs["a"].changes == [(5.0, 4), (10, 2)]
    assert found.capacity == [(5.0, 4)]  # the highest GPU that was given out


def test_capacity_follows_nodes_that_come_and_go() -> None:
    both = [node(EventKind.NODE_JOINED, 0, "n0"), node(EventKind.NODE_JOINED, 0, "n1", 8)]
    away = [node(EventKind.NODE_LOST, 5, "n1", 8), node(EventKind.NODE_JOINED, 9, "n1", 8)]
    assert lanes(both + away).capacity == [(0, 12), (5, 4), (9, 12)]
    # A simulation names only the nodes that it loses.
    assert lanes([job(EventKind.ALLOCATED, 0, gpus=[15]), *away]).capacity == [(0, 16), (5, 8), (9, 16)]


def test_what_is_reserved_is_not_capacity() -> None:
    both = [node(EventKind.NODE_JOINED, 0, "n0"), node(EventKind.NODE_JOINED, 0, "n1", 8)]
    held = [
        Event(at_s, EventKind.HELD, data={"reservation": "web", "gpus": gpus, "before": before})
        for at_s, gpus, before in ((5, [1, 2], []), (9, [], [1, 2]))
    ]
    assert lanes(both + held).capacity == [(0, 12), (5, 10), (9, 12)]
    assert lanes([job(EventKind.ALLOCATED, 0, gpus=[15]), *held]).capacity == [(0, 16), (5, 14), (9, 16)]


def test_figures_of_a_run() -> None:
    run = Run.read("live", two_jobs())
    assert run.jct_s.tolist() == [20, 20]
    assert run.deadlines == (1, 1)
    assert run.utilisation == pytest.approx(1.0, abs=0.01)
    assert run.waiting.tolist() == [0, 0]
    assert run.fairness == pytest.approx(1.0)
    assert run.span == (0, 30)


def test_a_refused_job_missed_its_deadline() -> None:
    refused = [job(EventKind.SUBMITTED, 1, "c", deadline_s=2.0), job(EventKind.REJECTED, 1, "c", reason="no")]
    run = Run.read("live", [*two_jobs(), *refused])
    assert (run.deadlines, run.refused, len(run.finished)) == ((1, 2), 1, 2)


def test_runs_with_the_same_jobs_are_compared() -> None:
    runs = [
        Run.read("week.x.afs", two_jobs()),
        Run.read("other", two_jobs("z")),
        Run.read("week.x.edf", two_jobs()),
    ]
    groups = grouped(runs)
    assert [(title, [run.label for run in members]) for title, members in groups] == [
        ("x: 2 jobs", ["afs", "edf"]),
        ("other: 2 jobs", ["other"]),
    ]


class Page(HTMLParser):
    """All tags of a page, and whatever could load or run something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.suspect: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.suspect += [(tag, name) for name, _ in attrs if name.startswith("on") or name in ("src", "href")]


def test_a_page_runs_and_loads_nothing_whatever_the_names_are() -> None:
    text = page(EVIL, grouped([Run.read(EVIL, two_jobs(EVIL)), Run.read("x", two_jobs(EVIL))]))
    seen = Page(text)
    assert "script" not in seen.tags and seen.suspect == []
    assert "&lt;script&gt;alert(1)" in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "") and "https://" not in text
    assert "default-src 'none'" in text


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "live.jsonl"
    path.write_text("".join(write_events(two_jobs())))
    return path


def test_the_command_writes_a_page(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    done = CliRunner().invoke(main, ["report", str(log), f"again={log}", "-o", str(out), "--title", "A week"])
    assert done.exit_code == 0, done.output
    text = out.read_text()
    assert "<h1>A week</h1>" in text and ">live</th>" in text and ">again</th>" in text
    assert "100 %" in text


def test_charts_are_svg_files_that_stand_alone(log: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["report", str(log), "-o", str(tmp_path / "r"), "--format", "svg"])
    assert done.exit_code == 0, done.output
    names = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert names == [
        "r-completion-times.svg",
        "r-deadlines-met.svg",
        "r-gpus-in-use-over-time.svg",
        "r-lanes-live.svg",
        "r-resizes.svg",
        "r-waiting.svg",
    ]
    for path in tmp_path.glob("*.svg"):
        assert ET.parse(path).getroot().tag.endswith("svg")
        assert "var(" not in path.read_text()  # which drawing programs do not know
    assert ">live</text>" in (tmp_path / "r-completion-times.svg").read_text()


def test_a_moving_picture_tells_what_happens_and_can_stand_still() -> None:
    run = Run.read("live", two_jobs(EVIL))
    told = sentences(run)
    assert any("swells from" in words or "ebbs from" in words for _, words in told)
    assert [share for share, _ in told] == sorted(share for share, _ in told) and told[-1][0] <= 1.0
    text = moving(run)
    assert ET.fromstring(text).tag.endswith("svg") and "<script" not in text
    assert "prefers-reduced-motion" in text and text.count('class="told') == text.count("step-end") > 2


@pytest.mark.parametrize("system_fonts", [True, False])
def test_charts_are_pixels_with_their_texts(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system_fonts: bool
) -> None:
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("resvg_py")
    drawn = partial(report_page.pixels, system_fonts=system_fonts)  # False: a machine without fonts
    monkeypatch.setattr(report_page, "pixels", drawn)
    done = CliRunner().invoke(main, ["report", str(log), "-o", str(tmp_path / "r"), "--format", "png"])
    assert done.exit_code == 0, done.output
    assert len(list(tmp_path.glob("*.png"))) == 6
    with image.open(tmp_path / "r-resizes.png") as opened:
        assert opened.width == 3 * svg.WIDTH
        grey = opened.convert("L")
        label = grey.crop((0, 0, 3 * 140, grey.height))  # only the run's name is there
        assert grey.getpixel((0, 0)) == 255 and label.getextrema()[0] < 100


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot read"), ("{}\n", "not an event line"), ("", "has no event of a job")],
)
def test_a_bad_log_is_named(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content)
    done = CliRunner().invoke(main, ["report", str(path), "-o", str(tmp_path / "out.html")])
    assert done.exit_code == 2
    assert "bad.jsonl" in done.output and said in done.output


def test_a_simulation_writes_its_page_and_leaves_nothing_else(tmp_path: Path) -> None:
    jobs, out = tmp_path / "jobs.csv", tmp_path / "page.html"
    made = CliRunner().invoke(main, ["generate", "--jobs", "12", "--seed", "1", "-o", str(jobs)])
    assert made.exit_code == 0, made.output
    words = ["simulate", str(jobs), "--cluster", "2x4", "--policy", "max-min", "--policy", "fifo", "-j", "1"]
    done = CliRunner().invoke(main, [*words, "--html", str(out)])
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["jobs.csv", "page.html"]
    text = out.read_text()
    assert re.search(r">max-min</th>", text) and re.search(r">fifo</th>", text)
