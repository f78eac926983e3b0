"""A shard's batches: the same for the same (seed, device, epoch, index), however they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgesplit.data import GIVEN_EPOCH, KEPT, TEST_EPOCH, Batch, Feed, epoch_order, rows
from edgesplit.errors import TaskError


def as_arrays(value: Any) -> dict[str, np.ndarray[Any, Any]]:
    return dict(value) if isinstance(value, Mapping) else {"x": np.asarray(value)}


def stack(samples: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    return np.array([x for x, _ in samples]), np.array([y for _, y in samples])


class Counting:
    """Sample ``i`` is ``(i, 100 + i)``."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return index, 100 + index


class Batches:
    """Batches of its own, a fresh pass each time; counts how many it made."""

    def __init__(self, *sizes: int) -> None:
        self.sizes, self.made = sizes, 0

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for index, size in enumerate(self.sizes):
            self.made += 1
            yield np.full(size, index), np.full((size, 2), index)


def feed(source: Any, batch_size: int = 4, **options: Any) -> Feed:
    given = {"device": "pi", "batch_size": batch_size, "seed": 7, "collate": stack, "to_arrays": as_arrays}
    return Feed(source, **{**given, **options})


def values(batch: Batch) -> list[int]:
    assert (batch[1]["x"] == batch[0]["x"] + 100).all()
    return [int(v) for v in batch[0]["x"]]


# --- the order ------------------------------------------------------------------------------------------------------


def test_the_order_is_pinned() -> None:
    """A resumed run must repeat it, with any later version too."""
    assert epoch_order(0, "pi-1", 0, 8).tolist() == [0, 3, 4, 7, 2, 1, 5, 6]
    assert epoch_order(3, "d", 2, 5).tolist() == [0, 4, 3, 2, 1]


@given(st.integers(0, 2**40), st.text(max_size=5), st.integers(0, 9), st.integers(0, 50))
def test_the_order_is_a_permutation(seed: int, device: str, epoch: int, count: int) -> None:
    order = epoch_order(seed, device, epoch, count)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(count))
    assert (order == epoch_order(seed, device, epoch, count)).all()


def test_seed_device_and_epoch_each_change_the_order() -> None:
    orders = {tuple(epoch_order(s, d, e, 50)) for s in (0, 1) for d in ("a", "b") for e in (0, 1)}
    assert len(orders) == 8


# --- data sets ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 30), st.integers(1, 9), st.integers(0, 3))
def test_an_epoch_has_every_sample_once(count: int, batch_size: int, epoch: int) -> None:
    made = feed(Counting(count), batch_size)
    sizes = made.sizes()
    batches = [values(made.batch(epoch, i)) for i in range(len(sizes))]
    assert [len(batch) for batch in batches] == sizes
    assert [value for batch in batches for value in batch] == epoch_order(7, "pi", epoch, count).tolist()


@given(st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 3)), max_size=12))
def test_a_jump_to_any_batch_gives_what_a_straight_run_gives(jumps: list[tuple[int, int]]) -> None:
    straight = {(e, i): values(feed(Counting(14)).batch(e, i)) for e in range(-1, 3) for i in range(4)}
    one = feed(Counting(14))
    assert [values(one.batch(*jump)) for jump in jumps] == [straight[jump] for jump in jumps]


def test_the_test_set_is_in_its_own_order() -> None:
    made = feed(Counting(6))
    assert [values(made.batch(TEST_EPOCH, i)) for i in range(2)] == [[0, 1, 2, 3], [4, 5]]


def test_an_empty_data_set_has_no_batches() -> None:
    assert feed(Counting(0)).sizes() == []
    assert feed([]).sizes() == []
    assert feed(Batches()).sizes() == []


def test_set_epoch_is_told_before_the_samples_are_taken() -> None:
    class Shifting(Counting):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __getitem__(self, index: int) -> tuple[int, int]:
            return index + 1000 * self.epoch, 0

    made = feed(Shifting(8))
    for epoch, index in [(0, 1), (3, 0), (1, 1), (0, 0), (2, 1), (0, 1)]:
        got = made.batch(epoch, index)[0]["x"]
        assert (got // 1000 == epoch).all()


def test_batches_are_kept_for_a_replay_but_not_for_ever() -> None:
    made = feed(Counting(400))
    first = made.batch(0, 0)
    assert made.batch(0, 0) is first
    for index in range(100):
        made.batch(0, index)
    assert len(made._kept) == KEPT


# --- iterables ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [lambda: Batches(3, 2, 4), lambda: list(Batches(3, 2, 4)), lambda: tuple(Batches(3, 2, 4))]
)
def test_an_iterable_brings_its_own_batches(make: Any) -> None:
    made = feed(make())
    assert made.sizes() == [3, 2, 4]
    for epoch in range(3):
        for index, size in enumerate([3, 2, 4]):
            x, target = made.batch(epoch, index)
            assert (x["x"] == index).all()
            assert x["x"].shape == (size,)
            assert target["x"].shape == (size, 2)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=12))
