"""A shard's batches, as a pure function of (seed, device, epoch, index): repeated exactly by a replay or a resume."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from edgesplit.errors import TaskError, Within
from edgesplit.segments.base import Arrays

TEST_EPOCH = -1
"""The epoch that names the test set: in its own order, once."""

GIVEN_EPOCH = -2
"""The epoch that names batches given by hand."""

Batch = tuple[Arrays, Arrays]
"""``(x, target)`` as named arrays; the first dimension of each is the sample."""

KEPT = 4
"""Batches kept: those of the steps that can be in flight, and of one that is replayed."""


def epoch_order(seed: int, device: str, epoch: int, count: int) -> np.ndarray[Any, Any]:
    """Return the order in which an epoch visits ``count`` samples: int64, shape (count,).

    Philox (Salmon et al., 2011) keyed by a hash, so that it depends on nothing else.
    """
    digest = hashlib.blake2b(f"order/{seed}/{device}/{epoch}".encode(), digest_size=16).digest()
    key = np.frombuffer(digest, dtype="<u8")
    return np.random.Generator(np.random.Philox(key=key)).permutation(count)


class Feed:
    """Batches of one shard.

    Args:
        source: a Dataset, or an iterable of ``(x, target)`` batches (not a list of samples).
        device: the shard's name, for errors and for the order.
        batch_size: samples in a batch of a Dataset; an iterable brings its own.
        seed: the run's.
        collate: samples -> ``(x, target)``.
        to_arrays: a tensor, array or flat dict of them -> named arrays.
    """

    def __init__(
        self,
        source: Any,
        *,
        device: str,
        batch_size: int,
        seed: int,
        collate: Callable[[Sequence[Any]], Any],
        to_arrays: Callable[[Any], Arrays],
    ) -> None:
        self.device, self.batch_size, self.seed = device, batch_size, seed
        self._source, self._collate, self._to_arrays = source, collate, to_arrays
        self._within = Within(f"the data of {device!r}")
        self._indexed = hasattr(source, "__getitem__") and hasattr(source, "__len__") and not _is_batches(source)
        if not self._indexed and not hasattr(source, "__iter__"):
            raise TaskError(
                f"the data of {device!r} is a {type(source).__name__}: "
                "give a Dataset (with __len__ and __getitem__) or an iterable of (x, target) batches"
            )
        self._kept: OrderedDict[tuple[int, int], Batch] = OrderedDict()
        self._sizes: list[int] = []
        self._pass: tuple[int, int, Iterator[Any]] | None = None  # epoch, next index, iterator

    def sizes(self) -> list[int]:
        """Return the samples in each batch of an epoch. An iterable is run through once to learn them."""
        with self._within:
            if self._indexed:
                count = len(self._source)
                return [min(self.batch_size, count - at) for at in range(0, count, self.batch_size)]
            self._sizes = [_samples(self._batch_of(batch), self.device) for batch in self._source]
            return self._sizes

    def batch(self, epoch: int, index: int) -> Batch:
        """Return batch ``index`` of ``epoch``; of the test set where ``epoch`` is :data:`TEST_EPOCH`."""
        key = epoch, index
        if key not in self._kept:
            if epoch == GIVEN_EPOCH:
                raise TaskError(f"batch {index} that was to be given to {self.device!r} by hand is not there")
            with self._within:
                batch = self._take_indexed(epoch, index) if self._indexed else self._take_next(epoch, index)
            self._keep(key, batch)
        return self._kept[key]

    def _keep(self, key: tuple[int, int], batch: Batch) -> None:
        self._kept[key] = batch
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    def insert(self, index: int, batch: Batch) -> None:
        """Keep a batch given by hand. Raises TaskError where its arrays do not go together."""
        _samples(batch, self.device)
        self._keep((GIVEN_EPOCH, index), batch)

    def _take_indexed(self, epoch: int, index: int) -> Batch:
        count = len(self._source)
        order = np.arange(count) if epoch == TEST_EPOCH else epoch_order(self.seed, self.device, epoch, count)
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)
        where = order[index * self.batch_size : (index + 1) * self.batch_size]
        batch = self._batch_of(self._collate([self._source[int(i)] for i in where]))
        if _samples(batch, self.device) != len(where):
            raise TaskError(f"collate made {_samples(batch, self.device)} samples of {len(where)} on {self.device!r}")
        return batch

    def _take_next(self, epoch: int, index: int) -> Batch:
        if self._pass is None or self._pass[:2] != (epoch, index):
            self._pass = epoch, index, islice(iter(self._source), index, None)
        try:
            batch = self._batch_of(next(self._pass[2]))
        except StopIteration:
            raise TaskError(
                f"the data of {self.device!r} ended before batch {index} of epoch {epoch}: "
                "an iterable must give the same batches on every pass"
            ) from None
        self._pass = epoch, index + 1, self._pass[2]
        found = _samples(batch, self.device)
        if index < len(self._sizes) and found != self._sizes[index]:
            raise TaskError(
                f"batch {index} of {self.device!r} had {self._sizes[index]} samples, and has {found} in epoch {epoch}: "
                "an iterable must give batches of the same sizes on every pass"
            )
        return batch

    def _batch_of(self, batch: Any) -> Batch:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise TaskError(f"a batch of {self.device!r} is a {type(batch).__name__}, not a pair (x, target)")
        return self._to_arrays(batch[0]), self._to_arrays(batch[1])


def _is_batches(source: Any) -> bool:
    return isinstance(source, list | tuple)


def _samples(batch: Batch, device: str) -> int:
    sizes: dict[str, int] = {}
    for part, arrays in zip(("x", "target"), batch, strict=True):
        sizes |= {f"{part}[{name!r}]": array.shape[0] if array.ndim else -1 for name, array in arrays.items()}
    if len(set(sizes.values())) != 1 or -1 in sizes.values():
        shown = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise TaskError(f"the first dimension of a batch of {device!r} is not the sample everywhere ({shown})")
    return next(iter(sizes.values()))


def rows(arrays: Arrays, start: int, stop: int) -> Arrays:
    """Return samples ``start`` to ``stop`` of each array."""
    return {name: array[start:stop] for name, array in arrays.items()}
