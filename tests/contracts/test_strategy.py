"""What every strategy must keep to, and FedAvg's law: one SGD step each, averaged, is one step on the joint batch."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from edgesplit.federated import STRATEGIES, Federation, Group, Reply, Request

NODES = ("pi-1", "pi-2", "pi-3")


@pytest.fixture(scope="module", autouse=True)
def small_collections() -> Iterator[None]:
    """Some strategies collect garbage for every reply; what the test session itself holds need not be walked."""
    gc.freeze()
    yield
    gc.unfreeze()


def build(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).to(dtype)


def batch(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 5, generator=draw).double(), torch.randn(rows, 2, generator=draw).double()


def weights(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy().copy() for name, value in model.named_parameters()}


def sgd_step(x: torch.Tensor, y: torch.Tensor, decay: float) -> dict[str, np.ndarray]:
    """Weights after one step from the common start, on the mean loss of a batch."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, weight_decay=decay)
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    return weights(model)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=5).filter(any), st.sampled_from([0.0, 0.1]))
def test_fedavg_after_one_sgd_step_is_one_step_on_the_joint_batch(rows: list[int], decay: float) -> None:
    nodes = tuple(f"pi-{i}" for i in range(len(rows)))
    batches = {node: batch(count, seed) for seed, (node, count) in enumerate(zip(nodes, rows, strict=True))}

    def train(requests: list[Request]) -> list[Reply]:
        return [
            Reply(r.node, r.group, sgd_step(x, y, decay) if len(x) else r.arrays, len(x))
            for r in requests
            for x, y in [batches[r.node]]
        ]

    averaged = Federation("fedavg").run_round(1, {"all": Group(nodes, weights(build()))}, train)["all"].arrays
    joint = sgd_step(torch.cat([x for x, _ in batches.values()]), torch.cat([y for _, y in batches.values()]), decay)
    for name, value in joint.items():
        np.testing.assert_allclose(averaged[name], value, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("name", STRATEGIES)
def test_replicas_that_agree_with_the_start_change_nothing(name: str, dtype: torch.dtype) -> None:
    federation, arrays = Federation(name), weights(build(dtype))
    for number in (1, 2):
        replied = federation.run_round(
            number, {"g": Group(NODES, arrays)}, lambda rs: [Reply(r.node, r.group, r.arrays, 3 + len(rs)) for r in rs]
        )
        found = replied["g"].arrays
        assert list(found) == list(arrays)
        for key, value in arrays.items():
            assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape)
            # in double precision a/3 + a/3 + a/3 may be off by an ulp, which Adagrad's 1 / tau makes a hundred of
            np.testing.assert_allclose(found[key], value, rtol=1e-13 if dtype is torch.float64 else 0, atol=0)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_result_does_not_depend_on_who_replies_first(name: str) -> None:
    def train(turn: int) -> dict[str, np.ndarray]:
        def reply(requests: list[Request]) -> list[Reply]:
            made = [
                Reply(r.node, r.group, {k: a + 0.1 * len(r.node) * i for k, a in r.arrays.items()}, 1 + i)
                for i, r in enumerate(requests)
            ]
            return made[turn:] + made[:turn]

        return dict(Federation(name).run_round(1, {"g": Group(NODES, weights(build()))}, reply)["g"].arrays)

    first = train(0)
    for turn in (1, 2):
        for key, value in train(turn).items():
            np.testing.assert_array_equal(value, first[key])
