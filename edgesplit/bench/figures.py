"""Figures with their bounds, and what they were measured on."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgesplit.errors import RunError
from edgesplit.launch import versions


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of docs/benchmarks.md.

    Attributes:
        name: in snake_case, after what it measures.
        value: the median of what was measured.
        unit: of the value; ``ratio`` where it has none.
        least, most: the bound; None: unbounded on that side.
        quartiles: the first and third of what was measured.
    """

    name: str
    value: float
    unit: str
    least: float | None = None
    most: float | None = None
    quartiles: tuple[float, float] | None = None

    @property
    def bound(self) -> str:
        """The bound in words."""
        if self.least is None:
            return "none" if self.most is None else f"at most {self.most:g}"
        return f"at least {self.least:g}" if self.most is None else f"{self.least:g} to {self.most:g}"

    @property
    def ok(self) -> bool:
        """Whether the value keeps the bound."""
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

    def to_json(self) -> dict[str, Any]:
        """As every ``bench`` prints it."""
        shown = {"name": self.name, "value": self.value, "unit": self.unit, "bound": self.bound, "ok": self.ok}
        return shown if self.quartiles is None else {**shown, "quartiles": list(self.quartiles)}


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile.

    >>> spread([4.0, 1.0, 3.0, 2.0, 5.0])
    (2.0, 3.0, 4.0)

    Raises:
        RunError: nothing was measured.
    """
    if not values:
        raise RunError("nothing was measured: a figure needs at least one value")
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def median_figure(
    name: str, values: Sequence[float], unit: str = "ratio", *, least: float | None = None, most: float | None = None
) -> Figure:
    """Return the figure of repeated measurements."""
    low, middle, high = spread(values)
    return Figure(name, middle, unit, least, most, (low, high))


def machine() -> dict[str, Any]:
    """What the figures were measured on, and how busy it was with other work when they began."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def report(
    figures: Sequence[Figure], details: Mapping[str, Any], where: Mapping[str, Any], repeats: int
) -> dict[str, Any]:
    """Return the object that ``edgesplit bench`` prints."""
    return {
        "figures": [figure.to_json() for figure in figures],
        "details": dict(details),
        "machine": dict(where),
        "versions": versions(),
        "repeats": repeats,
    }
