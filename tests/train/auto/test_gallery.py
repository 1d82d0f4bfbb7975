"""`--auto` sees what a plain run sees.

Every script of tests/train/gallery is run as its author would, and as a job that goes through 1, 3, a kill -9
of the leader, 1 and 2 workers. Both end with the same.

The same means: the weights and whatever else was saved, the printed numbers to four digits, the same files. A
script whose model draws random numbers by itself (dropout) ends with a quality as plain runs of several seeds
have. `TODAY` lists what does not hold yet, and a row that is not true any more fails its test.
"""

from __future__ import annotations

import csv
import enum
import importlib.util
import io
import json
import pickle
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swell.train.agent.errors import TrainError

GALLERY = Path(__file__).parents[1] / "gallery"


class Show(enum.Enum):
    """What the job's result must be."""

    EQUAL = 1e-4
    """That of the plain run, within the rounding of float32."""
    EXACT = 1e-9
    """That of the plain run, within the rounding of float64."""
    QUALITY = 0.0
    """As good: the script prints a quality, and it lies in the spread of plain runs."""


class Kind(enum.Enum):
    """What a script does instead, today."""

    ONE_WORKER = "its result is right, but it stays on one worker and says why"
    DIFFERS = "it ends with another result"
    FAILS = "it ends with an error, or takes no further worker without a word"
    VARIES = "it ends in one of these ways or well, depending on when its workers change"


@dataclass(frozen=True)
class Script:
    """One script of the gallery."""

    name: str
    style: str
    show: Show = Show.EQUAL
    short: bool = False
    """Whether `make test-gallery` runs it, as CI does; `make test-long` runs all."""
    needs: str = ""
    """The package that it is made for."""
    seeded: bool = True
    """Whether it takes `--seed`; only of interest for QUALITY."""
    env: dict[str, str] = field(default_factory=dict)
    """What starts it as a plain script sets (torchrun)."""


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
"""What torchrun sets."""

