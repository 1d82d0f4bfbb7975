"""Is this checkout as fast as another commit? CPU seconds of the same simulations, as ratios.

    python -m benchmarks.compare 9789d6a [--rounds 3]

Both commits run in turns, because the speed of a shared machine changes from minute to minute. Each ratio is
that of the fastest of the rounds: what else the machine does can only make a run slower.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import data_dir, table, write_json

ROOT = Path(__file__).parent.parent
ALLOWED = 1.10


def measure(tree: Path) -> dict[str, float]:
    """CPU seconds of each case of `benchmarks.speed`, with the code of this tree."""
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "SWELL_DATA": str(data_dir())}
    command = [sys.executable, "-m", "benchmarks.speed"]
    subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
    records = json.loads((tree / "out" / "speed.json").read_text())
    return {record["case"]: record["cpu_s"] for record in records}


def main() -> None:
    """Measure, print the ratios, and exit with 1 if a case is slower by more than a tenth."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=3, help="how often each commit runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swell-compare-") as folder:
        other = Path(folder) / "other"
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", other, args.commit], cwd=ROOT, check=True
        )
        try:
            runs: list[tuple[dict[str, float], dict[str, float]]] = []
            for i in range(args.rounds):
                print(f"round {i + 1} of {args.rounds} ...", file=sys.stderr, flush=True)
                runs.append((measure(other), measure(ROOT)))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", other], cwd=ROOT, check=True)
    rows = []
    for case in runs[0][0]:
        before, now = min(run[0][case] for run in runs), min(run[1][case] for run in runs)
        rows.append((case, before, now, now / before, "ok" if now <= ALLOWED * before else "slower"))
    header = ("case", f"cpu s at {args.commit}", "cpu s here", "ratio", "")
    table(f"CPU seconds against {args.commit}", header, rows)
    write_json("compare", [dict(zip(("case", "before_s", "now_s", "ratio", "verdict"), row)) for row in rows])
    sys.exit(any(row[-1] != "ok" for row in rows))


if __name__ == "__main__":
    main()
