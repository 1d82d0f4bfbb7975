"""The dashboard in a real Chromium: a life of real jobs on a real platform, and every page checked by axe."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from benchmarks.dashboard.browser import admin_token, browser, missing, open_page
from benchmarks.dashboard.stage import Part, Stage

from swell.api.server import Server
from swell.control.plane import ControlPlane
from swell.control.store import Store, connect
from swell.domain import Team
from swell.engines.local import LocalSite
from swell.engines.nursery import Nursery
from swell.engines.processes import processes_of
from swell.engines.supervised import SupervisedEngine

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "there is a browser"),
    pytest.mark.slow,
]

TOY = Path(__file__).parents[1] / "engines" / "toy.py"
HOSTILE = "<img src=x onerror=window.harmed=1>.py"
HOSTILE_SCRIPT = f"""
import runpy
print("<script>window.harmed = 1</script><b>bold?</b>", flush=True)
runpy.run_path({str(TOY)!r}, run_name="__main__")
"""
LONG_MS = 90_000


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture
def platform(tmp_path: Path, nursery: Nursery) -> Iterator[_Platform]:
    made = _Platform(tmp_path)
    yield made
    made.close()


class _Platform:
    """A control plane with local processes and a server that can be restarted."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.plane = self._plane()
        self.server = Server(self.plane, self.plane.store, home=home, port=0)
        self.server.start()
        self.port = int(self.server.url.rsplit(":", 1)[1])

    def _plane(self) -> ControlPlane:
        store = Store(connect(str(self.home / "store.db")))
        engine = SupervisedEngine(LocalSite(self.home, nodes="1x4"))
        plane = ControlPlane(store, engine, home=self.home, policy="elasticflow", interval_s=1.0)
        plane.start()
        return plane

    def go_away(self) -> None:
        self.server.stop()
        self.plane.stop()
        self.plane.store.close()

    def come_back(self) -> None:
        self.plane = self._plane()
        self.server = Server(self.plane, self.plane.store, home=self.home, port=self.port)
        self.server.start()

    def close(self) -> None:
        for record in self.plane.jobs.find():
            if not record.phase.over:
                with contextlib.suppress(Exception):
                    self.plane.jobs.cancel(record.job_id)
        self.go_away()
        for folder in (self.home / "jobs").glob("*"):
            for pid in processes_of(folder):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def fill(page: Page, **fields: str) -> None:
    """Type into the form."""
    for label, text in fields.items():
        page.get_by_label(label.replace("_", " "), exact=True).fill(text)


def gpus_of(page: Page, name: str, count: str) -> None:
    """Wait until the queue shows this many GPUs for a job."""
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name=name, exact=True))
    row.locator("td:nth-child(3)").filter(has_text=re.compile(f"^({count})$")).wait_for(timeout=LONG_MS)


def state_of(page: Page, name: str, phase: str) -> None:
    """Wait until the queue shows this phase for a job."""
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name=name, exact=True))
    row.locator(f".pill.{phase}").wait_for(timeout=LONG_MS)


