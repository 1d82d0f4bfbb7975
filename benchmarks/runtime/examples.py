"""What the examples reach, and in what time: each as examples/README.md tells to run it, on two workers.

    python -m benchmarks.runtime.examples [--only gan] [--workers 2]

Prints a line for each example and fails if one of them misses the quality that examples/README.md states.
Examples whose framework is not installed are left out, and said so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
FINAL = re.compile(r"final (?:accuracy|validation loss|distance|test error|loss \S+ accuracy) (\d+\.\d+)")


@dataclass(frozen=True, slots=True)
class Example:
    """How an example is run, what it needs besides torch, and what it reaches."""

    measure: str
    reaches: float
    """Accuracy: at least this. Everything else: at most this."""
    options: tuple[str, ...] = ()
    needs: str = "sklearn"

    def is_reached(self, quality: float) -> bool:
        """Whether the example reaches what is stated."""
        return quality >= self.reaches if self.measure == "accuracy" else quality <= self.reaches

    def __str__(self) -> str:
        return f"{self.measure} {'>=' if self.measure == 'accuracy' else '<='} {self.reaches:g}"


STATED = {
    "plain_mnist_style": Example("accuracy", 0.975, ("--auto",)),
    "digits_cnn": Example("accuracy", 0.975),
    "tiny_gpt": Example("validation loss", 2.15, needs="torch"),
    "nano_gpt": Example("validation loss", 2.15, needs="torch"),
    "gan": Example("distance", 2.0),
    "trainer_reviews": Example("accuracy", 0.92, ("--auto",), "transformers"),
    "lora_reviews": Example("accuracy", 0.92, ("--auto",), "peft"),
    "lightning_digits": Example("accuracy", 0.96, ("--auto",), "lightning"),
    "accelerate_digits": Example("accuracy", 0.96, ("--auto",), "accelerate"),
    "recommender": Example("test error", 0.34, needs="torch"),
    "sharded_gpt": Example("validation loss", 2.15, ("--replica", "2"), "torch"),
    "xgboost_digits": Example("accuracy", 0.95, needs="xgboost"),
    "jax_digits": Example("accuracy", 0.95, ("--command",), "jax"),
}
"""What examples/README.md states."""


def run(name: str, workers: int) -> tuple[float, float]:
    """The quality that one example reached, and the seconds that it took."""
    example = STATED[name]
    script = [str(EXAMPLES / f"{name}.py")]
    if "--command" in example.options:
        script = ["--", sys.executable, *script]
    with tempfile.TemporaryDirectory(prefix="swell-example-") as home:
        command = [sys.executable, "-m", "swell", "run", *example.options, "--workers", str(workers)]
        env, begin = os.environ | {"SWELL_HOME": home}, time.perf_counter()
        done = subprocess.run([*command, *script], env=env, capture_output=True, text=True, check=False)
        took_s = time.perf_counter() - begin
    found = FINAL.findall(done.stdout)
    if done.returncode or len(found) != 1:
        raise SystemExit(f"{name} failed: {done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return float(found[0]), took_s


def main() -> None:
    """Run the examples and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=sorted(STATED))
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    missed = []
    for name, example in STATED.items():
        if options.only not in (None, name):
            continue
        if importlib.util.find_spec(example.needs) is None:
            print(json.dumps({"example": name, "left_out": f"{example.needs} is not installed"}))
            continue
        quality, took_s = run(name, options.workers)
        missed += [name] * (not example.is_reached(quality))
        found = {"states": str(example), "reached": quality, "took_s": round(took_s, 1)}
        print(json.dumps({"example": name} | found), flush=True)
    if missed:
        raise SystemExit(f"less than examples/README.md states: {', '.join(missed)}")


if __name__ == "__main__":
    main()
