from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from edgesplit.errors import ExperimentError
from edgesplit.lr import lr_factor


def test_warm_up_then_constant() -> None:
    factor = lr_factor({"name": "constant", "warmup_steps": 4})
    assert [factor(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert lr_factor({"name": "constant"})(0) == 1.0


def torch_factors(schedule: Any, steps: int, **options: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = schedule(optimizer, **options)
    factors = []
    for _ in range(steps):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return factors


def test_equals_torch_schedulers() -> None:
    schedulers = torch.optim.lr_scheduler
    cosine = lr_factor({"name": "cosine", "total_steps": 10, "min_factor": 0.1})
    want = torch_factors(schedulers.CosineAnnealingLR, 11, T_max=10, eta_min=0.1)
    assert [cosine(step) for step in range(11)] == pytest.approx(want, abs=1e-12)
    linear = lr_factor({"name": "linear", "total_steps": 10, "min_factor": 0.2})
    want = torch_factors(schedulers.LinearLR, 14, start_factor=1.0, end_factor=0.2, total_iters=10)
    assert [linear(step) for step in range(14)] == pytest.approx(want, abs=1e-12)
    step_wise = lr_factor({"name": "step", "every": 3, "gamma": 0.5})
    want = torch_factors(schedulers.StepLR, 10, step_size=3, gamma=0.5)
    assert [step_wise(step) for step in range(10)] == pytest.approx(want, abs=1e-12)


def test_the_decay_follows_the_warm_up_and_stays_at_its_floor() -> None:
    factor = lr_factor({"name": "cosine", "warmup_steps": 2, "total_steps": 6, "min_factor": 0.5})
    half = 0.5 + 0.5 * (1 + math.cos(math.pi / 4)) / 2
    assert [factor(step) for step in (0, 1, 2, 3, 6, 99)] == pytest.approx([0.5, 1.0, 1.0, half, 0.5, 0.5])
    floor = lr_factor({"name": "step", "every": 1, "gamma": 0.1, "min_factor": 0.01, "warmup_steps": 1})
    assert [floor(step) for step in range(5)] == pytest.approx([1.0, 1.0, 0.1, 0.01, 0.01])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "name None is not known"),
        ({"name": "cosin"}, "did you mean 'cosine'"),
        ({"name": "cosine", "total_step": 1}, "did you mean 'total_steps'"),
        ({"name": "cosine"}, "cosine needs total_steps"),
        ({"name": "step"}, "step needs every and gamma"),
        ({"name": "constant", "min_factor": 0.1}, "min_factor has no effect on constant"),
        ({"name": "cosine", "total_steps": 5, "gamma": 0.1}, "gamma has no effect on cosine"),
        ({"name": "cosine", "total_steps": 5, "warmup_steps": 5}, "total_steps 5 must be above"),
        ({"name": "constant", "warmup_steps": -1}, "whole number from 0"),
        ({"name": "step", "every": 0, "gamma": 0.1}, "whole number from 1"),
        ({"name": "step", "every": 1, "gamma": 2}, "number from 0 to 1"),
    ],
)
def test_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        lr_factor(config)
