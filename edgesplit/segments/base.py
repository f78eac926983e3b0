"""The seam between a node and what computes: a runner over a contiguous range of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

Array = Any
"""A numpy array or a torch tensor: the arithmetic on weights is written once, for both."""

Arrays = Mapping[str, np.ndarray[Any, Any]]
"""A flat dict of named arrays: what a cut carries. A bare tensor has the one name :data:`BARE`."""

BARE = "x"

Weights = Mapping[str, Array]
"""Parameters by global name (the original model's)."""


class Samples(NamedTuple):
    """Which samples of whose batch an input holds, in order: what random masks are keyed by.

    Attributes:
        seed: the run's.
        step: the global step.
        parts: ``(device, start, stop)``: positions in that device's batch of the step.
    """

    seed: int
    step: int
    parts: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class Output:
    """What a forward gives.

    Attributes:
        arrays: the values at the cut, by name; on the last stage empty.
        needs_grad: the names among ``arrays`` whose gradient must come back.
        loss_sum: on the last stage the sum over ``weight`` units (the mean times the weight), else 0.
        metrics: on the last stage in evaluation, name -> (sum, count).
    """

    arrays: Arrays
    needs_grad: frozenset[str] = frozenset()
    loss_sum: float = 0.0
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class SegmentRunner(Protocol):
    """Computes layers ``start`` to ``stop`` of the chain. Holds the graphs of live micro-batches, no weights.

    ``micro`` names a live forward between ``forward`` and the backward that ends it (``backward``, or
    ``backward_input`` then ``backward_weights``). Gradients are of the *sum* over the micro-batch's weight,
    times ``loss_scale``. A gradient is present only for parameters that have one (not frozen, used).

    ``same_weights``, set once before the first forward, promises that a backward gets the very weights of its forward.

    While ``watchful`` is set, forwards look at what comes out of every layer; ``first_bad`` is then what made something
    not finite of what was finite: ``"layer 'conv1'"`` or ``"the loss"``. Whoever reads it sets it to None again.
    """

    start: int
    stop: int
    same_weights: bool
    watchful: bool
    first_bad: str | None

    def forward(
        self,
        micro: int,
        weights: Weights,
        buffers: dict[str, Array],
        inputs: Arrays,
        needs_grad: frozenset[str],
        samples: Samples,
    ) -> Output:
        """Run in training mode and keep the graph; ``buffers`` are updated in place (or replaced in the dict)."""
        ...

    def forward_loss(
        self,
        micro: int,
        weights: Weights,
        buffers: dict[str, Array],
        inputs: Arrays,
        needs_grad: frozenset[str],
        samples: Samples,
        target: Arrays,
        weight: float,
        loss_scale: float,
    ) -> Output:
        """The last stage's forward: through the loss. A weight of 0 does not call the loss and gives zero gradients."""
        ...

    def evaluate(
        self, weights: Weights, buffers: Mapping[str, Array], inputs: Arrays, target: Arrays | None = None
    ) -> Output:
        """Run in evaluation mode without a graph; with ``target``, through loss and metrics."""
        ...

    def backward(self, micro: int, weights: Weights, grads: Arrays) -> tuple[Arrays, dict[str, Array]]:
        """Return gradients of the inputs that need one, and of the weights. ``grads`` is empty on the last stage."""
        ...

    def backward_input(self, micro: int, weights: Weights, grads: Arrays) -> Arrays:
        """The ``I`` half: gradients of the inputs that need one."""
        ...

    def backward_weights(self, micro: int, weights: Weights) -> dict[str, Array]:
        """The ``W`` half: gradients of the weights; ends the micro-batch."""
        ...

    def drop(self, micros: Sequence[int] | None = None) -> None:
        """Forget live forwards: those of ``micros``, or all."""
        ...