SCRIPTS = [
    Script("mnist_conv", "pytorch/examples: train() and test(), Adadelta, StepLR", short=True),
    Script("mlp_regression", "a loop over a loader, double precision", Show.EXACT, short=True),
    Script("makemore_by_hand", "a list of parameters changed by hand"),
    Script("makemore_optimizer", "batches drawn by hand, AdamW"),
    Script("nanogpt", "get_batch, accumulation, clipping, the schedule by hand", short=True),
    Script("mingpt", "a trainer class, callbacks, an endless sampler"),
    Script(
        "word_language_model", "the batch is the second dimension, the rate divided when stalled", short=True
    ),
    Script("word2vec", "sparse embeddings, SparseAdam"),
    Script("gan", "two optimizers, noise drawn in the loop", Show.EXACT, short=True),
    Script("wgan", "several steps of the critic, weights clipped", Show.EXACT),
    Script("wgan_gp", "gradient penalty on interpolated samples", Show.EXACT),
    Script("vae", "noise drawn in the model, a summed loss", Show.QUALITY),
    Script("autoencoder", "encoder and decoder apart, noise drawn in the loop"),
    Script("clip", "every picture against every text, a learned scale", short=True),
    Script("simclr", "NT-Xent over two views", short=True),
    Script("supcon", "supervised contrastive loss"),
    Script("triplets_online", "the hardest triplets of the batch", Show.EXACT, short=True),
    Script("in_batch_negatives", "ranking among the batch's answers"),
    Script("siamese", "pairs, a contrastive loss per pair", short=True),
    Script("byol", "a target network that follows slowly"),
    Script("memory_bank", "a queue of keys in a buffer (MoCo)"),
    Script("distillation", "a teacher trained before the student"),
    Script("multi_task", "two loaders drawn at random"),
    Script("fixmatch", "two loaders, each begun again at its end", short=True),
    Script("source_target", "a second loader begun again while the first goes on"),
    Script("kfold", "a model and an optimizer for each fold"),
    Script("unfreeze", "layers unfrozen in the middle, a group of parameters added"),
    Script("onecycle", "OneCycleLR by batches"),
    Script("plateau", "ReduceLROnPlateau on the training loss", Show.EXACT, short=True),
    Script("early_stopping", "stops by a validation loss, numpy's averages", Show.EXACT, short=True),
    Script("warmup_cosine", "LambdaLR by batches, rates in a text file", short=True),
    Script("accumulation", "four batches to a step", short=True),
    Script("clipping", "norms before clipping are kept"),
    Script("ema_dict", "an average of the weights in a dict", short=True),
    Script("swa", "AveragedModel, SWALR, update_bn", Show.EXACT, short=True),
    Script("best_score", "a best score of numpy's, deep copies of the best weights", short=True),
    Script("penalty", "a summed error and penalties on the weights", Show.EXACT, short=True),
    Script("gradient_penalty", "a penalty on the gradient by the inputs", Show.EXACT),
    Script("autocast_bf16", "bfloat16 under autocast", Show.QUALITY),
    Script("checkpointing", "layers computed again in the backward pass"),
    Script("weighted_sampler", "WeightedRandomSampler, what was seen is counted"),
    Script("drop_last", "drop_last, samples counted"),
    Script("loader_processes", "two processes load", short=True),
    Script("iterable", "an IterableDataset"),
    Script("endless_generator", "while True over a loader"),
    Script("cycle", "itertools.cycle beside a longer loader"),
    Script("next_iter", "next() and StopIteration", short=True),
    Script("stateful_lstm", "the hidden state goes on to the next batch"),
    Script("seq2seq", "collated time first, teacher forcing by `random`"),
    Script("graph", "graphs joined to one, as PyG does"),
    Script("full_batch", "all data at once, no loader", Show.EXACT),
    Script("lbfgs", "a closure", Show.EXACT),
    Script("nesterov", "Nesterov, MultiStepLR, globals, the best accuracy saved", short=True),
    Script("param_groups", "three groups with schedules of their own"),
    Script("batch_norm", "statistics of the whole batch", Show.EXACT, short=True),
    Script("group_norm", "group norm and a parametrization"),
    Script("spectral_norm", "a buffer that each forward pass changes", Show.EXACT),
    Script("margin_head", "an angular margin, two modules in one optimizer"),
    Script("class_weights", "class weights, ignored positions, label smoothing", short=True),
    Script("reinforce", "whole episodes, actions drawn from the model", Show.EXACT, short=True),
    Script("dqn", "a replay memory and a target network", Show.EXACT),
    Script("actor_critic", "minibatches of rollouts (PPO)", Show.EXACT),
    Script("ddp", "made for torchrun", short=True, env=TORCHRUN),
    Script("ddp_reference", "for torchrun: no_sync, metrics of all ranks, objects gathered", env=TORCHRUN),
    Script("hf_trainer", "Hugging Face's Trainer", needs="transformers"),
    Script("accelerate_loop", "Accelerate", needs="accelerate"),
    Script("lightning_loop", "Lightning", needs="lightning"),
    Script("metric_list_csv", "a csv file open for the whole training"),
    Script("json_history", "a defaultdict of lists, written as JSON"),
    Script("resume", "its own checkpoints, resumed if there is one"),
    Script(
        "unseeded_split", "random's and numpy's split, nothing seeded", Show.QUALITY, seeded=False, short=True
    ),
    Script("numpy_augmentation", "augmentation from numpy's global generator", Show.QUALITY),
    Script("dropout", "dropout", Show.QUALITY),
]

OFF = Kind.VARIES, "in some runs printed lines or weights are off after the workers change"
BY_HAND = Kind.ONE_WORKER, "it changes its parameters by hand"

UNDIVIDED = (Kind.ONE_WORKER, "what its model computes of a batch is not made of")
AHEAD = (Kind.VARIES, "batches are read ahead, so each worker has a part of them")
TODAY: dict[str, tuple[Kind, str]] = {
    "gan": OFF,
    "batch_norm": (Kind.DIFFERS, "val"),
    "clip": UNDIVIDED,
    "makemore_by_hand": BY_HAND,
    "word_language_model": BY_HAND,
    "word2vec": (Kind.ONE_WORKER, "its gradients are sparse"),
    "cycle": (Kind.ONE_WORKER, "itertools.cycle"),
    "graph": UNDIVIDED,
    "memory_bank": UNDIVIDED,
    "stateful_lstm": UNDIVIDED,
    "seq2seq": UNDIVIDED,
    "lbfgs": (Kind.ONE_WORKER, "gives optimizer.step() a closure"),
    "kfold": (Kind.VARIES, "workers join late, or not at all, where each fold begins with another model"),
    "reinforce": (Kind.ONE_WORKER, "without calling a model"),
    "wgan_gp": (Kind.VARIES, "a death within a gradient of a gradient takes the job back"),
}
"""What does not hold yet, by script: in which way, and why. Of ONE_WORKER and FAILS this is a part of what is
said, and the test looks for it."""

