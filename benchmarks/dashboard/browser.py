"""Chromium, driven by Playwright, for tests, pictures and measurements of the dashboard."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def missing() -> str:
    """Why no browser can be driven here; empty if one can."""
    try:
        import playwright.sync_api  # noqa: F401
    except ModuleNotFoundError:
        return "playwright is not installed: pip install playwright"
    return "" if executable() else "there is no Chromium: apt-get install chromium, or set CHROMIUM"


def executable() -> str | None:
    """The path of a Chromium that is installed here."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=executable(), args=FLAGS)
        try:
            yield opened
        finally:
            opened.close()


def open_page(opened: Browser, url: str, token: str, path: str = "/#/cluster", **options: Any) -> Page:
    """A page of the dashboard, signed in by its own form."""
    page = opened.new_context(**options).new_page()
    page.goto(url + path)
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    page.locator(".connection.up").wait_for()
    return page


def admin_token(home: Path) -> str:
    """The administrator's token of a home."""
    return (home / "tokens" / "admin").read_text().strip()
