"""Any torch optimizer behind ``update(params, grads, state, lr)``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from edgesplit.errors import TaskError
from edgesplit.optimizers import OptimizerSpec
from edgesplit.segments.torch_optim import TorchUpdate
from edgesplit.weights import LayerStore

START = {"a.w": np.ones((2, 3)), "a.b": np.zeros(2), "c.w": np.full((), 0.5)}

FACTORIES = {
    "rmsprop": lambda named: torch.optim.RMSprop([p for _, p in named], lr=0.1, momentum=0.9, centered=True),
    "adagrad": lambda named: torch.optim.Adagrad([p for _, p in named], lr=0.1, lr_decay=0.1),
    "groups": lambda named: torch.optim.Adamax(
        [
            {"params": [p for n, p in named if n.endswith(".b")], "weight_decay": 0.0},
            {"params": [p for n, p in named if not n.endswith(".b")], "weight_decay": 0.1},
        ],
        lr=0.05,
    ),
}


def gradients(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    grads = {name: np.asarray(random.normal(size=value.shape)) for name, value in START.items()}
    if step % 3 == 1:
        del grads["a.b"]
    return grads


def plain_torch(factory: Any, steps: int) -> dict[str, np.ndarray]:
    params = {name: nn.Parameter(torch.from_numpy(value.copy())) for name, value in START.items()}
    optimizer = factory(list(params.items()))
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate / (step + 1)
        grads = gradients(step)
        for name, param in params.items():
            param.grad = torch.from_numpy(grads[name]) if name in grads else None
        optimizer.step()
    return {name: param.detach().numpy() for name, param in params.items()}


def native(array: np.ndarray, requires_grad: bool) -> torch.Tensor:
    return torch.from_numpy(np.array(array)).requires_grad_(requires_grad)


def store(factory: Any) -> LayerStore:
    layers = {"a": ["a.w", "a.b"], "c": ["c.w"]}
    held = LayerStore(layers, {}, OptimizerSpec((), {}), to_native=native, update=TorchUpdate(factory), slots=None)
    held.load(START)
    return held


def run(held: LayerStore, step: int, scale: float = 1.0) -> None:
    held.begin(step, {"a": [step], "c": [step]})
    grads = {name: native(grad * scale, False) for name, grad in gradients(step).items()}
    held.accumulate(["a", "c"], step, grads, 1.0)
    held.update(step, ["c"], lr=1 / (step + 1))
    held.update(step, ["a"], lr=1 / (step + 1))


@pytest.mark.parametrize("name", FACTORIES)
def test_equals_plain_torch_through_rollbacks_and_a_move_to_another_node(name: str) -> None:
    factory = FACTORIES[name]
    held = store(factory)
    for step in range(6):
        run(held, step, scale=7.0)
        held.rollback(step)
        run(held, step)
        held.confirm(step)
        if step == 2:
            exported = held.export()
            assert all(isinstance(array, np.ndarray) for array in exported.optimizer.values())
            held = store(factory)
            held.load(*exported)
    want = plain_torch(factory, 6)
    for key, value in held.export().params.items():
        np.testing.assert_allclose(value, want[key], rtol=1e-13, atol=1e-14)
        assert held.params[key].requires_grad


def test_nothing_is_written_in_place() -> None:
    update = TorchUpdate(FACTORIES["rmsprop"])
    params = {"w": torch.ones(3, requires_grad=True)}
    grads = {"w": torch.full((3,), 2.0)}
    once, state = update(params, grads, {}, 1.0)
    kept = once["w"].clone(), {slot: value.clone() for slot, value in state["w"].items()}
    update(once, grads, state, 0.5)
    assert torch.equal(params["w"], torch.ones(3))
    assert torch.equal(grads["w"], torch.full((3,), 2.0))
    assert torch.equal(once["w"], kept[0])
    assert all(torch.equal(value, kept[1][slot]) for slot, value in state["w"].items())


def test_a_parameter_in_no_group_stays() -> None:
    update = TorchUpdate(lambda named: torch.optim.Adagrad([p for n, p in named if n == "w"], lr=0.1))
    params = {"w": torch.ones(1), "v": torch.ones(1)}
    new, state = update(params, {"w": torch.ones(1), "v": torch.ones(1)}, {}, 1.0)
    assert new["v"] is params["v"]
    assert state.keys() == {"w"}
    assert update(params, {"v": torch.ones(1)}, state, 1.0) == (params, state)


class Counting(torch.optim.SGD):
    """Keeps a number where only tensors can be carried."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["steps"] = 1


class Decaying(torch.optim.SGD):
    """Keeps its own schedule."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["lr"] = 0.0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (torch.optim.LBFGS, "LBFGS needs a closure"),
        (Counting, "Counting keeps 'steps' as a int"),
        (Decaying, "Decaying changes its group's lr as it steps"),
    ],
)
def test_refused(kind: Any, message: str) -> None:
    update = TorchUpdate(lambda named: kind([p for _, p in named]))
    with pytest.raises(TaskError, match=message):
        update({"w": torch.ones(1)}, {"w": torch.ones(1)}, {}, 1.0)
