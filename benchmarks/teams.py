"""Two teams on one cluster: what quotas cost, and how fast borrowed slots come back.

    python -m benchmarks.teams                       # a generated day, 5 seeds, simulated
    python -m benchmarks.teams --policy tide --seeds 1
    python -m benchmarks.teams --live [--returns 10] # real processes on CPU slots of this machine

Simulated: every job is of one of two teams, at random; each team has half of the GPUs as its quota and
borrows what the other does not use. The same day runs without teams and with them. Printed are the average
JCT of both, and how long it took at most until a team was offered slots for a job that waited, while there
was room for the job in the team's quota and the other team had borrowed slots. It must never be longer than
one round of the policy. A policy may leave a job waiting although it was offered slots for it (Pollux gives
none to a job that was just submitted, or that was moved often); how long that took is printed besides.

Live: one team has all slots until the other submits a job. Printed is how long it took until the workers of
the borrower had left and the owner's job had the slots of its quota.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scipy import stats

from benchmarks.common import table, write_json
from swell.domain import Cluster, Event, EventKind, JobSpec, Teams
from swell.perf.profiles import ProfileSet
from swell.policies import Decision, Snapshot, make_policy
from swell.policies.by_team import ByTeam, by_team
from swell.sim import simulate
from swell.sim.generate import generate_jobs

POLICIES = ("tide", "elasticflow", "pollux", "max-min", "fifo")
CLUSTER = "16x4:T4"
HOURS, JOBS = 24.0, 480
COST_S = 30.0
NAMES = ("vision", "speech")
BOUND_S = 5.0
"""Live, borrowed slots must be back within this time."""


class Watch:
    """Follows a log, and measures how long teams wait for what is theirs while others borrow it."""

    def __init__(self, jobs: list[JobSpec], quotas: dict[str, int], *, rigid: bool) -> None:
        self._spec = {job.job_id: job for job in jobs}
        self._quotas = quotas
        self._rigid = rigid
        self._held: dict[str, int] = {}
        """GPUs of each job that is in, 0 while it waits; oldest first."""
        self._now_s = 0.0
        self._asked_s = 0.0
        """When the policy decided last."""
        self._offered: dict[str, int] = {}
        """By team: the most slots that the policy could give to its jobs in the last decision."""
        self._since_s: dict[tuple[str, bool], float] = {}
        self.returns_s: list[float] = []
        """How long it took each time until a team was offered what is its own."""
        self.refrained_s: list[float] = []
        """How long a job waited each time although its team was offered slots for it."""
        self.most_borrowed = 0
        self.borrowed_gpu_s = 0.0

    def decided(self, now_s: float, offered: dict[str, int]) -> None:
        """The policy has decided; what it offered to each team."""
        self._pass_time(now_s)
        self._asked_s, self._offered = now_s, offered

    def hear(self, event: Event) -> None:
        """Take in the next event."""
        self._pass_time(event.time_s)
        match event.kind:
            case EventKind.ADMITTED:
                self._held[str(event.job_id)] = 0
            case EventKind.ALLOCATED | EventKind.RESIZED:
                self._held[str(event.job_id)] = len(event.data["gpus"])
            case EventKind.PREEMPTED:
                self._held[str(event.job_id)] = 0
            case EventKind.FINISHED:
                self._held.pop(str(event.job_id), None)

    def _pass_time(self, now_s: float) -> None:
        if now_s > self._now_s:
            self._look(now_s - self._now_s)
            self._now_s = now_s

    def _look(self, lasts_s: float) -> None:
        """Look at the state that all events of one moment have led to."""
        used = dict.fromkeys(self._quotas, 0)
        for job_id, gpus in self._held.items():
            used[self._spec[job_id].team] += gpus
        borrowed = {name: max(used[name] - quota, 0) for name, quota in self._quotas.items()}
        self.most_borrowed = max(self.most_borrowed, *borrowed.values())
        self.borrowed_gpu_s += sum(borrowed.values()) * lasts_s
        for name, quota in self._quotas.items():
            waiting = [j for j, gpus in self._held.items() if not gpus and self._spec[j].team == name]
            # A policy for rigid jobs lets nobody pass the first job that waits.
            least = self._spec[waiting[0]].gpus if waiting and self._rigid else 1
            others = sum(gpus for other, gpus in borrowed.items() if other != name)
            room = used[name] + least
            owed = bool(waiting and others and room <= quota)
            told = owed and self._offered.get(name, 0) >= room
            told = told and self._spec[waiting[0]].submit_s <= self._asked_s
            for refrains, ends in ((False, not owed or told), (True, not told)):
                if not ends:
                    self._since_s.setdefault((name, refrains), self._now_s)
                elif (name, refrains) in self._since_s:
                    lasted_s = self._now_s - self._since_s.pop((name, refrains))
                    (self.refrained_s if refrains else self.returns_s).append(lasted_s)


def watch_decisions(policy: ByTeam, watch: Watch) -> ByTeam:
    """The policy, which tells the watch of every decision."""
    decide = policy.allocate

    def allocate(snapshot: Snapshot) -> Decision:
        decision = decide(snapshot)
        watch.decided(snapshot.now_s, {name: use.offered for name, use in policy.uses.items()})
        return decision

    policy.allocate = allocate  # type: ignore[method-assign]
    return policy


def compare(policy: str, cluster_text: str, jobs: int, seed: int) -> dict[str, float]:
    """One day without teams and with them."""
    profiles, cluster = ProfileSet.load(None), Cluster.parse(cluster_text)
    made = generate_jobs(
        profiles, jobs=jobs, hours=HOURS, seed=seed, max_gpu_hours=50.0, gpu_type="T4", teams=NAMES
    )
    teams = Teams.parse(",".join(f"{name}={cluster.capacity // 2}" for name in NAMES))
    chosen = make_policy(policy)
    watch = Watch(made, teams.quotas, rigid=chosen.rigid)
    watched = watch_decisions(by_team(chosen, teams), watch)
    free = simulate(made, profiles, cluster, policy, resize_cost=COST_S, seed=seed).record()
    shared = simulate(
        made, profiles, cluster, watched, resize_cost=COST_S, seed=seed, teams=teams, on_event=watch.hear
    ).record()
    assert free["finished"] == shared["finished"] == jobs, (free, shared)
    return {
        "free_jct_s": float(free["avg_jct_s"]),
        "shared_jct_s": float(shared["avg_jct_s"]),
        "round_s": chosen.interval_s or 0.0,
        "longest_s": max(watch.returns_s, default=0.0),
        "refrained": len(watch.refrained_s),
        "longest_refrained_s": max(watch.refrained_s, default=0.0),
        "most_borrowed": watch.most_borrowed,
        "borrowed_gpu_hours": watch.borrowed_gpu_s / 3600,
    }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the mean, by Student's t; of one value there is none."""
    if len(values) < 2:
        return math.nan, math.nan
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.mean(values)
    return mean - half, mean + half


