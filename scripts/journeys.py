"""Counts how many files a reader opens from "somebody typed this" to "this happened", by tracing real runs.

    python scripts/journeys.py [submit] [resize] [step] [--files] [--json] [--verify]

Three journeys: `swell submit train.py --deadline 2h` up to the first step of the first worker, `swell resize`
up to the newcomer's report that it is in the generation, and one `job.step(loss)` of two workers.

Every process of the run loads a profile function from a `sitecustomize` module, which this script writes
into a temporary folder and puts on PYTHONPATH; the product has no hook for it. The profile function writes
each call of a function of `src/swell` into memory that survives the process. A file counts if one of its
functions is called between the journey's begin and end. Module bodies, and what they call, do not count.
Neither do functions that the same process also called in the idle seconds before the journey: loops,
heartbeats, ordinary steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "swell"
DOCS = ROOT / "docs" / "how" / "architecture.md"
WANTED = {"submit": 35, "resize": 18, "step": 8}
IDLE_S = {"submit": 12.0, "resize": 3.0, "step": 0.0}
"""Seconds before a journey that show what its processes do anyway. A control plane takes a turn every 5 s."""
STEPS = 60
"""Steps of which the most common set of files is taken: a heartbeat may fall into any one of them."""
SENDERS = {
    "train/agent/wire.py:Channel.encode": "message",
    "train/sync/mesh.py:Mesh.exchange": "phase",
    "train/agent/prepared.py:ZygoteProcess.order": "order",
    "train/start/zygote.py:Zygote._send": "message",
    "engines/nursery.py:_answer": "order",
    "api/transport.py:BlockingTransport.request": "call",
}
"""Functions that send a message to another process, and the argument that holds it."""
STEP = "train/job.py:Job.step"
SERVE = "engines/nursery.py:serve"
RECORD = np.dtype([("ns", "<i8"), ("thread", "<u8"), ("event", "<i4"), ("code", "<i4"), ("caller", "<i4")])
CALL, RETURN, SEND = 0, 1, 2
MESSAGE = "message:"
PATIENCE_S = 120.0

HOOK = '''
import itertools, json, mmap, os, struct, sys, threading, time

HERE, PACKAGE, SENDERS, STEP = os.path.dirname(os.path.abspath(__file__)), {package!r}, {senders!r}, {step!r}
ROOM, RECORD = 1 << 26, struct.Struct("<qQiii")
ids, codes, kept, state = {{}}, {{}}, [], threading.local()

def begin():
    global memory, places, names
    path = os.path.join(HERE, str(os.getpid()))
    with open(path + ".trace", "w+b") as file:
        file.truncate(ROOM)
        memory = mmap.mmap(file.fileno(), ROOM)
    kept.append(memory)  # closing it would close a descriptor that others may use by then
    places, names = itertools.count(), path + ".names"
    note("started", getattr(sys, "orig_argv", []))
    for name, number in list(ids.items()):
        note("name", [number, name])

def note(kind, content):
    file = os.open(names, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, (json.dumps([kind, content]) + "\\n").encode())
    os.close(file)

def number_of(name):
    if name not in ids:
        ids[name] = len(ids)
        note("name", [ids[name], name])
    return ids[name]

def known(code):
    """Number and name of a function of swell, "module" for a module's body, None for all else."""
    found = None
    if code.co_filename.startswith(PACKAGE):
        if code.co_name == "<module>":
            found = "module"
        elif code.co_flags & 1:  # not the body of a class
            name = code.co_filename[len(PACKAGE):] + ":" + code.co_qualname
            found = (number_of(name), name)
    kept.append(code)  # so that no other one gets its id
    codes[id(code)] = found
    return found

def write(event, number, caller):
    at = next(places) * RECORD.size
    if at + RECORD.size <= ROOM:
        RECORD.pack_into(memory, at, time.monotonic_ns(), threading.get_ident(), event, number, caller)

