"""The live screen of `swell top`, driven by keys against a real server whose jobs pretend to train."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from benchmarks.dashboard.stage import Part, Stage
from click.testing import CliRunner

from swell.api.client import AsyncClient
from swell.api.refusals import NotAuthenticated
from swell.api.schemas import EventView
from swell.cli import _top, main, top
from swell.report.lanes import Lane, apart

app = pytest.importorskip("swell.cli._top")
job_page = pytest.importorskip("swell.cli._top")
HOSTILE = "[bold]evil[/bold]"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Two jobs that train and one that ended, a minute old."""
    made = Stage(tmp_path_factory.mktemp("stage"), "2x4", policy="max-min", began_s=time.time() - 60)
    parts = [
        Part(0, "steady", "gpt.py", 90_000),
        Part(20, "promised", "bert.py", 900, within_s=600),
        Part(30, "short", "resnet50.py", 20),
    ]
    made.rehearse(parts, time.time())
    made.go_live()
    yield made
    made.close()


@pytest.fixture
def client(stage: Stage) -> AsyncClient:
    assert stage.server is not None
    return AsyncClient(stage.server.url, (stage.home / "tokens" / "admin").read_text().strip(), retry_s=0.0)


def on_screen(client: AsyncClient, play: Callable[..., Awaitable[None]], size: tuple[int, int]) -> None:
    """Run the screen without a terminal, and what a person would do with it."""

    async def run() -> None:
        shown = app.TopApp(client)
        await shown.feed.read()
        async with shown.run_test(size=size) as pilot:
            await pilot.pause()
            await play(shown, pilot)
        await client.close()

    asyncio.run(run())


async def until(pilot: Any, condition: Callable[[], object], what: str) -> None:
    """Wait for the screen to show something."""
    for _ in range(300):
        if condition():
            return
        await pilot.pause(0.1)
    raise AssertionError(f"waited for {what}")


def text_of(widget: Any) -> str:
    return str(widget.render())


def test_lanes_queue_and_a_jobs_curves_are_shown_and_live(stage: Stage, client: AsyncClient) -> None:
    async def play(shown: Any, pilot: Any) -> None:
        live, queue, lanes = shown.live, shown.queue, shown.query_one(app.LanesPanel)
        await until(pilot, lambda: "promised" in text_of(lanes), "the lanes")
        assert {"steady", "promised"} <= {str(queue.get_row_at(i)[0]).split()[1] for i in range(3)}
        assert "8 slots" in text_of(lanes) and "n0" in text_of(lanes)
        assert "slots in use" in text_of(shown.query_one("#head"))

        # A job that comes is seen without asking.
        stage.submit(Part(0, "newcomer", "gpt.py", 90_000))
        await until(pilot, lambda: "newcomer" in text_of(lanes), "the lane of a new job")
        await until(pilot, lambda: queue.row_count >= 4, "the new job in the queue")
        await pilot.press("slash", *"ste", "enter")
        assert queue.row_count == 1

        # Its page has curves, and what happened to it with pauses.
        await pilot.press("enter")
        page = shown.screen
        assert isinstance(page, job_page.JobScreen)

        def titles() -> set[str]:
            return {text_of(plot).split("  ")[0].strip() for plot in page._plots}

        await until(pilot, lambda: {"GPUs", "Loss", "Goodput (it/s)", "Batch size"} <= titles(), "the curves")
        assert any("⠀" < character < "⣿" for character in text_of(page._plots[1]))
        await until(pilot, lambda: "pause" in text_of(page.query_one("#changes")), "a resize")

        # It is paused only once that was confirmed, and goes on when asked to.
        steady = next(job.job_id for job in live.jobs.values() if job.name == "steady")
        await pilot.press("p")
        assert isinstance(shown.screen, job_page.Confirm)
        await pilot.press("escape")
        assert stage.plane.jobs.get(steady).phase.value == "running"
        await pilot.press("p", "y")
        await until(pilot, lambda: live.jobs[steady].phase.value == "paused", "the pause")
        await pilot.press("p")
        await until(pilot, lambda: live.jobs[steady].phase.value != "paused", "the end of the pause")
        await pilot.press("escape", "slash", "escape")
        assert queue.row_count >= 4

    on_screen(client, play, (120, 40))


def test_keys_work_on_a_small_terminal_and_the_screen_outlives_the_server(
    stage: Stage, client: AsyncClient
) -> None:
    async def play(shown: Any, pilot: Any) -> None:
        live = shown.live
        await pilot.press("question_mark")
        assert isinstance(shown.screen, app.HelpScreen)
        await pilot.press("escape", "e")
        assert isinstance(shown.screen, app.EventsScreen)
        log = shown.screen.query_one("RichLog")
        await until(pilot, lambda: any("submitted" in line.text for line in log.lines), "events")
        await pilot.press("escape", "plus")
        assert shown.query_one(app.LanesPanel).span_s == 6 * 3600.0
        rows = shown.queue.row_count
        await pilot.press("a")
        assert shown.queue.row_count < rows

        # The server goes away and comes back: the screen says so, and follows.
        assert stage.server is not None
        await asyncio.to_thread(stage.server.stop)
        await until(pilot, lambda: "reconnecting" in text_of(shown.query_one("#head")), "the lost connection")
        await asyncio.to_thread(stage.restart)
        await until(pilot, lambda: live.connected, "the connection")
        stage.submit(Part(0, "afterwards", "gpt.py", 90_000))
        await until(pilot, lambda: any(j.name == "afterwards" for j in live.jobs.values()), "a new job")
        await pilot.press("q")

    on_screen(client, play, (80, 24))


