"""The fleet equals one process: the top oracle, over memory. ``tests/system`` has part of it over a real broker."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgesplit.codecs import CODECS
from edgesplit.coordinator import Coordinator
from edgesplit.data import epoch_order
from edgesplit.errors import ScheduleError
from edgesplit.plan import Plan
from edgesplit.protocol import Report, Send
from edgesplit.segments import masks
from edgesplit.segments.base import Samples
from edgesplit.sheets import Cutting, Draft, Share
from edgesplit.task import Shard, Task
from edgesplit.transport.base import Message
from tests.cases import (
    EXACT,
    FACTORIES,
    METHODS,
    PLANS,
    RULES,
    SIZES,
    Loader,
    Points,
    alternating,
    apart,
    by_rounds,
    chain,
    digits,
    distance,
    english,
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
    uneven,
)
from tests.oracle import train_replicas, train_single

pytestmark = pytest.mark.usefixtures("one_thread")


# --- (a) one replica a layer ----------------------------------------------------------------------------------------

LOOPS = {
    "two nodes twice": lambda task: chain(task, [1, 3, 5], ["a", "b", "a", "b"]),
    "two nodes thrice": lambda task: chain(task, [1, 2, 3, 4, 5], ["a", "b"] * 3),
    "three nodes twice": lambda task: chain(task, [1, 2, 3, 4, 5], ["a", "b", "c"] * 2),
}


@pytest.mark.parametrize(("shape", "method", "size", "rule"), alternating(PLANS, METHODS, SIZES))
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


def test_the_clip_factor_does_not_depend_on_who_reports_first() -> None:
    plan = tree(points_task([8] * 4), [1, 4])
    nodes = {node: index for index, node in enumerate(plan.nodes())}
    factors = set()
    for order in itertools.islice(itertools.permutations(nodes), 0, 5040, 97):
        coordinator = Coordinator(plan, Cutting(1), clip_norm=0.5)
        coordinator.issue([Draft(0, {device: Share(0, 0, 8) for device in ("d1", "d2", "d3", "d4")})], 0.0)
        effects: list[Any] = []
        for node in order:
            pair = (8.0 / 3, 1 / (nodes[node] + 3))
            report = Report(0, layers=dict.fromkeys(plan.layers_of(node), pair))
            effects += coordinator.receive(Message(kind="report", sender=node, meta=report.meta()), 0.0)
        factors |= {e.message.meta["clip"] for e in effects if isinstance(e, Send)}
    assert len(factors) == 1


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


@pytest.mark.parametrize(("method", "cuts", "size", "rule"), alternating(METHODS, [[1, 4], [1, 3, 5]], SIZES), ids=str)
def test_replicas_with_every_step_and_these_sizes(method: str, cuts: list[int], size: str, rule: str) -> None:
    samples, batch, micros = uneven(size)
    task = points_task(samples)
    plan = tree(task, cuts)
    options = {"every": "step", "micros": micros, "batch_size": batch, "steps_per_round": 5, **RULES[rule]}
    ran = run(plan, task, method=method, **options)
    equal(ran, one_process(task, rule, Loader(task, [r.device for r in plan.routes], batch).steps(5)))


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
@pytest.mark.parametrize("method", METHODS)
def test_the_cnn_of_the_demo_on_a_tree_equals_one_process(method: str, cuts: list[int], rule: str) -> None:
    task = digits([14, 9, 0, 12])
    plan = tree(task, cuts)
    ran = run(plan, task, method=method, every="step", micros=2, batch_size=6, steps_per_round=5, **RULES[rule])
    equal(ran, one_process(task, rule, Loader(task, [r.device for r in plan.routes], 6).steps(5)))


@pytest.mark.parametrize("cuts", [[1, 2], [1, 2, 3]], ids=["tree", "U-shape"])
@pytest.mark.parametrize("method", METHODS)
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
    equal(ran, by_rounds(task, plan, rounds, rule, state))


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


@pytest.mark.parametrize("every", ["step", "round"])
def test_an_optimizer_that_only_torch_has_equals_one_process(every: str) -> None:
    def rmsprop(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.RMSprop([param for _, param in named], lr=0.01, momentum=0.5, centered=True)

    task = points_task(UNEQUAL if every == "step" else [50], optimizer=rmsprop)
    plan = tree(task, [1, 4]) if every == "step" else chain(task, [1, 4], ["d1", "e1", "d1"])
    ran = run(plan, task, every=every, micros=3, batch_size=8, steps_per_round=5)
    loader = Loader(task, [r.device for r in plan.routes], 8)
    equal(ran, train_single(task, loader.steps(5), model=seeded(task)))


# --- (f) weights of 0, integers, frozen and unused parameters, BatchNorm ---------------------------------------------

IGNORED = -100


class Padded(Points):
    """Points of which only every third has a class, and none of those from ``start`` to ``stop``."""

    def __init__(self, count: int, seed: int, start: int = 0, stop: int = 0) -> None:
        super().__init__(count, seed)
        self.y[torch.arange(count) % 3 > 0] = IGNORED
        self.y[start:stop] = IGNORED


def padded_task(train: Callable[[Shard], Any]) -> Task:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        assert (target != IGNORED).any(), "a micro-batch of weight 0 must not reach the loss"
        return F.cross_entropy(output, target, ignore_index=IGNORED)

    return points_task(train=train, loss=loss, weight=lambda target: (target != IGNORED).sum(), test=None)


@pytest.mark.parametrize("options", [{"micro_batch_size": 1}, {"micros": 5, "split_backward": True}])
@pytest.mark.parametrize("rule", ["clipped AdamW", "momentum"])
def test_micro_batches_of_weight_0_do_not_count(rule: str, options: dict[str, Any]) -> None:
    task = padded_task(lambda shard: Padded(20, shard.index, 0, 20 if shard.index == 2 else 0))
    plan = tree(task, [1, 4])
    ran = run(plan, task, every="step", batch_size=8, steps_per_round=5, **options, **RULES[rule])
    equal(ran, one_process(task, rule, Loader(task, [r.device for r in plan.routes], 8).steps(5)))
    assert all(step.weight < step.samples / 2 for step in ran.steps)


@pytest.mark.parametrize("rule", ["clipped AdamW", "momentum"])
def test_a_step_of_weight_0_changes_nothing(rule: str) -> None:
    rows = epoch_order(0, "a", 0, 24)[8:16]
    data = Padded(24, 0)
    data.y[rows.tolist()] = IGNORED
    task = padded_task(lambda shard: data)
    plan = chain(task, [2], ["a", "b"])
    with open_session(plan, task, batch_size=8, micros=2, steps_per_round=1, **RULES[rule]) as session:
        found = []
        for _ in range(3):
            session.fit(1)
            found.append(session.weights())
    assert [done.skipped for done in session.rounds] == [0, 0, 0]
    assert identical(found[0], found[1])
    assert not identical(found[1], found[2])


def tokens() -> nn.Module:
    """Takes a bare integer tensor."""
    layers = [
        ("embed", nn.Embedding(50, 6)),
        ("flat", nn.Flatten()),
        ("drop", nn.Dropout(0.2)),
        ("out", nn.Linear(18, 4)),
    ]
    return nn.Sequential(OrderedDict(layers)).double()


@pytest.mark.parametrize("cuts", [[1, 2], [1, 2, 3]], ids=["tree", "U-shape"])
def test_integer_inputs(cuts: list[int]) -> None:
    def train(shard: Shard) -> Any:
        generator = torch.Generator().manual_seed(shard.index)
        x = torch.randint(0, 50, (UNEQUAL[shard.index], 3), generator=generator)
        return torch.utils.data.TensorDataset(x, x.sum(1) % 4)

    task = points_task(model=tokens, train=train, test=None)
    plan = tree(task, cuts)
    ran = run(plan, task, every="step", micros=3, batch_size=8, steps_per_round=5, **RULES["clipped AdamW"])
    equal(ran, one_process(task, "clipped AdamW", Loader(task, [r.device for r in plan.routes], 8).steps(5)))


class Spare(nn.Linear):
    """A linear layer with a parameter that its forward does not use."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.spare = nn.Parameter(torch.ones(3))


