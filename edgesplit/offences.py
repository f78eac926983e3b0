"""What devices may do before they are left out: caps on their weights and norms, and a count of offences. No I/O."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgesplit.protocol import Report
from edgesplit.schedule import Step

Arrays = Mapping[str, np.ndarray[Any, Any]]


@dataclass
class Offences:
    """Counts them.

    Attributes:
        after: of so many a device is left out; None: never.
        counts: by device.
        barred: devices that are left out for good, and why.
    """

    after: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    barred: dict[str, str] = field(default_factory=dict)

    def note(self, device: str, *, grave: bool = False) -> bool:
        """Note an offence; return whether the device is to be left out for it.

        Args:
            grave: one that the step cannot go on after counts as many.
        """
        self.counts[device] = self.counts.get(device, 0) + 1
        if self.after is None:
            return False
        if device in self.barred:  # and here nevertheless: in a resumed run, until its next plan
            return True
        if grave:
            self.counts[device] = max(self.counts[device], self.after)
        return self.counts[device] >= self.after


def weight_fits(weight: float, samples: int, factor: float | None) -> bool:
    """Whether a device may say that so many samples weigh so much; ``factor``: at most so much each."""
    return math.isfinite(weight) and weight >= 0 and (factor is None or weight <= samples * factor)


def offenders(step: Step, reports: Mapping[str, Report], devices: Collection[str]) -> tuple[dict[str, str], set[str]]:
    """Find whose fault it is that a step cannot count.

    What other nodes say of a device's messages is believed, and what a device says against itself. Where all devices
    of a step have numbers that are not finite it is not theirs, but the model's.

    Returns:
        Device -> what it did; and those of them who broke a rule, whatever the numbers.
    """
    here = {micro.micro: micro.device for micro in step.micros}
    rules: dict[str, str] = {}
    numbers: dict[str, str] = {}
    for node, report in reports.items():
        if node in devices:
            if not report.finite:
                numbers.setdefault(node, "its gradients are not finite")
            if not all(value >= 0 for pair in report.layers.values() for value in pair if not math.isnan(value)):
                rules.setdefault(node, "its weights or norms are negative")
        else:
            rules |= {device: what for device, what in report.offences.items() if device in step.batches}
        for micro, (loss, _) in report.losses.items():
            if not math.isfinite(loss) and here.get(micro) in devices:
                numbers.setdefault(here[micro], "its loss is not finite")
    numbers = {device: what for device, what in numbers.items() if device in step.batches}
    if len(step.batches) > 1 and set(step.batches) <= set(numbers):
        numbers = {}
    return {**numbers, **rules}, set(rules)


# --- replicas, at a round's end ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """A replica as it counts.

    Attributes:
        arrays: with its change clipped.
        weight: 0 where it does not count.
        what, value: an offence, and what was found.
    """

    arrays: Arrays
    weight: float
    what: str | None = None
    value: Any = None


def judge(
    replicas: Mapping[str, tuple[Arrays, float]],
    before: Arrays,
    *,
    norm: float | None,
    most: Mapping[str, float],
) -> dict[str, Judged]:
    """Look at the replicas of a group of layers before they are averaged.

    Args:
        replicas: node -> its arrays and its weight.
        before: the arrays at the round's beginning.
        norm: a change may be so many times the (lower) median of the nodes' changes; more is clipped.
        most: node -> the weight that it can have at most; others are not judged by it.
    """
    found: dict[str, Judged] = {}
    norms: dict[str, float] = {}
    for node, (arrays, weight) in replicas.items():
        size = _norm(arrays, before)
        if not math.isfinite(size):
            found[node] = Judged(before, 0.0, "its weights are not finite")
        elif not (math.isfinite(weight) and weight >= 0):
            found[node] = Judged(before, 0.0, "the weight of its samples is none", str(weight))
        elif weight > most.get(node, math.inf):
            found[node] = Judged(arrays, most[node], "its samples weigh too much", weight)
            norms[node] = size
        else:
            found[node] = Judged(arrays, weight)
            norms[node] = size
    if norm is None or not (usual := _median([norms[node] for node in norms if found[node].weight > 0])):
        return found
    for node, size in norms.items():
        if size > norm * usual:
            kept = found[node]
            what = kept.what or f"its change is {size / usual:.3g} times the others'"
            clipped = _clipped(kept.arrays, before, norm * usual / size)
            found[node] = Judged(clipped, kept.weight, what, kept.value if kept.what else size)
    return found


def as_most(replicas: Mapping[str, Arrays]) -> tuple[str, list[str]]:
    """Of replicas that must be equal, return a node whose is as most are (of as many, the first), and all others."""
    alike: dict[bytes, list[str]] = {}
    for node, arrays in replicas.items():
        digest = hashlib.sha256()
        for name in sorted(arrays):
            digest.update(name.encode() + np.ascontiguousarray(arrays[name]).tobytes())
        alike.setdefault(digest.digest(), []).append(node)
    most = max(alike.values(), key=len)
    return most[0], [node for nodes in alike.values() if nodes is not most for node in nodes]


def _norm(arrays: Arrays, before: Arrays) -> float:
    square = 0.0
    with np.errstate(all="ignore"):
        for name, array in arrays.items():
            if np.issubdtype(array.dtype, np.inexact):
                change = array.astype(np.float64) - before[name]
                square += float(np.vdot(change, change).real)
    return math.sqrt(square) if math.isfinite(square) else math.inf


def _median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0


def _clipped(arrays: Arrays, before: Arrays, factor: float) -> dict[str, np.ndarray[Any, Any]]:
    return {
        name: (before[name] + factor * (array.astype(np.float64) - before[name])).astype(array.dtype)
        if np.issubdtype(array.dtype, np.inexact)
        else array
        for name, array in arrays.items()
    }
