"""A Task on torch, made ready for a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from edgesplit.errors import TaskError, Within
from edgesplit.kit import Kit
from edgesplit.segments.base import Arrays
from edgesplit.segments.torch import TorchRunner, from_arrays, to_arrays
from edgesplit.segments.torch_optim import TorchUpdate
from edgesplit.splitting import Chain, build_chain, fingerprint, layer_buffers, layer_params
from edgesplit.task import Shard, Task

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def typed_chain(task: Task, dtype: str) -> Chain:
    """Build the task's chain with its floating-point weights in ``dtype``."""
    chain = build_chain(task)
    chain.model.to(DTYPES[dtype])
    return chain


def torch_kit(task: Task, chain: Chain, *, dtype: str, source: str = "") -> Kit:
    """Make a Task ready.

    Args:
        task: the user's.
        chain: its model, see :func:`typed_chain`.
        dtype: of weights and of floating-point data.
        source: text of the task's file, for the fingerprint.
    """

    def cast(value: Any) -> dict[str, np.ndarray[Any, Any]]:
        try:
            arrays = to_arrays(value)
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise TaskError(
                f"the data has a {type(value).__name__} where a tensor or a flat dict of tensors is wanted: {error}"
            ) from None
        return {name: a.astype(dtype) if a.dtype.kind == "f" else a for name, a in arrays.items()}

    def weigh(target: Arrays) -> float:
        return task.weigh(from_arrays(target))

    def data(shard: Shard, test: bool) -> Any:
        make = task.test if test else task.train
        with Within(f"the data of {shard.name!r}"):
            source = make(shard) if make is not None else None
        if isinstance(source, IterableDataset):
            raise TaskError(
                f"the data of {shard.name!r} is an IterableDataset, which gives samples: wrap it in a DataLoader"
            )
        return source

    frozen = (name for name, param in chain.model.named_parameters() if not param.requires_grad)
    return Kit(
        layers=tuple(layer.name for layer in chain.layers),
        params=layer_params(chain),
        buffers=layer_buffers(chain),
        frozen=frozenset(frozen),
        fingerprint=fingerprint(chain, source),
        runner=lambda start, stop: TorchRunner(chain, start, stop, task),
        native=_native,
        numpy=lambda tensor: np.asarray(tensor.detach().cpu()),
        data=data,
        collate=task.collate or _collate,
        to_arrays=cast,
        weigh=weigh,
        update=_own_update(task),
    )


def _own_update(task: Task) -> Callable[[Sequence[str]], Any] | None:
    make = task.optimizer
    return None if make is None else lambda names: TorchUpdate(make)


def _collate(samples: Sequence[Any]) -> Any:
    return default_collate(list(samples))


def _native(array: np.ndarray[Any, Any], trainable: bool) -> Tensor:
    """Copy into fresh torch memory: alignment changes the bits of matrix products."""
    tensor = torch.tensor(array)
    return tensor.requires_grad_(trainable and tensor.is_floating_point())
