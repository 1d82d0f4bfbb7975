"""A CSV file as columns. Every error message names the file, the line and the field.

Columns are checked as whole arrays, so that tens of thousands of rows take well under a second; only bad
values are looked at one by one. A row with several problems is reported with the first one found.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from swell.domain import FloatArray, InputError, IntArray

MAX_SHOWN = 40
"""Longer values are cut when they are quoted in a message."""


def shown(value: object) -> str:
    """A value as quoted in a message: on one line, and not too long."""
    text = repr(str(value))
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 4] + "...'"


@dataclass
class Table:
    """The rows of a file by column, and what is wrong with them."""

    path: Path
    header: list[str]
    columns: dict[str, Sequence[str]]
    lines: list[int]
    """The line of the file each row ends on."""
    problems: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Row -> (field, what is wrong), the first problem of each row."""

    def __len__(self) -> int:
        return len(self.lines)

    def refuse(self, row: int, name: str, what: str) -> None:
        """Record a problem of a row, unless the row has one already."""
        self.problems.setdefault(row, (name, what))

    def refuse_where(self, bad: npt.NDArray[np.bool_], name: str, allowed: str) -> None:
        """Record a problem of every row of a mask: its value in one field is not what is allowed."""
        for row in np.flatnonzero(bad).tolist():
            value = self.columns[name][row]
            got = "nothing" if value == "" else shown(value)
            self.refuse(row, name, f"must be {allowed}, got {got}")

    def message(self, row: int) -> str:
        """What is wrong with a row, in one line."""
        name, what = self.problems[row]
        return f"{self.path}:{self.lines[row]}: {name}: {what}"

    def good_rows(self, *, skip_bad: bool) -> IntArray:
        """The rows without a problem; raises for the first row with one, unless `skip_bad`."""
        if self.problems and not skip_bad:
            row = min(self.problems)
            raise InputError(self.message(row), field=self.problems[row][0])
        good = np.ones(len(self), dtype=bool)
        good[list(self.problems)] = False
        return np.flatnonzero(good)

    def texts(self, name: str) -> Sequence[str]:
        """A column of texts; an empty text is a problem."""
        column = self.columns[name]
        if not all(column):
            self.refuse_where(np.array([not value for value in column]), name, "given")
        return column

    def numbers(
        self,
        name: str,
        allowed: str,
        *,
        least: float = -np.inf,
        above: float = -np.inf,
        optional: bool = False,
    ) -> FloatArray:
        """A column of finite numbers within bounds; an optional one is NaN where it is empty or absent."""
        if optional and name not in self.columns:
            return np.full(len(self), np.nan)
        column = self.columns[name]
        try:
            values = np.array(column, dtype=np.float64)
            empty = np.zeros(len(values), dtype=bool)
        except ValueError:
            values = np.array([_number(value) for value in column])
            empty = np.array([value == "" for value in column])
        with np.errstate(invalid="ignore"):
            fine = np.isfinite(values) & (values >= least) & (values > above)
        self.refuse_where(~fine & ~(empty & optional), name, allowed)
        return values

    def counts(self, name: str, *, optional: bool = False) -> FloatArray:
        """A column of whole numbers of at least 1 (written as 4 or 4.0)."""
        allowed = "a whole number of at least 1"
        values = self.numbers(name, allowed, least=1, optional=optional)
        self.refuse_where(np.isfinite(values) & (values != np.floor(values)), name, allowed)
        return values


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return np.nan


def read_header(path: Path) -> list[str]:
    """The column names of a CSV file."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return _header(path, next(csv.reader(file), []))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        _unreadable(path, error)


def read_table(path: Path) -> Table:
    """Read a CSV file. Lines without any value are left out."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = _header(path, next(reader, []))
            rows: list[list[str]] = []
            lines: list[int] = []
            for row in reader:
                if row and (row[0] or any(row)):
                    rows.append(row)
                    lines.append(reader.line_num)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        _unreadable(path, error)
    wrong = {i: len(row) for i, row in enumerate(rows) if len(row) != len(header)}
    for i in wrong:
        rows[i] = (rows[i] + [""] * len(header))[: len(header)]
    columns: dict[str, Sequence[str]] = {
        name: [value.strip() for value in values] for name, values in zip(header, zip(*rows))
    }
    table = Table(path, header, columns, lines)
    for i, found in wrong.items():
        name = header[found] if found < len(header) else header[-1]
        table.refuse(i, name, f"the row has {found} values, the header names {len(header)} columns")
    return table


def _header(path: Path, row: list[str]) -> list[str]:
    header = [name.strip() for name in row]
    if not any(header):
        raise InputError(f"{path}: is empty; need a CSV file with a header line")
    twice = {name for name in header if header.count(name) > 1}
    if twice:
        raise InputError(
            f"{path}:1: column {shown(min(twice))} appears twice; remove or rename one", field=min(twice)
        )
    return header


def _unreadable(path: Path, error: Exception) -> NoReturn:
    if isinstance(error, IsADirectoryError):
        reason = "is a directory; need a CSV file"
    elif isinstance(error, FileNotFoundError):
        reason = "no such file; check the path"
    elif isinstance(error, UnicodeDecodeError):
        reason = "is not a text file; need CSV in UTF-8"
    elif isinstance(error, OSError):
        reason = f"cannot be read: {error.strerror or error}"
    else:
        reason = f"is not CSV: {error}"
    raise InputError(f"{path}: {reason}") from error
