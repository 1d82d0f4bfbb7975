"""How fast the page is with a large log: 2,000 jobs and 1,024 GPUs, 50 events a second.

python -m benchmarks.dashboard.scale [--jobs N] [--seconds S]
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import swell
from benchmarks.dashboard.browser import admin_token, browser, open_page
from benchmarks.dashboard.stage import KINDS, Part, Stage

if TYPE_CHECKING:
    from playwright.sync_api import Page

WATCH = """
() => {
  window.frames_ms = [];
  window.long_ms = [];
  new PerformanceObserver((list) => window.long_ms.push(...list.getEntries().map((one) => one.duration)))
    .observe({type: "longtask"});
  let last = performance.now();
  const frame = (now) => { window.frames_ms.push(now - last); last = now; requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
}
"""


def main() -> None:
    """Measure, and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=15.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stage = crowded(Path(folder) / "home", given.jobs)
        try:
            print(json.dumps(measure(stage, given.seconds), indent=2))
        finally:
            stage.close()


def crowded(home: Path, jobs: int, hours: float = 4.0) -> Stage:
    """Some hours of many jobs on 128 nodes of 8 GPUs, then live."""
    rng = random.Random(1)
    span_s = hours * 3600
    stage = Stage(home, "128x8", policy="max-min", began_s=time.time() - span_s)
    scripts = list(KINDS)
    parts = []
    for i in range(jobs):
        at_s, alone_s, most = rng.uniform(0, span_s), rng.uniform(600, 12_000), rng.choice([4, 8, 16, 32])
        parts.append(Part(at_s, f"job-{i}", rng.choice(scripts), alone_s, most=most))
    stage.engine.quiet = True
    stage.rehearse(parts, time.time(), losses=[(span_s - 900, span_s - 300, "n7")], every_s=30.0)
    stage.engine.quiet, stage.engine.every_s = False, 4.5
    stage.go_live()
    return stage


def measure(stage: Stage, seconds: float) -> dict[str, Any]:
    """First paint and frames of each page."""
    assert stage.server is not None
    with browser() as opened:
        page = open_page(
            opened, stage.server.url, admin_token(stage.home), viewport={"width": 1280, "height": 900}
        )
        page.reload()
        page.locator("main .card").first.wait_for()
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
        view = page.evaluate("performance.getEntriesByName('swell-first-view')[0]?.startTime")
        out: dict[str, Any] = {
            "jobs": len(stage.plane.jobs.find(limit=100_000)),
            "running": sum(bool(job.wanted) for job in stage.plane.jobs.find(limit=100_000)),
            "gpus": stage.slots,
            "events": stage.store.last_seq(),
            "first_paint_ms": paint,
            "first_view_ms": view,
            "page_gzip_kb": round(weight() / 1000, 1),
        }
        page.evaluate(WATCH)
        for name in ("Cluster", "Queue"):
            page.get_by_role("link", name=name).click()
            out[name.lower()] = watched(page, stage, seconds)
        return out


def watched(page: Page, stage: Stage, seconds: float) -> dict[str, float]:
    """Frames of the page while events arrive."""
    page.wait_for_timeout(2000)
    page.evaluate("() => { window.frames_ms = []; window.long_ms = []; }")
    before, began_s = stage.store.last_seq(), time.monotonic()
    page.wait_for_timeout(seconds * 1000)
    frames, long = page.evaluate("[window.frames_ms, window.long_ms]")
    passed_s = time.monotonic() - began_s
    return {
        "events_per_s": round((stage.store.last_seq() - before) / passed_s, 1),
        "frames": len(frames),
        "longest_frame_ms": round(max(frames), 1),
        "longest_task_ms": round(max(long, default=0.0), 1),
    }


def weight() -> int:
    """Bytes of the page, compressed."""
    web = Path(swell.__file__).parent / "web"
    return sum(
        len(gzip.compress((web / name).read_bytes()))
        for name in ("index.html", "app.js", "app.css", "icon.svg")
    )


if __name__ == "__main__":
    main()