PACE = '''"""Slows the steps of a job's members down, more and more, until its workers have changed:
so no job is over before its test has done to it what it wants, however slow the machine is."""

import json
import os
import posix
import time

import torch

gate = {gate!r}
nap, backward, state = time.sleep, torch.autograd.backward, {{"phase": 0, "naps": 0}}


def paced(*args, **options):
    try:
        file = posix.open(gate, posix.O_RDONLY)
    except FileNotFoundError:
        return backward(*args, **options)
    order = json.loads(posix.read(file, 4096))
    posix.close(file)
    if order["phase"] != state["phase"]:
        state.update(phase=order["phase"], naps=0)
    if os.environ["SWELL_WORKER"] in order["members"]:
        nap(min(0.02 * 1.1 ** state["naps"], 2.0))
        state["naps"] += 1
    return backward(*args, **options)


torch.autograd.backward = paced
'''


class Gate:
    """How fast a job's members may step."""

    def __init__(self, path: Path) -> None:
        self._path, self._phase, self._members = path, 0, list[str]()
        self.turn()

    def turn(self) -> None:
        """Another change of the workers begins."""
        self._phase += 1
        self._write()

    def members(self, names: list[str]) -> None:
        """Only members are slowed down: a worker that catches up with them must not be."""
        if names != self._members:
            self._members = names
            self._write()

    def open(self) -> None:
        """From now on, as fast as it can."""
        self._path.unlink()

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({"phase": self._phase, "members": self._members or ["w0"]}))
        new.replace(self._path)


class Stuck(Exception):
    """A job did not become as large, or as small, as it was told to."""


@dataclass
class Result:
    """How a run ended."""

    code: int
    printed: list[str]
    folder: Path
    complaint: str = ""
    """Why it is a failure, if the exit code does not say it."""
    confined: str = ""
    """Why it stayed on one worker, if it did."""


