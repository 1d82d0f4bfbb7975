"""What a heartbeat says about a worker's last step (docs/runtime.md); `reporting` has the means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swell.train import reporting

if TYPE_CHECKING:
    from swell.train.data.loader import ElasticLoader
    from swell.train.stepping import Stepper
    from swell.train.sync.reduction import Reduced


def report(job: Stepper, reduced: Reduced, loader: ElasticLoader | None, step_s: float) -> dict[str, Any]:
    """The report after a step that took `step_s`; with its loader also the speed and the job's progress."""
    out: dict[str, Any] = {
        "step": job.steps,
        "epoch": job.epoch,
        "generation": job._crew.mesh.number,
        "rank": job.rank,
        "world": job.world,
        "step_s": round(step_s, 6),
        "wait_s": round(reduced.wait_s, 6),
        "sync_s": round(reduced.sync_s, 6),
        "sums": job._crew.reducer.way,
        "mode": job.mode,
        "loss": job._loss.value,
        "lr": float(job.optimizer.param_groups[0]["lr"]),
        "metrics": job._metrics,
        "memory_bytes": reporting.memory_bytes(job._flat.device),
        "done": job.steps,
    }
    if loader is not None:
        now_with = (job._crew.mesh.number, loader.batch_size, loader.piece or 0)
        job._pace.add(now_with, step_s, reduced.sync_s, step_s - reduced.wait_s - reduced.sync_s)
        piece = loader.piece if job._ranks is None else -(-loader.batch_size // job._logical)
        out |= reporting.timing(job._pace, loader.batch_size, piece, job.world, job._crew.nodes)
        if job._pace.known and 0 < job.world == len(reduced.headers):
            out |= {"own_s": round(job._pace.own_s, 6), "samples": reduced.headers[job.rank]["n"]}
        out |= _progress(job, loader)
    if job._adaptive is not None:
        out |= job._adaptive.beat()
    return out


def _progress(job: Stepper, loader: ElasticLoader) -> dict[str, float | None]:
    """The job's progress and its total, in steps at the tuned batch."""
    out: dict[str, float | None]
    if job._adaptive is None:
        whole = job._total_steps
        if whole is None and job._epochs is not None and not loader.streaming:
            whole = job._epochs * len(loader)
        out = {"done": job.steps, "of": whole}
    else:
        passes = job.epoch + loader.cursor / len(loader.dataset)
        out = job._adaptive.progress(job._epochs, passes if job._by == "data" else None)
    if job._until_loss is not None:  # the number of epochs is the most it may take, not its length
        out |= {"target_loss": job._until_loss, "at_most": out["of"], "of": None}
    return out
