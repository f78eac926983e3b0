"""The gradient sums of one step, by layer, added in micro-batch order whatever the order of arrival."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from edgesplit.errors import RunError

Array = Any
Grads = Mapping[str, Array]
Layer = str
"""A layer's name in the chain."""


class Report(NamedTuple):
    """What a node reports after its last backward of a step.

    Attributes:
        finite: every gradient is.
        layers: layer -> (weight, sum of squares of its mean, unscaled gradient). 0 squares where not finite.
        nonfinite: the layers with a gradient that is not finite.
    """

    finite: bool
    layers: dict[Layer, tuple[float, float]]
    nonfinite: tuple[Layer, ...]


@dataclass(slots=True)
class _Sum:
    expected: tuple[int, ...]
    passed: int = 0
    early: dict[int, tuple[Grads, float]] = field(default_factory=dict)
    weight: float = 0.0
    sums: dict[str, Array] = field(default_factory=dict)
    owned: set[str] = field(default_factory=set)
    squares: float | None = None

    @property
    def complete(self) -> bool:
        return self.passed == len(self.expected)

    def take(self, micro: int, grads: Grads, weight: float) -> None:
        self.early[micro] = grads, weight
        while not self.complete and self.expected[self.passed] in self.early:
            self._add(*self.early.pop(self.expected[self.passed]))
            self.passed += 1

    def measure(self) -> float:
        """The sum of squares of the sums, kept for a report that comes after the update."""
        if self.squares is None:
            self.squares = sum(map(_squares, self.sums.values()), 0.0)
        return self.squares

    def _add(self, grads: Grads, weight: float) -> None:
        self.weight += weight
        for name, grad in grads.items():
            if name not in self.sums:
                self.sums[name] = grad
            elif name not in self.owned:
                # The first gradient is not ours to write into: two parameters may share its memory.
                self.sums[name] = self.sums[name] + grad
                self.owned.add(name)
            else:
                self.sums[name] += grad


class StepSums:
    """Sums of the gradients that passed each layer in one step, and of their weights.

    Args:
        step: the global step.
        micros: layer -> the micro-batches that will pass it, in the order in which they are added.
    """

    def __init__(self, step: int, micros: Mapping[Layer, Sequence[int]]) -> None:
        self.step = step
        self._layers = {layer: _Sum(tuple(expected)) for layer, expected in micros.items()}
        self._left = {layer: set(expected) for layer, expected in micros.items()}

    def __contains__(self, layer: Layer) -> bool:
        return layer in self._layers

    def expects(self, layer: Layer, micro: int) -> bool:
        """Whether this micro-batch's gradient is still to come for this layer."""
        return micro in self._left.get(layer, ())

    def add(self, layer: Layer, micro: int, grads: Grads, weight: float) -> None:
        """Add a micro-batch's gradient sums, now or when those before it have come."""
        self._left[layer].remove(micro)
        self._layers[layer].take(micro, grads, weight)

    def weight(self, layer: Layer) -> float:
        """The weight that passed the layer."""
        return self._layers[layer].weight

    def weights(self) -> dict[Layer, float]:
        """The weight that passed each layer."""
        return {layer: held.weight for layer, held in self._layers.items()}

    def due(self) -> set[Layer]:
        """The layers that this step's update must reach: those that micro-batches or sums of replicas were for."""
        return {layer for layer, held in self._layers.items() if held.expected or held.weight}

    def check_complete(self, layers: Iterable[Layer] | None = None) -> None:
        """Raise a RunError if some gradient of these layers (default: all) has not come."""
        for layer in self._layers if layers is None else layers:
            if layer in self._layers and not self._layers[layer].complete:
                missing = ", ".join(map(str, sorted(self._left[layer]))) or "some"
                raise RunError(f"step {self.step} lacks the gradients of micro-batches {missing} at layer {layer!r}")

    def sums(self, layer: Layer) -> dict[str, Array]:
        """The gradient sums of the layer's parameters that have one."""
        return self._layers[layer].sums

    def replace(self, layer: Layer, sums: Grads, weight: float) -> None:
        """Put other sums in the layer's place, for example those of all its replicas."""
        held = self._layers[layer]
        held.sums, held.owned, held.weight, held.squares = dict(sums), set(), float(weight), None

    def means(self, layer: Layer, loss_scale: float, clip: float = 1.0) -> dict[str, Array]:
        """The mean, unscaled gradients of a layer of weight above 0, times ``clip``."""
        held = self._layers[layer]
        means = {name: value / (held.weight * loss_scale) for name, value in held.sums.items()}
        return means if clip == 1.0 else {name: value * clip for name, value in means.items()}

    def release(self, layer: Layer) -> None:
        """Forget the sums, which the update has used; their weight and squares stay."""
        self._layers[layer].measure()
        self._layers[layer].sums = {}

    def report(self, loss_scale: float) -> Report:
        """Weights and squared norms by layer; the squares are added up in float64."""
        self.check_complete()
        layers, bad = {}, []
        for layer, held in self._layers.items():
            squares = held.measure()
            if not math.isfinite(squares):
                bad.append(layer)
                squares = 0.0
            scale = held.weight * loss_scale
            layers[layer] = held.weight, squares / scale / scale if scale else 0.0
        return Report(not bad, layers, tuple(bad))


def _squares(value: Array) -> float:
    flat = value.detach().double().reshape(-1) if hasattr(value, "detach") else np.ravel(value).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return float(flat @ flat)


def finite(grads: Iterable[Array]) -> bool:
    """Whether all values are (judged by their sum of squares in float64)."""
    return all(math.isfinite(_squares(value)) for value in grads)