def kind_of(name, message):
    if name == "api/transport.py:BlockingTransport.request":
        return message.method + " " + message.path.partition("?")[0]
    if name == "train/sync/mesh.py:Mesh.exchange":
        return "exchange " + ("READY", "REDUCED", "VOTE", "ENTER", "STATE", "PIECE", "LEVEL")[message]
    if name == "engines/nursery.py:_answer":
        return "order for a supervisor"
    if not isinstance(message, dict):
        return type(message).__name__
    return "type " + str(message["type"]) if "type" in message else "fork " + next(iter(message))

def watch(frame, event, arg):
    if event != "call" and event != "return":
        return
    code = frame.f_code
    found = codes[id(code)] if id(code) in codes else known(code)
    if found is None:
        return
    if found == "module":
        if frame.f_globals.get("__name__") != "__main__":
            state.importing = getattr(state, "importing", 0) + (1 if event == "call" else -1)
        return
    number, name = found
    if event == "return":
        if name == STEP:
            write(1, number, -1)
        return
    if getattr(state, "importing", 0) > 0:
        return
    caller, above = -1, frame.f_back
    while above is not None:
        got = codes[id(above.f_code)] if id(above.f_code) in codes else known(above.f_code)
        if got is not None:
            caller = -1 if got == "module" else got[0]
            break
        above = above.f_back
    write(0, number, caller)
    if name in SENDERS:
        write(2, number_of("message:" + kind_of(name, frame.f_locals[SENDERS[name]])), number)
    elif name == "train/agent/children.py:set_name":
        note("role", frame.f_locals["name"])

