"""`swell run --auto train.py`: an ordinary single-device script, data-parallel and elastic, unchanged.

`watched` is the context in which the script runs: it puts an `Observer` and the redirection of files in place
of what the script calls. Only one worker runs the script until its first step, so that data are downloaded
once and a script that cannot be shared is run once; the others wait until that worker trains, and then come
as newcomers. A worker that cannot follow, for whatever reason, gives way (`giving_way`): trouble of one
worker never ends a healthy job.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from swell.train.agent.client import JobClient
from swell.train.agent.jobdir import JobDirectory
from swell.train.agent.protocol import age
from swell.train.auto import processes
from swell.train.auto.files import Files, LeaderOnly
from swell.train.auto.job import ScriptRun, give_way, what_ended
from swell.train.auto.observer import Observer
from swell.train.auto.processes import Processes
from swell.train.auto.randomness import job_seed
from swell.train.auto.trackers import Trackers
from swell.train.sync.control import Link

_LOOK_S = 0.1
_PATIENCE_S = 60.0
"""A worker that waits longer than this for the first one says so."""


def goes_first(link: Link) -> bool:
    """Wait until another worker trains; True if there is none, and this worker is the oldest of all."""
    begin, said = time.monotonic(), False
    while True:
        with contextlib.suppress(OSError, ValueError), JobClient(link.directory, wait_s=10.0) as client:
            while True:
                others = {n: s for n, s in client.status()["workers"].items() if n != link.name}
                if any(status in ("ready", "member", "done") for status in others.values()):
                    return False
                older = [n for n, s in others.items() if s == "starting" and age(n) < age(link.name)]
                if not older:
                    return True
                if not said and time.monotonic() - begin > _PATIENCE_S:
                    said = True
                    sys.stderr.write(
                        f"--auto: {link.name} waits until {older[0]}, which began first, trains\n"
                    )
                time.sleep(_LOOK_S)
        time.sleep(_LOOK_S)


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module once that has been imported."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._actions = dict(actions)
        for name in [name for name in actions if name in sys.modules]:
            self._actions.pop(name)(sys.modules[name])

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, with a loader that calls the action at the end."""
        action = self._actions.pop(fullname, None)
        if action is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            action(module)

        loader.exec_module = exec_module
        return spec


class Iterations:
    """`__iter__` of DataLoaders, of torch's own and of subclasses with their own."""

    def __init__(self) -> None:
        self._originals: dict[type, Any] = {}
        self.open: Callable[[Any], Iterator[Any]] = self.whole

    def whole(self, loader: Any) -> Iterator[Any]:
        """Iterate as the loader itself does."""
        kind = next(kind for kind in type(loader).__mro__ if kind in self._originals)
        found: Iterator[Any] = self._originals[kind](loader)
        return found

    def watch(self, kind: Any) -> None:
        """Have iterations over loaders of this class come here."""
        self._originals[kind] = kind.__iter__
        kind.__iter__ = lambda loader: self.open(loader)

    def undo(self) -> None:
        """Restore the classes."""
        kind: Any
        for kind, original in self._originals.items():
            kind.__iter__ = original


@contextlib.contextmanager
def watched(script: Path, directory: Path, worker: str) -> Iterator[None]:
    """Within this context the script that runs is one worker of the job in `directory`."""
    link = Link(JobDirectory(directory), worker)
    first = not link.welcome().live and goes_first(link)
    checkpoints = Path(link.config.checkpoints or directory / "checkpoints")
    resumes = first and checkpoints.is_dir() and any(checkpoints.iterdir())
    iterations = Iterations()
    run = ScriptRun(link, leads=first and not resumes, processes=processes.asked())
    observer = Observer(run, iterations.whole)
    group = Processes(run, observer.position.in_batch, observer.dividing.norm)
    iterations.open = observer.open
    tracked, seeded = checkpoints.with_name("trackers"), checkpoints.with_name("random")
    files = Files(
        directory / "private" / worker,
        checkpoints.with_name("files"),
        [directory, checkpoints, tracked, seeded],
        run.leads,
        lambda: run.behind,
    )
    run.files = files
    if first and not resumes:
        files.journal.begin_anew()
    launch = link.config.launch
    observer.readings.home = seeded / "passes" / "streams"
    run.randomness.begin(job_seed(seeded, launch, anew=first and not resumes), seeded / "passes")
    private = directory / "private"
    shown = [LeaderOnly(sys.stdout, run, private / "stdout"), LeaderOnly(sys.stderr, run, private / "stderr")]
    for stream in shown if first and not resumes else []:
        stream.begin_anew()
    trackers = Trackers(tracked, run.leads, lambda: run.steps)
    logging.getLogger("swell").propagate = False  # the script's log is the script's
    processes.announce(run)
    try:
        with (
            _patched(observer, iterations),
            processes.environment(run),
            group.installed(),
            _shown(shown),
            files.installed(),
            run.randomness.installed(),
            _each_step(files, shown),
            _after_imports(iterations, files, trackers, observer, group),
        ):
            yield
            trackers.close()
    except SystemExit as stop:
        if stop.code not in (None, 0):
            _give_way(run, first, stop)
            raise
        observer.finish()
        raise
    except Exception as error:
        _give_way(run, first, error)
        raise
    else:
        observer.finish()
        _after_step(files, shown)  # the leader may have died at the end of its script


