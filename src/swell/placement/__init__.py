"""Which GPUs each job gets: buddy allocation, network packing, first fit, and the ledger of held GPUs.

placer = make_placer("packed", Cluster.parse("16x4"))
placer.place({7: 4, 8: 2})      # job 7 gets 4 GPUs and job 8 two: {7: (0, 1, 2, 3), 8: (4, 5)}
placer.place({7: 0, 8: 4})      # job 7 ends, job 8 grows
"""

from swell.domain import Cluster, InputError, nearest
from swell.placement.base import DOWN, FREE, NoRoom, Occupancy, Placer
from swell.placement.buddy import BlockMove, Buddy, MigrationPlan, plan
from swell.placement.simple import FirstFit, MostFree, PackedPlacer

PLACERS: dict[str, type[Placer]] = {cls.name: cls for cls in (PackedPlacer, Buddy, MostFree, FirstFit)}


def make_placer(name: str, cluster: Cluster) -> Placer:
    if name not in PLACERS:
        names = list(PLACERS)
        raise InputError(
            f"unknown placer '{name}'.{nearest(name, names)} Known: {', '.join(names)}", field="placer"
        )
    return PLACERS[name](cluster)


__all__ = [
    "DOWN",
    "FREE",
    "PLACERS",
    "BlockMove",
    "Buddy",
    "FirstFit",
    "MigrationPlan",
    "MostFree",
    "NoRoom",
    "Occupancy",
    "PackedPlacer",
    "Placer",
    "make_placer",
    "plan",
]
