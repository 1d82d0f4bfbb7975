"""What people may ask a control plane about nodes, reservations and teams; about jobs, see `job_desk`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from swell.control import lifecycle, teams, views
from swell.control.access import Access
from swell.control.conductor import NOT_BOTH
from swell.control.errors import Conflict, NotFound
from swell.control.renting import AutoscalerState
from swell.control.reservations import ReservationState
from swell.control.teams import TeamState
from swell.control.views import NodeView
from swell.domain import Reservation, Team


@dataclass(frozen=True, slots=True)
class NodeDesk:
    """Shows the nodes, and takes some of them out of use. Methods are thread-safe."""

    _access: Access

    def states(self) -> list[NodeView]:
        """The nodes and how many of their slots are in use."""
        conductor = self._access.conductor
        with self._access.lock:
            cluster = conductor.engine.cluster().without(conductor.scheduler.cluster.held)
            slow = conductor.slow_nodes.slow(self._access.clock())
            records = conductor.book.records.values()
            return views.nodes(
                cluster, conductor.drained, records, conductor.renting, slow, conductor.avoided
            )

    def autoscaler(self) -> AutoscalerState | None:
        """How many nodes are rented, how many should be, and why; None if no nodes are rented."""
        with self._access.lock:
            renting = self._access.conductor.renting
            return None if renting is None else renting.state()

    def drain(self, node: str) -> None:
        """Move all jobs off a node, and give it none until it is undrained."""
        self._set_drained(node, True)

    def undrain(self, node: str) -> None:
        """Use a drained node again."""
        self._set_drained(node, False)

    def _set_drained(self, node: str, drained: bool) -> None:
        conductor = self._access.conductor
        store = conductor.book.store
        with self._access.changing():
            names = [n.name for n in conductor.engine.cluster().nodes]
            if node not in names:
                raise NotFound(f"there is no node '{node}'; nodes: {', '.join(names)}")
            changed = conductor.drained | {node} if drained else conductor.drained - {node}
            store.set_setting("drained", json.dumps(sorted(changed)))
            conductor.drained = changed
            if not drained:  # whoever says that the node is well again knows better than what was measured
                conductor.slow_nodes.forget(node)
                store.set_setting("slow_nodes", json.dumps(conductor.slow_nodes.to_json()))


@dataclass(frozen=True, slots=True)
class ReservationDesk:
    """Reserves capacity for services. Methods are thread-safe."""

    _access: Access

    def states(self) -> list[ReservationState]:
        """What is reserved for services, and the slots that they have now."""
        with self._access.lock:
            return self._access.conductor.reservations.states(self._access.clock())

    def make(self, asked: Reservation, by: str, *, force: bool = False) -> ReservationState:
        """Reserve capacity for a service, or change a reservation. Refused if it would break a promise."""
        conductor = self._access.conductor
        if conductor.renting is not None:
            raise Conflict(NOT_BOTH)
        with self._access.changing() as now_s:
            made = conductor.reservations.make(asked, now_s, by=by, force=force)
            text = f"its promised finish is in danger: slots are reserved for {asked.name}"
            for job_id in made.endangered:
                conductor.feed(conductor.book.records[job_id], lifecycle.Noticed(text), now_s)
            return made

    def remove(self, name: str, by: str) -> ReservationState:
        """Remove a reservation."""
        with self._access.changing() as now_s:
            return self._access.conductor.reservations.remove(name, now_s, by=by)

    def demand(self, name: str, gpus: int) -> ReservationState:
        """Give the service that a reservation follows this many slots from now on."""
        with self._access.changing() as now_s:
            return self._access.conductor.reservations.demand(name, gpus, now_s)


@dataclass(frozen=True, slots=True)
class TeamDesk:
    """Shows and changes the teams. Methods are thread-safe."""

    _access: Access

    def states(self) -> list[TeamState]:
        """The teams, and how many slots each has now."""
        with self._access.lock:
            return teams.states(self._access.conductor.scheduler)

    def change(self, asked: Team, *, keep_users: bool = False, force: bool = False) -> TeamState:
        """Make a team, or change it (`keep_users`: its slots alone). Refused if it would break a promise."""
        conductor = self._access.conductor
        with self._access.changing() as now_s:
            present = conductor.scheduler.teams.get(asked.name) if keep_users else None
            asked = asked if present is None else replace(asked, users=present.users)
            return teams.change(conductor.scheduler, conductor.book.store, asked, now_s, force=force)

    def remove(self, name: str, *, force: bool = False) -> TeamState:
        """Remove a team. Refused if it would break a promise."""
        conductor = self._access.conductor
        with self._access.changing() as now_s:
            return teams.remove(conductor.scheduler, conductor.book.store, name, now_s, force=force)