def simulated(policies: list[str], cluster: str, jobs: int, seeds: int) -> dict[str, Any]:
    """All policies and seeds, as figures and as a table."""
    figures: dict[str, Any] = {}
    rows: list[tuple[Any, ...]] = []
    for policy in policies:
        runs = figures[policy] = [compare(policy, cluster, jobs, seed) for seed in range(seeds)]
        free, shared = (statistics.mean(run[name] for run in runs) for name in ("free_jct_s", "shared_jct_s"))
        costs = [run["shared_jct_s"] / run["free_jct_s"] - 1 for run in runs]
        low, high = interval(costs)
        rows.append(
            (
                policy,
                round(free),
                round(shared),
                f"{shared / free - 1:+.1%}",
                f"{statistics.mean(costs):+.1%}",
                f"{low:+.1%} to {high:+.1%}",
                f"{max(costs):+.1%}",
                round(statistics.mean(run["borrowed_gpu_hours"] for run in runs)),
                f"{max(run['longest_s'] for run in runs):g}",
                f"{runs[0]['round_s']:g}",
                f"{max(run['longest_refrained_s'] for run in runs):g}",
            )
        )
    header = ("policy", "JCT s, no teams", "JCT s, teams", "cost", "by seed, mean", "95% interval", "worst")
    header += ("borrowed GPU-h a day", "longest return s", "round s", "longest by the policy's choice s")
    table(f"{cluster}, {jobs} jobs in {HOURS:g} h, two teams, {seeds} seeds", header, rows)
    return figures


