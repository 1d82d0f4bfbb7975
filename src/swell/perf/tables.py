"""Reading the published profile formats. Every refusal names the file, the line and the field."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from swell.domain import ANY_GPU, FloatArray, InputError
from swell.perf.batch import BatchLimits
from swell.perf.epochs import Epochs
from swell.perf.measured import MeasuredCounts, MeasuredPlacements
from swell.perf.profile import Profile, Shape

ANY = ANY_GPU
_COUNTS_PREFIX = "throughputs_"
_COUNTS_HEADER = "global_batch_size"

_PARAMETERS = {
    "bert": 110e6,
    "cifar10": 11.2e6,
    "deepspeech2": 45e6,
    "gpt2": 124e6,
    "imagenet": 25.6e6,
    "inception3": 27.2e6,
    "ncf": 3.7e6,
    "resnet50": 25.6e6,
    "resnet50_cifar10": 23.5e6,
    "vgg16": 138.4e6,
    "yolov3": 61.9e6,
}
"""Published parameter counts of the models in the public data, which does not state them."""

_UNKNOWN_PARAMETERS = 25e6

_MAX_LOCAL = {"yolov3": 8}
"""Largest local batch in the published simulations, where it is below the largest one measured."""

_ONE_GPU = {"ncf": 32768}
"""Models that the published simulations kept on one GPU at this batch size."""


def model_bytes(name: str) -> float:
    """Size of a model's parameters in single precision."""
    return 4.0 * _PARAMETERS.get(name, _UNKNOWN_PARAMETERS)


def find(path: Path) -> list[Profile] | None:
    """The profiles in a directory, None if it holds none of the formats known."""
    if (path / "placements.csv").exists():
        return [read_placements(path)]
    children = sorted(path.iterdir())
    apps = [child for child in children if (child / "placements.csv").exists()]
    if apps:
        return [read_placements(app) for app in apps]
    kinds = [c for c in children if c.is_dir() and c.name.startswith(_COUNTS_PREFIX)]
    if kinds:
        return read_counts({c.name.removeprefix(_COUNTS_PREFIX): sorted(c.glob("*.csv")) for c in kinds})
    files = [child for child in children if child.suffix == ".csv" and _first_column(child) == _COUNTS_HEADER]
    if files:
        kind = path.name.removeprefix(_COUNTS_PREFIX) if path.name.startswith(_COUNTS_PREFIX) else ANY
        return read_counts({kind: files})
    return None


def read_placements(folder: Path) -> MeasuredPlacements:
    """One model in Pollux's format: measured on T4 GPUs, 4 to a node."""
    placements = _placements(folder / "placements.csv")
    scalability = _columns(
        folder / "scalability.csv", ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
    )
    validation: dict[int, FloatArray] = {}
    for path in folder.glob("validation-*.csv"):
        batch = path.stem.removeprefix("validation-")
        if not batch.isdigit():
            raise InputError(f"{path}: the name must be validation-<batch size>.csv", field="profiles")
        validation[int(batch)] = _columns(path, ("progress", "iteration", "grad_sqr", "grad_var"))
    if not validation:
        raise InputError(f"{folder}: no validation-<batch size>.csv beside placements.csv", field="profiles")
    batches = sorted(validation)
    length = min(len(rows) for rows in validation.values())
    course = np.array([validation[batch][:length] for batch in batches])
    locals_ = [rows[:, 0] for rows in placements.values()]
    name = folder.name
    return MeasuredPlacements(
        name,
        "T4",
        BatchLimits(
            batches[0],
            batches[-1],
            int(min(map(min, locals_))),
            _MAX_LOCAL.get(name, int(max(map(max, locals_)))),
        ),
        # Batch sizes differ in the progress an epoch needs; the published simulations use the smallest.
        Epochs(course[:, :, 0].min(axis=0), batches, course[:, :, 1], course[:, :, 2], course[:, :, 3]),
        model_bytes(name),
        placements,
        scalability,
        max_gpus=1 if name in _ONE_GPU else None,
        pinned_batch=_ONE_GPU.get(name),
    )


