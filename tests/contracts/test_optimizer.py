"""The optimizer's contract: ``update(params, grads, state, lr)`` equals torch.optim in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgesplit.optimizers import OptimizerSpec, update
from edgesplit.segments.torch_optim import spec_of

SHAPES = {"a.weight": (3, 2), "a.bias": (2,), "scale": (), "unused": (2,)}

sgd = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.1, 0.01]),
        "momentum": st.sampled_from([0.0, 0.9]),
        "dampening": st.sampled_from([0.0, 0.3]),
        "weight_decay": st.sampled_from([0.0, 0.05]),
    }
)
nesterov = st.fixed_dictionaries(
    {"lr": st.just(0.1), "momentum": st.just(0.8), "nesterov": st.just(True), "weight_decay": st.sampled_from([0, 0.1])}
)
adam = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.1, 0.001]),
        "betas": st.sampled_from([(0.9, 0.999), (0.5, 0.7)]),
        "eps": st.sampled_from([1e-8, 1e-3]),
        "weight_decay": st.sampled_from([0.0, 0.05]),
    }
)
kinds = st.sampled_from(
    [(torch.optim.SGD, sgd), (torch.optim.SGD, nesterov), (torch.optim.Adam, adam), (torch.optim.AdamW, adam)]
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[type[torch.optim.Optimizer], list[dict[str, Any]], int, list[list[str]]]:
    kind, options = draw(kinds)
    seen = st.lists(st.sampled_from(["a.weight", "a.bias", "scale"]), unique=True)
    return kind, [draw(options), draw(options)], draw(st.integers(0, 2**16)), [draw(seen) for _ in range(20)]


def run_torch(
    kind: Any, groups: list[dict[str, Any]], start: dict[str, np.ndarray], grads: list[dict[str, np.ndarray]]
) -> tuple[OptimizerSpec, dict[str, np.ndarray]]:
    """Twenty steps of torch itself; the weight is one group, everything else the other."""
    params = {name: torch.nn.Parameter(torch.from_numpy(value.copy())) for name, value in start.items()}
    first = [params["a.weight"]]
    rest = [param for name, param in params.items() if name != "a.weight"]
    optimizer = kind([{"params": first, **groups[0]}, {"params": rest, **groups[1]}])
    spec = spec_of(optimizer, list(params.items()))
    rates = [group["lr"] for group in optimizer.param_groups]
    for step, given_grads in enumerate(grads):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor(step)
        for name, param in params.items():
            param.grad = torch.from_numpy(given_grads[name].copy()) if name in given_grads else None
        optimizer.step()
    return spec, {name: param.detach().numpy() for name, param in params.items()}


def factor(step: int) -> float:
    return 1.0 / (1 + step % 4)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_equals_torch_over_twenty_steps(case: Any) -> None:
    kind, groups, seed, seen = case
    random = np.random.default_rng(seed)
    start = {name: np.asarray(random.normal(size=shape)) for name, shape in SHAPES.items()}
    grads = [{name: np.asarray(random.normal(size=SHAPES[name])) for name in names} for names in seen]
    spec, expected = run_torch(kind, groups, start, grads)

    arrays, state = dict(start), {}
    tensors: dict[str, Any] = {name: torch.from_numpy(value).requires_grad_() for name, value in start.items()}
    tensor_state: Any = {}
    for step, now in enumerate(grads):
        arrays, state = update(spec, arrays, now, state, factor(step))
        torch_grads = {name: torch.from_numpy(grad) for name, grad in now.items()}
        tensors, tensor_state = update(spec, tensors, torch_grads, tensor_state, factor(step))

    for name, want in expected.items():
        np.testing.assert_allclose(arrays[name], want, rtol=1e-13, atol=1e-13)
        np.testing.assert_allclose(tensors[name].detach().numpy(), arrays[name], rtol=1e-14, atol=1e-15)
        assert tensors[name].requires_grad
        assert tensors[name].is_leaf
    assert state.keys() == tensor_state.keys()
    assert "unused" not in state


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_keeps_dtype_and_shape_and_writes_nothing_in_place(kind: Any, dtype: str) -> None:
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {"eps": 1e-3}
    params = {"w": np.ones((2, 3), dtype), "s": np.ones((), dtype)}
    named = [(name, torch.nn.Parameter(torch.from_numpy(value))) for name, value in params.items()]
    spec = spec_of(kind([param for _, param in named], lr=0.1, weight_decay=0.1, **options), named)
    grads = {name: np.full_like(value, 0.5) for name, value in params.items()}
    frozen = [*params.values(), *grads.values()]
    state: Any = {}
    for _ in range(3):
        for array in frozen:
            array.setflags(write=False)
        params, state = update(spec, params, grads, state, np.float64(0.5))
        frozen = [
            *params.values(),
            *[v for slots in state.values() for v in slots.values() if isinstance(v, np.ndarray)],
        ]
    for name, value in params.items():
        assert isinstance(value, np.ndarray)
        assert value.dtype == dtype
        assert value.shape == grads[name].shape
        assert all(v.dtype == dtype and v.shape == value.shape for k, v in state[name].items() if k != "count")
        assert state[name]["count"] == 3


def test_count_starts_again_after_a_reset() -> None:
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    spec = spec_of(torch.optim.Adam([param], lr=0.1), [("w", param)])
    grads = {"w": np.array([1.0, 2.0])}
    once, state = update(spec, {"w": np.ones(2)}, grads, {}, 1.0)
    twice, _ = update(spec, once, grads, {}, 1.0)
    assert state["w"]["count"] == 1
    np.testing.assert_allclose(once["w"] - twice["w"], 1 - once["w"], rtol=1e-12)