def test_a_wrong_token_is_refused_before_there_is_a_screen(stage: Stage) -> None:
    async def run() -> None:
        assert stage.server is not None
        async with AsyncClient(stage.server.url, "swell_wrong", retry_s=0.0) as stranger:
            await app.watch(stranger)

    with pytest.raises(NotAuthenticated):
        asyncio.run(run())


def test_a_jobs_fit_is_told_while_it_runs_and_when_it_is_over(stage: Stage) -> None:
    jobs = {job.request.name: job for job in stage.plane.jobs.find()}
    running, ended = (stage.plane.jobs.explain(jobs[name].job_id) for name in ("steady", "short"))
    assert jobs["short"].phase.over and len(ended["curve"]) == len(running["curve"]) == 9
    assert [one["workers"] for one in running["steps"]] == [1, 2, 4] and ended["steps"] == []
    for one in running["steps"]:
        assert one["rate"] == pytest.approx(running["curve"][one["workers"]], rel=0.05)


@pytest.mark.parametrize(
    ("words", "terminal", "textual", "shown"),
    [
        ([], True, True, "screen"),
        ([], True, False, "tables"),
        ([], False, True, "tables"),
        (["--plain"], True, True, "tables"),
        (["--once"], True, True, "once"),
    ],
)
def test_the_screen_is_for_terminals_with_textual(
    words: list[str], terminal: bool, textual: bool, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    for name in ("screen", "tables", "once"):
        monkeypatch.setattr(top, f"_{name}", lambda *_, said=name, **__: called.append(said))
    monkeypatch.setattr(top, "find_spec", lambda _: object() if textual else None)
    # rich takes the output for a terminal if colours are forced.
    monkeypatch.setenv("FORCE_COLOR", "1") if terminal else monkeypatch.delenv("FORCE_COLOR", raising=False)
    done = CliRunner().invoke(main, ["top", *words])
    assert done.exit_code == 0, done.output
    assert called == [shown]


# -- drawing -----------------------------------------------------------------------------------------------


def test_a_lane_shows_numbers_where_they_change_and_is_higher_with_more() -> None:
    lane = Lane("a", HOSTILE, changes=[(0.0, 4), (50.0, 1), (80.0, 0)], ended_s=80.0)
    line = _top.lane_line(lane, "#ffffff", _top.Window(0.0, 100.0, 20), 4).plain
    assert line == "4" + "█" * 9 + "1" + "▄" * 5 + " " * 4


def test_the_river_stacks_jobs_under_what_there_is() -> None:
    lanes = [Lane("a", "a", changes=[(0.0, 2)]), Lane("b", "b", changes=[(50.0, 1)])]
    paint = {"a": "#111111", "b": "#222222"}
    capacity = [(0.0, 4), (75.0, 2)]
    marks = [(75.0, "node_lost", "n1")]
    lines = _top.river(lanes, capacity, 4, marks, paint, _top.Window(0.0, 100.0, 4), 2)
    assert [line.plain for line in lines] == ["··▄▼", "████"]
    assert lines[0].spans[1].style == "#222222"


def test_a_curve_falls_from_its_highest_to_its_lowest_line() -> None:
    window = _top.Window(0.0, 10.0, 10)
    lines = [text.plain for text in _top.plot([(0.0, 3.0), (10.0, 1.0)], window, 4)]
    assert lines[0].startswith("       3 ") and lines[3].startswith("       1 ")
    assert lines[0][9] != " " and lines[0][18] == " " and lines[3][18] != " " and lines[3][9] == " "
    assert _top.plot([], window, 4)[0].plain == "nothing reported yet"


def test_jobs_at_the_same_time_have_different_colours() -> None:
    spans = {f"job{i}": (float(i), i + 3.5) for i in range(40)}
    chosen = apart(spans, 4)
    for i in range(37):
        assert len({chosen[f"job{j}"] for j in range(i, i + 4)}) == 4
    assert set(apart(spans, 2).values()) == {0, 1}


def test_the_speed_is_known_from_events_before_the_reading() -> None:
    live = app.LiveCluster()
    live.begins_at(10)
    for seq, (time_s, done) in enumerate([(0.0, 0.0), (2.0, 10.0)], start=5):
        live.apply(EventView(seq=seq, time_s=time_s, kind="progress", job_id="a", data={"done": done}))
    live.apply(EventView(seq=7, time_s=3.0, kind="resized", job_id="b", data={"gpus": [1, 2]}))
    assert list(live._points["a"]) == [(0.0, 0.0), (2.0, 10.0)]
    assert live.lanes == {} and live.stale == set()
    live.apply(EventView(seq=11, time_s=4.0, kind="resized", job_id="b", data={"gpus": [1, 2]}))
    assert live.lanes["b"].changes == [(4.0, 2)] and live.stale == {"b"}