def partly(frozen: Sequence[str]) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        whole = mlp()
        whole[3] = Spare(10, 10).double()
        for name, param in whole.named_parameters():
            param.requires_grad_(not name.startswith(tuple(frozen)))
        return whole

    return model


@pytest.mark.parametrize("frozen", [("c.weight",), ("a",), ("a", "c"), ("e",), ("a.bias", "e")], ids="-".join)
@pytest.mark.parametrize(("shape", "split"), [("two nodes", False), ("four nodes", True), ("U-shape", False)])
def test_frozen_and_unused_parameters_stay_as_they_are(shape: str, split: bool, frozen: Sequence[str]) -> None:
    task = points_task([50], model=partly(frozen))
    plan = PLANS[shape](task)
    ran = run(plan, task, split_backward=split, micros=3, batch_size=20, steps_per_round=3, **RULES["clipped AdamW"])
    equal(ran, one_process(task, "clipped AdamW", Loader(task, [plan.routes[0].device], 20).steps(3)))
    start = dict(seeded(task).named_parameters())
    still = [name for name in start if name.startswith(tuple(frozen)) or name.endswith("spare")]
    assert identical({n: ran.weights[n] for n in still}, {n: start[n] for n in still})


@pytest.mark.parametrize("every", ["step", "round"])
def test_a_frozen_first_layer_on_a_tree(every: str) -> None:
    task = points_task(UNEQUAL, model=partly(["a"]))
    plan = tree(task, [1, 4])
    ran = run(plan, task, every=every, micros=3, batch_size=8, rounds=5, steps_per_round=1, **RULES["sgd"])
    equal(ran, one_process(task, "sgd", Loader(task, [r.device for r in plan.routes], 8).steps(5)))