@contextlib.contextmanager
def _patched(observer: Observer, iterations: Iterations) -> Iterator[None]:
    backward, make = torch.autograd.backward, torch.optim.Optimizer.__init__
    depth = 0

    def watch_backward(tensors: Any, grad_tensors: Any = None, *args: Any, **options: Any) -> None:
        nonlocal depth
        # Checkpointed layers compute gradients inside a backward pass, and scripts may fork processes.
        if depth or os.getpid() != observer.pid:
            backward(tensors, grad_tensors, *args, **options)
            return
        depth += 1
        try:
            if not observer.skips(tensors):
                observer.before_backward(tensors)
                backward(tensors, grad_tensors, *args, **options)
        finally:
            depth -= 1
        observer.after_backward()

    def watch_optimizer(optimizer: Any, *args: Any, **options: Any) -> None:
        make(optimizer, *args, **options)
        observer.trained.made(optimizer)

    patched: Any = torch
    iterations.watch(DataLoader)
    patched.autograd.backward, patched.optim.Optimizer.__init__ = watch_backward, watch_optimizer
    hooks = [
        register_optimizer_step_pre_hook(observer.before_step),
        register_optimizer_step_post_hook(observer.after_step),
    ]
    try:
        yield
    finally:
        observer.dividing.watch(on=False)
        iterations.undo()
        patched.autograd.backward, patched.optim.Optimizer.__init__ = backward, make
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _shown(shown: list[Any]) -> Iterator[None]:
    """Show what the leader prints."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = shown
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


@contextlib.contextmanager
def _each_step(files: Files, shown: list[LeaderOnly]) -> Iterator[None]:
    """After each step: what a leader may have died before is written and printed by the next one."""

    hook = register_optimizer_step_post_hook(lambda *_: _after_step(files, shown))
    try:
        yield
    finally:
        hook.remove()


def _after_step(files: Files, shown: list[LeaderOnly]) -> None:
    files.stepped()
    for stream in shown:
        stream.stepped()


@contextlib.contextmanager
def _after_imports(
    iterations: Iterations, files: Files, trackers: Trackers, observer: Observer, group: Processes
) -> Iterator[None]:
    """Reach what the script imports later: loaders with an `__iter__` of their own, writers, trackers."""

    def save_tensors(module: Any) -> None:
        write = module.serialize_file

        def serialize_file(tensors: Any, filename: Any, *args: Any, **options: Any) -> None:
            write(tensors, files.destination(filename), *args, **options)

        module.serialize_file = serialize_file

    def open_tensors(module: Any) -> None:
        read = module.safe_open
        module.safe_open = lambda filename, *args, **options: read(files.source(filename), *args, **options)

    def keep_tokenizers(module: Any) -> None:
        save, read = module.Tokenizer.save, module.Tokenizer.from_file

        def read_tokenizer(path: Any) -> Any:
            return read(str(files.source(path)))

        def save_tokenizer(tokenizer: Any, path: Any, *args: Any, **options: Any) -> None:
            save(tokenizer, str(files.destination(path)), *args, **options)

        module.Tokenizer.save, module.Tokenizer.from_file = save_tokenizer, staticmethod(read_tokenizer)

    def leave_uncompiled(dynamo: Any) -> None:
        group.leave_uncompiled(dynamo)
        observer.dividing.leave_uncompiled(dynamo.eval_frame.OptimizedModule)

    finder = AfterImport(
        {
            "torch._dynamo": leave_uncompiled,
            "safetensors": open_tensors,
            "safetensors.torch": save_tensors,
            "tokenizers": keep_tokenizers,
            "torch.utils.tensorboard.writer": trackers.tensorboard,
            "mlflow.tracking._tracking_service.client": trackers.mlflow,
            "wandb": trackers.wandb,
            "torchdata.stateful_dataloader.stateful_dataloader": lambda m: iterations.watch(
                m.StatefulDataLoader
            ),
        }
    )
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def _give_way(run: ScriptRun, first: bool, error: BaseException) -> None:
    """If it is not the leader's script that failed: ask for another worker in its place."""
    if run.left or run.leads() or (first and (run.job is None or run.job.forwarding)):
        return  # what happens to the leader happens to the job
    give_way(run.link, what_ended(error), steps=0 if run.job is None else run.job.steps, error=error)