def read_counts(files: Mapping[str, Sequence[Path]]) -> list[Profile]:
    """Models in ElasticFlow's format, from the CSV files of each GPU type."""
    tables: dict[str, dict[str, tuple[FloatArray, dict[int, FloatArray]]]] = {}
    for kind in sorted(files):
        for path in files[kind]:
            tables.setdefault(path.stem, {})[kind] = _counts(path)
    return [MeasuredCounts(name, tables[name], model_bytes(name)) for name in sorted(tables)]


def _counts(path: Path) -> tuple[FloatArray, dict[int, FloatArray]]:
    rows = _rows(path)
    _, header = next(rows)
    if header[0] != _COUNTS_HEADER or len(header) < 2:
        raise InputError(f"{path}: the header must be {_COUNTS_HEADER} and GPU counts, got {header}")
    counts = np.array([_number(path, 1, "header", text) for text in header[1:]])
    if np.any(np.diff(counts, prepend=0) <= 0):
        raise InputError(
            f"{path}: the GPU counts of the header must ascend, got {header[1:]}", field="header"
        )
    rates: dict[int, FloatArray] = {}
    for line, row in rows:
        batch = int(_number(path, line, _COUNTS_HEADER, row[0], least=1))
        values = [_number(path, line, name, text or "0") for name, text in zip(header[1:], row[1:])]
        values += [0.0] * (len(counts) - len(values))
        rates[batch] = np.nan_to_num(np.array(values[: len(counts)]))
    if not rates:
        raise InputError(f"{path}: no rows after the header")
    return counts, rates


def _placements(path: Path) -> dict[Shape, FloatArray]:
    columns = ("placement", "local_bsz", "step_time", "sync_time")
    rows: dict[str, list[tuple[float, ...]]] = {}
    for line, texts in _select(path, columns):
        if not texts[0].isdigit() or "0" in texts[0]:
            raise InputError(
                f"{path}:{line}: placement must be a digit per node, its GPUs, such as 12, got '{texts[0]}'",
                field="placement",
            )
        numbers = tuple(_number(path, line, name, text) for name, text in zip(columns[1:], texts[1:]))
        rows.setdefault(texts[0], []).append(numbers)
    return {tuple(map(int, text)): np.array(times) for text, times in rows.items()}


def _columns(path: Path, columns: tuple[str, ...]) -> FloatArray:
    """The named columns of a CSV file as numbers."""
    selected = _select(path, columns)
    return np.array(
        [[_number(path, line, name, text) for name, text in zip(columns, row)] for line, row in selected]
    )


def _select(path: Path, columns: tuple[str, ...]) -> list[tuple[int, list[str]]]:
    rows = _rows(path)
    _, header = next(rows)
    missing = [name for name in columns if name not in header]
    if missing:
        raise InputError(
            f"{path}: column '{missing[0]}' is missing from the header {header}", field=missing[0]
        )
    at = [header.index(name) for name in columns]
    out = []
    for line, row in rows:
        if len(row) != len(header):
            raise InputError(f"{path}:{line}: {len(row)} fields where the header has {len(header)}")
        out.append((line, [row[i] for i in at]))
    if not out:
        raise InputError(f"{path}: no rows after the header")
    return out


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows of a file with their line numbers, the header first, without empty lines."""
    try:
        with path.open(newline="") as file:
            reader = csv.reader(file)
            empty = True
            for row in reader:
                if row:
                    empty = False
                    yield reader.line_num, row
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}", field="profiles") from error
    if empty:
        raise InputError(f"{path} is empty", field="profiles")


def _number(path: Path, line: int, name: str, text: str, least: float = 0.0) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -math.inf
    if value < least:
        raise InputError(
            f"{path}:{line}: {name} must be a number of at least {least:g}, got '{text}'", field=name
        )
    return value


def _first_column(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline().split(",")[0].strip()
