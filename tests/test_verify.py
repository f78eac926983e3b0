"""``--verify`` and ``edgesplit check``: what they say of sound tasks, and that they find what is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgesplit.checking import Fact, check_task
from edgesplit.options import options
from edgesplit.task import Shard, Task
from edgesplit.topology import Topology
from edgesplit.verify import Check, verify
from edgesplit.weights.sums import StepSums
from tests.cases import DEMOS, FACTORIES, RULES, Points, chain, digits, english, mlp, normed, points_task, tree

UNEQUAL = [30, 11, 0, 23]


pytestmark = pytest.mark.usefixtures("one_thread")


def found(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def rmsprop(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop([param for _, param in named], lr=0.01)


PROCESS = "equals one process"
ONE_STEP = "one step a round equals one process"
RULE = "federated averaging"


@pytest.mark.parametrize(
    ("task", "cuts", "keywords", "statement"),
    [
        (points_task(UNEQUAL), [1, 4], {"every": "step", **RULES["clipped AdamW"]}, PROCESS),
        (points_task(UNEQUAL), [1, 3, 5], {"every": "step", "loss_scale": "dynamic", **RULES["momentum"]}, PROCESS),
        (points_task(UNEQUAL), [1, 4], RULES["sgd"], ONE_STEP),
        (points_task(UNEQUAL), [1, 4], {"optimizer_state": "average", **RULES["momentum"]}, ONE_STEP),
        (points_task(UNEQUAL), [1, 4], RULES["momentum"], RULE),
        (points_task(UNEQUAL), [1, 3, 5], {"optimizer_state": "reset", **RULES["momentum"]}, RULE),
        (points_task(UNEQUAL), [1, 4], {"optimizer_state": "average", **RULES["clipped AdamW"]}, RULE),
        (points_task(UNEQUAL), [1, 4], {"strategy": "fedadam", **RULES["clipped momentum"]}, RULE),
        (points_task(UNEQUAL, optimizer=rmsprop), [1, 4], {}, RULE),
        (points_task([24, 14, 0, 16], model=normed), [2, 4], {"every": "step", **RULES["momentum"]}, PROCESS),
        (digits([14, 9, 0, 12]), [3, 6], RULES["clipped momentum"], RULE),
        (english([14, 9, 0, 12]), [1, 2], {"every": "step"}, PROCESS),
    ],
)
def test_on_a_tree_it_says_which_statement_holds(
    task: Task, cuts: list[int], keywords: dict[str, Any], statement: str
) -> None:
    checks = found(verify(tree(task, cuts), task, options(batch_size=8, micros=3, **keywords)))
    assert all(check.holds for check in checks.values()), checks
    assert {f"{statement}: losses", f"{statement}: weights"} < set(checks)
    assert checks["a second run is the same bit for bit"].value == 0
    for part in ("losses", "weights"):
        assert 0 <= checks[f"{statement}: {part}"].value <= 1e-12


@pytest.mark.parametrize("model", [mlp, normed])
def test_on_a_chain_everything_equals_one_process(model: Any) -> None:
    task = points_task([50], model=model)
    plan = chain(task, [2, 4], ["a", "b", "a"])
    checks = found(verify(plan, task, options(batch_size=20, micros=3, **RULES["clipped momentum"])))
    assert all(check.holds for check in checks.values())
    assert f"{PROCESS}: weights" in checks


def test_a_codec_is_measured_beside_the_exact_comparison() -> None:
    task = points_task([50])
    experiment = options(batch_size=20, micros=3, codec={"up": "int8", "down": "fp16"}, **RULES["sgd"])
    checks = found(verify(chain(task, [2]), task, experiment))
    assert checks[f"{PROCESS}: weights"].holds
    assert 0 < checks["codecs"].value < 0.1
    assert "fp16, int8" in checks["codecs"].note


@pytest.mark.parametrize("window", [1, 2])
def test_an_asynchronous_method_is_not_compared(window: int) -> None:
    task = points_task([50])
    experiment = options(batch_size=20, micros=4, method="pipedream", window=window, **RULES["momentum"])
    checks = found(verify(chain(task, [2]), task, experiment))
    assert all(check.holds for check in checks.values())
    assert "not expected" in checks["asynchronous"].note


def test_a_model_that_insists_on_float32_is_compared_in_float32() -> None:
    class Single(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float()

    task = points_task([50], model=lambda: nn.Sequential(Single(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
    checks = found(verify(chain(task, [2]), task, options(batch_size=20, micros=4, **RULES["sgd"])))
    assert all(check.holds for check in checks.values())
    assert checks[f"{PROCESS}: weights"].bound == 1e-4


def test_a_wrong_engine_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    task = points_task([50])
    real = StepSums.means

    def short(self: StepSums, layer: str, loss_scale: float, clip: float = 1.0) -> dict[str, Any]:
        return {name: mean * (1 - 1e-9) for name, mean in real(self, layer, loss_scale, clip).items()}

    monkeypatch.setattr(StepSums, "means", short)
    checks = found(verify(chain(task, [2]), task, options(batch_size=20, micros=3, **RULES["sgd"])))
    assert not checks[f"{PROCESS}: weights"].holds


def test_random_data_and_losses_that_are_no_numbers_are_found_out() -> None:
    class Noisy(Points):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            x, y = super().__getitem__(index)
            return x + torch.rand(()), y

    task = points_task(train=lambda shard: Noisy(40, 0))
    checks = found(verify(chain(task, [2]), task, options(batch_size=20, **RULES["sgd"])))
    assert not checks["data"].holds
    assert checks[f"{PROCESS}: weights"].holds, "the comparison is on the same batches all the same"
    bad = points_task([40], poisoned={0: range(40)})
    checks = found(verify(chain(bad, [2]), bad, options(batch_size=20, **RULES["sgd"])))
    assert not checks["finite"].holds


# --- check ----------------------------------------------------------------------------------------------------------


def texts(facts: Iterator[Fact]) -> tuple[list[str], list[str]]:
    """What is well, and what is not."""
    every = list(facts)
    return [fact.text for fact in every if fact.ok], [fact.text for fact in every if not fact.ok]


def has(lines: list[str], *words: str) -> bool:
    return any(all(word in line for word in words) for line in lines)


def test_a_task_object_is_checked_on_a_device_and_a_server() -> None:
    task = points_task([50], optimizer=FACTORIES["clipped AdamW"])
    well, ill = texts(check_task(task))
    assert not ill
    assert has(well, "6 layers", "224 parameters")
    assert has(well, "layer 3 c: 110 parameters -> [10] float32, 40 B a sample")
    assert has(well, "chain == model")
    assert has(well, "loss weight", "off the whole")
    assert has(well, "gradients: 6 of 6")
    assert has(well, "data of device: 50 samples in 7 batches; x [6]", "labels 0:")
    assert has(well, "held-out data: 30 samples")
    assert has(well, "one split step (device -> server)", "equals one process: weights")


def test_the_demo_is_checked_with_its_experiment_and_topology() -> None:
    well, ill = texts(check_task(str(DEMOS / "mnist" / "experiment.yaml")))
    assert not ill
    assert sum("data of pi-" in line for line in well) == 4
    assert has(well, "one split step (pi-1 -> edge-1 -> cloud)")


def test_a_topology_may_be_given_with_a_task() -> None:
    home = Topology.load(DEMOS / "mnist" / "home.yaml")
    experiment = options(batch_size=8, micros=2, plan={"cuts": [1, 4]}, every="step", **RULES["momentum"])
    well, ill = texts(check_task(points_task(UNEQUAL), experiment, home))
    assert not ill
    assert has(well, "data of pi-3: no samples; it sits out")
    assert has(well, "the replicas' gradient sums are added")


def broken(**fields: Any) -> Task:
    return dataclasses.replace(points_task([50]), **fields)


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) + x)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (broken(model=Skipping, layers=["a", "b"]), "the chain of layers is not the model"),
        (broken(loss=lambda o, t: F.cross_entropy(o, t, reduction="sum")), "task.weight must count"),
        (broken(weight=lambda t: 1.0), "task.weight must count"),
        (broken(train=lambda shard: Points(0, 0)), "no device has any samples"),
        (broken(train=lambda shard: Points(20, 0, range(20))), "not finite"),
        (broken(loss=lambda o, t: F.mse_loss(o, t)), "the task's code raises"),
        (broken(model=lambda: mlp().requires_grad_(False)), "nothing can be trained"),
    ],
)
def test_what_is_wrong_with_a_task_is_said(task: Task, said: str) -> None:
    _, ill = texts(check_task(task))
    assert has(ill, said), ill


def test_frozen_and_unused_parameters_are_named() -> None:
    def model() -> nn.Module:
        whole = mlp()
        whole[0].weight.requires_grad_(False)
        whole[3].register_parameter("spare", nn.Parameter(torch.ones(2)))
        return whole

    well, ill = texts(check_task(points_task([50], model=model)))
    assert not ill
    assert has(well, "gradients: 5 of 7", "frozen: a.weight", "unused: c.spare")


def test_a_task_that_does_not_import_is_said(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("import no_such_module_anywhere\n")
    well, ill = texts(check_task(f"{tmp_path / 'task.py'}:make"))
    assert not well
    assert has(ill, "no_such_module_anywhere")


def test_data_of_other_kinds_is_described() -> None:
    def train(shard: Shard) -> Any:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(20, 6, generator=generator)
        return [({"a": x[i : i + 5], "b": x[i : i + 5] > 0}, x[i : i + 5, :4]) for i in range(0, 20, 5)]

    class Take(nn.Module):
        def forward(self, value: dict[str, Tensor]) -> Tensor:
            return value["a"] * value["b"]

    task = points_task(
        train=train, test=None, metrics={}, loss=F.mse_loss, model=lambda: nn.Sequential(Take(), nn.Linear(6, 4))
    )
    well, ill = texts(check_task(task))
    assert not ill
    assert has(well, "20 samples in 4 batches; x a [6] float32, b [6] bool, 30 B a sample; target [4] float32")
    assert not has(well, "labels")
