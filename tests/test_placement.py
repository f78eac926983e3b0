"""From a Task and a topology to a plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from edgesplit.assembly import build_model
from edgesplit.errors import ExperimentError, PlanError, TaskError
from edgesplit.options import options
from edgesplit.placement import _state_arrays, feed_of, first_batch, placement, plan, shard_of
from edgesplit.task import Shard, Task
from edgesplit.topology import Node, Topology
from tests.cases import Points, mlp, points_task


def fleet(*devices: str, **config: Any) -> Topology:
    nodes = [Node(name="cloud", tier="cloud", gflops=100.0)]
    nodes += [Node(name=d, tier="device", parent="cloud", gflops=1.0, config=config.get(d, {})) for d in devices]
    return Topology(nodes={node.name: node for node in nodes})


def task(**fields: Any) -> Task:
    return points_task([6, 6, 6], **fields)


def small(**keywords: Any) -> Any:
    return options(**{"optimizer": {"name": "sgd", "lr": 0.1}, "batch_size": 4, "dtype": "float64", **keywords})


def test_shards() -> None:
    topology = fleet("a", "b", a={"path": "a.npz"})
    experiment = small(seed=9, data={"partition": {"name": "dirichlet", "alpha": 0.5}})
    shard = shard_of("a", topology, experiment)
    assert (shard.name, shard.index, shard.count, shard.seed, shard.config) == ("a", 0, 2, 9, {"path": "a.npz"})
    assert shard.data == {"partition": {"name": "dirichlet", "alpha": 0.5}}
    assert shard_of("b", topology, experiment).index == 1


def test_the_first_batch_is_of_the_first_device_that_has_one() -> None:
    def train(shard: Shard) -> Any:
        return {"a": None, "b": Points(0, 1), "c": Points(6, 2)}[shard.name]

    experiment = small()
    model = build_model(task(train=train), experiment)
    topology = fleet("a", "b", "c")
    assert feed_of(model, experiment, shard_of("a", topology, experiment)) is None
    x, target = first_batch(model, topology, experiment)
    wanted = feed_of(model, experiment, shard_of("c", topology, experiment))
    assert wanted is not None
    assert (x["x"] == wanted.batch(0, 0)[0]["x"]).all()
    assert target["x"].shape == (4,)


@pytest.mark.parametrize("data", [None, Points(0, 1), []])
def test_no_data_at_all(data: Any) -> None:
    experiment = small()
    model = build_model(task(train=lambda shard: data), experiment)
    with pytest.raises(TaskError, match="no device has any samples"):
        first_batch(model, fleet("a", "b"), experiment)


def test_a_first_batch_without_samples_is_passed_over() -> None:
    full = (np.ones((3, 6)), np.zeros(3, np.int64))
    experiment = small()
    model = build_model(task(train=lambda shard: [tuple(part[:0] for part in full), full]), experiment)
    x, _ = first_batch(model, fleet("a"), experiment)
    assert len(x["x"]) == 3


def test_a_plan_carries_topology_and_profile() -> None:
    experiment = small(plan={"planner": "manual", "cuts": [2]})
    topology = fleet("a", "b")
    made = placement(build_model(task(), experiment), topology, experiment)
    assert [tuple(stage) for stage in made.route("b").stages] == [("b", 0, 2), ("cloud", 2, 6)]
    assert Topology.from_dict(dict(made.topology or {})).nodes.keys() == topology.nodes.keys()
    assert made.profile is not None
    assert [layer["name"] for layer in made.profile["layers"]] == ["a", "b", "drop", "c", "d", "e"]


def test_what_is_given_goes_before_the_experiment() -> None:
    experiment = small(plan={"planner": "even"})
    model = build_model(task(), experiment)
    made = placement(model, fleet("a"), experiment, cuts=["c"])
    assert [stage.start for stage in made.route("a").stages] == [0, 3]
    assert [s.node for s in placement(model, fleet("a"), experiment, tiers=["device"]).route("a").stages] == ["a"]
    with pytest.raises(PlanError, match="cut"):
        placement(model, fleet("a"), experiment, cuts=[9])


def test_a_model_that_is_no_chain_is_refused() -> None:
    class Odd(type(mlp())):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return super().forward(x) * 2

    def odd() -> Any:
        model = mlp()
        model.__class__ = Odd
        return model

    with pytest.raises(TaskError):
        plan(task(model=odd), fleet("a"), dtype="float64", batch_size=4)


def test_plan_of_a_task_of_names_and_of_nothing() -> None:
    made = plan(task(), fleet("a"), cuts=[3], batch_size=4, dtype="float64")
    assert [stage.start for stage in made.route("a").stages] == [0, 3]
    by_names = plan(list(made.layers), fleet("a"), planner="manual", cuts=[3])
    assert by_names.routes == made.routes
    with pytest.raises(ExperimentError, match="bach_size"):
        plan(task(), fleet("a"), bach_size=4)
    with pytest.raises(ExperimentError, match="evn"):
        plan(task(), fleet("a"), planner="evn", batch_size=4, dtype="float64")


@pytest.mark.parametrize(
    ("optimizer", "arrays"),
    [
        ({"name": "sgd", "lr": 0.1}, 0),
        ({"name": "sgd", "lr": 0.1, "momentum": 0.9}, 1),
        ({"name": "adam", "lr": 0.1}, 2),
        ({"name": "adamw", "lr": 0.1, "no_decay": "bias"}, 2),
    ],
)
def test_memory_of_optimizer_state(optimizer: dict[str, Any], arrays: int) -> None:
    assert _state_arrays(build_model(task(), small(optimizer=optimizer))) == arrays
    import torch

    own = dataclasses.replace(task(), optimizer=lambda named: torch.optim.RMSprop([p for _, p in named], lr=0.1))
    assert _state_arrays(build_model(own, small(optimizer=None))) == 2, "unknown: the most that is usual"
