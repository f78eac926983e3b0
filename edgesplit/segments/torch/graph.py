"""What a live forward keeps for its backward, and on which version of the weights that backward runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from edgesplit.errors import RunError, TaskError
from edgesplit.segments.base import Weights


class _Entries(torch.autograd.Function):
    """Makes tensors that have no history entries of the graph, without a copy."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.mark_dirty(*tensors)
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        return (None,) * (len(grads) + 1)


_TOKEN = torch.zeros((), requires_grad=True)
"""What makes a call of :class:`_Entries` part of the graph; it never gets a gradient."""


def entries(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, GradientEdge]]:
    """Return the tensors as ones that require a gradient, and the edges where those gradients arrive.

    No leaves: a layer may write to its input in place, and the graph does not keep the weights alive.
    """
    if not tensors:
        return {}, {}
    # `.data` shares memory but not the count of in-place writes, which marking as dirty raises.
    plain = [tensor.data for tensor in tensors.values()]
    made = _Entries.apply(_TOKEN, *plain)  # type: ignore[no-untyped-call]
    node = made[0].grad_fn
    return dict(zip(tensors, made, strict=True)), {name: GradientEdge(node, i) for i, name in enumerate(tensors)}


class _Saved(NamedTuple):
    """A tensor that autograd saved, and how often it had been written to."""

    tensor: Tensor
    version: int


class _SavedWeight(NamedTuple):
    """A weight that autograd saved, or a view of it: which one and what view."""

    name: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class SameWeights:
    """The plain graph, for a backward that gets the weights of its forward: what :class:`Versions` does costs time."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights

    def hooks(self) -> AbstractContextManager[object]:
        """Return a context that does nothing."""
        return nullcontext()

    def end_forward(self) -> None:
        """Nothing to forget."""

    def use(self, weights: Weights) -> None:
        """Refuse other weights than the forward's; none end a backward."""
        if weights and any(weights.get(name) is not weight for name, weight in self._weights.items()):
            raise RunError("a backward was given other weights than its forward, although they were to be the same")


class Versions:
    """Lets a graph back-propagate on other weights than its forward's, and keeps none alive.

    A saved weight, or view of one, is packed as its name; the backward unpacks it from the version that it is given.
    What a layer computes from weights alone (the product of a weight norm) keeps the forward's values.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._layout = {name: (weight.stride(), int(weight.storage_offset())) for name, weight in weights.items()}
        # An address says which weight for as long as `weights` live: during the forward. Weights that share a storage
        # cannot be told apart; they are saved as other tensors are.
        self._names: dict[int, str | None] = {0: None}
        for name, weight in weights.items():
            address = weight.untyped_storage().data_ptr()
            self._names[address] = None if address in self._names else name
        self._current: Weights = {}

    def hooks(self) -> saved_tensors_hooks:
        """Return the context to run the forward in."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def end_forward(self) -> None:
        """Forget addresses."""
        self._names = {}

    def use(self, weights: Weights) -> None:
        """Set what the next backward unpacks."""
        self._current = weights

    def _pack(self, tensor: Tensor) -> _Saved | _SavedWeight:
        name = self._names.get(tensor.untyped_storage().data_ptr())
        if name is None:
            # Detached: an operator that saves its own output would keep itself alive.
            return _Saved(tensor.detach(), tensor._version)  # noqa: SLF001  # the counter has no public name
        offset = int(tensor.storage_offset()) - self._layout[name][1]
        return _SavedWeight(name, tensor.shape, tensor.stride(), offset)

    def _unpack(self, saved: _Saved | _SavedWeight) -> Tensor:
        if isinstance(saved, _SavedWeight):
            return self._view(saved)
        # With hooks autograd leaves this check to us.
        if saved.tensor._version != saved.version:  # noqa: SLF001
            raise TaskError(
                f"a value of shape {tuple(saved.tensor.shape)} that the backward needs was written to in place after "
                "its use: replace the in-place operation in the model"
            )
        return saved.tensor

    def _view(self, saved: _SavedWeight) -> Tensor:
        if saved.name not in self._current:
            raise RunError(f"the backward needs weight {saved.name!r}, which it was not given")
        weight: Tensor = self._current[saved.name].detach()
        stride = self._layout[saved.name][0]
        if weight.stride() != stride:
            same = torch.empty_strided(weight.shape, stride, dtype=weight.dtype, device=weight.device)
            weight = same.copy_(weight)
        return weight.as_strided(saved.size, saved.stride, weight.storage_offset() + saved.offset)


@dataclass
class Graph:
    """A live forward.

    Attributes:
        versions: the weights that a backward runs on.
        inputs, weights: names -> edges (or leaves) where their gradients arrive.
        outputs: what requires a gradient, by name.
        last: it ends in the loss: no gradients come from another node.
        zero: the micro-batch has weight 0: its gradients are zero, whatever the values.
        received: gradients of ``outputs``.
    """

    versions: Versions | SameWeights
    inputs: Mapping[str, GradientEdge]
    weights: Mapping[str, GradientEdge | Tensor]
    outputs: dict[str, Tensor] = field(default_factory=dict)
    last: bool = False
    zero: bool = False
    received: dict[str, Tensor] = field(default_factory=dict)

    def gradients(
        self, edges: Iterable[tuple[Any, GradientEdge | Tensor]], current: Weights, keep: bool = False
    ) -> dict[Any, Tensor]:
        """Back-propagate ``received`` to ``(key, edge)``; what gets no gradient is left out.

        Args:
            edges: where to.
            current: the version of the weights.
            keep: whether the graph is needed again.
        """
        pairs = list(edges)
        if not pairs or not self.received:
            return {}
        targets: Any = [edge for _, edge in pairs]
        self.versions.use(current)
        try:
            grads = torch.autograd.grad(
                [self.outputs[name] for name in self.received],
                targets,
                list(self.received.values()),
                retain_graph=keep,
                allow_unused=True,
            )
        finally:
            self.versions.use({})
        found = {key: grad for (key, _), grad in zip(pairs, grads, strict=True) if grad is not None}
        return {key: torch.zeros_like(grad) for key, grad in found.items()} if self.zero else found
