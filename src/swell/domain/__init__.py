"""The basic types: jobs, nodes, clusters, placements, events. Imports no other part of swell."""

from swell.domain.calendar import NO_RESERVATIONS, Calendar, Reservation, SlotsAhead
from swell.domain.cluster import (
    ANY_GPU,
    BoolArray,
    Cluster,
    FloatArray,
    IntArray,
    Node,
    Placement,
    clean_type,
    gpu_of_slot,
    overlapping,
    packed_shape,
)
from swell.domain.errors import InputError, SwellError, nearest
from swell.domain.events import Event, EventKind, read_events, write_events
from swell.domain.job import JobSpec
from swell.domain.request import JobOptions, JobRequest
from swell.domain.teams import NO_TEAM, NO_TEAMS, NORMAL, OTHERS, PRIORITIES, Team, Teams, entitled, rank_of
from swell.domain.words import many

__all__ = [
    "ANY_GPU",
    "NORMAL",
    "NO_RESERVATIONS",
    "NO_TEAM",
    "NO_TEAMS",
    "OTHERS",
    "PRIORITIES",
    "BoolArray",
    "Calendar",
    "Cluster",
    "Event",
    "EventKind",
    "FloatArray",
    "InputError",
    "IntArray",
    "JobOptions",
    "JobRequest",
    "JobSpec",
    "Node",
    "Placement",
    "Reservation",
    "SlotsAhead",
    "SwellError",
    "Team",
    "Teams",
    "clean_type",
    "entitled",
    "gpu_of_slot",
    "many",
    "nearest",
    "overlapping",
    "packed_shape",
    "rank_of",
    "read_events",
    "write_events",
]
