"""The fleet equals one process: the top oracle, over memory. ``tests/system`` has part of it over a real broker."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from edgesplit.errors import ScheduleError
from edgesplit.plan import Plan
from edgesplit.segments import masks
from edgesplit.segments.base import Samples
from edgesplit.task import Task
from tests.cases import (
    EXACT,
    FACTORIES,
    RULES,
    Loader,
    apart,
    chain,
    digits,
    distance,
    english,
    equal,
    homes,
    identical,
    normed,
    one_process,
    points_task,
    run,
    seeded,
    tree,
    warm_up,
)
from tests.oracle import train_replicas, train_single


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
SIZES = {"48 in 4": (96, 48, 4), "50 in 7": (100, 50, 7), "a short last batch": (98, 48, 4)}
MATRIX = list(itertools.product(PLANS, ("gpipe", "1f1b", "breadth-first"), SIZES))


@pytest.mark.parametrize(
    ("shape", "method", "size", "rule"),
    [(*case, ("clipped AdamW", "momentum")[i % 2]) for i, case in enumerate(MATRIX)],
)
def test_one_replica_a_layer_equals_one_process(shape: str, method: str, size: str, rule: str) -> None:
    samples, batch, micros = SIZES[size]
    task = points_task([samples])
    plan = PLANS[shape](task)
    ran = run(plan, task, method=method, micros=micros, batch_size=batch, steps_per_round=5, **RULES[rule])
    equal(ran, one_process(task, rule, Loader(task, [plan.routes[0].device], batch).steps(5)))


@pytest.mark.parametrize(
    ("method", "shape", "samples", "batch", "micros"),
    [
        ("breadth-first", "two nodes twice", 100, 50, 7),
        ("breadth-first", "three nodes twice", 98, 48, 4),
        ("interleaved", "two nodes twice", 96, 48, 4),
        ("interleaved", "two nodes thrice", 100, 50, 8),
        ("interleaved", "three nodes twice", 56, 50, 6),
    ],
)
def test_a_looping_route_equals_one_process(method: str, shape: str, samples: int, batch: int, micros: int) -> None:
    task = points_task([samples])
    options = {"method": method, "micros": micros, "batch_size": batch, "steps_per_round": 5, **RULES["momentum"]}
    ran = run(LOOPS[shape](task), task, **options)
    device = LOOPS[shape](task).routes[0].device
    equal(ran, one_process(task, "momentum", Loader(task, [device], batch).steps(5)))


@pytest.mark.parametrize(
    ("method", "plan", "micros", "said"),
    [
        ("gpipe", LOOPS["two nodes twice"], 4, "looping"),
        ("1f1b", LOOPS["two nodes twice"], 4, "looping"),
        ("interleaved", PLANS["two nodes"], 4, "looping placement"),
        ("interleaved", PLANS["U-shape"], 4, "U-shape"),
        ("interleaved", LOOPS["two nodes twice"], 7, "multiple of 2"),
        ("interleaved", lambda task: tree(task, [1, 3]), 4, "replicas"),
    ],
)
def test_what_a_method_does_not_allow_is_refused_at_once(
    method: str, plan: Callable[[Task], Plan], micros: int, said: str
) -> None:
    task = points_task([50, 50, 50, 50])
    with pytest.raises(ScheduleError, match=said):
        run(plan(task), task, method=method, micros=micros, batch_size=50, **RULES["sgd"])


@pytest.mark.parametrize("shape", ["three nodes", "U-shape"])
@pytest.mark.parametrize(
    "options",
    [
        {"split_backward": True, "micros": 4},
        {"window": 2, "micros": 4},
        {"window": 3, "split_backward": True, "micros": 7, "method": "gpipe"},
        {"micro_batch_size": 9},
        {"micro_batch_size": 48, "method": "breadth-first"},
    ],
)
def test_how_the_work_is_cut_and_ordered_changes_nothing(shape: str, options: dict[str, Any]) -> None:
    task = points_task([98])
    plan = PLANS[shape](task)
    ran = run(plan, task, batch_size=48, steps_per_round=5, **RULES["clipped AdamW"], **options)
    equal(ran, one_process(task, "clipped AdamW", Loader(task, [plan.routes[0].device], 48).steps(5)))


@pytest.mark.parametrize("rule", ["clipped AdamW", "momentum"])
@pytest.mark.parametrize("shape", ["three nodes", "U-shape"])
def test_in_float32_it_is_no_further_from_float64_than_twice_one_process(shape: str, rule: str) -> None:
    task = points_task([100])
    plan = PLANS[shape](task)
    steps = Loader(task, [plan.routes[0].device], 50).steps(5)
    exact = one_process(task, rule, steps).weights[-1]
    single = [(step, {d: (x.float(), y) for d, (x, y) in batches.items()}) for step, batches in steps]
    plain = one_process(task, rule, single, model=seeded(task).float()).weights[-1]
    ran = run(plan, task, dtype="float32", micros=7, batch_size=50, steps_per_round=5, **RULES[rule])
    assert {w.dtype.name for w in ran.weights.values()} == {"float32"}
    assert 0 < distance(ran.weights, exact) <= 2 * distance(plain, exact)


# --- runs repeat themselves, and cuts and micro-batches change nothing ------------------------------------------------


def both_ways() -> list[Any]:
    chain3 = points_task([50])
    tree4 = points_task([20, 11, 0, 14])
    return [
        pytest.param(chain3, PLANS["three nodes"](chain3), {"steps_per_round": 3}, id="chain"),
        pytest.param(tree4, tree(tree4, [1, 4]), {"every": "step"}, id="tree, every step"),
        pytest.param(tree4, tree(tree4, [1, 3, 5]), {"rounds": 2}, id="U-shaped tree, every round"),
    ]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("task", "plan", "options"), both_ways())
def test_two_runs_are_the_same_bit_for_bit(task: Task, plan: Plan, options: dict[str, Any], dtype: str) -> None:
    keywords = {"dtype": dtype, "micros": 3, "batch_size": 8, **RULES["clipped AdamW"], **options}
    first, second = run(plan, task, **keywords), run(plan, task, window=2, **keywords)
    assert first.losses == second.losses
    assert identical(first.weights, second.weights)


@pytest.mark.parametrize("make", [lambda: points_task([45]), lambda: english([18])], ids=["mlp", "transformer"])
def test_losses_are_the_same_bit_for_bit_for_all_cuts(make: Callable[[], Task]) -> None:
    task = make()
    rules = {} if task.optimizer else RULES["clipped AdamW"]
    plans = [chain(task, cuts, ["d", "x", "y", "z"][: len(cuts) + 1]) for cuts in ([], [1], [3], [1, 2, 3])]
    plans.append(chain(task, [1, 3], ["d", "x", "d"]))
    ran = [run(plan, task, micros=3, batch_size=12, steps_per_round=4, **rules) for plan in plans]
    for other in ran[1:]:
        assert other.losses == ran[0].losses
        assert identical(other.weights, ran[0].weights)


Drawn = dict[tuple[Any, ...], bytes]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Drawn]]:
    """What masks are drawn, by module, call, step, device and sample; each test appends a dict to fill."""
    books: list[Drawn] = []
    real = masks.keep_masks

    def spy(name: str, call: int, samples: Samples, count: int, p: float) -> Any:
        found = real(name, call, samples, count, p)
        keys = [(name, call, samples.step, d, i) for d, start, stop in samples.parts for i in range(start, stop)]
        for key, mask in zip(keys, found, strict=True):
            assert key not in books[-1], "a mask is drawn once"
            books[-1][key] = mask.tobytes()
        return found

    monkeypatch.setattr(masks, "keep_masks", spy)
    return books


@pytest.mark.parametrize("make", [lambda: points_task([25]), lambda: english([12])], ids=["mlp", "transformer"])
def test_masks_are_the_same_for_two_and_five_micro_batches_and_one_process(
    make: Callable[[], Task], drawn: list[Drawn]
) -> None:
    task = make()
    rules = {} if task.optimizer else RULES["clipped AdamW"]
    plan, ran = chain(task, [1, 3], ["d", "x", "y"]), []
    for micros in (2, 5):
        drawn.append({})
        ran.append(run(plan, task, micros=micros, batch_size=10, steps_per_round=3, **rules))
    drawn.append({})
    steps = Loader(task, ["d"], 10).steps(3)
    want = (
        train_single(task, steps, model=seeded(task)) if task.optimizer else one_process(task, "clipped AdamW", steps)
    )
    assert drawn[0] == drawn[1] == drawn[2]
    assert len(drawn[0]) >= sum(len(y) for _, batches in steps for _, y in batches.values())
    assert apart(ran[0].losses, ran[1].losses) <= EXACT
    for one in ran:
        equal(one, want)


# --- (b) replicas, every: step --------------------------------------------------------------------------------------

UNEQUAL = [30, 11, 0, 23]
"""Samples of the four devices: other shares, other last batches, and one has none."""


@pytest.mark.parametrize(
    ("method", "cuts", "rule"),
    [
        ("gpipe", [1, 4], "clipped AdamW"),
        ("1f1b", [1, 4], "momentum"),
        ("breadth-first", [2, 3], "clipped AdamW"),
        ("1f1b", [1, 3, 5], "clipped AdamW"),
        ("gpipe", [1, 4, 5], "momentum"),
        ("1f1b", [3], "momentum"),
        ("1f1b", [], "clipped AdamW"),
    ],
)
def test_replicas_with_every_step_equal_one_process(method: str, cuts: list[int], rule: str) -> None:
    task = points_task(UNEQUAL)
    plan = tree(task, cuts)
    ran = run(plan, task, method=method, every="step", micros=3, batch_size=8, rounds=2, **RULES[rule])
    loader = Loader(task, [r.device for r in plan.routes], 8)
    steps = [*loader.epoch(), *loader.epoch()]
    assert len({len(batches) for _, batches in steps}) > 1, "devices must drop out"
    equal(ran, one_process(task, rule, steps))


@pytest.mark.parametrize("options", [{"window": 2, "split_backward": True}, {"micro_batch_size": 3}])
def test_replicas_with_every_step_in_other_orders(options: dict[str, Any]) -> None:
    task = points_task(UNEQUAL)
    plan = tree(task, [1, 4])
    cutting = {} if "micro_batch_size" in options else {"micros": 4}
    options = {**cutting, **options, **RULES["clipped AdamW"]}
    ran = run(plan, task, every="step", batch_size=8, steps_per_round=5, **options)
    equal(ran, one_process(task, "clipped AdamW", Loader(task, [r.device for r in plan.routes], 8).steps(5)))


@pytest.mark.parametrize("rule", ["clipped AdamW", "momentum"])
@pytest.mark.parametrize("cuts", [[3, 6], [3, 6, 8]], ids=["tree", "U-shape"])
def test_the_cnn_of_the_demo_on_a_tree_equals_one_process(cuts: list[int], rule: str) -> None:
    task = digits([14, 9, 0, 12])
    plan = tree(task, cuts)
    ran = run(plan, task, every="step", micros=2, batch_size=6, steps_per_round=5, **RULES[rule])
    equal(ran, one_process(task, rule, Loader(task, [r.device for r in plan.routes], 6).steps(5)))


@pytest.mark.parametrize(("cuts", "method"), [([1, 2], "gpipe"), ([1, 2, 3], "1f1b")], ids=["tree", "U-shape"])
def test_the_transformer_of_the_demo_on_a_tree_equals_one_process(cuts: list[int], method: str) -> None:
    task = english([14, 9, 0, 12])
    plan = tree(task, cuts)
    ran = run(plan, task, method=method, every="step", micros=2, batch_size=6, steps_per_round=5)
    loader = Loader(task, [r.device for r in plan.routes], 6)
    equal(ran, train_single(task, loader.steps(5), model=seeded(task)))


def test_replicas_in_float32_are_no_further_from_float64_than_twice_one_process() -> None:
    task = points_task(UNEQUAL)
    plan = tree(task, [1, 4])
    steps = Loader(task, [r.device for r in plan.routes], 8).steps(5)
    exact = one_process(task, "momentum", steps).weights[-1]
    single = [(step, {d: (x.float(), y) for d, (x, y) in batches.items()}) for step, batches in steps]
    plain = one_process(task, "momentum", single, model=seeded(task).float()).weights[-1]
    options = {"micros": 3, "batch_size": 8, "steps_per_round": 5, **RULES["momentum"]}
    ran = run(plan, task, dtype="float32", every="step", **options)
    assert 0 < distance(ran.weights, exact) <= 2 * distance(plain, exact)


# --- (c) replicas, every: round -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[1, 4], [1, 3, 5], []], ids=["tree", "U-shape", "device only"])
@pytest.mark.parametrize(("rule", "state"), [("sgd", "keep"), ("sgd", "reset"), ("momentum", "average")])
def test_replicas_with_one_step_a_round_equal_one_process(cuts: list[int], rule: str, state: str) -> None:
    task = points_task(UNEQUAL)
    plan = tree(task, cuts)
    options = {"optimizer_state": state, "rounds": 5, "steps_per_round": 1, "micros": 3, "batch_size": 8}
    ran = run(plan, task, **options, **RULES[rule])
    equal(ran, one_process(task, rule, Loader(task, [r.device for r in plan.routes], 8).steps(5)))


@pytest.mark.parametrize("cuts", [[1, 4], [1, 3, 5]], ids=["tree", "U-shape"])
@pytest.mark.parametrize(
    ("rule", "state", "steps"),
    [
        ("clipped AdamW", "keep", 1),
        ("clipped AdamW", "reset", 1),
        ("clipped AdamW", "average", 1),
        ("clipped AdamW", "keep", None),
        ("momentum", "keep", 1),
        ("momentum", "reset", 2),
        ("momentum", "average", None),
    ],
)
def test_federated_rounds_equal_the_rule_of_the_design(
    cuts: list[int], rule: str, state: str, steps: int | None
) -> None:
    task = points_task(UNEQUAL)
    plan = tree(task, cuts)
    loader = Loader(task, [r.device for r in plan.routes], 8)
    rounds = [list(loader.epoch() if steps is None else loader.steps(steps)) for _ in range(3)]
    options = {"optimizer_state": state, "rounds": 3, "micros": 3, "batch_size": 8}
    ran = run(plan, task, **options, **RULES[rule], **({"steps_per_round": steps} if steps else {}))
    model = seeded(task)
    want = train_replicas(
        task,
        homes(plan, model),
        rounds,
        FACTORIES[rule],
        model=model,
        state=state,
        lr=warm_up if rule == "clipped AdamW" else lambda step: 1.0,
        clip_norm=RULES[rule].get("clip_norm"),
    )
    equal(ran, want)


def test_buffers_of_replicas_are_averaged_by_weight() -> None:
    task = points_task([16, 8, 0, 12], model=normed)
    plan = tree(task, [2, 4])
    loader = Loader(task, [r.device for r in plan.routes], 4)
    rounds = [list(loader.epoch()) for _ in range(2)]
    ran = run(plan, task, method="gpipe", rounds=2, batch_size=4, **RULES["momentum"])
    model = seeded(task)
    want = train_replicas(task, homes(plan, model), rounds, FACTORIES["momentum"], model=model)
    equal(ran, want)
    assert int(ran.weights["norm1.num_batches_tracked"]) == int(want.weights[-1]["norm1.num_batches_tracked"])
