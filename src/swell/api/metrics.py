"""Figures for Prometheus: requests, counted as they are answered, and the control plane's own figures.

There are only aggregates: no label names a user or a job, so any token may read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class RequestMetrics:
    """Counts requests by route template, not by path, so that names in paths do not make new counters."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("method", "route")
        self._answers = Counter(
            "swell_http_requests", "Requests answered.", (*labels, "status"), registry=registry
        )
        self._seconds = Histogram(
            "swell_http_request_seconds",
            "Time to the first byte of the answer.",
            labels,
            registry=registry,
            buckets=_BUCKETS,
        )

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        method = method if method in ("GET", "POST", "PUT", "DELETE", "HEAD") else "other"
        self._answers.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)


class PlaneCollector:
    """The control plane's statistics: a number is a gauge, a mapping a gauge with one label."""

    def __init__(self, stats: Callable[[], Mapping[str, Any]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The figures, in the form that the Prometheus library asks for."""
        for key, value in self._stats().items():
            name = f"swell_{key}"
            if isinstance(value, Mapping):
                family = GaugeMetricFamily(name, key.replace("_", " "), labels=["name"])
                for label, number in value.items():
                    family.add_metric([str(label)], float(number))
                yield family
            elif isinstance(value, (int, float)):
                yield GaugeMetricFamily(name, key.replace("_", " "), value=float(value))


def exposition(registry: CollectorRegistry, stats: Callable[[], Mapping[str, Any]]) -> bytes:
    """All figures, in Prometheus' text format."""
    own = CollectorRegistry()
    own.register(PlaneCollector(stats))
    return bytes(generate_latest(registry) + generate_latest(own))
