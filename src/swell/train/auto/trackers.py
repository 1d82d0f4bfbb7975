"""Trackers that an unmodified script calls by itself: one writer, one run per job, steps that never go back.

Every worker runs the script, so each of them would make a run of its own in MLflow or Weights & Biases, and a
job that goes back to a checkpoint would log steps again. So what the script tells a tracker comes here first:

- Only the leader's calls are carried out. Other workers count them, because one of them may lead next.
- A call is known by its *place*: the job's step, and how many calls were made before it in that step. The
  last place that was carried out is in a file that outlives all workers. Calls up to it are left out.
- The runs that the first leader made are noted in a file. Later leaders go on with them.

Covered are `torch.utils.tensorboard`, MLflow's client (so `mlflow.log_metric` and autologging too), and
`wandb.init` with `run.log` and `wandb.log`. Files of TensorBoard are the leader's anyway (see `files`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Place = tuple[int, int]

_FLUSH_S = 1.0
"""TensorBoard's writer keeps events for two minutes, which a death would take along."""

_MLFLOW_WRITES = (
    "log_metric", "log_batch", "log_param", "log_inputs", "log_outputs", "set_tag", "delete_tag",
    "update_run", "set_terminated", "log_artifact", "log_artifacts", "_record_logged_model",
)  # fmt: skip
_RUN_FIELDS = ("run_id", "experiment_id", "user_id", "status", "start_time", "artifact_uri", "run_name")


