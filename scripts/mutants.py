"""Change the pure machines on purpose, one place at a time, and see whether the tests notice.

    python scripts/mutants.py               # 300 changes and a verdict: at least 95% are noticed
    python scripts/mutants.py --only placement --sample 40
    python scripts/mutants.py --slice 1/3         # a third of the sample; the other two another time
    python scripts/mutants.py --list              # the sample alone

cosmic-ray makes the changes (another operator, another number, a condition turned round). Each is made in a
copy of the tree, and the tests of its room run there, the nearest first, until one fails. Changes that nobody
could observe are explained in `tests/mutants.toml`; every other change that all tests let pass counts against
the verdict. The sample is drawn by a hash of the changed line, so an edit elsewhere does not redraw it.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import hashlib
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import parso.python.tree  # noqa: F401 - before the plugins, which import each other in a circle otherwise
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parent.parent
EXPLAINED = ROOT / "tests" / "mutants.toml"
TARGET = 0.95
BASELINE_S = 3600.0
"""How long the tests of one room may take unchanged, on a machine that does much else."""
SLOWER, STUCK_S = 6.0, 180.0
"""A change makes an endless loop if the tests take so many times as long as before, and so much more."""


@dataclass(frozen=True)
class Room:
    """Files that are changed, and the tests that should notice."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]


def _files(pattern: str, names: str) -> tuple[str, ...]:
    return tuple(pattern.format(name) for name in names.split())


ROOMS = {
    "placement": Room(
        ("placement/*.py",),
        ("tests/placement", "tests/board", "tests/policies/test_properties.py", "tests/sim/test_recorded.py"),
    ),
    "board": Room(
        ("board/*.py",),
        (
            *("tests/board", "tests/sim/test_engine.py", "tests/sim/test_recorded.py"),
            "tests/control/test_same_as_simulator.py",
        ),
    ),
    "control": Room(
        ("control/lifecycle.py",),
        _files("tests/control/test_{}.py", "lifecycle reconcile plane strays confined pause"),
    ),
    "engines": Room(("engines/job_state.py",), _files("tests/engines/test_{}.py", "job_state parts")),
    "agent": Room(
        _files(
            "train/agent/{}.py",
            "membership reach stragglers prepared",
        ),
        _files(
            "tests/train/{}.py",
            "agent/test_membership agent/test_membership_slots agent/test_replicas_membership"
            " agent/test_reach modes/test_scaling agent/test_stragglers agent/test_coordinator"
            " sync/test_released sync/test_standing agent/test_restarts",
        ),
    ),
    "files": Room(
        ("train/agent/regular.py",),
        (
            "tests/train/agent/test_outputs.py",
            "tests/control/test_retention.py",
            "tests/cli/test_safekeeping.py",
        ),
    ),
    "data": Room(
        _files("train/data/{}.py", "plan shards samples room"),
        _files(
            "tests/train/{}.py",
            "data/test_plan data/test_shards data/test_samples data/test_stream modes/test_packed"
            " agent/test_membership data/test_memory",
        ),
    ),
    "policies": Room(
        ("policies/*.py", "perf/goodput.py"),
        (
            *("tests/policies", "tests/perf/test_goodput.py", "tests/control/test_teams.py"),
            *("tests/control/test_user_limits.py", "tests/sim/test_recorded.py"),
        ),
    ),
}

TESTS = "not slow and not long and not data"

WARM = """
import json, os, signal, sys, time
sys.path[:0] = sys.argv[1:]
import hypothesis, numba, numpy, pytest, scipy.optimize, torch
answers = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0), os.dup2(output, 1), os.dup2(output, 2)
        os.environ["NUMBA_CACHE_DIR"] = request["compiled"]
        numba.config.reload_config()
        import swell
        if not swell.__file__.startswith(sys.argv[1]):
            print(f"the tests would run the code of {swell.__file__}, not that of {sys.argv[1]}")
            code = 99
        else:
            code = pytest.main(request["arguments"])
        sys.stdout.flush()
        os._exit(int(code))
    until, code = time.monotonic() + request["limit_s"], None
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.02)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if code is None:
        os.waitpid(child, 0)
    print(json.dumps(code), file=answers, flush=True)
"""
"""Imports once what pytest takes seconds to import; every run is a fork of that process.

The copy comes first on the path: what an environment's .pth files put there comes before PYTHONPATH."""

