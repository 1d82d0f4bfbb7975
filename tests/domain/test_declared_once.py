"""A job is declared once: a new field is written in one file and reaches every place that needs it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from swell.domain import JobOptions
from swell.domain.request import FIELDS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "swell"
DECLARATION = Path("domain", "request.py")

NEW_FIELDS = """
    patience_s: float = field(
        default=5.0,
        metadata=_about(Kind.DURATION, "How patient it is.", example="2m", above=0, for_runtime=True),
    )
    labels: tuple[str, ...] = field(
        default=(), metadata=_about(Kind.WORDS, "Labels to find it by.", example=["vision"], most=3)
    )

    def __post_init__(self)"""
NEW_OPTIONS = """
    patience_s: float
    labels: Sequence[str]


@dataclass(frozen=True, slots=True)
class RequestField"""

JOURNEY = '''
"""From a job file and flags, through SDK, HTTP, store and engine, into a worker; in the directory argv[1]."""
import json, sys
from pathlib import Path

from click.testing import CliRunner

import swell
from swell.api.server import Server, create_app
from swell.cli import main
from swell.cli.submit import script_and_options, submit
from swell.control.store import connect
from swell.control.plane import ControlPlane
from swell.control.store import Store
from swell.domain import InputError
from swell.engines.local import LocalSite
from swell.engines.supervised import SupervisedEngine

here = Path(sys.argv[1])
home = here / "home"
home.mkdir()
(here / "train.py").write_text("print('trained')")
helped = CliRunner().invoke(main, ["submit", "--help"]).output
assert "--patience DURATION" in helped and "How patient it is. [default: 5s]" in helped, helped
assert "--labels" in helped
assert CliRunner().invoke(main, ["init", "train.py", "-o", str(here / "new.toml")]).exit_code == 0
template = (here / "new.toml").read_text()
assert '# patience = "2m"' in template and '# labels = ["vision"]' in template, template

nobody = object()
fields = create_app(nobody, nobody, book=nobody).openapi()["components"]["schemas"]
asked = fields["JobSubmission"]["properties"]
assert asked["patience_s"]["exclusiveMinimum"] == 0 and asked["patience_s"]["default"] == 5.0
assert asked["labels"]["maxItems"] == 3 and asked["labels"]["description"] == "Labels to find it by."
assert {"patience_s", "labels"} <= set(fields["RequestView"]["properties"])

(here / "job.toml").write_text('script = "train.py"\\npatience = "90s"\\nlabels = ["a", "b"]\\n')
command = submit.make_context("submit", ["--patience", "3m", str(here / "job.toml")])
flags = {name: command.params[name] for name in command.params if name not in ("detach", "as_json", "home")}
script, options = script_and_options(**flags)
assert (options["patience_s"], options["labels"]) == (180.0, ["a", "b"])

store = Store(connect(str(home / "store.db")))
plane = ControlPlane(store, SupervisedEngine(LocalSite(home, slots=1)), home=home, policy="afs-l")
plane.start()
server = Server(plane, store, home=home, port=0)
server.start()
try:
    with swell.Client(server.url, server.book.create("ann", "user")[0]) as client:
        for wrong in ({"patience_s": 0.0}, {"labels": ["x"] * 4}):
            try:
                client.submit(script, **options | wrong)
                raise AssertionError(wrong)
            except InputError as refused:
                assert refused.field in wrong, refused
        job = client.wait(client.submit(script, **options), timeout_s=60)  # it ends at once
        assert (job.request.patience_s, job.request.labels) == (180.0, ("a", "b"))
finally:
    server.stop()
    plane.stop()
stored = store.job(job.job_id).request
store.close()
assert (stored.patience_s, stored.labels) == (180.0, ("a", "b"))
runtime = json.loads((home / "jobs" / job.job_id / "runs" / "0000" / "job.json").read_text())
assert runtime["patience_s"] == 180.0 and "labels" not in runtime
print("arrived")
'''


def test_a_new_field_is_written_in_one_file_and_arrives_everywhere(tmp_path: Path) -> None:
    text = (SOURCE / DECLARATION).read_text()
    for place, addition in (
        ("\n    def __post_init__(self)", NEW_FIELDS),
        ("\n\n\n@dataclass(frozen=True, slots=True)\nclass RequestField", NEW_OPTIONS),
    ):
        assert text.count(place) == 1
        text = text.replace(place, addition)
    changed = tmp_path / "src" / "swell" / DECLARATION
    changed.parent.mkdir(parents=True)
    changed.write_text(text)
    # Everything else is the real thing.
    for entry in (*SOURCE.iterdir(), *(SOURCE / DECLARATION).parent.iterdir()):
        link = tmp_path / "src" / "swell" / entry.relative_to(SOURCE)
        if not link.exists() and entry.name != "__pycache__":
            link.symlink_to(entry)
    (tmp_path / "journey.py").write_text(JOURNEY)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SWELL_")}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "journey.py"), str(tmp_path)],
        env=environment | {"PYTHONPATH": str(tmp_path / "src")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["arrived"], done.stdout + done.stderr


def test_nothing_else_lists_the_fields_of_a_job() -> None:
    """A class, signature, call, dictionary or list that names five fields declares a job a second time."""
    found = {
        (str(path.relative_to(SOURCE)), where)
        for path in SOURCE.rglob("*.py")
        for where, names in lists_of_names(ast.parse(path.read_text()))
        if len(FIELD_NAMES & names) >= 5
    }
    # A job's own processes start without the platform's code: what they read has its limits in `JobFile`.
    reads = ("train/agent/protocol.py", "JobFile")
    assert found == {(str(DECLARATION), "JobRequest"), (str(DECLARATION), "JobOptions"), reads}


FIELD_NAMES = {name for field in FIELDS.values() for name in (field.name, field.spoken)}


def lists_of_names(tree: ast.Module) -> Iterator[tuple[str, set[str]]]:
    """Every place that gives a row of things their names, and these names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, {text(s.target) for s in node.body if isinstance(s, ast.AnnAssign)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            yield node.name, {a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs}
            yield node.name, {text(decorator) for decorator in node.decorator_list}
        elif isinstance(node, ast.Call):
            yield f"call in line {node.lineno}", {keyword.arg or "" for keyword in node.keywords}
        elif isinstance(node, ast.Dict):
            yield f"dictionary in line {node.lineno}", {text(key) for key in node.keys}
        elif isinstance(node, ast.List | ast.Tuple | ast.Set):
            yield f"list in line {node.lineno}", {text(element) for element in node.elts}


def text(node: ast.AST | None) -> str:
    """The name that a node stands for: itself, a string such as '--max-workers', a call's first argument."""
    if isinstance(node, ast.Call) and node.args:
        return text(node.args[0])
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.lstrip("-").replace("-", "_")
    return node.id if isinstance(node, ast.Name) else ""


def test_a_second_declaration_would_be_noticed() -> None:
    names = ["script", "env", "min_workers", "max_workers", "checkpoint"]
    flags = [f"--{name.replace('_', '-')}" for name in names]
    seconds = [
        "class View:\n" + "\n".join(f"    {name}: int" for name in names),
        f"def job({', '.join(names)}): ...",
        f"Launch({', '.join(f'{name}=1' for name in names)})",
        f"order = {dict.fromkeys(names, 1)}",
        f"flags = [{', '.join(f'click.option({flag!r})' for flag in flags)}]",
        "\n".join(f"@click.option({flag!r})" for flag in flags) + "\ndef submit(**flags): ...",
    ]
    for second in seconds:
        assert any(len(FIELD_NAMES & names) >= 5 for _, names in lists_of_names(ast.parse(second))), second


def test_the_guide_names_every_option() -> None:
    guide = (ROOT / "docs" / "reference" / "api.md").read_text()
    _, _, options = guide.partition("Options of `submit` and `quote`:")
    listed = options.partition("\n\n")[0]
    assert [name for name in JobOptions.__annotations__ if f"`{name}`" not in listed] == []
