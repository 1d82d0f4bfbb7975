"""The simulator: a virtual clock around the same policies and placers that decide on live clusters.

It is event-driven. A job's row in the table holds its state as of the job's last change and is brought up to
date only when the job changes again, so an event costs no more than the jobs it affects. The events are: a
job is submitted, a job's present segment (see `truth`) ends, a node is lost or comes back, a policy's round
or wake-up is due. After all events of one moment the policy decides once, unless it decides in rounds.

The simulator is deterministic: the same jobs, profiles, cluster, policy and seed give the same result.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from swell.board import Board, Rhythm
from swell.domain import NO_RESERVATIONS, NO_TEAMS, OTHERS, Calendar, Cluster, InputError, JobSpec, Teams
from swell.perf.profiles import ProfileSet
from swell.policies import Policy, make_policy
from swell.policies.by_team import ByTeam, by_team
from swell.policies.by_type import ByType, by_type
from swell.policies.by_user import NO_USER_LIMITS, UserLimits, by_user
from swell.sim.beliefs import Beliefs
from swell.sim.capacity import Capacity, DemandChange, NodeFailure
from swell.sim.cloud import Cloud
from swell.sim.costs import ConstantCost, ResizeCost
from swell.sim.events import EventSink, JobEvents
from swell.sim.explore import Exploration
from swell.sim.metrics import Result
from swell.sim.running import RunningJobs
from swell.sim.scheduler import Scheduler
from swell.sim.simulation import ProgressSink, Simulation
from swell.sim.workload import Workload
from swell.sim.world import World


def simulate(
    jobs: Sequence[JobSpec],
    profiles: ProfileSet,
    cluster: Cluster,
    policy: str | Policy,
    *,
    interval_s: float | None = None,
    resize_cost: ResizeCost | float = 0.0,
    seed: int = 0,
    belief: str | None = None,
    failures: Sequence[NodeFailure] = (),
    calendar: Calendar = NO_RESERVATIONS,
    demand: Sequence[DemandChange] = (),
    explore: Exploration | None = None,
    planned_cost: ResizeCost | None = None,
    belief_error: float = 0.0,
    blind_to_types: bool = False,
    cloud: Cloud | None = None,
    throughput_only: bool = False,
    teams: Teams = NO_TEAMS,
    user_limits: UserLimits = NO_USER_LIMITS,
    on_event: EventSink | None = None,
    on_progress: ProgressSink | None = None,
) -> Result:
    """Run the jobs on the cluster under the policy, and report how each of them ended.

    Args:
        interval_s: length of the rounds; None for the policy's own rounds, or none if it has no rounds.
        belief: 'profiles' or 'fitted' to override what the policy is told of the jobs' speed.
        calendar: reservations that take GPUs away from training; `demand`: what the services among them want.
        explore: if given, jobs grow only as their speed becomes known, as on a live cluster.
        planned_cost: the cost of changes that policies plan with, if it is not the true cost.
        belief_error: the relative standard deviation of each job's believed speed from the true one, for
            policies that are told curves; 0.1 for beliefs that are wrong by 10%.
        blind_to_types: treat all GPUs as if they were of the most frequent type, as published policies do.
        cloud: if given, the nodes of the cluster are rented from it as its autoscaler decides.
        throughput_only: jobs that adapt their batch size choose the one with the most samples per second.
        teams: quotas that the jobs' teams have; without any, the team of a job means nothing.
        user_limits: what the jobs of one user may have at a time; jobs without a user count as one user's.
    """
    if not jobs:
        raise InputError(
            "nothing to simulate: the trace has no jobs; 'swell generate' writes one that has", field="trace"
        )
    if belief not in (None, "profiles", "fitted"):
        raise InputError(f"belief must be 'profiles' or 'fitted', got '{belief}'", field="belief")
    chosen = make_policy(policy) if isinstance(policy, str) else policy
    if hasattr(chosen, "seed") and seed:
        chosen.seed = seed
    chosen = chosen if blind_to_types else by_type(chosen, cluster)
    types = cluster.gpu_types if isinstance(chosen, ByType) and not blind_to_types else ()
    jobs = sorted(_with_teams(jobs, teams, cluster), key=lambda job: job.submit_s)
    chosen = _obeying(chosen, teams, user_limits, jobs)
    cost = ConstantCost(float(resize_cost)) if isinstance(resize_cost, int | float) else resize_cost

    def pause_of(row: int, before: int, after: int) -> float:
        return cost.seconds(world.state_bytes(row), before, after, world.startup_s(row))

    board = Board(cluster if cloud is None else cloud.empty, chosen.placer, pause_of, jobs)
    workload = Workload.of(jobs, profiles, cluster, types)
    beliefs = Beliefs(workload, cluster, board)
    knows, adaptive = belief or chosen.knows, chosen.adaptive_batch
    if knows == "fitted":
        beliefs.learn(adaptive=adaptive, throughput_only=throughput_only)
    world = World(workload, cluster, board.table, beliefs.by_type, adaptive=adaptive)
    if belief_error:
        beliefs.mistake(belief_error, seed)
    rhythm = Rhythm(chosen, chosen.interval_s if interval_s is None else interval_s)
    planned = cost if planned_cost is None else planned_cost
    costs_s = _planned_costs_s(planned, world.typical_state_bytes, rhythm.interval_s or 0.0)
    scheduler = Scheduler(chosen, board, beliefs, costs_s, cloud)
    events = JobEvents(jobs, on_event)
    running = RunningJobs(board, world, events)
    capacity = Capacity(board, failures, calendar, demand, cloud, running.settle, on_event)
    simulation = Simulation(board, running, scheduler, rhythm, capacity, events, explore, on_progress)
    started = time.process_time()
    simulation.run()
    shown = "fitted" if beliefs.learned else "none" if knows == "nothing" else "oracle"
    result = _result(simulation, world, shown)
    result.cpu_s = time.process_time() - started
    return result


def _with_teams(jobs: Sequence[JobSpec], teams: Teams, cluster: Cluster) -> Sequence[JobSpec]:
    """The jobs with teams that there are; without teams, no job is of one."""
    teams.check_fits(sum(node.gpus for node in cluster.nodes))
    if not teams:
        return [replace(job, team=OTHERS) if job.team else job for job in jobs]
    names = [*teams.quotas, OTHERS]
    if unknown := next((job for job in jobs if job.team not in names), None):
        raise InputError(
            f"job '{unknown.job_id}': there is no team '{unknown.team}'; teams: {', '.join(teams.quotas)}",
            field="team",
        )
    return jobs


def _obeying(policy: Policy, teams: Teams, limits: UserLimits, jobs: Sequence[JobSpec]) -> Policy:
    """The policy as it obeys teams, classes of priority and limits of users, where there are any."""
    if isinstance(policy, ByTeam):
        policy.set_teams(teams)
    elif teams or len({job.priority for job in jobs}) > 1:
        policy = by_team(policy, teams)
    return by_user(policy, limits) if limits else policy


def _planned_costs_s(cost: ResizeCost, state_bytes: float, round_s: float) -> tuple[float, float]:
    """What policies plan a resize and a start with, which includes waiting for the next round."""
    return cost.seconds(state_bytes, 1, 2) + round_s, cost.seconds(state_bytes, 0, 1) + round_s


def _result(done: Simulation, world: World, belief: str) -> Result:
    table, tally, cloud = done.board.table, done.tally, done.capacity.cloud
    return Result(
        policy=done.scheduler.policy.name,
        cluster=str(done.board.cluster),
        belief=belief,
        job_ids=[spec.job_id for spec in table.specs],
        submit_s=table.submit_s,
        deadline_s=table.deadline_s,
        weight=table.weight,
        finish_s=tally.finish_s,
        promised_s=tally.promised_s,
        rejected=tally.rejected,
        rho=world.fairness(tally.finish_s - table.submit_s, tally.mean_active),
        job_resizes=table.resizes - table.returns,
        gpu_seconds=float(table.attained_gpu_s.sum()),
        capacity_gpu_seconds=tally.capacity_gpu_s,
        cost=None if cloud is None else cloud.cost(done.now_s),
        node_hours=None if cloud is None else cloud.provider.node_hours(done.now_s),
        decision_s=done.scheduler.decision_s,
        stalled=tally.ended < len(table),
    )