_LEFT_OUT_OPERATORS = re.compile(
    # Names put where they do not belong fail at once; `is` for `==` is the same for small numbers and enums.
    r"Variable|RemoveDecorator|Exception"
    r"|Comparison\w*_(Eq|NotEq|Lt|LtE|Gt|GtE)_Is(Not)?$|Comparison\w*_Is(Not)?_(Eq|NotEq|Lt|LtE|Gt|GtE)$"
)


@dataclass(frozen=True)
class Mutant:
    file: str  # below src/swell
    line: int
    now: str
    changed: str
    operator: str
    occurrence: int

    def where(self) -> str:
        return f"{self.file}:{self.line}\n    - {self.now}\n    + {self.changed}"


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    killed: bool
    how: str
    seconds: float


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--sample", type=int, default=300, help="how many changes are tried (300)")
    parser.add_argument("--seed", type=int, default=1, help="draws another sample (1)")
    cores = os.cpu_count() or 2
    parser.add_argument("--jobs", type=int, default=cores, help="how many run side by side (the cores)")
    parser.add_argument("--only", default="", help="only files whose path matches this pattern")
    parser.add_argument("--slice", default="1/1", help="2/3: only the second third of the sample")
    parser.add_argument("--list", action="store_true", help="print the sample and end")
    parser.add_argument("--json", type=Path, help="write every outcome to this file")
    parser.add_argument("--again", type=Path, help="try only the changes that were alive in this --json file")
    given = parser.parse_args()
    mutants = sampled(given.seed, given.sample, re.compile(given.only))
    which, slices = (int(number) for number in given.slice.split("/"))
    mutants = mutants[which - 1 :: slices]
    if given.again:
        before = json.loads(given.again.read_text())
        alive = {tuple(one["mutant"].values())[2:] for one in before if not one["killed"]}
        mutants = [mutant for mutant in mutants if tuple(asdict(mutant).values())[2:] in alive]
    if given.list:
        for mutant in mutants:
            print(mutant.where())
        return 0
    explained = explanations()
    outcomes = tried(mutants, explained, given.jobs)
    if given.json:
        given.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    return verdict(outcomes, explained)


def sampled(seed: int, size: int, only: re.Pattern[str]) -> list[Mutant]:
    """`size` changes, at most one for each place in the source, drawn by hash."""

    def draw(*parts: object) -> str:
        return hashlib.sha256(repr((seed, *parts)).encode()).hexdigest()

    places: list[tuple[str, Mutant]] = []
    for path in _sources():
        name = path.relative_to(ROOT / "src/swell").as_posix()
        if not only.search(name):
            continue
        alike: dict[tuple[str, int], int] = {}
        lines = path.read_text().splitlines()
        for (row, column), choices in _places(path).items():
            line = lines[row - 1].strip()
            nth = alike[line, column] = alike.get((line, column), -1) + 1
            place = (name, line, column, nth)
            operator, occurrence, _ = min(choices, key=lambda c: draw(*place, c[0], c[2]))
            places.append((draw(*place), Mutant(name, row, line, "", operator, occurrence)))
    places.sort(key=lambda place: place[0])
    chosen = []
    for _, mutant in places:
        if len(chosen) == size:
            break
        source = (ROOT / "src/swell" / mutant.file).read_text()
        text = mutated(source, mutant)
        changed = _first_difference(source, text)
        if changed is not None and _means_something_else(source, text):
            line, now, then = changed
            chosen.append(Mutant(mutant.file, line, now, then, mutant.operator, mutant.occurrence))
    return chosen


