"""`make bench-cluster`: beside services, teams, sweeps, rented nodes, different GPUs; in out/cluster.json.

    python -m benchmarks.cluster [--quick] [--minutes 30] [part ...]

All of it takes about 25 minutes on two quiet cores and needs ../shared/data. Each part runs in a process of
its own with a time limit. A part that fails is reported, and the others go on. Without parts all of them run;
with some, their figures replace those in the file. Messages of a part are in out/cluster/PART.log. What
cannot be measured here (`gpu_sharing` without a GPU) is skipped and says why.
"""

from __future__ import annotations

from benchmarks.bench import Suite, main
from benchmarks.cluster.parts import PARTS
from benchmarks.cluster.verdicts import verdicts

SUITE = Suite(name="cluster", parts=PARTS, verdicts=verdicts, minutes=30.0)

if __name__ == "__main__":
    main(SUITE, __doc__)
