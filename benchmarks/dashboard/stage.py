"""A platform with a past, for pictures and measurements: all of it is real but the jobs.

Jobs run at the speed of a curve and report loss, batch size and learning rate as real ones do. The first part
of the play happens on a virtual clock, in a moment; from then on the clock is the real one.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from swell.api.schemas import ReplayRequest
from swell.api.server import Server
from swell.control.knowledge import Knowledge, Length, Speed
from swell.control.model import JobRequest
from swell.control.plane import ControlPlane
from swell.control.store import Store, connect
from swell.domain import Cluster, FloatArray, Placement
from swell.engines.base import EngineReport
from swell.engines.null import NullEngine
from swell.perf.belief import JobBelief
from swell.perf.goodput import BatchLimits
from swell.sim.replay import replay

PAUSE_S = 0.6
START_S = 4.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of job: how fast it is, and what its curves look like."""

    script: str
    rate: float
    """Iterations per second on one GPU."""
    overhead: float
    """The share of a step that does not get shorter with more GPUs."""
    batch: int
    lr: float
    loss: tuple[float, float]
    """Loss at the beginning and at the end."""

    def curve(self, most: int) -> FloatArray:
        """Iterations per second on 0, 1, 2 ... GPUs."""
        gpus = np.arange(most + 1.0)
        return self.rate * gpus / (1.0 + self.overhead * np.maximum(gpus - 1.0, 0.0))


KINDS = {
    kind.script: kind
    for kind in (
        Kind("resnet50.py", 3.0, 0.035, 256, 0.1, (6.9, 1.1)),
        Kind("bert.py", 1.6, 0.05, 64, 3e-5, (2.8, 0.7)),
        Kind("gpt.py", 1.1, 0.02, 128, 6e-4, (9.8, 2.9)),
        Kind("recommender.py", 6.0, 0.2, 2048, 0.01, (0.69, 0.31)),
        Kind("detector.py", 1.9, 0.08, 32, 0.02, (5.2, 1.6)),
    )
}


@dataclass(frozen=True, slots=True)
class Part:
    """One job of the play: when it comes (seconds after the start), what it is, and how long it takes."""

    at_s: float
    name: str
    script: str
    alone_s: float
    """How long it would take on one GPU."""
    within_s: float | None = None
    owner: str = "ada"
    most: int | None = None
    least: int = 1
    priority: str = "normal"


@dataclass(slots=True)
class TrueSpeed(Speed):
    """The speed of a pretended job: its true curve."""

    rates: FloatArray = field(default_factory=lambda: np.zeros(1))

    def curve_on(
        self, gpu_type: str, max_gpus: int, gpus_per_node: int, *, cautious: bool = False
    ) -> FloatArray:
        return self.rates[: max_gpus + 1]

    def most_workers(self, bound: int) -> int:
        return bound


class Known(Knowledge):
    """What the platform knows of a pretended job."""

    def noise_figures(self, batch_size: int | None) -> dict[str, float]:
        """Gradients get noisier as the loss falls, so larger batches get cheaper."""
        latest, of = self.length.latest, self.length.of
        if batch_size is None or self.batch_size is None or latest is None or not of:
            return {}
        noise = self.batch_size * (0.4 + 9.0 * (latest.done / of) ** 1.5)
        return {"noise_scale": noise, "efficiency": (noise + self.batch_size) / (noise + batch_size)}


class Actors(NullEngine):
    """An engine whose pretended jobs report progress every two seconds, and write output."""

    def __init__(self, stage: Stage, cluster: Cluster) -> None:
        super().__init__(cluster, truth=stage, clock=stage.clock)
        self._stage = stage
        self._reported: dict[str, float] = {}
        self.quiet = False
        self.every_s = 2.0
        """Seconds between two reports of one job."""

    def play(self) -> None:
        """Have every running job report its progress."""
        now_s = self._clock()
        with self._lock:
            running = [(job_id, run) for job_id, run in self._runs.items() if run.placement]
        for job_id, run in running:
            if self.quiet or now_s - self._reported.get(job_id, -math.inf) < self.every_s:
                continue
            self._reported[job_id] = now_s
            kind, of = self._stage.kind(job_id), self._stage.work(job_id)
            trained_s = max(now_s - max(run.since_s, run.paused_until_s), 0.0)
            done = min(of - run.left + run.speed * trained_s, of)
            data = curves_at(kind, done / of, len(run.placement), job_id)
            report = EngineReport(
                job_id=job_id, time_s=now_s, kind="progress", data={"done": done, "of": of} | data
            )
            self._reports.append(report)

    def confine(self, job_id: str, workers: int, reason: str) -> None:
        """Have a job say that it can use no more than so many workers."""
        data = {"workers": workers, "reason": reason}
        self._reports.append(EngineReport(job_id=job_id, time_s=self._clock(), kind="confined", data=data))

    def logs(self, job_id: str, job_dir: Path, *, offset: int = 0, limit: int = 65536) -> tuple[bytes, int]:
        """What such a job would have printed so far."""
        record, kind = self._stage.plane.jobs.get(job_id), self._stage.kind(job_id)
        if record.started_s is None:
            return b"", offset
        share = record.done / (record.of or math.inf)
        lines = [
            f"epoch {i / 4:6.2f}  loss {curves_at(kind, i / 400, 1, job_id)['loss']:.4f}\n"
            for i in range(int(share * 400) + 1)
        ]
        text = "".join(lines).encode()
        return text[offset : offset + limit], min(offset + limit, len(text))