def mutated(source: str, mutant: Mutant) -> str:
    text = mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence)
    assert text is not None
    return str(text)


def _first_difference(source: str, text: str) -> tuple[int, str, str] | None:
    for number, (now, changed) in enumerate(zip(source.splitlines(), text.splitlines(), strict=False), 1):
        if now != changed:
            return number, now.strip(), changed.strip()
    return None


def _means_something_else(source: str, text: str) -> bool:
    try:
        return ast.dump(ast.parse(source)) != ast.dump(ast.parse(text))
    except SyntaxError:
        return False


def _sources() -> list[Path]:
    base = ROOT / "src/swell"
    found = []
    for pattern in [pattern for room in ROOMS.values() for pattern in room.sources]:
        paths = sorted(base.glob(pattern))
        if not paths:
            raise SystemExit(f"no file of src/swell is called {pattern}: mend ROOMS in scripts/mutants.py")
        found += paths
    return found


def _places(path: Path) -> dict[tuple[int, int], list[tuple[str, int, int]]]:
    """Position in the file -> the changes that can be made there (operator, occurrence, which of it)."""
    source = path.read_text()
    left_out = _left_out(source)
    tree = get_ast(source)
    nodes = list(ast_nodes(tree))
    places: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
    for name in sorted(operator_names()):
        if _LEFT_OUT_OPERATORS.search(name):
            continue
        operator = get_operator(name)()
        occurrence = 0
        for node in nodes:
            for index, (start, _) in enumerate(operator.mutation_positions(node)):
                if not any(first <= start <= last for first, last in left_out):
                    places.setdefault(start, []).append((name, occurrence, index))
                occurrence += 1
    return places


