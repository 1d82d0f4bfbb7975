"""How many GPUs each job gets: one file per paper, one registry."""

from swell.policies.base import ADMITTED, Admission, Decision, Policy
from swell.policies.registry import (
    DEFAULT,
    described,
    is_ours,
    make_policy,
    options_of,
    policy_class,
    policy_names,
)
from swell.policies.snapshot import JobTable, Snapshot

__all__ = [
    "ADMITTED",
    "DEFAULT",
    "Admission",
    "Decision",
    "JobTable",
    "Policy",
    "Snapshot",
    "described",
    "is_ours",
    "make_policy",
    "options_of",
    "policy_class",
    "policy_names",
]