begin()
os.register_at_fork(after_in_child=begin)
threading.setprofile(watch)
sys.setprofile(watch)
'''
SCRIPT = """
import time, torch, swell
from torch.utils.data import TensorDataset

torch.manual_seed(0)
model = torch.nn.Linear(16, 1)
job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=0.01))
loader = job.loader(TensorDataset(torch.randn(1 << 17, 16), torch.randn(1 << 17, 1)), batch_size=32)
for _ in job.epochs(1000):
    for x, y in loader:
        time.sleep(0.02)
        job.step(torch.nn.functional.mse_loss(model(x), y))
"""


@dataclass
class Process:
    """The records of one process of a run."""

    pid: int
    names: list[str]
    role: str
    records: npt.NDArray[np.void]

    def when(self, name: str, event: int = CALL) -> npt.NDArray[np.int64]:
        """The moments at which a function was called (or returned, or a message was sent)."""
        if name not in self.names:
            return np.empty(0, np.int64)
        chosen = (self.records["event"] == event) & (self.records["code"] == self.names.index(name))
        return self.records["ns"][chosen]


@dataclass
class Journey:
    """The files, calls, processes and messages of one journey."""

    name: str
    files: list[str]
    """In the order in which they are first entered."""
    files_with_idle: int
    """How many there are with those that the processes enter when idle, too."""
    functions: int
    jumps: int
    """Pairs of a calling and a called function in two files."""
    processes: dict[str, int]
    """How many files each of them enters, in the order in which they take part."""
    messages: list[str]
    """Kinds of message between processes, in the order in which they are first sent."""


class Run:
    """A temporary folder, and traced processes that write into it."""

    def __init__(self, folder: Path) -> None:
        self.traces, self.home, self.script = folder / "traces", folder / "home", folder / "train.py"
        self.traces.mkdir()
        self.script.write_text(SCRIPT)
        hook = HOOK.format(package=f"{PACKAGE}/", senders=SENDERS, step=STEP)
        (self.traces / "sitecustomize.py").write_text(hook)

    def environment(self) -> dict[str, str]:
        """The environment of a traced process."""
        path = os.pathsep.join(filter(None, [str(self.traces), os.environ.get("PYTHONPATH")]))
        out = {name: value for name, value in os.environ.items() if not name.startswith("SWELL_")}
        return out | {"PYTHONPATH": path, "SWELL_HOME": str(self.home)}

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a traced `swell` command."""
        with (self.traces / "output").open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "swell", *words], env=self.environment(), stdout=out, stderr=out
            )

    def until(self, called: str, expected: str, others: frozenset[str] = frozenset()) -> None:
        """Wait until a process, none of `others`, has called a function (or sent a message) of this name."""
        give_up_s = time.monotonic() + PATIENCE_S
        while not any(f'"{called}"' in self._names(pid) for pid in self.pids() - others):
            if time.monotonic() > give_up_s:
                output = (self.traces / "output").read_text()[-2000:]
                raise SystemExit(f"journeys: waited {PATIENCE_S:g} s for {expected}\n{output}")
            time.sleep(0.2)

    def pids(self) -> frozenset[str]:
        """The traced processes so far."""
        return frozenset(path.stem for path in self.traces.glob("*.names"))

    def _names(self, pid: str) -> str:
        return (self.traces / f"{pid}.names").read_text()

    def processes(self) -> list[Process]:
        """The records of all processes so far."""
        return [_read(path) for path in sorted(self.traces.glob("*.names"))]


def _read(path: Path) -> Process:
    names, role = dict[int, str](), ""
    for kind, content in map(json.loads, path.read_text().splitlines()):
        if kind == "name":
            names[content[0]] = content[1]
        else:
            role = content.removeprefix("swell-") if kind == "role" else _role(content)
    records = np.memmap(path.with_suffix(".trace"), np.uint8, "r")
    records = records[: len(records) // RECORD.itemsize * RECORD.itemsize].view(RECORD)
    filled = int(np.argmax(records["ns"] == 0))
    if not filled:
        raise SystemExit(f"journeys: the trace of {role} is full")
    listed = [names.get(n, "") for n in range(max(names, default=-1) + 1)]
    return Process(int(path.stem), listed, role, np.array(records[:filled]))


def _role(words: list[str]) -> str:
    if "-m" not in words:
        return "other"
    module, *rest = words[words.index("-m") + 1 :]
    return f"swell {rest[0]}" if module == "swell" and rest else module.rpartition(".")[2]


def _between(name: str, processes: list[Process], begin: int, end: int) -> Journey:
    """The journey from `begin` to `end`, without what the processes did in the idle seconds before."""
    entered, jumps, sent, anyway = [], set(), [], set()
    for process in processes:
        at = process.records["ns"]
        before = process.records[(at >= begin - int(IDLE_S[name] * 1e9)) & (at < begin)]
        idle = set(zip(before["event"].tolist(), before["code"].tolist(), strict=True))
        for ns, _, event, code, caller in process.records[(at >= begin) & (at <= end)].tolist():
            called = process.names[code]
            if event == CALL:
                anyway.add(_file(called))
            if (event, code) in idle:
                continue
            if event == SEND:
                sent.append((ns, called.removeprefix(MESSAGE)))
            elif event == CALL:
                entered.append((ns, process.role, called))
                if caller >= 0 and _file(process.names[caller]) != _file(called):
                    jumps.add((process.names[caller], called))
    roles: dict[str, set[str]] = {}
    for _, role, called in sorted(entered):
        roles.setdefault(role, set()).add(_file(called))
    return Journey(
        name,
        files=list(dict.fromkeys(_file(called) for _, _, called in sorted(entered))),
        files_with_idle=len(anyway),
        functions=len({called for _, _, called in entered}),
        jumps=len(jumps),
        processes={role: len(files) for role, files in roles.items()},
        messages=list(dict.fromkeys(kind for _, kind in sorted(sent))),
    )


def _file(called: str) -> str:
    return called.partition(":")[0]


def submit(folder: Path) -> list[Journey]:
    """`swell submit train.py --deadline 2h` on a new platform, until the first step of its first worker."""
    run = Run(folder)
    plane = run.start("up", "--slots", "2", "--port", "0", "--no-wall")
    try:
        run.until(SERVE, "the nursery of the control plane")
        time.sleep(IDLE_S["submit"] + 1)
        typed = run.start("submit", str(run.script), "--deadline", "2h")
        run.until(STEP, "the first step of the submitted job")
        processes = run.processes()
        typed.kill()  # it would show how the job is profiled
    finally:
        run.start("down").wait(PATIENCE_S)
        plane.wait(PATIENCE_S)
    begin = min(p.records["ns"][0] for p in processes if p.role == "swell submit")
    end = min(p.when(STEP).min() for p in processes if len(p.when(STEP)))
    return [_between("submit", processes, begin, end)]


def resize(folder: Path) -> list[Journey]:
    """`swell resize` from one worker to two, until the newcomer is in the generation; then ordinary steps."""
    run = Run(folder)
    job = run.start(
        "run", "--workers", "1:2", "--start", "1", "--name", "traced", "--threads", "1", str(run.script)
    )
    try:
        run.until(STEP, "the first step of the job")
        time.sleep(IDLE_S["resize"] + 3)
        before = run.pids()
        run.start("resize", "traced", "2").wait(PATIENCE_S)
        run.until(f"{MESSAGE}Switched", "the newcomer in the generation", before)
        time.sleep(STEPS * 0.05 + 1)
        processes = run.processes()
    finally:
        job.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(30)
        job.kill()
    begin = min(p.records["ns"][0] for p in processes if p.role == "swell resize")
    newcomer = next(p for p in processes if str(p.pid) not in before and len(p.when(STEP)))
    end = newcomer.when(f"{MESSAGE}Switched", SEND).min()
    steps = [_between("step", [newcomer], *span) for span in _steps(newcomer)]
    usual, _ = Counter(tuple(sorted(step.files)) for step in steps).most_common(1)[0]
    return [
        _between("resize", processes, begin, end),
        next(step for step in steps if tuple(sorted(step.files)) == usual),
    ]


def _steps(process: Process) -> Iterator[tuple[int, int]]:
    """Begin and end of the last `STEPS` whole calls of `job.step`."""
    returns = process.when(STEP, RETURN)
    for end in returns[-STEPS:]:
        yield int(process.when(STEP)[process.when(STEP) < end][-1]), int(end)


def main() -> int:
    """Trace the journeys asked for and print what they go through."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("journeys", nargs="*", metavar="JOURNEY", help="default: all")
    parser.add_argument("--files", action="store_true", help="list the files in the order of first entry")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--verify", action="store_true", help="fail if there are more files than the docs state"
    )
    args = parser.parse_args()
    wanted, journeys = args.journeys or list(WANTED), list[Journey]()
    for trace, names in ((submit, {"submit"}), (resize, {"resize", "step"})):
        if names & set(wanted):
            with tempfile.TemporaryDirectory(prefix="swell-journeys-") as folder:
                journeys += [journey for journey in trace(Path(folder)) if journey.name in wanted]
    if args.json:
        print(json.dumps([asdict(journey) for journey in journeys], indent=1))
    else:
        show(journeys, with_files=args.files)
    return verify(journeys) if args.verify else 0


def verify(journeys: list[Journey]) -> int:
    """Compare with the documentation; returns an exit code, 1 if a journey has more files than stated."""
    limits = stated()
    over = [journey for journey in journeys if len(journey.files) > limits[journey.name]]
    for journey in over:
        print(f"{journey.name}: {len(journey.files)} files, {DOCS.name} states {limits[journey.name]}")
    return int(bool(over))


def stated() -> dict[str, int]:
    """The number of files of each journey in the table of docs/how/architecture.md."""
    rows = re.findall(r"^\| (\w+): [^|]*\| (\d+) \|", DOCS.read_text(), re.M)
    return {name: int(files) for name, files in rows}


def show(journeys: list[Journey], *, with_files: bool) -> None:
    """Print a table, and below it what each journey goes through."""
    print(
        f"{'journey':<9}{'files':>6}{'wanted':>8}{'jumps':>7}{'functions':>11}{'processes':>11}{'messages':>10}"
    )
    for j in journeys:
        counts = f"{j.jumps:>7}{j.functions:>11}{len(j.processes):>11}{len(j.messages):>10}"
        print(f"{j.name:<9}{len(j.files):>6}{WANTED[j.name]:>8}{counts}")
    for j in journeys:
        print(f"\n{j.name}: {', '.join(f'{role} ({count})' for role, count in j.processes.items())}")
        print(f"  messages: {', '.join(j.messages)}")
        print(f"  files with what idle processes enter anyway: {j.files_with_idle}")
        for number, file in enumerate(j.files if with_files else [], 1):
            print(f"  {number:>3}  {file}")


if __name__ == "__main__":
    sys.exit(main())