@pytest.mark.parametrize("shape", PLANS)
def test_batch_norm_with_whole_batches_equals_one_process(shape: str) -> None:
    task = points_task([50], model=normed)
    plan = PLANS[shape](task)
    ran = run(plan, task, batch_size=20, steps_per_round=5, **RULES["clipped momentum"])
    equal(ran, one_process(task, "clipped momentum", Loader(task, [plan.routes[0].device], 20).steps(5)))


def test_batch_norm_kept_in_evaluation_mode_allows_micro_batches_and_replicas() -> None:
    def frozen(module: nn.Module) -> None:
        for part in module.modules():
            if isinstance(part, nn.BatchNorm1d):
                part.eval()

    task = points_task(UNEQUAL, model=normed, train_mode=frozen)
    plan = tree(task, [2, 4])
    ran = run(plan, task, every="step", micros=4, batch_size=8, steps_per_round=5, **RULES["momentum"])
    equal(ran, one_process(task, "momentum", Loader(task, [r.device for r in plan.routes], 8).steps(5)))


# --- (g) codecs on links ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["three nodes", "U-shape"])
@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
def test_with_a_codec_it_stays_near(codec: str, shape: str) -> None:
    """The bound: a gradient is a product of values that crossed each cut up and down, each time with the codec's error.

    That the model's own slopes and five steps may double it is the margin.
    """
    task = points_task([100])
    plan = PLANS[shape](task)
    options = {"micros": 4, "batch_size": 48, "steps_per_round": 5, **RULES["momentum"]}
    exact, start = run(plan, task, **options).weights, dict(seeded(task).named_parameters())
    coded = run(plan, task, codec={"up": codec, "down": codec}, **options).weights
    meetings = 2 * (len(plan.routes[0].stages) - 1)
    assert 0 < distance(coded, exact) <= meetings * 2 * CODECS[codec].error * distance(exact, start)


class Pass(nn.Module):
    """Hands integers on, beside a number that nothing reads."""

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return {"ids": ids, "noise": ids.double() / 7}


class Look(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(70_001, 4)

    def forward(self, value: dict[str, Tensor]) -> Tensor:
        return self.table(value["ids"])


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
def test_integers_are_exact_under_every_codec(codec: str) -> None:
    ids = torch.arange(70_000, 69_960, -1)
    task = points_task(
        model=lambda: nn.Sequential(Pass(), Look()).double(),
        train=lambda shard: torch.utils.data.TensorDataset(ids, ids % 4),
        test=None,
    )
    plan = chain(task, [1], ["a", "b"])
    options = {"micros": 3, "batch_size": 16, "steps_per_round": 3, **RULES["sgd"]}
    raw, coded = run(plan, task, **options), run(plan, task, codec={"up": codec, "down": codec}, **options)
    assert raw.losses == coded.losses
    assert identical(raw.weights, coded.weights)