def curves_at(kind: Kind, share: float, gpus: int, job_id: str) -> dict[str, object]:
    """Loss, batch size and learning rate of a job that has done this share of its work."""
    first, last = kind.loss
    wobble = 0.012 * random.Random(f"{job_id} {share:.4f}").gauss(0, 1) * (1 - 0.5 * share)
    batch = kind.batch * max(1, round(gpus * (0.35 + 0.65 * share)))
    lr = kind.lr * math.sqrt(batch / kind.batch) * 0.5 * (1 + math.cos(math.pi * share))
    loss = last + (first - last) * math.exp(-5.5 * share) + wobble * first
    accuracy = 1 - math.exp(-4 * share) * 0.9 - 0.08
    return {
        "loss": loss,
        "batch_size": batch,
        "lr": lr,
        "epoch": share * 90,
        "metrics": {"accuracy": accuracy},
    }


class Stage:
    """A platform whose clock is turned by hand at first."""

    def __init__(self, home: Path, cluster: str, policy: str = "elasticflow", began_s: float = 0.0) -> None:
        self.home = home
        home.mkdir(exist_ok=True)
        for script in KINDS:
            (home / script).write_text("# pretends to train\n")
        self._parts: dict[str, Part] = {}
        self._now_s: float | None = began_s
        self.began_s = began_s
        self.engine = Actors(self, Cluster.parse(cluster, "a100"))
        self.slots = self.engine.cluster().capacity
        self.store = Store(connect(str(home / "store.db")))
        self.plane = ControlPlane(
            self.store, self.engine, home=home, policy=policy, clock=self.clock, recall=self.recall
        )
        self.plane.come_up()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.server: Server | None = None

    def clock(self) -> float:
        """The virtual time, or the real one once the play is live."""
        return time.time() if self._now_s is None else self._now_s

    # -- the truth, for the engine -----------------------------------------------------------------------

    def kind(self, job_id: str) -> Kind:
        """The kind of a job, by its id."""
        return KINDS[Path(self.plane.jobs.get(job_id).request.script).name]

    def work(self, job_id: str) -> float:
        """Iterations of a job."""
        kind, args = self.kind(job_id), self.plane.jobs.get(job_id).request.args
        return kind.rate * (float(args[-1]) if args else 600.0)

    def speed(self, job_id: str, placement: Placement) -> float:
        """Iterations per second on these slots."""
        return float(self.kind(job_id).curve(self.slots)[len(placement)])

    def pause_s(self, job_id: str, before: int, after: int) -> float:
        """What a change costs."""
        return PAUSE_S if before else START_S

    def recall(self, request: JobRequest) -> Knowledge:
        """What is known of a job before it runs."""
        kind = KINDS.get(Path(request.script).name)
        if kind is None:
            return Knowledge(request.script)
        rates = kind.curve(self.slots)
        belief = JobBelief(BatchLimits(kind.batch, kind.batch, 1, kind.batch), fixed_batch=kind.batch)
        for gpus in (1, 2, 4):
            belief.observe(1, gpus, kind.batch // gpus, 1.0 / float(rates[gpus]), 0.01)
        work = kind.rate * (float(request.args[-1]) if request.args else 600.0)
        return Known(
            kind.script,
            TrueSpeed(belief=belief, rates=rates),
            Length(work),
            batch_size=kind.batch,
            startup_s=START_S,
            pause_s=PAUSE_S,
            closing_s=0.5,
            source="history",
        )

    # -- the play ----------------------------------------------------------------------------------------

    def submit(self, part: Part) -> str:
        """Hand in one job now; returns its id."""
        deadline_s = None if part.within_s is None else self.clock() + part.within_s
        request = JobRequest(
            name=part.name,
            script=part.script,
            args=("--seconds", f"{part.alone_s:g}"),
            workdir=str(self.home),
            deadline_s=deadline_s,
            max_workers=part.most,
            min_workers=part.least,
            priority=part.priority,
        )
        return self.plane.jobs.submit(request, part.owner).job_id

    def rehearse(
        self, parts: Sequence[Part], until_s: float, losses: Sequence[tuple[float, float, str]] = (),
        every_s: float = 2.0,
    ) -> None:  # fmt: skip
        """Play up to a moment on the virtual clock. `losses`: when a node is lost and back, and its name."""
        coming = sorted(parts, key=lambda part: part.at_s)
        nodes = sorted([(a, False, n) for a, _, n in losses] + [(b, True, n) for _, b, n in losses])
        assert self._now_s is not None
        while self._now_s < until_s:
            while coming and self.began_s + coming[0].at_s <= self._now_s:
                self.submit(coming.pop(0))
            while nodes and self.began_s + nodes[0][0] <= self._now_s:
                _, up, name = nodes.pop(0)
                self.engine.set_node(name, up=up)
            self.engine.play()
            self.plane.turn()
            self._now_s += every_s

    def go_live(self, port: int = 0) -> Server:
        """From now on by the real clock, with a server."""
        self._now_s = None
        options = {"home": self.home, "port": port, "replay": self._replay}
        self.server = Server(self.plane, self.store, **options)  # type: ignore[arg-type]
        self.server.start()
        self._thread = threading.Thread(target=self._run, name="stage", daemon=True)
        self._thread.start()
        return self.server

    def restart(self) -> None:
        """Another server on the same port, as after a restart of the control plane."""
        assert self.server is not None
        port = int(self.server.url.rsplit(":", 1)[1])
        self.server.stop()
        self.server = Server(self.plane, self.store, home=self.home, port=port, replay=self._replay)
        self.server.start()

    def _replay(self, request: ReplayRequest) -> dict[str, object]:
        cluster = None if request.cluster is None else Cluster.parse(request.cluster)
        events = [event for _, event in self.plane.events(limit=1_000_000)]
        return {"runs": replay(events, request.policies or [self.plane.policy()], cluster)}

    def _run(self) -> None:
        while not self._stop.wait(0.2):
            self.engine.play()
            self.plane.turn()

    def close(self) -> None:
        """End everything."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(10.0)
        if self.server is not None:
            self.server.stop()
        self.plane.stop()
        self.store.close()


PLAY = (
    Part(10, "resnet-baseline", "resnet50.py", 5200, owner="ada"),
    Part(130, "recsys-daily", "recommender.py", 3000, within_s=900, owner="grace"),
    Part(280, "gpt-small", "gpt.py", 15000, owner="alan"),
    Part(420, "bert-finetune", "bert.py", 3600, within_s=480, owner="grace"),
    Part(600, "yolo-traffic", "detector.py", 4200, owner="ada"),
    Part(760, "resnet-aug-a", "resnet50.py", 4300, within_s=700, owner="alan"),
    Part(770, "resnet-aug-b", "resnet50.py", 4300, within_s=900, owner="alan"),
    Part(800, "impossible", "gpt.py", 30000, within_s=240, owner="grace"),
    Part(1010, "recsys-hourly", "recommender.py", 1500, within_s=420, owner="grace"),
    Part(1180, "bert-long", "bert.py", 14000, within_s=2400, owner="ada"),
    Part(1350, "yolo-night", "detector.py", 5000, owner="ada", most=8),
    Part(1480, "gpt-medium", "gpt.py", 24000, owner="alan"),
    Part(1600, "resnet-final", "resnet50.py", 9000, within_s=1500, owner="grace"),
    Part(1690, "bert-probe", "bert.py", 2500, owner="ada"),
    Part(1750, "vit-large", "resnet50.py", 40000, owner="alan", least=24),
)
"""Half an hour on 32 GPUs: jobs swell into what is free, ebb for deadlines, and a node is lost."""


@contextlib.contextmanager
def play(home: Path) -> Iterator[Stage]:
    """The play that the pictures are taken of, live at its half hour."""
    length_s = 1800.0
    stage = Stage(home, "4x8", began_s=time.time() - length_s)
    try:
        stage.rehearse(PLAY, time.time(), every_s=4.0, losses=[(900.0, 1120.0, "n2")])
        stage.go_live()
        yield stage
    finally:
        stage.close()
