"""The fleet equals one process: the top oracle, over memory. ``tests/system`` has part of it over a real broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from edgesplit.errors import ScheduleError
from edgesplit.plan import Plan
from edgesplit.task import Task
from tests.cases import (
    Loader,
    apart,
    chain,
    digits,
    distance,
    english,
    homes,
    identical,
    normed,
    points_task,
    run,
    seeded,
    tree,
)
from tests.oracle import Factory, Trained, train_replicas, train_single

EXACT = 1e-12


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- what is trained with, once for us and once for torch -----------------------------------------------------------


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    groups: dict[float, list[nn.Parameter]] = {0.1: [], 0.0: []}
    for name, param in named:
        groups[0.0 if name.endswith("bias") else 0.1].append(param)
    return torch.optim.AdamW([{"params": params, "weight_decay": d} for d, params in groups.items()], lr=0.02)


def momentum(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for _, param in named], lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for _, param in named], lr=0.2, weight_decay=0.01)


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 4)


RULES: dict[str, dict[str, Any]] = {
    "clipped AdamW": {
        "optimizer": {"name": "adamw", "lr": 0.02, "weight_decay": 0.1, "no_decay": "bias$"},
        "lr_schedule": {"name": "constant", "warmup_steps": 4},
        "clip_norm": 0.3,
    },
    "momentum": {
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    },
    "sgd": {"optimizer": {"name": "sgd", "lr": 0.2, "weight_decay": 0.01}},
}
FACTORIES: dict[str, Factory] = {"clipped AdamW": adamw, "momentum": momentum, "sgd": sgd}


def one_process(task: Task, rule: str, steps: Sequence[Any], model: nn.Module | None = None) -> Trained:
    clipped = rule == "clipped AdamW"
    return train_single(
        task,
        steps,
        FACTORIES[rule],
        model=model or seeded(task),
        lr=warm_up if clipped else None,
        clip_norm=RULES[rule].get("clip_norm"),
    )


def equal(ran: Any, want: Trained, bound: float = EXACT) -> None:
    assert apart(ran.losses, want.losses) <= bound
    assert apart(ran.weights, want.weights[-1]) <= bound


# --- (a) one replica a layer ----------------------------------------------------------------------------------------

PLANS: dict[str, Callable[[Task], Plan]] = {
    "device only": lambda task: chain(task, []),
    "two nodes": lambda task: chain(task, [2]),
    "three nodes": lambda task: chain(task, [1, 4]),
    "four nodes": lambda task: chain(task, [1, 3, 5]),
    "U-shape": lambda task: chain(task, [1, 4], ["a", "b", "a"]),
    "longer U-shape": lambda task: chain(task, [1, 3, 5], ["a", "b", "c", "a"]),
}
LOOPS = {
    "two nodes twice": lambda task: chain(task, [1, 3, 5], ["a", "b", "a", "b"]),
    "two nodes thrice": lambda task: chain(task, [1, 2, 3, 4, 5], ["a", "b"] * 3),
    "three nodes twice": lambda task: chain(task, [1, 2, 3, 4, 5], ["a", "b", "c"] * 2),
}
SIZES = {"48 in 4": (96, 48, 4), "50 in 7": (100, 50, 7), "a short last batch": (53, 48, 4), "a tiny one": (50, 48, 4)}


@pytest.mark.parametrize("rule", ["clipped AdamW", "momentum"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("method", ["gpipe", "1f1b", "breadth-first"])
@pytest.mark.parametrize("shape", PLANS)
def test_one_replica_a_layer_equals_one_process(shape: str, method: str, size: str, rule: str) -> None:
    samples, batch, micros = SIZES[size]
    task = points_task([samples])
    plan = PLANS[shape](task)
    ran = run(plan, task, method=method, micros=micros, batch_size=batch, steps_per_round=5, **RULES[rule])
    equal(ran, one_process(task, rule, Loader(task, [plan.routes[0].device], batch).steps(5)))