class Trackers:
    """Decides which calls of a tracker are carried out, and keeps the runs of the job."""

    def __init__(self, home: Path, leads: Callable[[], bool], steps: Callable[[], int]) -> None:
        """`home`: a folder of its own that outlives the job's workers; `steps`: how many the job has made."""
        self._leads, self._steps = leads, steps
        self._home, self._marks, self._runs = home, home / "place", home / "runs.json"
        self._here: Place = (-1, 0)
        self._mark: Place | None = None
        self._made = {"mlflow": 0, "wandb": 0, "tensorboard": 0}
        self._open: list[Any] = []

    # ------------------------------------------------------------------ which calls count

    def admits(self) -> bool:
        """Whether the call that the script makes now is carried out; every such call must ask, once."""
        step = self._steps()
        self._here = (step, self._here[1] + 1 if step == self._here[0] else 1)
        if not self._leads():
            self._mark = None
            return False
        if self._mark is None:
            self._mark = self._read_mark()
        if self._here <= self._mark:
            return False
        self._mark = self._here
        with contextlib.suppress(OSError):  # a full disk must not end the job
            self._home.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._marks, os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                os.write(descriptor, b"%20d %20d" % self._here)
            finally:
                os.close(descriptor)
        return True

    def _read_mark(self) -> Place:
        try:
            step, calls = self._marks.read_text().split()
            return int(step), int(calls)
        except (OSError, ValueError):
            return -1, 0

    def _noted(self, kind: str) -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] = json.loads(self._runs.read_text()).get(kind, [])
            return found
        except (OSError, ValueError):
            return []

    def _note(self, kind: str, run: dict[str, Any]) -> None:
        kinds = {one: self._noted(one) for one in self._made}
        kinds[kind].append(run)
        self._home.mkdir(parents=True, exist_ok=True)
        new = self._runs.with_suffix(".new")
        new.write_text(json.dumps(kinds))
        new.replace(self._runs)

    # ------------------------------------------------------------------ TensorBoard

    def tensorboard(self, module: Any) -> None:
        """Take over `torch.utils.tensorboard.writer`: all workers write into the first leader's folders."""
        make = module.FileWriter.__init__

        def begin(writer: Any, log_dir: Any, *args: Any, **options: Any) -> None:
            number, self._made["tensorboard"] = self._made["tensorboard"], self._made["tensorboard"] + 1
            noted = self._noted("tensorboard")
            if number < len(noted):
                log_dir = noted[number]["folder"]
            elif self._leads():
                folder = os.fspath(log_dir)
                if "://" not in folder:
                    folder = os.path.abspath(folder)  # noqa: PTH100 - Path would change what people gave
                self._note("tensorboard", {"folder": folder})
            make(writer, log_dir, *args, **options)

        module.FileWriter.__init__ = begin
        add, flushed_s = module.FileWriter.add_event, time.monotonic()

        def add_event(writer: Any, event: Any, *args: Any, **options: Any) -> None:
            nonlocal flushed_s
            if self.admits():
                add(writer, event, *args, **options)
                if time.monotonic() - flushed_s > _FLUSH_S:
                    flushed_s = time.monotonic()
                    writer.flush()

        module.FileWriter.add_event = add_event

    # ------------------------------------------------------------------ MLflow

    def mlflow(self, module: Any) -> None:
        """Take over `mlflow.tracking._tracking_service.client`."""
        client = module.TrackingServiceClient
        create, get = client.create_run, client.get_run

        def create_run(service: Any, *args: Any, **options: Any) -> Any:
            number, self._made["mlflow"] = self._made["mlflow"], self._made["mlflow"] + 1
            noted = self._noted("mlflow")
            if number < len(noted):
                return _mlflow_run(noted[number])
            run = create(service, *args, **options)
            if self._leads():
                self._note("mlflow", {name: getattr(run.info, name) for name in _RUN_FIELDS})
            return run

        def get_run(service: Any, run_id: str) -> Any:
            noted = None if self._leads() else _of_id(self._noted("mlflow"), run_id)
            return get(service, run_id) if noted is None else _mlflow_run(noted)

        client.create_run, client.get_run = create_run, get_run
        for name in _MLFLOW_WRITES:
            if hasattr(client, name):
                setattr(client, name, self._gated(getattr(client, name)))

    def _gated(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            return original(*args, **options) if self.admits() else None

        return call

    # ------------------------------------------------------------------ Weights & Biases

    def wandb(self, module: Any) -> None:
        """Take over `wandb`."""
        start = module.init

        def init(*args: Any, **options: Any) -> Any:
            number, self._made["wandb"] = self._made["wandb"], self._made["wandb"] + 1
            if self._leads():
                run = self._start(start, number, args, options)
                shown, real = run, run
            else:  # a stand-in, until this worker leads
                shown, real = start(*args, **{**options, "mode": "disabled"}), None
            write = None if real is None else real.log

            def log(data: Any, step: int | None = None, *more: Any, **others: Any) -> None:
                nonlocal write
                if not self.admits():
                    return
                if write is None:
                    late = {**options, "reinit": "create_new"}
                    write = self._start(start, number, args, late).log
                # Runs that are continued offline count from 0 again, so they are told the job's step.
                write(data, self._here[0] if step is None else step, *more, **others)

            shown.log = module.log = log
            return shown

        module.init = init

    def _start(self, start: Callable[..., Any], number: int, args: Any, options: dict[str, Any]) -> Any:
        noted = self._noted("wandb")
        again = number < len(noted)
        name = noted[number]["id"] if again else options.get("id") or secrets.token_hex(4)
        run = start(*args, **{**options, "id": name, "resume": options.get("resume") or "allow"})
        if not again:
            self._note("wandb", {"id": name})
        self._open.append(run)
        return run

    def close(self) -> None:
        """End the runs that this worker has opened late; those of the script itself are ended already."""
        for run in self._open:
            with contextlib.suppress(Exception):
                run.finish()
        self._open.clear()


def _of_id(runs: list[dict[str, Any]], run_id: str) -> dict[str, Any] | None:
    return next((run for run in runs if run["run_id"] == run_id), None)


def _mlflow_run(noted: dict[str, Any]) -> Any:
    """A run as MLflow's client returns it, without asking a server or looking at files."""
    from mlflow.entities import Run, RunData, RunInfo

    return Run(RunInfo(**noted, end_time=None, lifecycle_stage="active"), RunData())
