"""Values at a cut: tensors to arrays and back, in one canonical layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edgesplit.segments.base import BARE, Arrays
from edgesplit.splitting import Value


def to_arrays(value: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return a tensor (or number), or a flat dict of tensors, as contiguous numpy arrays; memory may be shared."""
    named = value if isinstance(value, Mapping) else {BARE: value}
    return {name: torch.as_tensor(item).detach().contiguous().cpu().numpy() for name, item in named.items()}


def from_arrays(arrays: Arrays, device: torch.device | str = "cpu") -> Any:
    """Return the tensor, or dict of tensors, that :func:`to_arrays` took apart, always in fresh memory.

    Fresh, because where an array begins in a message would change the bits of matrix products.
    """
    tensors = {name: fresh(array, device) for name, array in arrays.items()}
    return tensors[BARE] if list(tensors) == [BARE] else tensors


def fresh(array: np.ndarray[Any, Any], device: torch.device | str = "cpu") -> Tensor:
    """Return the array as a tensor in memory of its own (``torch.tensor``, without its search for what it is given)."""
    tensor = torch.empty(array.shape, dtype=_torch_dtype(array.dtype))
    tensor.numpy()[...] = array
    return tensor.to(device)


@cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype


def named(value: Value) -> dict[str, Tensor]:
    """Return the value's tensors by the names that they have at a cut."""
    return value if isinstance(value, dict) else {BARE: value}


def each(value: Value, change: Callable[[Tensor], Tensor]) -> Value:
    """Return the value with each tensor changed."""
    return {name: change(tensor) for name, tensor in value.items()} if isinstance(value, dict) else change(value)


def settled(tensor: Tensor) -> Tensor:
    """Return the tensor as it would come out of a message: contiguous, aligned, with the plain strides.

    Each of these can change the bits of a matrix product. So values and gradients are settled at every boundary
    between layers, cut or not: what is computed does not depend on the cuts.
    """
    if tensor.data_ptr() % 64 == 0 and tensor.is_contiguous() and 1 not in tensor.shape:
        return tensor
    # A contiguous tensor may have any stride where a dimension is 1.
    expected, plain = 1, tensor.data_ptr() % 64 == 0
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        plain = plain and stride == expected
        expected *= max(size, 1)
    return tensor if plain else tensor.clone(memory_format=torch.contiguous_format)
