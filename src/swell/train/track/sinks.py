"""The trackers that a job's figures can go to: TensorBoard, MLflow, Weights & Biases.

A sink continues the run of the job if there is one: what it needs for that is in `memory`, a small mapping
that is kept in the job's directory through all restarts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

Memory = dict[str, Any]


class Sink(Protocol):
    """Where figures go. Calls may raise anything; the caller decides what that means."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Add figures of one step; steps only grow."""

    def end(self, outcome: str) -> None:
        """Close the run: 'finished', 'failed', or 'stopped' if it will go on."""


class TensorBoard:
    """Event files in a directory of the job's own, which TensorBoard shows as one run."""

    def __init__(self, directory: str, job: str, memory: Memory) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(Path(directory, job)))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Add figures of one step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def end(self, outcome: str) -> None:
        """Close the file."""
        self._writer.close()


class MLflow:
    """A run of the experiment 'swell', or of the one that MLFLOW_EXPERIMENT_NAME names."""

    def __init__(self, uri: str, job: str, memory: Memory) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # directories need leave in new versions
        from mlflow.tracking import MlflowClient

        where = uri if "://" in uri or uri.startswith("file:") else Path(uri).absolute().as_uri()
        self._client = MlflowClient(tracking_uri=where)
        self._run = str(memory.get("run_id", ""))
        if not self._run:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "swell")
            found = self._client.get_experiment_by_name(name)
            experiment = self._client.create_experiment(name) if found is None else found.experiment_id
            self._run = memory["run_id"] = self._client.create_run(experiment, run_name=job).info.run_id
        else:
            self._client.update_run(self._run, status="RUNNING")

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Add figures of one step."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._client.log_batch(
            self._run, [Metric(name, value, now_ms, step) for name, value in figures.items()]
        )

    def end(self, outcome: str) -> None:
        """Say how the run ended; one that will go on stays as it is."""
        if outcome != "stopped":
            self._client.set_terminated(self._run, "FINISHED" if outcome == "finished" else "FAILED")


class WandB:
    """A run of a project; offline unless there is an API key. `wandb sync` joins its parts by their id."""

    def __init__(self, project: str, job: str, memory: Memory) -> None:
        import wandb

        if "WANDB_MODE" not in os.environ and "WANDB_API_KEY" not in os.environ:
            os.environ["WANDB_MODE"] = "offline"
        memory.setdefault("id", secrets.token_hex(4))
        self._run = wandb.init(
            project=project, name=job, id=memory["id"], resume="allow", settings={"silent": True}
        )

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Add figures of one step."""
        self._run.log(dict(figures), step=step)

    def end(self, outcome: str) -> None:
        """Close the run."""
        with contextlib.suppress(OSError):
            self._run.finish(exit_code=0 if outcome != "failed" else 1)


KINDS: dict[str, type[TensorBoard] | type[MLflow] | type[WandB]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
}
