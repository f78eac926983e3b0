"""Fleets that come up with little or uneven data, and with routes of different depth; against one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from edgesplit.errors import ExperimentError, RunError
from edgesplit.plan import Plan
from edgesplit.training import sizes_of
from edgesplit.transport.base import Message
from tests.cases import (
    FACTORIES,
    RULES,
    Loader,
    apart,
    chain,
    equal,
    names_of,
    one_process,
    points_task,
    route,
    run,
    seeded,
)
from tests.oracle import train_single

SGD = {"name": "sgd", "lr": 0.1}


@pytest.mark.parametrize("sizes", [None, {}, {"train": 3}, {"train": [3, "4"]}, {"train": [-1]}, {"train": [1.5]}])
def test_sizes_that_a_node_cannot_mean(sizes: Any) -> None:
    with pytest.raises(RunError, match="'pi' did not say how many samples it has"):
        sizes_of(Message(kind="assigned", sender="pi", meta={"sizes": sizes}), "train")


def test_no_samples_anywhere() -> None:
    task = points_task([0])
    with pytest.raises(ExperimentError, match="no device has any samples"):
        run(chain(task, [2]), task, optimizer=SGD)


def test_empty_batches_of_an_iterable_are_passed_over() -> None:
    x, y = torch.ones(6, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0, 1])
    batches = [(x[:0], y[:0]), (x[:4], y[:4]), (x[:0], y[:0]), (x[4:], y[4:])]
    task = points_task([1], train=lambda shard: batches)
    plan = chain(task, [2])
    ran = run(plan, task, micros=3, epochs_per_round=2, **RULES["momentum"])
    assert [step.samples for step in ran.steps] == [0, 4, 0, 2] * 2
    steps = [(i, {"n0": batches[i % 4]}) for i in range(8) if i % 2]
    want = train_single(task, steps, FACTORIES["momentum"], model=seeded(task))
    assert apart(ran.weights, want.weights[-1]) < 1e-12


def test_rounds_whose_devices_have_no_samples() -> None:
    task = points_task([16, 0, 0])
    plan = Plan(names_of(task), tuple(route([device, "c"], [2], 6) for device in ("d1", "d2", "d3")))
    ran = run(plan, task, batch_size=8, rounds=6, data={"per_round": 1}, optimizer=SGD)
    assert {done.steps for done in ran.rounds} == {0, 2}
    assert all(np.isfinite(value).all() for value in ran.weights.values())


@pytest.mark.parametrize("method", ["1f1b", "gpipe"])
@pytest.mark.parametrize("split", [False, True])
def test_routes_of_different_depth_with_a_barrier(method: str, split: bool) -> None:
    """``c`` is stage 1 for one device and stage 2 for the other: the one's layers are done before the step is."""
    task = points_task([20, 20])
    plan = Plan(names_of(task), (route(["d1", "c"], [2], 6), route(["d2", "e", "c"], [2, 4], 6)))
    rule = "clipped AdamW"
    options = {"method": method, "micros": 3, "batch_size": 8, "every": "step", "split_backward": split}
    ran = run(plan, task, epochs_per_round=2, **options, **RULES[rule])
    loader = Loader(task, ["d1", "d2"], 8)
    equal(ran, one_process(task, rule, [*loader.epoch(), *loader.epoch()]))
