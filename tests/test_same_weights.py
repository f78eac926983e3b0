"""A runner that may rely on getting the forward's weights again computes what any other does, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from edgesplit.errors import RunError
from edgesplit.segments.base import Samples
from edgesplit.segments.torch import TorchRunner
from edgesplit.splitting import build_chain, weights_of
from edgesplit.task import Task


def model() -> nn.Module:
    torch.manual_seed(3)
    made = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 5)
    )
    made[0].bias.requires_grad_(False)
    return made


TASK = Task(model=model, loss=F.cross_entropy, train=lambda shard: [])
X = np.random.default_rng(0).normal(size=(6, 1, 6, 6)).astype(np.float32)
TARGET = {"x": np.arange(6) % 5}
SAMPLES = Samples(0, 0, (("d", 0, 6),))


def runners(start: int, stop: int) -> list[TorchRunner]:
    chain = build_chain(TASK)
    made = [TorchRunner(chain, start, stop, TASK) for _ in range(2)]
    made[1].same_weights = True
    return made


def state() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return weights_of(build_chain(TASK), range(6))


@pytest.mark.parametrize("halves", [False, True])
def test_it_computes_the_same_bits(halves):
    found = []
    for first, last in zip(runners(0, 3), runners(3, 6), strict=True):
        weights, buffers = state()
        out = first.forward(0, weights, buffers, {"x": X}, frozenset(), SAMPLES)
        end = last.forward_loss(0, weights, buffers, out.arrays, out.needs_grad, SAMPLES, TARGET, 6.0, 1.0)
        if halves:
            back, grads = last.backward_input(0, weights, {}), last.backward_weights(0, weights)
        else:
            back, grads = last.backward(0, weights, {})
        grads = grads | first.backward(0, weights, back)[1]
        assert set(grads) == {name for name, weight in weights.items() if weight.requires_grad}
        assert all(weight.grad is None for weight in weights.values())
        found.append([end.loss_sum, back["x"].tobytes(), {n: g.numpy().tobytes() for n, g in grads.items()}, buffers])
    assert found[0][:3] == found[1][:3]
    assert all(torch.equal(found[0][3][name], found[1][3][name]) for name in found[0][3])


def test_other_weights_are_refused():
    runner = runners(0, 6)[1]
    weights, buffers = state()
    runner.forward_loss(0, weights, buffers, {"x": X}, frozenset(), SAMPLES, TARGET, 6.0, 1.0)
    with pytest.raises(RunError, match="other weights than its forward"):
        runner.backward(0, state()[0], {})
