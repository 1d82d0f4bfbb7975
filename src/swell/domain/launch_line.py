"""Lines that start a script by another launcher, taken as they are: `torchrun --nproc-per-node 8 train.py`.

`understand` finds the script in such a line, its arguments, and for how many processes it was made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from swell.domain.errors import InputError

PROCESSES = "SWELL_PROCESSES"
"""Environment variable of a job's workers: the number of processes that its script was made for."""

_TORCHRUN = ("torch.distributed.run", "torch.distributed.launch")
_HARMLESS = {
    "torchrun": (
        "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts", "monitor-interval",
        "start-method", "role", "log-dir", "redirects", "tee", "local-ranks-filter", "node-rank",
        "master-addr", "master-port", "local-addr", "logs-specs", "numa-binding", "event-log-handler",
        "r", "t",        "duplicate-stdout-filters", "duplicate-stderr-filters", "signals-to-handle",
    ),
    "accelerate launch": (
        "machine-rank", "main-process-ip", "main-process-port", "gpu-ids", "num-cpu-threads-per-process",
        "config-file", "rdzv-backend", "rdzv-conf", "max-restarts", "monitor-interval", "role", "log-dir",
        "tee",
    ),
}  # fmt: skip
"""Options with a value that is no matter for a job: where processes meet, and what is logged."""
_SWITCHES = {
    "torchrun": ("standalone", "use-env", "virtual-local-rank"),
    "accelerate launch": ("multi-gpu", "cpu", "same-network", "quiet", "q", "debug"),
}
"""Options without a value."""
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?$")


@dataclass(frozen=True, slots=True)
class LaunchLine:
    """The script that a launcher's line names, its arguments, and the number of processes in the line."""

    script: str
    arguments: tuple[str, ...]
    processes: int = 1
    env: dict[str, str] = field(default_factory=dict)
    """Variables that the launcher would set by its options."""

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the job's workers need for it."""
        return self.env | ({PROCESSES: str(self.processes)} if self.processes > 1 else {})


def understand(words: Sequence[str]) -> LaunchLine | None:
    """The script and what is asked for it; None if the words begin with no launcher that is known.

    Raises:
        InputError: an option is not known, or cannot be fulfilled.
    """
    name, rest = PurePath(words[0]).name, list(words[1:])
    if _PYTHON.match(name):
        while rest and rest[0] in ("-u", "-O", "-OO", "-B"):
            rest.pop(0)
        if rest[:1] == ["-m"] and len(rest) > 1:
            if rest[1] in _TORCHRUN:
                return _torchrun(rest[2:], classic=rest[1].endswith("launch"))
            if rest[1] in ("accelerate.commands.launch", "accelerate.commands.accelerate_cli"):
                return _accelerate(rest[2:] if rest[1].endswith("launch") else rest[3:])
        if rest and rest[0].endswith(".py"):
            return LaunchLine(rest[0], tuple(rest[1:]))
        return None
    if name == "torchrun":
        return _torchrun(rest)
    if name == "accelerate" and rest[:1] == ["launch"]:
        return _accelerate(rest[1:])
    return None


def _torchrun(words: list[str], *, classic: bool = False) -> LaunchLine:
    given, script, arguments = _options("torchrun", words, ("nnodes", "nproc-per-node"))
    nodes, each = given.get("nnodes", "1"), given.get("nproc-per-node", "1")
    if nodes.partition(":")[2] not in ("", nodes.partition(":")[0]):
        raise _refused("torchrun", f"--nnodes {nodes}: give one number, not a range")
    count = _number("torchrun", "nnodes", nodes.partition(":")[0])
    count *= _number("torchrun", "nproc-per-node", each)
    if classic and "use-env" not in given:
        arguments = ("--local-rank=0", *arguments)
    return LaunchLine(script, arguments, count)


def _accelerate(words: list[str]) -> LaunchLine:
    wanted = (
        "num-processes",
        "num-machines",
        "mixed-precision",
        "gradient-accumulation-steps",
        "dynamo-backend",
    )
    given, script, arguments = _options("accelerate launch", words, wanted)
    count = _number("accelerate launch", "num-processes", given.get("num-processes", "1"))
    count *= _number("accelerate launch", "num-machines", given.get("num-machines", "1"))
    if count > 1:
        raise _refused(
            "accelerate launch",
            f"{count} processes: Accelerate divides batches among them by itself. Give --num_processes 1 and "
            f"multiply the script's batch size by {count}; swell divides the batch over its workers",
        )
    names = {
        "mixed-precision": "ACCELERATE_MIXED_PRECISION",
        "gradient-accumulation-steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    }
    env = {variable: given[option] for option, variable in names.items() if option in given}
    if "dynamo-backend" in given:
        env["ACCELERATE_DYNAMO_BACKEND"] = given["dynamo-backend"].upper()
    if "cpu" in given:
        env["ACCELERATE_USE_CPU"] = "true"
    return LaunchLine(script, arguments, 1, env)


def _options(
    launcher: str, words: list[str], wanted: tuple[str, ...]
) -> tuple[dict[str, str], str, tuple[str, ...]]:
    """The launcher's options, the script and its arguments."""
    found: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        if word == "--":
            continue
        if not word.startswith("-"):
            return found, word, tuple(rest)
        option, equals, value = word.partition("=")
        name = option.lstrip("-").replace("_", "-")
        if name in _SWITCHES[launcher] and not equals:
            found[name] = ""
        elif name in (*wanted, *_HARMLESS[launcher]):
            found[name] = value if equals else _value(launcher, option, rest)
        elif name in ("m", "module", "no-python", "run-path"):
            raise _refused(launcher, f"{option}: give the path of the script instead")
        else:
            raise _refused(launcher, f"{option} is no option that swell can take over; leave it out")
    raise _refused(launcher, "there is no script in the line")


def _value(launcher: str, option: str, rest: Iterator[str]) -> str:
    value = next(rest, None)
    if value is None:
        raise _refused(launcher, f"{option} needs a value")
    return value


def _number(launcher: str, option: str, text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 4096:
        raise _refused(launcher, f"--{option} must be a number of at least 1, got '{text}'")
    return int(text)


def _refused(launcher: str, why: str) -> InputError:
    return InputError(f"{launcher}: {why}", field="script")
