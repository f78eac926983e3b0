"""Whether a node's reply fits what it was asked for: names, shapes, dtypes, weights, finite values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from edgesplit.errors import RunError
from edgesplit.federated.grid import Arrays, Reply


def check_weight(reply: Reply) -> None:
    """Raise RunError for a weight that is negative or not finite."""
    if not (math.isfinite(reply.weight) and reply.weight >= 0):
        raise RunError(f"node {reply.node!r} reports weight {reply.weight} for group {reply.group!r}")


def check_fits(reply: Reply, like: Arrays) -> None:
    """Raise RunError where names, shapes or dtypes differ from the group's."""
    for name in sorted(set(reply.arrays) ^ set(like)):
        what = "has not sent" if name in like else "has sent an unknown"
        raise RunError(f"node {reply.node!r} {what} array {name!r} of group {reply.group!r}")
    for name, array in reply.arrays.items():
        if (array.shape, array.dtype) != (like[name].shape, like[name].dtype):
            raise RunError(
                f"node {reply.node!r} sent {name!r} as {array.dtype} {array.shape}; "
                f"group {reply.group!r} has {like[name].dtype} {like[name].shape}"
            )


def check_finite(reply: Reply, names: Iterable[str]) -> None:
    """Raise RunError for an infinity or NaN in one of the named arrays."""
    for name in names:
        if not np.isfinite(reply.arrays[name]).all():
            raise RunError(f"node {reply.node!r} sent a value of {name!r} that is not finite")


def float_names(arrays: Arrays) -> list[str]:
    """Return the names of the arrays that can be averaged, in order."""
    return [name for name, array in arrays.items() if is_float(array)]


def is_float(array: np.ndarray[Any, Any]) -> bool:
    """Return whether an array holds floating-point numbers, real or complex."""
    return bool(np.issubdtype(array.dtype, np.inexact))


def widen(arrays: Arrays) -> dict[str, np.ndarray[Any, Any]]:
    """Return arrays in double precision."""
    return {name: array.astype(np.result_type(array.dtype, np.float64), copy=False) for name, array in arrays.items()}


def agree(arrays: Sequence[np.ndarray[Any, Any]]) -> bool:
    """Return whether all arrays are equal, NaN included."""
    return all(np.array_equal(array, arrays[0], equal_nan=is_float(array)) for array in arrays[1:])
