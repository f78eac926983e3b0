"""A session driven by hand, and runs that stop and go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from edgesplit.errors import ExperimentError, RunError
from edgesplit.plan import Plan
from edgesplit.session import Session
from edgesplit.task import Shard, Task
from tests.cases import (
    EXACT,
    FACTORIES,
    RULES,
    Loader,
    Points,
    apart,
    chain,
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
UNEQUAL = [30, 11, 0, 23]


pytestmark = pytest.mark.usefixtures("one_thread")


# --- stopping and going on ------------------------------------------------------------------------------------------


def stopped(
    directory: Path, after: int, plan: Plan, task: Task, prepare: Callable[[Session], None], **keywords: Any
) -> Path:
    """Run some rounds and return the last checkpoint."""
    with open_session(plan, task, directory=directory, **keywords) as session:
        prepare(session)
        session.fit(after)
    return max((directory / "checkpoints").glob("round-*"))


def resumed(path: Path, plan: Plan, task: Task, prepare: Callable[[Session], None], **keywords: Any) -> Session:
    """Go on from a checkpoint to the end, in a new session."""
    with open_session(plan, task, **keywords) as session:
        prepare(session)
        session.resume(path)
        session.fit()
    return session


def as_it_is(session: Session) -> None:
    """Prepare nothing."""


def growing(session: Session) -> None:
    """Let the loss scale double every second step."""
    session._conductor.coordinator.loss_scale.growth_interval = 2


COMBINATIONS: dict[str, tuple[Callable[[], nn.Module], list[int], dict[str, Any], Callable[[Session], None]]] = {
    "AdamW, clipped, kept": (mlp, [1, 4], RULES["clipped AdamW"], as_it_is),
    "momentum, kept": (mlp, [1, 3, 5], RULES["momentum"], as_it_is),
    "momentum, averaged": (normed, [2, 4], {**RULES["momentum"], "optimizer_state": "average"}, as_it_is),
    "momentum, reset": (mlp, [1, 4], {**RULES["momentum"], "optimizer_state": "reset"}, as_it_is),
    "local buffers": (normed, [2, 4], {**RULES["momentum"], "buffers": "local"}, as_it_is),
    "every step": (mlp, [1, 4], {**RULES["clipped AdamW"], "every": "step"}, as_it_is),
    "two devices a round": (mlp, [1, 4], {**RULES["clipped AdamW"], "data": {"per_round": 2}}, as_it_is),
    "dynamic scale": (mlp, [3], {**RULES["clipped AdamW"], "every": "step", "loss_scale": "dynamic"}, growing),
    "cosine": (
        mlp,
        [1, 4],
        {"optimizer": {"name": "adamw", "lr": 0.02}, "lr_schedule": {"name": "cosine", "warmup_steps": 2}},
        as_it_is,
    ),
    "FedAdam": (mlp, [1, 4], {**RULES["momentum"], "strategy": "fedadam"}, as_it_is),
    "pipedream": (mlp, [], {**RULES["momentum"], "method": "pipedream"}, as_it_is),
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_resumed_run_ends_like_one_that_never_stopped(name: str, tmp_path: Path) -> None:
    model, cuts, options, prepare = COMBINATIONS[name]
    task = points_task(UNEQUAL, model=model)
    plan = tree(task, cuts)
    micros = {} if model is normed else {"micros": 3}
    keywords = {"rounds": 4, "batch_size": 8, **micros, **options}
    with open_session(plan, task, **keywords) as session:
        prepare(session)
        session.fit()
    want = session.weights()
    path = stopped(tmp_path, 2, plan, task, prepare, **keywords)
    found = resumed(path, plan, task, prepare, **keywords)
    assert [done.number for done in found.rounds] == [3, 4]
    assert [(done.loss, done.steps) for done in found.rounds] == [(d.loss, d.steps) for d in session.rounds[2:]]
    assert identical(found.weights(), want)


def test_a_resumed_run_repeats_a_task_optimizer_that_only_torch_has(tmp_path: Path) -> None:
    def rmsprop(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.RMSprop([param for _, param in named], lr=0.01, momentum=0.5, centered=True)

    task = points_task([30], optimizer=rmsprop)
    plan = chain(task, [1, 4], ["a", "b", "a"])
    keywords = {"rounds": 4, "batch_size": 8, "micros": 3}
    path = stopped(tmp_path, 2, plan, task, as_it_is, **keywords)
    assert identical(resumed(path, plan, task, as_it_is, **keywords).weights(), run(plan, task, **keywords).weights)


@pytest.mark.parametrize("rule", ["clipped AdamW", "momentum"])
def test_a_run_may_go_on_under_another_plan(rule: str, tmp_path: Path) -> None:
    task = points_task([45])
    keywords = {"rounds": 4, "batch_size": 20, "micros": 3, **RULES[rule]}
    first = chain(task, [1, 4], ["a", "b", "c"])
    want = run(first, task, **keywords).weights
    path = stopped(tmp_path, 2, first, task, as_it_is, **keywords)
    for second in (chain(task, [3], ["a", "x"]), chain(task, [2, 5], ["a", "c", "a"]), chain(task, [], ["a"])):
        assert apart(resumed(path, second, task, as_it_is, **keywords).weights(), want) <= EXACT


def test_a_bad_step_before_the_checkpoint_does_not_matter(tmp_path: Path) -> None:
    task = points_task([40], poisoned={0: [7]})
    plan = chain(task, [1, 4], ["a", "b", "a"])
    keywords = {"rounds": 4, "batch_size": 8, "micros": 3, "max_skipped": 9, **RULES["momentum"]}
    path = stopped(tmp_path, 2, plan, task, as_it_is, **keywords)
    assert identical(resumed(path, plan, task, as_it_is, **keywords).weights(), run(plan, task, **keywords).weights)


def test_a_checkpoint_of_another_seed_or_model_is_refused(tmp_path: Path) -> None:
    task = points_task([40])
    plan = chain(task, [3], ["a", "b"])
    path = stopped(tmp_path, 1, plan, task, as_it_is, batch_size=8, **RULES["sgd"])
    other = points_task([40], model=normed)
    for changed, seed, said in ((task, 1, "seed 0, the experiment 1"), (other, 0, "another model")):
        plan = chain(changed, [3], ["a", "b"])
        with (
            open_session(plan, changed, batch_size=8, seed=seed, **RULES["sgd"]) as session,
            pytest.raises(RunError, match=said),
        ):
            session.resume(path)


# --- by hand --------------------------------------------------------------------------------------------------------


def batches(count: int, size: int, seed: int = 50) -> list[Any]:
    points = Points(count * size, seed)
    return [(points.x[i : i + size], points.y[i : i + size]) for i in range(0, count * size, size)]


def test_steps_by_hand_equal_one_process() -> None:
    task = points_task([40])
    given = batches(5, 20)
    with open_session(chain(task, [1, 4], ["a", "b", "a"]), task, micros=3, **RULES["clipped AdamW"]) as session:
        losses = [session.step(batch) for batch in given]
        model = session.gather()
    want = one_process(task, "clipped AdamW", [(i, {"a": batch}) for i, batch in enumerate(given)])
    assert apart(losses, want.losses) <= EXACT
    assert apart(dict(model.named_parameters()), want.weights[-1]) <= EXACT
    assert type(model) is nn.Sequential


def test_steps_by_hand_on_a_tree_then_federate() -> None:
    task = points_task(UNEQUAL)
    plan = tree(task, [1, 4])
    given = [dict(zip(("d1", "d2", "d4"), batches(3, 8, seed), strict=True)) for seed in range(3)]
    with open_session(plan, task, method="gpipe", micros=2, **RULES["momentum"]) as session:
        losses = [session.step(step) for step in given[:2]]
        session.federate()
        middle = session.weights()
        losses.append(session.step(given[2]))
        session.federate()
        end = {name: param.detach().clone() for name, param in session.gather().named_parameters()}
    model = seeded(task)
    rounds = [[(0, given[0]), (1, given[1])], [(2, given[2])]]
    want = train_replicas(task, homes(plan, model), rounds, FACTORIES["momentum"], model=model)
    assert apart(losses, want.losses) <= EXACT
    assert apart(middle, want.weights[0]) <= EXACT
    assert apart(end, want.weights[1]) <= EXACT


def test_rounds_and_steps_by_hand_go_together() -> None:
    task = points_task([40])
    extra = batches(1, 20)[0]
    with open_session(chain(task, [3], ["a", "b"]), task, batch_size=10, micros=2, **RULES["momentum"]) as session:
        session.fit(1)
        session.step(extra)
        session.fit(1)
        found = session.weights()
    loader = Loader(task, ["a"], 10)
    steps = [*loader.epoch(), (4, {"a": extra}), *((step + 1, given) for step, given in loader.epoch())]
    assert apart(found, one_process(task, "momentum", steps).weights[-1]) <= EXACT


def test_evaluation_on_the_held_out_set_and_on_the_devices() -> None:
    task = points_task(UNEQUAL)
    plan = tree(task, [1, 4])
    options = {"evaluate": {"every": 1, "where": ["coordinator", "device"]}, "micros": 3, "batch_size": 8}
    with open_session(plan, task, rounds=2, **options, **RULES["clipped AdamW"]) as session:
        before = session.evaluate()
        done = session.fit()[-1]
        assert session.evaluate() | session.evaluate("device") == done.metrics
        model = session.gather().eval()
    assert before["test/loss"] != done.metrics["test/loss"]
    for name, index in [("test", -1), *((f"device/{device}", i) for i, device in enumerate(DEVICES))]:
        assert task.test is not None
        points = task.test(Shard(name=name, index=index, count=4, seed=0))
        with torch.no_grad():
            output = model(points.x)
        accuracy = float((output.argmax(1) == points.y).double().mean())
        assert done.metrics[f"{name}/accuracy"] == pytest.approx(accuracy, abs=1e-12)
        if name == "test":
            loss = float(F.cross_entropy(output, points.y))
            assert done.metrics["test/loss"] == pytest.approx(loss, rel=1e-12)


def test_evaluation_changes_nothing_in_training() -> None:
    task = points_task([40], model=normed)
    plan = chain(task, [2, 4], ["a", "b", "a"])
    keywords = {"rounds": 3, "batch_size": 10, **RULES["momentum"]}
    often = run(plan, task, evaluate={"every": 1, "where": ["coordinator", "device"]}, **keywords)
    assert identical(often.weights, run(plan, task, **keywords).weights)


def test_devices_without_a_test_set_are_left_out_and_none_is_an_error() -> None:
    only_first = points_task(UNEQUAL)
    task = points_task(UNEQUAL, test=lambda shard: only_first.test(shard) if shard.index == 0 else None)
    options = {"batch_size": 8, "evaluate": {"every": 1, "where": ["device"]}, **RULES["sgd"]}
    with open_session(tree(task, [1, 4]), task, **options) as session:
        assert list(session.evaluate("device")) == ["device/d1/accuracy"]
    none = points_task(UNEQUAL, test=None)
    with open_session(tree(none, [1, 4]), none, **options) as session:
        assert session.evaluate() == {}
        with pytest.raises(ExperimentError, match="no device has a test set"):
            session.evaluate("device")


# --- some devices a round -------------------------------------------------------------------------------------------


def test_the_devices_of_a_round_equal_one_process_on_their_samples() -> None:
    task = points_task(UNEQUAL)
    plan = tree(task, [1, 4])
    options = {"rounds": 6, "steps_per_round": 1, "micros": 3, "batch_size": 8, "data": {"per_round": 2}}
    with open_session(plan, task, **options, **RULES["sgd"]) as session:
        chosen = [session.training.devices(number) for number in range(1, 7)]
        session.fit()
    assert len({tuple(devices) for devices in chosen}) > 1
    loader = Loader(task, DEVICES, 8)
    taking_part = [[d for d in devices if loader.count(d)] for devices in chosen]
    steps = [loader.take(devices) for devices in taking_part if devices]
    assert apart(session.weights(), one_process(task, "sgd", steps).weights[-1]) <= EXACT


def test_a_round_whose_devices_have_no_samples_has_no_steps() -> None:
    task = points_task([0, 0, 0, 16])
    options = {"rounds": 8, "steps_per_round": 1, "batch_size": 8, "data": {"per_round": 1}}
    for every in ("round", "step"):
        ran = run(tree(task, [1, 4]), task, every=every, **options, **RULES["sgd"])
        steps = Loader(task, DEVICES, 8).steps(len(ran.steps))
        assert 0 < len(steps) < 8
        assert apart(ran.weights, one_process(task, "sgd", steps).weights[-1]) <= EXACT
