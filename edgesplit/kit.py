"""What a node computes with, whatever computes: the seam between the engine and torch (or, later, ONNX)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgesplit.segments.base import Array, Arrays, SegmentRunner
from edgesplit.task import Shard


@dataclass(frozen=True, kw_only=True)
class Kit:
    """A Task made ready for one node.

    Attributes:
        layers: the chain's layer names.
        params, buffers: global names by layer.
        frozen: names of parameters that are not trained.
        fingerprint: of the chain and its source.
        runner: ``(start, stop) ->`` what computes these layers.
        native: ``(array, trainable) ->`` the runner's own array.
        numpy: the other way.
        data: ``(shard, test) ->`` the user's Dataset or batches, or None where there is no test set.
        collate: samples -> ``(x, target)``.
        to_arrays: a value of the user's -> named arrays.
        weigh: named arrays of a target -> ``Task.weight``.
        update: parameter names -> an ``Update`` (see ``weights.store``) that is the Task's own torch optimizer.
    """

    layers: tuple[str, ...]
    params: Sequence[Sequence[str]]
    buffers: Sequence[Sequence[str]]
    frozen: frozenset[str]
    fingerprint: str
    runner: Callable[[int, int], SegmentRunner]
    native: Callable[[np.ndarray[Any, Any], bool], Array]
    numpy: Callable[[Array], np.ndarray[Any, Any]]
    data: Callable[[Shard, bool], Any]
    collate: Callable[[Sequence[Any]], Any]
    to_arrays: Callable[[Any], Arrays]
    weigh: Callable[[Arrays], float]
    update: Callable[[Sequence[str]], Any] | None = None
