from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edgesplit.errors import PlanError, TaskError
from edgesplit.profile import Profile
from edgesplit.profiling import profile_chain
from edgesplit.splitting import build_chain
from edgesplit.task import Task


def profile(model: nn.Module, x: Any, target: Any = None, **options: Any) -> Profile:
    task = Task(model=lambda: model, loss=lambda out, target: out.sum(), train=lambda shard: [])
    return profile_chain(build_chain(task), x, torch.zeros(len(x)) if target is None else target, **options)


def test_operations_and_bytes_are_those_of_the_shapes() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    got = profile(model, torch.randn(8, 10), torch.zeros(8, dtype=torch.int64))
    assert [layer.name for layer in got.layers] == ["0", "1", "2"]
    assert [layer.flops for layer in got.layers] == [2 * 10 * 20, 0, 2 * 20 * 5]
    assert [layer.param_bytes for layer in got.layers] == [4 * 220, 0, 4 * 105]
    assert [layer.trainable_bytes for layer in got.layers] == [4 * 220, 0, 4 * 105]
    assert [dict(layer.cut_bytes) for layer in got.layers] == [{"x": 80}, {"x": 80}, {"x": 20}]
    assert [layer.grad_bytes for layer in got.layers] == [80, 80, 20]
    # Kept for the backward: a Linear its input (the parameters are held anyway), a ReLU its output.
    assert [layer.stash_bytes for layer in got.layers] == [40, 80, 80]
    assert (got.input_bytes, got.target_bytes, got.dtype, got.batch) == (40, 8, "float32", 8)
    assert got.gflops > 0


def test_only_gradients_that_are_needed_are_timed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU())
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    got = profile(model, torch.randn(3, 4))
    assert all(layer.forward_s > 0 for layer in got.layers)
    assert [layer.input_grad_s > 0 for layer in got.layers] == [False, False, True, True]
    assert [layer.weight_grad_s > 0 for layer in got.layers] == [False, True, False, False]
    assert [layer.grad_bytes for layer in got.layers] == [0, 16, 16, 16]
    assert [layer.trainable_bytes for layer in got.layers] == [0, 80, 0, 0]
    assert got.layers[0].stash_bytes == 0


class Embed(nn.Module):
    """Integers in, a flat dict out: hidden states that need a gradient, a mask that cannot have one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"hidden": self.table(tokens), "mask": tokens != 0}


class Pool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)

    def forward(self, arrays: dict[str, Tensor]) -> Tensor:
        return self.head((arrays["hidden"] * arrays["mask"].unsqueeze(-1)).mean(1))


def test_integer_inputs_and_dicts_at_the_cut() -> None:
    got = profile(nn.Sequential(Embed(), Pool()).double(), torch.randint(7, (4, 5)))
    embed, pool = got.layers
    assert dict(embed.cut_bytes) == {"hidden": 5 * 6 * 8, "mask": 5}
    assert embed.grad_bytes == 5 * 6 * 8
    assert embed.input_grad_s == 0
    assert embed.weight_grad_s > 0
    assert pool.input_grad_s > 0
    assert got.dtype == "float64"


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(inplace=True))
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(6, 4)
    random, threads, batch = torch.get_rng_state(), torch.get_num_threads(), x.clone()
    profile(model, x, repeats=1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model] == [True, False, True, True]
    assert all(param.grad is None for param in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_num_threads() == threads
    assert torch.equal(x, batch)


def test_json_round_trip_and_micro_batches() -> None:
    got = profile(nn.Sequential(nn.Linear(4, 2), nn.Tanh()), torch.randn(3, 4), repeats=1)
    assert Profile.from_json(json.loads(json.dumps(got.to_json()))) == got
    four = got.for_samples(4)
    assert four.samples == 4
    assert four.layers[0].stash_bytes == 4 * got.layers[0].stash_bytes
    assert four.layers[0].forward_s == 4 * got.layers[0].forward_s
    assert four.layers[0].param_bytes == got.layers[0].param_bytes
    assert four.input_bytes == 64
    assert four.for_samples(1).layers[0].cut_bytes == got.layers[0].cut_bytes


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda value: [], "must have exactly"),
        (lambda value: value | {"more": 1}, "must have exactly"),
        (lambda value: value | {"layers": []}, "at least one"),
        (lambda value: value | {"layers": value["layers"] * 2}, "different names"),
        (lambda value: value | {"gflops": float("nan")}, "gflops nan"),
        (lambda value: value | {"batch": 0}, "batch 0"),
        (lambda value: value | {"dtype": 3}, "dtype 3"),
        (lambda value: value | {"layers": [value["layers"][0] | {"forward_s": -1.0}]}, "forward_s -1.0"),
        (lambda value: value | {"layers": [value["layers"][0] | {"param_bytes": 1.5}]}, "param_bytes 1.5"),
        (lambda value: value | {"layers": [value["layers"][0] | {"cut_bytes": {"x": "1"}}]}, "cut_bytes"),
    ],
)
def test_json_is_checked(spoil: Any, message: str) -> None:
    value = profile(nn.Sequential(nn.Tanh()), torch.randn(2, 2), repeats=1).to_json()
    with pytest.raises(PlanError, match=message):
        Profile.from_json(spoil(value))


def test_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    with pytest.raises(TaskError, match="at least one sample"):
        profile(model, torch.zeros(0, 4))
    with pytest.raises(TaskError, match="repeats 0"):
        profile(model, torch.zeros(1, 4), repeats=0)
    with pytest.raises(PlanError, match="micro-batch of 0 samples"):
        profile(model, torch.zeros(1, 4), repeats=1).for_samples(0)