def test_a_jump_in_an_iterable(jumps: list[tuple[int, int]]) -> None:
    made = feed(Batches(3, 2, 4))
    for epoch, index in jumps:
        assert (made.batch(epoch, index)[0]["x"] == index).all()


def test_a_straight_run_makes_each_batch_once() -> None:
    source = Batches(*[1] * 10)
    made = feed(source)
    for index in range(10):
        made.batch(0, index)
    assert source.made == 10


def test_an_iterable_that_ends_too_early() -> None:
    made = feed(Batches(3, 2))
    with pytest.raises(TaskError, match=r"data of 'pi' ended before batch 2 of epoch 1: .*same batches on every pass"):
        made.batch(1, 2)


def test_a_generator_is_no_data() -> None:
    """It can be gone through once, and learning its sizes was that."""
    made = feed(pair for pair in Batches(3, 2))
    assert made.sizes() == [3, 2]
    with pytest.raises(TaskError, match=r"ended before batch 0 of epoch 0"):
        made.batch(0, 0)


# --- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [7, None, object(), lambda: 1])
def test_what_is_no_data(source: Any) -> None:
    with pytest.raises(TaskError, match=r"the data of 'pi' is a \w+: give a Dataset"):
        feed(source)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (np.zeros(3), "a batch of 'pi' is a ndarray, not a pair"),
        ((np.zeros(3),), "a batch of 'pi' is a tuple, not a pair"),
        ((np.zeros(3), np.zeros(3), np.zeros(3)), "a batch of 'pi' is a tuple, not a pair"),
        ({"x": 1, "y": 2}, "a batch of 'pi' is a dict, not a pair"),
        (
            (np.zeros(3), np.zeros(2)),
            r"first dimension .* is not the sample everywhere \(x\['x'\]: 3, target\['x'\]: 2\)",
        ),
        (({"a": np.zeros(3), "b": np.zeros((4, 3))}, np.zeros(3)), r"x\['a'\]: 3, x\['b'\]: 4"),
        ((np.zeros(()), np.zeros(3)), r"x\['x'\]: -1"),
        ((1.5, 2.5), r"x\['x'\]: -1"),
        (({}, {}), "is not the sample everywhere"),
    ],
)
def test_batches_that_are_none(batch: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        feed([batch]).sizes()


def test_a_list_of_samples_is_no_list_of_batches() -> None:
    with pytest.raises(TaskError, match="is not the sample everywhere"):
        feed([(0.5, 1), (0.25, 0)]).sizes()


def test_a_collate_that_loses_samples() -> None:
    made = feed(Counting(8), collate=lambda samples: stack(samples[1:]))
    with pytest.raises(TaskError, match=r"collate made 3 samples of 4 on 'pi'"):
        made.batch(0, 0)


# --- by hand --------------------------------------------------------------------------------------------------------


def test_batches_given_by_hand() -> None:
    made = feed(Counting(8))
    for number in range(1, 200):
        made.insert(number, ({"x": np.full(2, number)}, {"x": np.zeros(2)}))
        assert (made.batch(GIVEN_EPOCH, number)[0]["x"] == number).all()
        made.batch(0, number % 2)
    assert len(made._kept) <= KEPT
    with pytest.raises(TaskError, match="batch 3 that was to be given to 'pi' by hand is not there"):
        made.batch(GIVEN_EPOCH, 3)
    with pytest.raises(TaskError, match="is not the sample everywhere"):
        made.insert(7, ({"x": np.zeros(2)}, {"x": np.zeros(3)}))


def test_rows() -> None:
    arrays = {"a": np.arange(5), "b": np.arange(10).reshape(5, 2)}
    part = rows(arrays, 1, 3)
    assert part["a"].tolist() == [1, 2]
    assert part["b"].tolist() == [[2, 3], [4, 5]]
