"""Pictures of every page of the dashboard, for the documentation.

python -m benchmarks.dashboard.screenshots [DIRECTORY [PART...]]

Parts: desk, whatif, looks, terminal, teams. Without any, all of them are taken.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.dashboard.browser import admin_token, browser, open_page
from benchmarks.dashboard.stage import Part, Stage, play
from swell.domain import Team

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

DESK = {"viewport": {"width": 1280, "height": 860}, "device_scale_factor": 1.5}
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True}


def main() -> None:
    """Take them."""
    where = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures")
    where.mkdir(parents=True, exist_ok=True)
    parts = sys.argv[2:] or ["desk", "whatif", "looks", "terminal", "teams"]
    with tempfile.TemporaryDirectory() as folder, play(Path(folder) / "home") as stage:
        if "terminal" in parts:
            asyncio.run(terminal(stage, where))
        with browser() as opened:
            if "desk" in parts:
                desk(stage, opened, where)
            if "looks" in parts:
                looks(stage, opened, where)
            if "whatif" in parts:
                whatif(stage, opened, where)
            if "teams" in parts:  # the last one, because it changes who has what
                teams(stage, opened, where)


def enter(stage: Stage, opened: Browser, path: str, options: dict[str, object]) -> Page:
    """A page, signed in as the administrator."""
    assert stage.server is not None
    page = open_page(opened, stage.server.url, admin_token(stage.home), path, **options)
    page.locator("main .card").first.wait_for()
    return page


def desk(stage: Stage, opened: Browser, where: Path) -> None:
    """Every page, one after the other, in one window."""
    page = enter(stage, opened, "/#/cluster", DESK)
    page.wait_for_timeout(4500)  # a few progress reports, for the speeds
    shoot(page, where / "cluster.png", whole=True)
    page.get_by_role("link", name="Queue").click()
    page.locator("table.jobs tbody tr").nth(5).wait_for()
    shoot(page, where / "queue.png")
    for name in ("bert-long", "bert-probe", "bert-finetune"):
        page.get_by_label(f"Compare {name}", exact=True).check()
    page.get_by_role("button", name="Compare 3 jobs").click()
    page.locator(".curve canvas").nth(3).wait_for()
    page.get_by_label("Smoothing").select_option("0.6")
    shoot(page, where / "compare.png", whole=True)
    page.get_by_role("link", name="bert-long").click()
    page.locator(".curve canvas").nth(6).wait_for()
    page.get_by_text("epoch").first.wait_for()
    page.wait_for_timeout(2500)
    shoot(page, where / "job.png", whole=True)
    page.get_by_role("link", name="Submit").click()
    for label, text in (
        ("Script", "gpt.py"),
        ("Arguments", "--seconds 9000"),
        ("Name", "gpt-urgent"),
        ("Done within", "5m"),
    ):
        page.get_by_label(label, exact=True).fill(text)
    page.get_by_text("Take it").wait_for()
    page.evaluate("document.getElementById('workdir').value = '/home/grace/language'")  # not a temporary path
    shoot(page, where / "submit.png")


def looks(stage: Stage, opened: Browser, where: Path) -> None:
    """The cluster in the dark and on a phone."""
    for name, options in (("cluster-dark", DESK | {"color_scheme": "dark"}), ("cluster-phone", PHONE)):
        shoot(enter(stage, opened, "/#/cluster", options), where / f"{name}.png")


def whatif(stage: Stage, opened: Browser, where: Path) -> None:
    """The history replayed under other policies."""
    page = enter(stage, opened, "/#/whatif", DESK)
    page.get_by_label("elasticflow").first.wait_for()
    page.get_by_role("button", name="Replay").click()
    page.get_by_role("heading", name="Side by side").wait_for(timeout=240_000)
    shoot(page, where / "whatif.png", whole=True)


def teams(stage: Stage, opened: Browser, where: Path) -> None:
    """The same jobs, shared out among teams."""
    for name, slots, user in (("vision", 12, "ada"), ("language", 8, "alan"), ("ranking", 8, "grace")):
        stage.plane.teams.change(Team(name=name, slots=slots, users=(user,)), force=True)
    stage.plane.teams.change(Team(name="robotics", slots=3, users=("rosa",)), force=True)
    stage.submit(Part(0, "gpt-urgent", "gpt.py", 9000, owner="alan", priority="high", most=3))
    page = enter(stage, opened, "/#/cluster", DESK)
    page.locator("table.teams td.number:nth-child(5)").filter(has_text=re.compile("[1-9]")).first.wait_for()
    page.wait_for_timeout(2500)
    card = page.locator("section.card").filter(has=page.locator("table.teams"))
    card.screenshot(path=where / "teams.png")
    print(where / "teams.png")


async def terminal(stage: Stage, where: Path) -> None:
    """`swell top`: the cluster, and a job."""
    from swell.api.client import AsyncClient
    from swell.cli._top import TopApp

    assert stage.server is not None
    async with AsyncClient(stage.server.url, admin_token(stage.home)) as client:
        top = TopApp(client)
        await top.feed.read()
        async with top.run_test(size=(150, 46)) as pilot:
            await pilot.pause(3.0)
            picture(top.export_screenshot(title="swell top"), where / "top.png")
            await pilot.press("slash", *"bert-long", "enter", "enter")
            await pilot.pause(3.0)
            picture(top.export_screenshot(title="swell top: a job"), where / "top-job.png")


def picture(text: str, path: Path) -> None:
    """A picture of a terminal, with a font that is here."""
    from resvg_py import svg_to_bytes

    drawn = re.sub(r"@font-face \{.*?\}", "", text, flags=re.DOTALL).replace("Fira Code", "DejaVu Sans Mono")
    path.write_bytes(bytes(svg_to_bytes(svg_string=drawn, monospace_family="DejaVu Sans Mono")))
    print(path)


def shoot(page: Page, path: Path, *, whole: bool = False) -> None:
    """One picture."""
    page.screenshot(path=path, full_page=whole)
    print(path)


if __name__ == "__main__":
    main()