def _left_out(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Spans in which a change says nothing about behaviour: types, messages, logs, tuned constants."""
    spans: list[ast.AST] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.arg(annotation=ast.AST() as annotation) | ast.AnnAssign(annotation=annotation):
                spans.append(annotation)
            case ast.Raise(exc=ast.AST() as error):
                spans.append(error)
            case ast.Assert(msg=ast.AST() as message):
                spans.append(message)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="log" | "_log" | "logger"))):
                spans.append(node)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                spans.append(node)
            case ast.JoinedStr():
                spans.append(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            spans += node.decorator_list
            if getattr(node, "returns", None) is not None:
                spans.append(node.returns)
    module = ast.parse(source)
    bodies = [module.body, *(node.body for node in ast.walk(module) if isinstance(node, ast.ClassDef))]
    for node in [node for body in bodies for node in body]:
        # A number that somebody tuned, or the default of an option: a test of it would only repeat it.
        if isinstance(node, ast.Assign | ast.AnnAssign) and _number(node.value):
            spans.append(node)
    return [
        ((span.lineno, span.col_offset), (span.end_lineno or 0, span.end_col_offset or 0))  # type: ignore[attr-defined]
        for span in spans
    ]


def _number(node: ast.AST | None) -> bool:
    """Whether `node` is a number that is written out, such as 2.5, -1 or 24 * 3600."""
    if isinstance(node, ast.BinOp):
        return _number(node.left) and _number(node.right)
    if isinstance(node, ast.UnaryOp):
        return _number(node.operand)
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def explanations() -> dict[tuple[str, str, str], str]:
    """(file, line now, line changed) -> why nobody can observe that change."""
    if not EXPLAINED.exists():
        return {}
    entries = tomllib.loads(EXPLAINED.read_text()).get("equivalent", [])
    return {(entry["file"], entry["now"], entry["changed"]): entry["why"] for entry in entries}


def tried(mutants: list[Mutant], explained: dict[tuple[str, str, str], str], jobs: int) -> list[Outcome]:
    """Every change with its outcome; those that are explained are not tried."""
    todo = [mutant for mutant in mutants if (mutant.file, mutant.now, mutant.changed) not in explained]
    print(
        f"{len(mutants)} changes, {len(mutants) - len(todo)} of them explained in {EXPLAINED.name}",
        flush=True,
    )
    outcomes = [Outcome(mutant, False, "explained", 0.0) for mutant in mutants if mutant not in todo]
    with tempfile.TemporaryDirectory(prefix="swell-mutants-") as folder:
        trees = [Tree(Path(folder) / f"tree-{number}") for number in range(jobs)]
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            rooms = sorted({room_of(mutant.file) for mutant in todo})
            seconds, *_ = pool.map(lambda tree: tree.baseline(rooms), trees)
            print(f"{', '.join(rooms)}: tests pass unchanged in {sum(seconds.values()):.0f} s", flush=True)
            free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
            for tree in trees:
                free.put(tree)

            def outcome(mutant: Mutant) -> Outcome:
                tree = free.get()
                try:
                    return tree.outcome(mutant, seconds)
                finally:
                    free.put(tree)

            start_s = time.monotonic()
            futures = [pool.submit(outcome, mutant) for mutant in todo]
            for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
                result = future.result()
                outcomes.append(result)
                so_far = f"[{done}/{len(todo)}, {time.monotonic() - start_s:.0f} s]"
                if not result.killed:
                    print(f"{so_far} ALIVE {result.mutant.where()}", flush=True)
                elif done % 25 == 0:
                    print(so_far, flush=True)
    return outcomes


def room_of(file: str) -> str:
    for name, room in ROOMS.items():
        if any(Path(file).match(pattern) for pattern in room.sources):
            return name
    raise KeyError(file)


class Tree:
    """A copy of what the tests need, in which one file at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        left_out = ".git .venv .*_cache .hypothesis node_modules build __pycache__".split()  # noqa: SIM905
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*left_out), symlinks=True)
        shared = ROOT.parent / "shared"
        if shared.exists() and not (folder.parent / "shared").exists():
            (folder.parent / "shared").symlink_to(shared)
        self._compiled = folder.parent / f"{folder.name}-compiled"
        environment = {
            **os.environ,
            "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{folder}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._warm = subprocess.Popen(
            [sys.executable, "-c", WARM, str(folder / "src"), str(folder)],
            cwd=folder, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def baseline(self, rooms: list[str]) -> dict[str, float]:
        """Seconds of each test file of `rooms` with nothing changed. Stops if a test fails."""
        seconds: dict[str, float] = {}
        for room in rooms:
            files = [str(path.relative_to(self.folder)) for path in self._test_files(room)]
            code, output = self._pytest([*files, "--durations=0", "-vv"], BASELINE_S, self._compiled)
            if code != 0:
                raise SystemExit(f"the tests of {room} fail without any change:\n{output[-3000:]}")
            for number, file in re.findall(r"^([\d.]+)s \w+ +(\S+?)::", output, re.MULTILINE):
                seconds[file] = seconds.get(file, 0.0) + float(number)
        return seconds

    def outcome(self, mutant: Mutant, seconds: dict[str, float]) -> Outcome:
        path = self.folder / "src/swell" / mutant.file
        source = path.read_text()
        files = [str(file.relative_to(self.folder)) for file in self._test_files(room_of(mutant.file))]
        near = _near(mutant.file)
        files.sort(key=lambda file: (not near(file), seconds.get(file, 0.0)))
        limit_s = SLOWER * sum(seconds.get(file, 0.0) for file in files) + STUCK_S
        compiled = self._compiled_for(mutant.file)
        start_s = time.monotonic()
        path.write_text(mutated(source, mutant))
        try:
            code, output = self._pytest([*files, "-x"], limit_s, compiled)
        finally:
            path.write_text(source)
            if compiled != self._compiled:
                shutil.rmtree(compiled, ignore_errors=True)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        how = "took too long" if code is None else failed[1] if failed else f"exit {code}"
        return Outcome(mutant, code != 0, how, time.monotonic() - start_s)

    def _test_files(self, room: str) -> Iterator[Path]:
        for name in ROOMS[room].tests:
            path = self.folder / name
            yield from [path] if path.is_file() else sorted(path.glob("test_*.py"))

    def _compiled_for(self, file: str) -> Path:
        """A cache of compiled functions without those that depend on `file`: numba looks at one file only."""
        stale = _compiled_dependants(file)
        if not stale:
            return self._compiled
        clone = Path(tempfile.mkdtemp(dir=self.folder.parent))
        for path in self._compiled.rglob("*"):
            if path.is_file() and path.name.split(".")[0] not in stale:
                to = clone / path.relative_to(self._compiled)
                to.parent.mkdir(parents=True, exist_ok=True)
                os.link(path, to)
        return clone

    def _pytest(self, arguments: list[str], limit_s: float, compiled: Path) -> tuple[int | None, str]:
        """Exit code (None: more than `limit_s`) and the output of pytest, in a fork of the warm process."""
        output = self.folder.parent / f"{self.folder.name}.out"
        request = {
            "arguments": ["-q", "-m", TESTS, "-p", "no:cacheprovider", *arguments],
            "output": str(output),
            "compiled": str(compiled),
            "limit_s": limit_s,
        }
        assert self._warm.stdin is not None and self._warm.stdout is not None
        self._warm.stdin.write(json.dumps(request) + "\n")
        self._warm.stdin.flush()
        answer = json.loads(self._warm.stdout.readline())
        return answer, output.read_text(errors="replace")


def _near(file: str) -> re.Pattern[str] | object:
    stem = Path(file).stem.strip("_")
    return lambda name: stem in Path(name).stem or Path(name).stem.removeprefix("test_") in stem


def _compiled_dependants(file: str) -> set[str]:
    """Stems of modules with compiled functions that are, or call into, those of `file`."""
    base = ROOT / "src/swell"
    modules = {
        path.relative_to(base).with_suffix("").as_posix().replace("/", "."): path.read_text()
        for path in base.rglob("*.py")
        if "import compiled" in path.read_text()
    }
    name = Path(file).with_suffix("").as_posix().replace("/", ".")
    if name not in modules:
        return set()
    stale = {name}
    while more := {m for m in modules if m not in stale and any(f"swell.{s} " in modules[m] for s in stale)}:
        stale |= more
    return {module.rsplit(".", 1)[-1] for module in stale}


def verdict(outcomes: list[Outcome], explained: dict[tuple[str, str, str], str]) -> int:
    alive = [outcome for outcome in outcomes if not outcome.killed and outcome.how != "explained"]
    killed = sum(outcome.killed for outcome in outcomes)
    counted = killed + len(alive)
    share = killed / counted if counted else 1.0
    unseen = len(outcomes) - counted
    print(
        f"\n{len(outcomes)} changes: {killed} noticed, {unseen} that nobody can observe, {len(alive)} alive"
    )
    by_room: dict[str, list[int]] = {}
    for outcome in outcomes:
        if outcome.how != "explained":
            row = by_room.setdefault(room_of(outcome.mutant.file), [0, 0])
            row[0] += outcome.killed
            row[1] += 1
    for room, (noticed, tried_) in sorted(by_room.items()):
        print(f"  {room:10s} {noticed:3d} of {tried_}")
    for outcome in sorted(outcomes, key=lambda o: o.mutant.file):
        if outcome.how == "explained":
            mutant = outcome.mutant
            print(f"explained {mutant.where()}\n    {explained[mutant.file, mutant.now, mutant.changed]}")
    for outcome in sorted(alive, key=lambda o: o.mutant.file):
        print(f"ALIVE {outcome.mutant.where()}")
    good = share >= TARGET
    share_text = f"of those that change behaviour are noticed (at least {TARGET:.0%})"
    print(f"{'PASS' if good else 'FAIL'}: {share:.1%} {share_text}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
