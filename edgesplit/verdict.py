"""The verdict on a step, from what its nodes report: what counts of it, whether it is finite, sums, the clip factor.

Reports come by node in the plan's order, never in that of their arrival: the same bits in every run. No I/O.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgesplit.codecs import Packed, unpack
from edgesplit.errors import FrameError, RunError
from edgesplit.plan import Plan
from edgesplit.protocol import Report
from edgesplit.schedule import Step
from edgesplit.transport.base import Message

Reports = Mapping[str, Report]
"""Node -> what it reports of a step."""

Sums = dict[str, np.ndarray[Any, Any]]
"""``layer/parameter`` -> sum of its gradients."""

Weights = Mapping[int, float]
"""Layer -> the weight that has passed it in a step."""

Metrics = Mapping[str, Mapping[str, tuple[float, float]]]
"""Device -> metric -> its sum and its weight."""


@dataclass
class LossScale:
    """What the loss is multiplied by before the backward (Micikevicius et al., 2018, section 3.2)."""

    value: float = 1.0
    dynamic: bool = False
    growth_interval: int = 2000
    good: int = 0

    def note(self, finite: bool) -> bool:
        """Note a step's outcome; return whether a non-finite one was only the scale's search."""
        if not self.dynamic:
            return False
        if finite:
            self.good += 1
            if self.good % self.growth_interval == 0:
                self.value *= 2.0
            return False
        self.good = 0
        searching = self.value > 1.0
        self.value = max(self.value / 2.0, 1.0)
        return searching


# --- what counts of a report ----------------------------------------------------------------------------------------


def check_sums(message: Message, layers: Collection[int], like: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
    """Refuse a report with sums that are not asked for.

    Args:
        message: the report.
        layers: which the sender shares.
        like: ``layer/parameter`` -> shape and dtype of the model's; empty: not known.

    Raises:
        FrameError: it carries others.
    """
    known = set(map(str, layers))
    for name, packed in message.arrays.items():
        if name.partition("/")[0] not in known:
            raise FrameError(f"a report of {message.sender!r} carries {name!r}, which is of no layer it shares")
        if like and like.get(name) != (packed.shape, packed.dtype):
            raise FrameError(f"a report of {message.sender!r} carries {name!r} in a shape that is not the model's")


def its_own(report: Report, node: str, step: Step, plan: Plan) -> Report:
    """Return what a node can know: of its own layers, and of the losses of micro-batches whose way ends on it."""
    mine = [micro for micro in step.micros if plan.path(micro.device, micro.route)[-1].node == node]
    losses, ends = {micro.micro for micro in mine}, {micro.device for micro in mine}
    layers = set(plan.layers_of(node))
    return replace(
        report,
        layers={layer: pair for layer, pair in report.layers.items() if layer in layers},
        losses={micro: pair for micro, pair in report.losses.items() if micro in losses},
        metrics={device: values for device, values in report.metrics.items() if device in ends},
    )


# --- whether it is finite -------------------------------------------------------------------------------------------


def is_finite(reports: Reports, sums: Sums) -> bool:
    """Whether all that a step has come to is."""
    return all(map(_finite, reports.values())) and all(np.isfinite(array).all() for array in sums.values())


def _finite(report: Report) -> bool:
    """Whether the gradients are, as the node found, and the losses: one that is not may have gradients that are.

    So are weights and squares of norms, of an honest node also not negative.
    """
    sums = all(math.isfinite(value) and value >= 0 for pair in report.layers.values() for value in pair)
    losses = all(math.isfinite(total) and 0 <= weight < math.inf for total, weight in report.losses.values())
    return report.finite and sums and losses


def not_finite(step: int, reports: Reports, in_row: int) -> RunError:
    """Say where the last of so many steps in a row that were not finite went wrong."""
    bad = [(node, report.culprit) for node, report in reports.items() if report.skipped or not report.finite]
    node, layer = bad[0] if bad else (list(reports)[-1], None)
    where = f"last in layer {layer!r} on {node!r}" if layer else f"last in {node!r}"
    sources = [(node, report.source) for node, report in reports.items() if report.source]
    if sources:
        node, source = sources[0]
        where = f"first in {source} on {node!r}"
    return RunError(
        f"{in_row} steps in a row were not finite (steps {step - in_row + 1} to {step}), "
        f"{where}: lower the learning rate, clip the norm, or look at that device's data"
    )


# --- what it comes to -----------------------------------------------------------------------------------------------


def add_replicas(
    reports: Reports, arrays: Mapping[str, Mapping[str, Packed]], shared: Iterable[int]
) -> tuple[Sums, dict[int, float]]:
    """Add the gradient sums and weights of replicated layers, in node order."""
    sums: Sums = {}
    weights = dict.fromkeys(shared, 0.0)
    if not weights:
        return sums, weights
    for node, report in reports.items():
        for layer, (weight, _) in report.layers.items():
            if layer in weights:
                weights[layer] += weight
        for name, array in unpack(arrays[node]).items():
            if name in sums and (sums[name].shape, sums[name].dtype) != (array.shape, array.dtype):
                raise FrameError(f"the sum of {name!r} of {node!r} has another shape or dtype than other replicas'")
            sums[name] = sums[name] + array if name in sums else array
    return sums, weights


def clip_factor(reports: Reports, sums: Sums, weights: Weights, *, norm: float | None, scale: float) -> float:
    """Factor that brings the global norm to ``norm``: min(1, c / (norm + 1e-6)), as torch clips.

    Args:
        reports: of layers that have one replica, or whose replicas are not added.
        sums, weights: of those whose replicas are.
        norm: None: nothing is clipped.
        scale: of the loss, in this step's gradients.
    """
    if norm is None:
        return 1.0
    square = 0.0
    for name, array in sums.items():
        layer = int(name.partition("/")[0])
        if weights[layer]:
            mean = array.astype(np.float64) / (weights[layer] * scale)
            square += float(np.vdot(mean, mean))
    by_layer: dict[int, list[tuple[float, float]]] = {}
    for report in reports.values():
        for layer, pair in report.layers.items():
            if layer not in weights:
                by_layer.setdefault(layer, []).append(pair)
    for pairs in by_layer.values():
        total = sum(weight for weight, _ in pairs)
        if total:
            square += sum(weight * sq for weight, sq in pairs) / total
    return min(1.0, norm / (math.sqrt(square) + 1e-6))


def loss_of(reports: Reports) -> tuple[float, float]:
    """Return a step's loss, the mean by weight (nan where it has none), and that weight."""
    losses = {micro: pair for report in reports.values() for micro, pair in report.losses.items()}
    total = weight = 0.0
    for micro in sorted(losses):  # in micro-batch order: the same bits whoever computed them
        total += losses[micro][0]
        weight += losses[micro][1]
    return total / weight if weight else math.nan, weight


def add_metrics(parts: Sequence[Metrics]) -> dict[str, dict[str, tuple[float, float]]]:
    """Add up the devices' metrics: where nodes share the last layers, each has a part of them."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for part in parts:
        for device, metrics in part.items():
            of_device = found.setdefault(device, {})
            for name, (value, weight) in metrics.items():
                before = of_device.get(name, (0.0, 0.0))
                of_device[name] = (before[0] + value, before[1] + weight)
    return found
