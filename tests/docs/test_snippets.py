"""Every command and snippet of the documentation: it parses, and it is known which test runs it.

Pages whose snippets no test can run here say why in `NOT_HERE`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from swell.cli import COMMANDS, main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [page for page in sorted(DOCS.rglob("*.md")) if page.parent.name != "decisions"]
RUN_BY = {
    "guides/adaptive.md": "tests/train/test_guide.py",
    "README.md": "tests/cli/test_platform_docs.py",
    "reference/api.md": "tests/cli/test_platform_docs.py",
    "guides/checkpoints.md": "tests/train/test_guide.py",
    "guides/cloud.md": "tests/cli/test_nodes_docs.py",
    "guides/dashboard.md": "tests/cli/test_platform_docs.py",
    "guides/gpus.md": "tests/cli/test_nodes_docs.py",
    "guides/operations.md": "tests/cli/test_platform_docs.py",
    "guides/quickstart.md": "tests/cli/test_platform_docs.py",
    "guides/security.md": "tests/cli/test_platform_docs.py",
    "guides/services.md": "tests/cli/test_platform_docs.py",
    "guides/simulator.md": "tests/cli/test_platform_docs.py",
    "guides/teams.md": "tests/cli/test_platform_docs.py",
    "guides/streams.md": "tests/train/test_guide.py",
    "guides/training.md": "tests/train/test_guide.py",
    "guides/writing-a-policy.md": "tests/policies/test_writing_a_policy.py",
}
NOT_HERE = {
    "guides/any-command.md": "tests/train/start/test_command.py runs the examples that it shows parts of",
    "guides/tracking.md": "tests/train/track/test_tracking.py tracks with files instead of servers",
    "guides/traces.md": "needs the public traces; tests/sim/test_traces.py reads them",
    "guides/xgboost.md": "tests/train/test_boosting.py runs examples/xgboost_digits.py and smaller jobs",
    "guides/frameworks.md": "tests/cli/test_launch_lines.py runs such lines, with a script of its own",
    "CONTRIBUTING.md": "what CI itself runs",
    "guides/ray.md": "needs several machines, Slurm or Kubernetes; tests/engines has a Ray of processes",
}
PROGRAMS = ("swell", "python", "curl", "make", "ray", "kubectl", "openssl", "sbatch", "import", "from", "for")


def named(page: Path) -> str:
    """A page's name: its path from docs/, or the name alone of a page at the top."""
    return page.relative_to(DOCS).as_posix() if DOCS in page.parents else page.name


def blocks(page: Path) -> Iterator[str]:
    """The lines of a page's fenced and indented blocks; lines that end in a backslash are joined."""
    text = re.sub(r" *\\\n\s*", " ", page.read_text())
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        if language in ("sh", "python"):
            yield from body.splitlines()
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for line in outside.splitlines():
        if re.match(r"    \S", line) and "(launcher)" not in line:
            yield line[4:]


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every `swell` command in the page's blocks."""
    for line in blocks(page):
        if re.match(r"swell [a-z]", line):
            words = shlex.split(re.split(r"\s{3,}", line)[0], comments=True)
            yield words[1 : words.index(">") if ">" in words else None]


def parsed(words: list[str]) -> click.Command:
    """The command that the words are for; fails if it or one of the options does not exist."""
    context = click.Context(main, info_name="swell")
    command: click.Command | None = main
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        command, words = command.get_command(context, words[0]), words[1:]
    assert command is not None
    own = click.Context(command, parent=context, **command.context_settings)
    command.make_parser(own).parse_args(list(words))
    return command


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_command_in_a_block_is_one(page: Path) -> None:
    for words in commands(page):
        try:
            parsed(words)
        except (click.UsageError, AssertionError) as error:
            pytest.fail(f"swell {shlex.join(words)}: {error}")


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_command_in_the_text_is_one(page: Path) -> None:
    for found in re.findall(r"`swell ([^`\n]+)`", page.read_text()):
        name, *words = found.split()
        if not re.fullmatch(r"[a-z-]+", name):
            continue
        assert name in COMMANDS, f"there is no `swell {name}`"
        command = main.get_command(click.Context(main), name)
        assert command is not None
        known = {option for one in _all(command) for option in one}
        script = next((i for i, word in enumerate(words) if word == "--" or word.endswith(".py")), len(words))
        # What stands behind a script is the script's own, and behind -- another launcher's.
        options = [word.split("=")[0] for word in words[:script] if re.match(r"--?[a-z]", word)]
        assert [option for option in options if option not in known] == [], f"`swell {found}`"


def _all(command: click.Command) -> Iterator[list[str]]:
    """The options of a command and of those inside it."""
    yield from (param.opts + param.secondary_opts for param in command.params)
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from _all(inner)


def test_a_mistake_would_be_found() -> None:
    with pytest.raises(click.NoSuchOption):
        parsed(["submit", "--dead-line", "2h", "train.py"])
    assert list(commands(DOCS / "guides" / "dashboard.md"))


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "lab"], ids=named)
def test_it_is_known_which_test_runs_the_snippets_of_a_page(page: Path) -> None:
    """Notes in docs/lab name the scripts that their figures came from; nobody follows them."""
    name = named(page)
    told = name in RUN_BY or name in NOT_HERE
    found = [line for line in blocks(page) if line.split(" ")[0] in PROGRAMS]
    assert bool(found) == told, found
    if name in RUN_BY:
        assert page.name in (ROOT / RUN_BY[name]).read_text()