def _plain(stage: Any, script: Script, folder: Path, *arguments: str) -> Any:
    """Start a plain run; a function that waits for its result."""
    (folder / "work").mkdir(parents=True)
    output = folder / "printed"
    env = {**script.env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"} if script.env else {}
    path = GALLERY / f"{script.name}.py"
    pid = stage.prepared.plain(path, *arguments, cwd=folder / "work", output=output, env=env)

    def wait() -> Result:
        code = stage.prepared.wait(pid, 120.0)
        return Result(code, output.read_text().splitlines(), folder / "work")

    return wait


def _start(stage: Any, script: Script, folder: Path) -> tuple[Any, Gate]:
    """Start the job, paced by `PACE`, which the first line of its script imports."""
    (folder / "work").mkdir(parents=True)
    (folder / "code").mkdir()
    (folder / "pace").mkdir()  # not beside the script: what its modules hold travels to newcomers
    gate = Gate(folder / "gate")
    (folder / "pace" / "gallery_pace.py").write_text(PACE.format(gate=str(folder / "gate")))
    path = folder / "code" / f"{script.name}.py"
    path.write_text("__import__('gallery_pace'); " + (GALLERY / path.name).read_text())
    settings = {"auto": True, "checkpoint_s": 0.5}
    env = {"PYTHONPATH": str(folder / "pace")}
    places = {"cwd": str(folder / "work"), "env": env}
    job = stage.run(path, settings=settings, workers=1, maximum=3, gather_s=0.1, **places)
    return job, gate


def _why_alone(job: Any) -> str:
    said = [e for e in job.events("confined") if e["workers"] == 1]
    return said[-1]["reason"] if said else ""


def _until(job: Any, gate: Gate, count: int, without: str = "", timeout_s: float = 100.0) -> bool:
    """Wait until so many workers have made some steps together; False if the job says it stays on one."""
    begin, since = time.monotonic(), None
    while True:
        with job.client() as client:
            status = client.status()
        members = status["members"]
        gate.members(members)
        if status["step"] and len(members) == count and without not in members:
            if since is None or since[0] != members:
                since = members, status["step"]
            elif status["step"] >= since[1] + 2:
                return True
        else:
            since = None
            if count > 1 and _why_alone(job):
                return False
        if time.monotonic() > begin + timeout_s:
            raise Stuck(f"it has {len(members)} workers instead of {count} after {timeout_s:g} s")
        time.sleep(0.03)


def _resized(job: Any, gate: Gate, count: int) -> bool:
    """Change the workers; False if the job stays on one and says why."""
    gate.turn()
    try:
        job.resize(count)
    except TrainError:
        if not _why_alone(job):
            raise
    return _until(job, gate, count)


def _schedule(job: Any, gate: Gate) -> None:
    """1 and 3 workers, a kill -9 of the leader, 1 and 2."""
    _until(job, gate, 1)
    several = _resized(job, gate, 3)
    gate.turn()
    killed = job.kill(0)
    # A script on one worker begins again, and may be over before anybody looks.
    if several and _until(job, gate, 3, without=killed) and _resized(job, gate, 1):
        _resized(job, gate, 2)
    gate.open()


def _finish(job: Any, gate: Gate, folder: Path) -> Result:
    complaint = ""
    try:
        _schedule(job, gate)
    except (Stuck, TrainError, OSError, EOFError, LookupError) as error:
        complaint = f"{type(error).__name__}: {error}"
        if (folder / "gate").exists():
            gate.open()
    try:
        code = job.wait(60.0)
    except AssertionError:
        code, complaint = -1, complaint or "it did not end"
    confined = _why_alone(job)
    lines = [line.partition("| ") for line in job.output().splitlines() if re.match(r"w\d+\| ", line)]
    lines = [line for line in lines if not line[2].startswith(("--auto: ", "resumed from "))]
    if "it begins again" in confined and lines:  # as was said, and the killed worker's lines stay
        lines = [line for line in lines if line[0] == lines[-1][0]]
    return Result(code, [line[2] for line in lines], folder / "work", complaint, confined)


# ---------------------------------------------------------------- comparing

NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|\b(?:inf|nan)\b")


def _close(one: float, two: float, relative: float, absolute: float) -> bool:
    return one == two or abs(one - two) <= max(relative * max(abs(one), abs(two)), absolute)


class _Anything(torch.nn.Module):
    """A module of a class that only the script has."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Anything if module == "__main__" else super().find_class(module, name)


class _Pickle:
    """For `torch.load`: reads what a script saved as a whole module."""

    Unpickler = _Unpickler
    load = pickle.load


def _texts(where: str, plain: list[str], job: list[str], relative: float) -> Iterator[str]:
    plain, job = ([line for line in lines if "_runtime" not in line] for lines in (plain, job))
    for i, (one, two) in enumerate(zip_longest(plain, job)):
        if one is None or two is None:
            yield f"{where}: {len(plain)} lines and {len(job)}; line {i + 1}: {one!r}, and {two!r}"
            return
        # A number that is printed with few digits may be rounded up in one run and down in the other.
        numbers = list(zip(NUMBER.findall(one), NUMBER.findall(two), strict=False))
        units = [
            max(10.0 ** -len(n.partition(".")[2]) if "." in n and "e" not in n else 0.0 for n in p)
            for p in numbers
        ]
        same = all(
            _close(float(a), float(b), relative, 1.01 * u) for (a, b), u in zip(numbers, units, strict=True)
        )
        if NUMBER.sub("#", one) != NUMBER.sub("#", two) or not same:
            yield f"{where}: line {i + 1}: {one!r}, and {two!r}"
            return


def _values(where: str, plain: Any, job: Any, relative: float) -> Iterator[str]:
    if isinstance(plain, torch.nn.Module) and isinstance(job, torch.nn.Module):
        plain, job = plain.state_dict(), job.state_dict()
    if isinstance(plain, np.ndarray | np.generic) and isinstance(job, np.ndarray | np.generic):
        plain, job = torch.as_tensor(plain), torch.as_tensor(job)
    if isinstance(plain, torch.Tensor) and isinstance(job, torch.Tensor) and plain.shape == job.shape:
        one, two = plain.detach().double(), job.detach().double()
        if one.numel() and not (one - two).abs().max() <= relative * max(one.abs().max().item(), 1e-3):
            off = ((one - two).abs().max() / one.abs().max()).item()
            yield f"{where}: off by {off:.1e}"
    elif isinstance(plain, dict) and isinstance(job, dict) and list(plain) == list(job):
        for key in plain:
            yield from _values(f"{where}.{key}", plain[key], job[key], relative)
    elif isinstance(plain, list | tuple) and isinstance(job, list | tuple) and len(plain) == len(job):
        for i, (one, two) in enumerate(zip(plain, job, strict=True)):
            yield from _values(f"{where}[{i}]", one, two, relative)
    elif isinstance(plain, float) and isinstance(job, float):
        if not _close(plain, job, relative, 1e-8):
            yield f"{where}: {plain} and {job}"
    elif isinstance(plain, torch.Tensor | dict | list | tuple | float) or plain != job:
        yield f"{where}: {str(plain)[:80]} and {str(job)[:80]}"


def _load(path: Path) -> Any:
    if path.suffix == ".json":
        return json.loads(path.read_text())
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".csv":
        return list(csv.reader(io.StringIO(path.read_text())))
    return torch.load(path, weights_only=False, map_location="cpu", pickle_module=_Pickle)


def differences(plain: Result, job: Result, show: Show) -> Iterator[str]:
    """What the job's result differs in: printed lines, files, and what they hold."""
    relative = show.value
    yield from _texts("printed", plain.printed, job.printed, max(relative, 1e-4))
    files = [{str(p.relative_to(r.folder)) for p in r.folder.rglob("*") if p.is_file()} for r in (plain, job)]
    if files[0] != files[1]:
        yield f"files: {sorted(files[0])} and {sorted(files[1])}"
    for name in sorted(files[0] & files[1]):
        one, two = plain.folder / name, job.folder / name
        if one.suffix in {".csv", ".txt", ".log"}:
            yield from _texts(
                name, one.read_text().splitlines(), two.read_text().splitlines(), max(relative, 1e-4)
            )
        elif one.suffix in {".pt", ".pth", ".tar", ".npy", ".json"}:
            yield from _values(name, _load(one), _load(two), relative)


def _quality(result: Result) -> float:
    return float(result.printed[-1].removeprefix("quality "))


def worse(plain: list[Result], job: Result) -> Iterator[str]:
    """Whether the job's quality lies outside of what plain runs have, and their spread on either side."""
    yield from _texts(
        "printed",
        [NUMBER.sub("#", t) for t in plain[0].printed],
        [NUMBER.sub("#", t) for t in job.printed],
        0,
    )
    values, value = [_quality(result) for result in plain], _quality(job)
    spread = max(values) - min(values)
    if not min(values) - spread <= value <= max(values) + spread:
        yield f"quality {value}, plain runs {values}"


def outcome(plain: list[Result], job: Result, show: Show) -> tuple[Kind | None, str]:
    """How a script fails to show what it must, and in what; None if it does show it."""
    if job.complaint or job.code:
        said = [line for line in job.printed if re.match(r"(\w+\.)*\w*(Error|Exception)\b", line)]
        return Kind.FAILS, said[-1] if said and job.code else job.complaint or f"exit code {job.code}"
    different = list(worse(plain, job) if show is Show.QUALITY else differences(plain[0], job, show))
    if different:
        also = f" (on one worker: {job.confined})" if job.confined else ""
        return Kind.DIFFERS, "; ".join(different[:3]) + also
    return (Kind.ONE_WORKER, job.confined) if job.confined else (None, "")


def _cases() -> list[Any]:
    cases = []
    for script in SCRIPTS:
        marks = [pytest.mark.long, *([pytest.mark.gallery] if script.short else [])]
        if script.needs and importlib.util.find_spec(script.needs) is None:
            marks.append(
                pytest.mark.skip(reason=f"{script.needs} is not installed (pip install 'swell[frameworks]')")
            )
        cases.append(pytest.param(script, id=script.name, marks=marks))
    return cases


def test_the_gallery_is_listed() -> None:
    names = [script.name for script in SCRIPTS]
    assert sorted(names) == sorted(path.stem for path in GALLERY.glob("*.py"))
    assert len(names) >= 40 and set(TODAY) <= set(names)
    assert 3 * sum(script.short for script in SCRIPTS) >= len(SCRIPTS) - 3, "CI runs a third"


@pytest.mark.timeout(900)
@pytest.mark.slow  # each starts a job and changes its workers four times
@pytest.mark.parametrize("script", _cases())
def test_a_job_that_grows_dies_and_shrinks_ends_as_a_plain_run(
    stage: Any, tmp_path: Path, script: Script
) -> None:
    job, gate = _start(stage, script, tmp_path / "job")
    seeds = range(1, 6) if script.show is Show.QUALITY else [0]
    arguments = [("--seed", str(s)) if script.seeded and script.show is Show.QUALITY else () for s in seeds]
    runs = [_plain(stage, script, tmp_path / f"plain{s}", *a) for s, a in zip(seeds, arguments, strict=True)]
    result = _finish(job, gate, tmp_path / "job")
    plain = [run() for run in runs]
    assert not any(run.code for run in plain), plain[0].printed
    kind, what = outcome(plain, result, script.show)
    expected, said = TODAY.get(script.name, (None, ""))
    print(job.output()[-3000:])
    if expected is Kind.VARIES:
        return
    known = said in what or kind is Kind.DIFFERS
    assert kind is expected and known, f"{kind and kind.name}: {what}"