def come_back(home: Path, *, returns: int, slots: int) -> dict[str, Any]:
    """Lend one team's slots to another's job and want them back, again and again, with real processes."""
    from benchmarks.reclaims import LIMIT_S, end_jobs
    from benchmarks.soak.scripts import COUNTING
    from swell.control.model import JobRequest
    from swell.control.plane import ControlPlane
    from swell.control.store import Store, connect
    from swell.domain import Team
    from swell.engines.local import LocalSite
    from swell.engines.supervised import SupervisedEngine

    store = Store(connect(str(home / "store.db")))
    engine = SupervisedEngine(LocalSite(home, slots=slots))
    plane = ControlPlane(store, engine, home=home, policy="tide", interval_s=0.5)
    plane.start()

    def submit(name: str) -> str:
        args = f"--samples 64 --batch 16 --epochs 100000 --pace 0.01 --out {home / name}.json".split()
        request = JobRequest(name=name, script=str(COUNTING), args=tuple(args), workdir=str(home))
        return plane.jobs.submit(request, f"{name}-user").job_id

    def holds(job_id: str) -> set[int]:
        found = plane.engine.observe().get(job_id)
        return set() if found is None else set(found.placement)

    def wait(condition: Any, what: str) -> None:
        until_s = time.monotonic() + LIMIT_S
        while not condition():
            if time.monotonic() > until_s:
                raise TimeoutError(f"{what}: not within {LIMIT_S:g} s")
            time.sleep(0.01)

    took_s = []
    try:
        for name in NAMES:
            plane.teams.change(Team(name=name, slots=slots // 2, users=(f"{name}-user",)))
        borrower, owner = submit(NAMES[0]), ""
        for _ in range(returns):
            wait(lambda: len(holds(borrower)) == slots, "the borrower to have all slots")
            asked_s = time.monotonic()
            owner = submit(NAMES[1])
            # The slots of the owner's job are its own once the borrower's workers have left them.
            wait(
                lambda job=owner: (given := set(plane.jobs.get(job).wanted)) and not given & holds(borrower),
                "the borrowed slots to come back",
            )
            took_s.append(time.monotonic() - asked_s)
            plane.jobs.cancel(owner)
            wait(lambda job=owner: plane.jobs.get(job).phase.over, "the owner's job to end")
        running = not plane.jobs.get(borrower).phase.over
    finally:
        end_jobs(plane)
        plane.stop()
        store.close()
    return {
        "returns": len(took_s),
        "median_s": round(statistics.median(took_s), 3),
        "worst_s": round(max(took_s), 3),
        "over_bound": sum(took > BOUND_S for took in took_s),
        "borrower_still_runs": running,
    }


def live(returns: int = 10) -> dict[str, Any]:
    """Returns of borrowed slots in a platform of its own."""
    with tempfile.TemporaryDirectory() as home:
        return come_back(Path(home), returns=returns, slots=2)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--policy", action="append")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cluster", default=CLUSTER)
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--returns", type=int, default=10)
    options = parser.parse_args()
    if options.live:
        found = live(options.returns)
        write_json("teams_live", found)
        print(found)
        return
    figures = simulated(options.policy or list(POLICIES), options.cluster, options.jobs, options.seeds)
    write_json("teams", figures)


if __name__ == "__main__":
    main()
