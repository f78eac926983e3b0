"""Loss scales, and steps that are not finite: skipped everywhere, as if their update had not happened."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import nn
from torch.nn import functional as F

from edgesplit.data import epoch_order
from edgesplit.errors import RunError
from edgesplit.plan import Plan
from edgesplit.session import Session
from edgesplit.task import Task
from tests.cases import (
    EXACT,
    FACTORIES,
    RULES,
    Loader,
    Ran,
    Steps,
    apart,
    chain,
    equal,
    homes,
    identical,
    mlp,
    normed,
    one_process,
    open_session,
    points_task,
    run,
    seeded,
    tree,
)
from tests.oracle import train_replicas

DEVICES = ["d1", "d2", "d3", "d4"]
SIZES = [24, 24, 8, 16]
"""Batches of 8: in step 2 of an epoch only the devices of the first edge take part."""


pytestmark = pytest.mark.usefixtures("one_thread")


def in_step(step: int, device: str, count: int, batch: int, seed: int = 0) -> int:
    """A sample of ``device`` that the ``step``-th batch of its first epoch holds."""
    return int(epoch_order(seed, device, 0, count)[step * batch + batch // 2])


def skipped(ran: Ran) -> list[int]:
    return [step.step for step in ran.steps if not step.applied]


# --- loss scales ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["clipped AdamW", "momentum"])
@pytest.mark.parametrize("scale", [1024.0, 1000.0, 0.125, "dynamic"])
def test_a_loss_scale_changes_nothing_on_a_chain(scale: Any, rule: str) -> None:
    task = points_task([45])
    plan = chain(task, [1, 4], ["a", "b", "a"])
    ran = run(plan, task, loss_scale=scale, micros=3, batch_size=20, steps_per_round=5, **RULES[rule])
    equal(ran, one_process(task, rule, Loader(task, ["a"], 20).steps(5)))


@pytest.mark.parametrize("rule", ["clipped AdamW", "momentum"])
@pytest.mark.parametrize("cuts", [[1, 4], [1, 3, 5], [3]], ids=["tree", "U-shape", "two tiers"])
def test_a_dynamic_loss_scale_that_grows_changes_nothing_with_replicas(cuts: list[int], rule: str) -> None:
    """In two tiers the last layers have replicas, some of which sit out the steps at which the scale grows."""
    task = points_task(SIZES)
    plan = tree(task, cuts)
    options = {"loss_scale": "dynamic", "micros": 3, "batch_size": 8, "rounds": 2, "every": "step"}
    ran, scales = grown(plan, task, **options, **RULES[rule])
    assert scales > 65536
    loader = Loader(task, DEVICES, 8)
    equal(ran, one_process(task, rule, [*loader.epoch(), *loader.epoch()]))


def grown(plan: Plan, task: Task, **options: Any) -> tuple[Ran, float]:
    """Run with a scale that doubles after every step; also return where it ends."""
    watch = Steps()
    with open_session(plan, task, **options) as session:
        scale = session._conductor.coordinator.loss_scale
        scale.growth_interval = 1
        session.fit(callbacks=[watch])
        return Ran(watch.done, session.weights()), scale.value


@pytest.mark.parametrize("rule", ["clipped momentum", "momentum"])
@pytest.mark.parametrize("cuts", [[1, 3, 5], [3]], ids=["U-shape", "two tiers"])
def test_federated_rounds_under_a_loss_scale_equal_the_rule_of_the_design(cuts: list[int], rule: str) -> None:
    task = points_task(SIZES)
    plan = tree(task, cuts)
    loader = Loader(task, DEVICES, 8)
    rounds = [list(loader.epoch()) for _ in range(2)]
    ran, _ = grown(plan, task, loss_scale="dynamic", micros=3, batch_size=8, rounds=2, **RULES[rule])
    model = seeded(task)
    found, clip = homes(plan, model), RULES[rule].get("clip_norm")
    equal(ran, train_replicas(task, found, rounds, FACTORIES[rule], model=model, clip_norm=clip))


def test_a_dynamic_scale_halves_until_the_gradients_are_finite_and_that_search_does_not_end_the_run() -> None:
    task = points_task([40], loss=lambda output, target: F.cross_entropy(output, target) * 1e36, model=mlp)
    plan = chain(task, [1, 4])
    options = {"dtype": "float32", "loss_scale": "dynamic", "max_skipped": 1, "batch_size": 8, "micros": 2}
    watch, sgd = Steps(), {"name": "sgd", "lr": 1e-36}
    with open_session(plan, task, **options, steps_per_round=14, optimizer=sgd) as session:
        session.fit(callbacks=[watch])
        scale = session._conductor.coordinator.loss_scale.value
    applied = [step.applied for step in watch.done]
    assert applied == sorted(applied)
    assert applied.count(False) > 3
    assert scale == 65536 / 2 ** applied.count(False)


# --- one step is not finite -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"window": 2, "split_backward": True}], ids=["", "window 2, split"])
@pytest.mark.parametrize("rule", ["clipped momentum", "momentum"], ids=["barrier", "optimistic"])
@pytest.mark.parametrize(
    ("model", "shape", "micros"),
    [
        (normed, ([2, 4], ["a", "b", "c"]), 1),
        (normed, ([2, 4], ["a", "b", "a"]), 1),
        (mlp, ([1, 4], ["a", "b", "a"]), 3),
        (mlp, ([], ["a"]), 3),
    ],
    ids=["norms, chain", "norms, U-shape", "U-shape", "device only"],
)
def test_a_bad_step_is_skipped_on_a_chain(
    model: Callable[[], nn.Module], shape: Any, micros: int, rule: str, options: dict[str, Any]
) -> None:
    task = points_task([40], model=model, poisoned={0: [in_step(2, "a", 40, 8)]})
    ran = run(chain(task, *shape), task, micros=micros, batch_size=8, rounds=2, **options, **RULES[rule])
    assert skipped(ran)[0] == 2
    assert len(skipped(ran)) == 2, "once an epoch"
    assert [done.skipped for done in ran.rounds] == [1, 1]
    equal(ran, one_process(task, rule, Loader(task, ["a"], 8).steps(10)))


@pytest.mark.parametrize("rule", ["clipped AdamW", "momentum"])
@pytest.mark.parametrize("cuts", [[1, 4], [1, 3, 5], [3]], ids=["tree", "U-shape", "two tiers"])
def test_a_bad_step_is_skipped_on_a_tree_with_every_step(cuts: list[int], rule: str) -> None:
    task = points_task(SIZES, poisoned={0: [in_step(2, "d1", 24, 8)]})
    ran = run(tree(task, cuts), task, every="step", micros=3, batch_size=8, rounds=3, **RULES[rule])
    assert skipped(ran)[0] == 2
    assert set(ran.steps[2].metrics) == {"d1", "d2"}, "the others take no part in the bad step"
    loader = Loader(task, DEVICES, 8)
    equal(ran, one_process(task, rule, [step for _ in range(3) for step in loader.epoch()]))


@pytest.mark.parametrize("rule", ["clipped momentum", "momentum"], ids=["barrier", "optimistic"])
@pytest.mark.parametrize(
    ("model", "cuts", "micros"),
    [(normed, [2, 4], 1), (normed, [1, 3, 5], 1), (mlp, [1, 4], 3), (mlp, [3], 3), (normed, [], 1)],
    ids=["norms, tree", "norms, U-shape", "tree", "two tiers", "norms, device only"],
)
def test_a_bad_step_is_skipped_on_a_tree_with_federated_rounds(
    model: Callable[[], nn.Module], cuts: list[int], micros: int, rule: str
) -> None:
    """The third device takes part in step 0 only: what it did there stays."""
    task = points_task(SIZES, model=model, poisoned={1: [in_step(1, "d2", 24, 8)], 0: [in_step(2, "d1", 24, 8)]})
    plan = tree(task, cuts)
    loader = Loader(task, DEVICES, 8)
    rounds = [list(loader.epoch()) for _ in range(2)]
    ran = run(plan, task, method="gpipe", micros=micros, batch_size=8, rounds=2, max_skipped=9, **RULES[rule])
    assert skipped(ran)[:2] == [1, 2]
    start = seeded(task)
    want = train_replicas(
        task,
        homes(plan, start),
        rounds,
        FACTORIES[rule],
        model=start,
        clip_norm=RULES[rule].get("clip_norm"),
    )
    equal(ran, want)


def everything(session: Session) -> dict[str, Any]:
    """Parameters, buffers and optimizer state of every node."""
    session.training.fetch(optimizer=True)
    return {f"{node}/{n}": np.array(a) for node, held in session.training.held.items() for n, a in held.arrays.items()}


@pytest.mark.parametrize("rule", ["clipped AdamW", "momentum"], ids=["barrier", "optimistic"])
@pytest.mark.parametrize(("every", "cuts"), [("round", [2, 4]), ("round", [1, 3, 5]), ("step", [2, 4])])
def test_a_bad_step_leaves_every_bit_of_every_node_as_it_was(every: str, cuts: list[int], rule: str) -> None:
    task = points_task([24, 24, 8, 16], model=normed, poisoned={1: [in_step(1, "d2", 24, 8)]})
    with open_session(tree(task, cuts), task, batch_size=8, steps_per_round=1, every=every, **RULES[rule]) as session:
        found = []
        for _ in range(3):
            session.fit(1)
            found.append(everything(session))
    assert [done.skipped for done in session.rounds] == [0, 1, 0]
    assert any("optimizer/" in name for name in found[0])
    assert any("running_mean" in name for name in found[0])
    assert identical(found[0], found[1])
    changed = {name for name in found[2] if not np.array_equal(found[1][name], found[2][name])}
    assert len(changed) > len(found[2]) / 2


@pytest.mark.parametrize("cuts", [[1, 4], [1, 3, 5]], ids=["tree", "U-shape"])
@pytest.mark.parametrize("rule", ["clipped AdamW", "momentum"])
def test_three_bad_steps_in_a_row_end_the_run_and_name_node_and_layer(cuts: list[int], rule: str) -> None:
    task = points_task([24, 80, 24, 24], poisoned={1: range(40, 80)})
    with pytest.raises(RunError) as caught:
        run(tree(task, cuts), task, micros=2, batch_size=8, steps_per_round=30, **RULES[rule])
    text = str(caught.value)
    assert "3 steps in a row were not finite" in text
    assert any(f"layer {layer!r} on {node!r}" in text for layer in "abcde" for node in ("c", "d2", "e1"))


def test_more_bad_steps_in_a_row_are_allowed_where_the_experiment_says_so() -> None:
    bad = [in_step(step, "a", 40, 8) for step in range(3)]
    task = points_task([40], poisoned={0: bad})
    ran = run(chain(task, [3], ["a", "b"]), task, max_skipped=4, micros=2, batch_size=8, **RULES["momentum"])
    assert skipped(ran) == [0, 1, 2]
    equal(ran, one_process(task, "momentum", Loader(task, ["a"], 8).steps(5)))


def test_an_asynchronous_method_skips_by_itself_and_ends_the_run_with_node_and_layer() -> None:
    task = points_task([40], poisoned={0: range(40)})
    with pytest.raises(RunError, match=r"3 steps in a row .* layer '[a-e]' on '[ab]'"):
        run(chain(task, [3], ["a", "b"]), task, method="pipedream", micros=2, batch_size=8, **RULES["momentum"])
    task = dataclasses.replace(task, train=points_task([40], poisoned={0: [in_step(1, "a", 40, 8)]}).train)
    ran = run(chain(task, [3], ["a", "b"]), task, method="pipedream", micros=2, batch_size=8, **RULES["momentum"])
    assert skipped(ran) == [1]
    assert apart(ran.weights, ran.weights) <= EXACT
