"""The documentation as a site that opens from disk: `make docs` runs it.

Pages are those of docs/, the README as the first one, the commands' reference from their own help, and the
API reference from docstrings. Warnings, dead links among them, end it with an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from swell.cli import SECTIONS, main

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "docs-src"
AT_THE_TOP = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages of the site that are not in docs/."""
SHIM = "https://unpkg.com/iframe-worker/shim"
PUBLIC = {
    "The SDK": ["swell.Client", "swell.AsyncClient", "swell.api.client.Calls"],
    "Training": ["swell.elastic"],
    "Policies": ["swell.policies.base", "swell.policies.snapshot"],
    "Simulator": ["swell.sim.engine", "swell.sim.metrics"],
    "Events": ["swell.domain.events"],
    "Reports": ["swell.report.lanes", "swell.report.runs"],
}


def build() -> int:
    """Make the pages, then the site; returns an exit code."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES)
    shutil.copytree(ROOT / "examples", PAGES / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "src" / "swell" / "web" / "icon.svg", PAGES / "pictures" / "icon.svg")
    for path in PAGES.rglob("*.md"):
        path.write_text(inside(path.read_text(), path.relative_to(PAGES).parent))
    for name, page in AT_THE_TOP.items():
        text = re.sub(r"\]\((?:\./)?docs/", "](", (ROOT / name).read_text())
        (PAGES / page).write_text(inside(text, Path()))
    (PAGES / "decisions" / "index.md").write_text(decisions())
    (PAGES / "reference" / "commands.md").write_text(commands())
    (PAGES / "reference" / "python.md").write_text(reference())
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--clean"], cwd=ROOT, env=quiet, check=False
    )
    if done.returncode == 0:
        search_from_disk(ROOT / "build" / "site")
        print(ROOT / "build" / "site" / "index.html")
    return done.returncode


def search_from_disk(site: Path) -> None:
    """Make the search load our own stand-in for workers, not one from the network."""
    shutil.copy(ROOT / "scripts" / "docs_worker.js", site / "assets" / "worker.js")
    for page in site.rglob("*.html"):
        up = "../" * (len(page.relative_to(site).parts) - 1)
        page.write_text(page.read_text().replace(SHIM, f"{up}assets/worker.js"))


def inside(text: str, folder: Path) -> str:
    """A page with its links as they are in the site."""

    def link(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        name = Path(target).name
        up = "../" * len(folder.parts)
        if "examples/" in target:
            return f"]({up}examples/{name})"
        if name in AT_THE_TOP:
            return f"]({up}{AT_THE_TOP[name]}{anchor})"
        if target.rstrip("/").endswith("decisions"):
            return f"]({up}decisions/index.md)"
        return found[0]

    return re.sub(r"\]\(([^)#\s:]+)(#[^)]*)?\)", link, text)


def decisions() -> str:
    """A list of the decisions."""
    lines = ["# Decisions", "", "Choices that a newcomer would question.", ""]
    for path in sorted((PAGES / "decisions").glob("0*.md")):
        title = path.read_text().splitlines()[0].lstrip("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines) + "\n"


def commands() -> str:
    """The reference of all commands, from their own help."""
    parts = ["# Commands\n", "Every command with the help that it prints itself.\n"]
    for heading, section in SECTIONS.items():
        parts.append(f"## {heading}\n")
        for name in section:
            context = click.Context(main, info_name="swell")
            command = main.get_command(context, name)
            assert command is not None
            for words, one in each(f"swell {name}", command, context):
                with click.Context(one, info_name=words, max_content_width=100, terminal_width=100) as shown:
                    parts.append(f"### {words}\n\n```text\n{one.get_help(shown)}\n```\n")
    return "\n".join(parts)


def each(words: str, command: click.Command, parent: click.Context) -> Iterator[tuple[str, click.Command]]:
    """A command, then those inside it."""
    yield words, command
    if isinstance(command, click.Group):
        for name in command.list_commands(parent):
            inner = command.get_command(parent, name)
            if inner is not None:
                yield from each(f"{words} {name}", inner, parent)


def reference() -> str:
    """The API reference: what mkdocstrings reads from docstrings."""
    parts = ["# Python reference\n"]
    for heading, names in PUBLIC.items():
        parts.append(f"## {heading}\n")
        parts += [f"::: {name}\n    options:\n      heading_level: 3\n" for name in names]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(build())
