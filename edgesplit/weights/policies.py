"""Weight policies: which version of its weights a stage uses for the forward and the backward of a micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol, TypeVar

from edgesplit.errors import RunError
from edgesplit.segments.base import Weights
from edgesplit.weights.store import LayerStore
from edgesplit.weights.sums import Grads, Layer, finite

Phase = Literal["F", "B"]
T = TypeVar("T")
"""Forward, or backward (whole, or its halves). Evaluation uses the store's weights: it needs no policy."""


class WeightPolicy(Protocol):
    """The versions of one stage's weights on one node. A version is the number of updates that made it.

    Attributes:
        skipped: updates that were not made, because a gradient was not finite.
    """

    skipped: int

    @property
    def version(self) -> int:
        """The newest version."""
        ...

    def weights(self, micro: int, phase: Phase) -> tuple[int, Weights]:
        """Return the version to use, and at least the stage's weights in it. A forward comes before its backward."""
        ...

    def delay(self, micro: int) -> int:
        """How many updates were applied here since the forward of this live micro-batch: measured, not foretold."""
        ...

    def accumulate(self, micro: int, grads: Grads, delay: int, weight: float) -> None:
        """Take the gradients of the sum over ``weight`` units; ends the micro-batch here."""
        ...

    def apply(self, step: int, micro: int, lr: float, clip: float = 1.0, loss_scale: float = 1.0) -> int:
        """Update; return the newest version. ``micro`` is the last micro-batch whose gradient is applied."""
        ...

    def drop(self, micros: Iterable[int] | None = None) -> None:
        """Forget live micro-batches: these, or all."""
        ...


class Latest:
    """The weights of the moment, for synchronous methods: no update comes between a forward and its backward.

    Args:
        store: the node's layers; ``begin``, ``report``, ``confirm`` and ``rollback`` of a step are called on it.
        layers: the stage's.
    """

    def __init__(self, store: LayerStore, layers: Sequence[Layer]) -> None:
        self.store, self.layers, self.skipped = store, tuple(layers), 0
        self._live: dict[int, int] = {}

    @property
    def version(self) -> int:
        """How many updates the stage has had."""
        return self.store.version(self.layers)

    def weights(self, micro: int, phase: Phase) -> tuple[int, Weights]:
        """Return the newest version, which must be that of the micro-batch's forward too."""
        version = self.version
        if phase == "F":
            self._live[micro] = version
        elif version != _of(self._live, micro):
            raise RunError(
                f"micro-batch {micro} saw version {self._live[micro]} forward and would see {version} backward: "
                "this order needs a method that keeps versions"
            )
        return version, self.store.params

    def delay(self, micro: int) -> int:
        """How many updates came since the forward: 0 in an order that suits this policy."""
        return self.version - _of(self._live, micro)

    def accumulate(self, micro: int, grads: Grads, delay: int, weight: float) -> None:
        """Add the gradients to the step's sums."""
        if delay:
            raise RunError(f"micro-batch {micro} comes {delay} updates late: a synchronous step cannot use it")
        self.store.accumulate(self.layers, micro, grads, weight)
        self.drop([micro])

    def apply(self, step: int, micro: int, lr: float, clip: float = 1.0, loss_scale: float = 1.0) -> int:
        """Apply the step's mean gradient to the stage."""
        self.store.update(step, self.layers, lr, clip, loss_scale)
        return self.version

    def drop(self, micros: Iterable[int] | None = None) -> None:
        """Forget live micro-batches: these, or all."""
        for micro in list(self._live if micros is None else micros):
            self._live.pop(micro, None)


class Stash:
    """PipeDream's weight stashing (Narayanan et al., SOSP 2019): asynchronous, an update after every micro-batch.

    A forward uses the newest weights, its backward the same version as its forward, and the gradient, the mean over
    that micro-batch alone, is applied to the newest weights. A version is freed when no live micro-batch needs it.

    Args:
        store: the node's layers.
        layers: the stage's.

    Attributes:
        delays: how many updates late -> how many gradients.
    """

    def __init__(self, store: LayerStore, layers: Sequence[Layer]) -> None:
        self.store, self.layers, self.skipped = store, tuple(layers), 0
        self.delays: Counter[int] = Counter()
        self._live: dict[int, tuple[int, ...]] = {}  # a stamp and not a number: layers are shared with other stages
        self._versions: dict[tuple[int, ...], Weights] = {}
        self._pending: dict[int, tuple[Grads, float]] = {}

    @property
    def version(self) -> int:
        """How many updates the stage has had."""
        return self.store.version(self.layers)

    @property
    def held(self) -> tuple[int, ...]:
        """The versions kept for live micro-batches."""
        return tuple(sorted(max(stamp) for stamp in self._versions))

    def weights(self, micro: int, phase: Phase) -> tuple[int, Weights]:
        """Return the newest version forward, and the same one backward."""
        if phase == "F":
            stamp = self._live[micro] = self.store.stamp(self.layers)
            if stamp not in self._versions:
                self._versions[stamp] = self.store.params_of(self.layers)
        stamp = _of(self._live, micro)
        return max(stamp), self._versions[stamp]

    def delay(self, micro: int) -> int:
        """How many updates came since the forward."""
        return self.version - max(_of(self._live, micro))

    def accumulate(self, micro: int, grads: Grads, delay: int, weight: float) -> None:
        """Hold the gradients until the micro-batch's update, and free versions."""
        _of(self._live, micro)
        self.delays[delay] += 1
        del self._live[micro]
        self._pending[micro] = grads, weight
        self._free()

    def apply(self, step: int, micro: int, lr: float, clip: float = 1.0, loss_scale: float = 1.0) -> int:
        """Apply the micro-batch's mean gradient to the newest weights, unless it is not finite."""
        if clip != 1.0:
            raise RunError(f"an asynchronous update has no global norm to clip by (clip {clip:g}): drop clip_norm")
        if micro not in self._pending:
            raise RunError(f"no gradient of micro-batch {micro} is here to apply in step {step}")
        grads, weight = self._pending.pop(micro)
        if not finite(grads.values()):
            self.skipped += 1
        elif weight:
            means = {name: grad / (weight * loss_scale) for name, grad in grads.items()}
            self.store.apply(self.layers, means, weight, lr)
        return self.version

    def drop(self, micros: Iterable[int] | None = None) -> None:
        """Forget live micro-batches, and gradients not applied: these, or all."""
        for micro in [*self._live, *self._pending] if micros is None else micros:
            self._live.pop(micro, None)
            self._pending.pop(micro, None)
        self._free()

    def _free(self) -> None:
        needed = set(self._live.values())
        self._versions = {stamp: weights for stamp, weights in self._versions.items() if stamp in needed}


def _of(live: Mapping[int, T], micro: int) -> T:
    if micro not in live:
        raise RunError(f"micro-batch {micro} has no live forward here")
    return live[micro]