def test_a_life_seen_in_the_browser(platform: _Platform, chromium: Browser, tmp_path: Path) -> None:
    hurry = tmp_path / "hurry"
    (tmp_path / HOSTILE).write_text(HOSTILE_SCRIPT)
    # Minutes of work on all slots, until it may hurry: it does not end while a busy machine gets this far.
    toy = f"--epochs 100 --sample-ms 12 --hurry {hurry}"

    page = chromium.new_context().new_page()
    page.set_default_timeout(LONG_MS)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(platform.server.url)
    page.get_by_label("Token").fill("swell_wrong")
    page.get_by_role("button", name="Sign in").click()
    page.get_by_text("this token is not known here").wait_for()
    page.get_by_label("Token").fill(admin_token(tmp_path))
    page.get_by_role("button", name="Sign in").click()
    page.locator(".connection.up").wait_for()
    assert "swell_" not in page.url
    assert not page.get_by_role("heading", name="Teams").is_visible()  # there are none

    # Submitted by the form, with a quote as one types. Its script is named like markup and prints some.
    page.get_by_role("link", name="Submit").click()
    fill(page, Script=HOSTILE, Directory=str(tmp_path), Arguments=toy, Name="first")
    page.get_by_text("Best effort.").wait_for()
    page.get_by_role("button", name="Submit").click()
    page.get_by_role("heading", name="first", exact=True).wait_for()
    page.get_by_text("<b>bold?</b>").wait_for(timeout=LONG_MS)
    page.get_by_text(HOSTILE).wait_for()
    assert page.evaluate("window.harmed") is None

    # It grows to all four slots; its loss moves, without a reload.
    loss = (
        page.locator("figure.curve")
        .filter(has=page.get_by_role("heading", name="Loss"))
        .locator("figcaption")
    )
    loss.wait_for(timeout=LONG_MS)
    before = loss.text_content()
    page.wait_for_function(
        "([e, t]) => e.textContent !== t", arg=[loss.element_handle(), before], timeout=LONG_MS
    )
    page.get_by_role("link", name="Queue").click()
    gpus_of(page, "first", "4")

    # Another one comes, and the first makes room.
    page.get_by_role("link", name="Submit").click()
    fill(page, Script=str(TOY), Directory=str(tmp_path), Arguments=toy + " --seed 1", Name="second")
    page.get_by_role("button", name="Submit").click()
    page.get_by_role("heading", name="second", exact=True).wait_for()
    page.get_by_role("link", name="Queue").click()
    gpus_of(page, "first", "[123]")
    gpus_of(page, "second", "[123]")

    # Cancelled, but only once it was confirmed.
    page.get_by_role("link", name="second", exact=True).click()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Back").click()
    assert page.locator(".pill.running").count() == 1
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Cancel the job").click()
    page.locator(".pill.cancelled").wait_for()

    # The control plane goes away and comes back; the page follows, and sees the end.
    page.get_by_role("link", name="Queue").click()
    platform.go_away()
    page.get_by_text("reconnecting").wait_for()
    platform.come_back()
    page.locator(".connection.up").wait_for(timeout=LONG_MS)
    gpus_of(page, "first", "4")
    hurry.touch()
    state_of(page, "first", "finished")

    # Its kind is known now: too short a deadline is refused, with an offer that is then promised.
    page.get_by_role("link", name="Submit").click()
    hurry.unlink()
    fill(page, Script=HOSTILE, Directory=str(tmp_path), Arguments=toy, Name="third", Done_within="1s")
    page.get_by_text("cannot be promised").wait_for()
    page.get_by_role("button", name=re.compile("Take it")).click()
    page.get_by_text("Promised by").wait_for()
    assert problems == []
    assert page.evaluate("window.harmed") is None


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Pretended jobs of one team, a minute old; the other team has no job, and lends its slots."""
    made = Stage(tmp_path_factory.mktemp("stage"), "2x4", began_s=time.time() - 60)
    made.plane.teams.change(Team(name="vision", slots=4, users=("ada",)))
    made.plane.teams.change(Team(name="speech", slots=4, users=("eve",)))
    made.rehearse(
        [
            Part(0, "steady", "gpt.py", 90_000),
            Part(20, "promised", "bert.py", 900, within_s=600),
            Part(30, "short", "resnet50.py", 20, priority="high"),
        ],
        time.time(),
    )
    made.go_live()
    yield made
    made.close()


def test_no_page_has_serious_barriers(stage: Stage, chromium: Browser) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    assert stage.server is not None
    page = open_page(chromium, stage.server.url, admin_token(stage.home), bypass_csp=True)
    jobs = {job.request.name: job.job_id for job in stage.plane.jobs.find()}
    found = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        both = f"{jobs['steady']},{jobs['promised']}"
        for path in ("cluster", "queue", f"job/{jobs['steady']}", f"compare/{both}", "submit", "whatif"):
            page.evaluate(f"location.hash = '#/{path}'")
            page.locator("main .card").first.wait_for()
            found += [
                (scheme, path, one["id"], [node["html"][:120] for node in one["nodes"]][:3])
                for one in axe.run(page).response["violations"]
                if one["impact"] in ("serious", "critical")
            ]
    assert found == []


def test_a_viewer_looks_and_changes_nothing(stage: Stage, chromium: Browser) -> None:
    assert stage.server is not None
    secret, _ = stage.server.book.create("wall", "viewer")
    page = open_page(chromium, stage.server.url, secret, "/#/queue")
    page.get_by_role("link", name="steady", exact=True).click()
    page.get_by_role("heading", name="steady", exact=True).wait_for()
    assert page.get_by_role("button", name="Cancel").count() == 0
    job_id = page.url.rsplit("/", 1)[1]
    status = page.evaluate(
        "([id, token]) => fetch(`/v1/jobs/${id}/cancel`, {method: 'POST',"
        " headers: {Authorization: `Bearer ${token}`}}).then((answer) => answer.status)",
        [job_id, secret],
    )
    assert status == 403


def test_what_is_not_there_is_said_and_who_waits_has_a_lane(stage: Stage, chromium: Browser) -> None:
    assert stage.server is not None
    page = open_page(chromium, stage.server.url, admin_token(stage.home), "/#/job/nobody-1")
    page.get_by_role("heading", name="There is no such job").wait_for()
    page.evaluate("location.hash = '#/nowhere'")
    page.get_by_role("heading", name="There is no such page").wait_for()
    page.get_by_role("link", name="The cluster").click()
    summary = page.locator("#lanes-summary")
    summary.filter(has_text="are in use now").wait_for()
    summary.filter(has_not_text="wait").wait_for()
    job_id = stage.submit(Part(0, "patient", "bert.py", 9000, owner="eve"))
    stage.plane.jobs.pause(job_id)
    stage.plane.jobs.scale(job_id, 8, 8)
    stage.plane.jobs.resume(job_id)
    summary.filter(has_text="1 job waits.").wait_for()
    stage.plane.jobs.cancel(job_id)


def test_jobs_are_found_sorted_and_compared(stage: Stage, chromium: Browser) -> None:
    assert stage.server is not None
    page = open_page(chromium, stage.server.url, admin_token(stage.home), "/#/queue?find=stea")
    rows = page.locator("table.jobs tbody tr")
    page.get_by_role("link", name="steady", exact=True).wait_for()
    assert rows.count() == 1
    page.get_by_label("Filter jobs").fill("")
    page.wait_for_function("location.hash === '#/queue'")
    page.get_by_role("button", name="Progress").click()
    page.wait_for_function("document.querySelector('table.jobs tbody a').textContent === 'short'")
    assert page.locator('th[aria-sort="descending"]').count() == 1

    for name in ("steady", "promised"):
        page.get_by_label(f"Compare {name}", exact=True).check()
    page.get_by_role("button", name="Compare 2 jobs").click()
    loss = page.locator("figure.curve").filter(has=page.get_by_role("heading", name="Loss"))
    loss.get_by_text(re.compile("steady: .* promised: ")).wait_for()
    page.get_by_label("Horizontal axis").select_option("done")
    page.get_by_label("log scale").check()
    loss.locator("canvas").wait_for()

    # Dragging over one curve of a job zooms all of them; the way back is a button.
    page.get_by_role("link", name="steady", exact=True).click()
    page.get_by_text("Steps took").wait_for()
    page.get_by_text(re.compile("Measured by this job")).wait_for()
    box = page.locator(".curve .u-over").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 20, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 120, box["y"] + 24, steps=4)
    page.mouse.up()
    page.get_by_role("button", name="Show all").click()
    page.get_by_label("Find in the output").fill("no such words")
    page.get_by_text("0 lines").wait_for()

    page.get_by_role("link", name="Cluster").click()
    page.get_by_text(re.compile("(ebbs|swells) from")).first.wait_for()


def test_teams_are_shown_where_slots_and_jobs_are(stage: Stage, chromium: Browser) -> None:
    assert stage.server is not None
    page = open_page(chromium, stage.server.url, admin_token(stage.home))
    rows = page.locator("table.teams tbody tr")
    rows.get_by_role("link", name="speech").wait_for()
    # Quota, in use, borrowed, lent, running and waiting, in numbers beside the bars.
    assert rows.nth(0).locator("td.number").all_text_contents()[:4] == ["4", "8", "4", "0"]
    assert rows.nth(1).locator("td.number").all_text_contents() == ["4", "0", "0", "4", "0", "0"]

    # A job of the other team comes: what was lent goes back, and the page follows by its events.
    job_id = stage.submit(Part(0, "speaker", "bert.py", 9000, owner="eve"))
    rows.nth(1).locator("td.number").nth(1).filter(has_text=re.compile("^4$")).wait_for()
    rows.nth(0).locator("td.number").nth(2).filter(has_text=re.compile("^0$")).wait_for()
    stage.plane.jobs.cancel(job_id)

    rows.get_by_role("link", name="vision").click()
    jobs = page.locator("table.jobs tbody tr")
    jobs.filter(has_text="steady").get_by_text("ada · team vision").wait_for()
    assert jobs.filter(has_text="speaker").count() == 0
    assert jobs.filter(has_text="short").locator(".class-high").text_content() == "▲ high priority"
    page.get_by_role("link", name="steady", exact=True).click()
    page.locator(".tiles div").filter(
        has_text=re.compile("^teamvision · has 8 slots, 4 borrowed$")
    ).wait_for()

    # The server lets no such name in; if there were one, it would be text here.
    page.route(
        "**/v1/teams", lambda route: route.fulfill(body=route.fetch().text().replace("speech", HOSTILE))
    )
    page.get_by_role("link", name="Cluster").click()
    page.reload()
    rows.get_by_role("link", name=HOSTILE).wait_for()
    assert page.evaluate("window.harmed") is None
    assert page.locator("table.teams img").count() == 0


def test_keys_alone_reach_a_job_and_its_actions(stage: Stage, chromium: Browser) -> None:
    assert stage.server is not None
    page = open_page(chromium, stage.server.url, admin_token(stage.home), "/#/queue")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "steady":
            break
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Pause").wait_for()
    page.get_by_role("button", name="Pause").focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Pause steady?").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("heading", name="Pause steady?").wait_for(state="detached")
    assert page.locator(".pill.running").count() == 1


def test_a_job_that_cannot_be_shared_says_so_where_its_state_is_shown(
    stage: Stage, chromium: Browser
) -> None:
    assert stage.server is not None
    page = open_page(chromium, stage.server.url, admin_token(stage.home), "/#/queue")
    job_id = stage.submit(Part(0, "alone", "detector.py", 9000, most=3))
    state_of(page, "alone", "running")
    stage.engine.confine(job_id, 1, "it changes its parameters by hand")
    page.get_by_text("at most 1 worker: it changes its parameters by hand").wait_for()
    gpus_of(page, "alone", "1")
    page.get_by_role("link", name="alone", exact=True).click()
    fact = page.locator(".tiles div").filter(has_text="confined to")
    assert fact.text_content() == "confined to1 worker"
    page.get_by_text("gets no more than 1, because it changes its parameters by hand").wait_for()
    page.get_by_role("button", name="Bounds").click()
    assert page.get_by_label("Most GPUs").get_attribute("max") == "1"
