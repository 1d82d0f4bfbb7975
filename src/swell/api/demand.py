"""What a service wants, read from outside: a command that prints a number, or one metric of Prometheus.

    read = command_source(["./wanted.sh"])
    read = metric_source("http://web:9090/metrics", 'requests_per_second{job="web"}')
    gpus = to_gpus(read(), per=50.0, most=8)

A source raises `SourceFailed`, with a line for people, if there is no number to be had.
"""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Callable, Sequence

from swell.domain import InputError, SwellError

READ_LIMIT_S = 10.0
MOST_BYTES = 4 << 20
Source = Callable[[], float]

_METRIC = re.compile(r"\s*([A-Za-z_:][\w:]*)\s*(?:\{(.*)\})?\s*", re.DOTALL)
_LABEL = re.compile(r'\s*([A-Za-z_]\w*)\s*=\s*"([^"\\]*)"\s*(?:,|$)')


class SourceFailed(SwellError):
    """The demand of a service could not be read."""


def command_source(words: Sequence[str]) -> Source:
    """Runs a command; the last word of its output is the number."""
    if not words:
        raise InputError("command: give a command that prints a number", field="command")

    def read() -> float:
        try:
            done = subprocess.run(
                list(words), capture_output=True, text=True, timeout=READ_LIMIT_S, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            raise SourceFailed(f"'{words[0]}' took longer than {READ_LIMIT_S:g} s") from None
        except OSError as error:
            raise SourceFailed(f"'{words[0]}' cannot be run: {error.strerror}") from error
        if done.returncode:
            said = (done.stderr.strip().splitlines() or [""])[-1][:200]
            raise SourceFailed(f"'{words[0]}' ended with exit code {done.returncode}: {said}")
        return _number((done.stdout.split() or [""])[-1], f"'{words[0]}' printed")

    return read


def metric_source(url: str, metric: str) -> Source:
    """Reads a page in the Prometheus text format; the sum of all samples of the metric with its labels."""
    if not url.startswith(("http://", "https://")):
        raise InputError(f"url must begin with http:// or https://, got {url!r}", field="url")
    name, labels = _parse_metric(metric)

    def read() -> float:
        import httpx2
        from prometheus_client.parser import text_string_to_metric_families

        try:
            answer = httpx2.get(url, timeout=READ_LIMIT_S, follow_redirects=False)
            answer.raise_for_status()
            families = list(text_string_to_metric_families(answer.text[:MOST_BYTES]))
        except (httpx2.HTTPError, ValueError) as error:
            raise SourceFailed(f"{url} cannot be read: {error}") from error
        samples = [
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        if not samples:
            raise SourceFailed(f"{url} has no metric '{metric}'")
        return _number(math.fsum(samples), f"'{metric}' is")

    return read


def to_gpus(value: float, *, per: float, most: int) -> int:
    """How many slots a service wants whose metric has this value, at `per` of it for each slot."""
    return min(math.ceil(max(value, 0.0) / per - 1e-9), most)


def _number(text: str | float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise SourceFailed(f"{what} {text!r}, which is no number") from None
    if not math.isfinite(value):
        raise SourceFailed(f"{what} {value}, which is no number of anything")
    return value


def _parse_metric(text: str) -> tuple[str, dict[str, str]]:
    found = _METRIC.fullmatch(text)
    rest, labels = (found[2] or "") if found else "", dict[str, str]()
    while found and rest.strip():
        label = _LABEL.match(rest)
        if label is None:
            found = None
            break
        labels[label[1]] = label[2]
        rest = rest[label.end() :]
    if found is None:
        raise InputError(f'metric must be NAME or NAME{{label="value"}}, got {text!r}', field="metric")
    return found[1], labels
