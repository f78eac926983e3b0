"""The weight store: sums in micro-batch order, and steps that can be taken back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgesplit.errors import RunError
from edgesplit.optimizers import OptimizerSpec, Rule, spec_from_config
from edgesplit.weights import LayerStore

CONV, NORM = "conv", "norm"
LAYERS = {CONV: ["conv.w", "conv.b"], NORM: ["norm.w"]}
BUFFERS = {CONV: [], NORM: ["norm.mean", "norm.count"]}
START = {"conv.w": np.ones((2, 3)), "conv.b": np.zeros(2), "norm.w": np.ones(())}
MEANS = {"norm.mean": np.zeros(2), "norm.count": np.zeros((), np.int64)}


def tensor(array: np.ndarray, requires_grad: bool) -> torch.Tensor:
    return torch.from_numpy(np.array(array)).requires_grad_(requires_grad)


def store(kind: str = "numpy", **optimizer: Any) -> LayerStore:
    spec = spec_from_config({"name": "sgd", "lr": 0.1, **optimizer}, START)
    native = {"to_native": tensor} if kind == "torch" else {}
    held = LayerStore(LAYERS, BUFFERS, spec, **native)  # type: ignore[arg-type]
    held.load(START, MEANS)
    return held


def grads(held: LayerStore, value: float) -> dict[str, Any]:
    full = {name: np.full(array.shape, value) for name, array in START.items()}
    return {name: tensor(g, False) for name, g in full.items()} if torch.is_tensor(held.params["conv.w"]) else full


def forward(held: LayerStore) -> None:
    """What a BatchNorm's forward does to buffers: writes in place, or replaces in the dict."""
    held.buffers["norm.mean"] += 1.0
    held.buffers["norm.count"] = held.buffers["norm.count"] + 1


def snapshot(held: LayerStore) -> dict[str, np.ndarray]:
    exported = held.export()
    parts: list[Mapping[str, np.ndarray]] = [exported.params, exported.buffers, exported.optimizer]
    return {f"{index}/{name}": np.array(array) for index, part in enumerate(parts) for name, array in part.items()}


def run(held: LayerStore, step: int, micro: int, value: float = 1.0) -> None:
    """One step of one micro-batch of weight 2, up to the update."""
    held.begin(step, {CONV: [micro], NORM: [micro]})
    forward(held)
    held.accumulate([CONV, NORM], micro, grads(held, value), 2.0)
    held.update(step, [CONV, NORM])


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


@pytest.fixture(params=["numpy", "torch"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@settings(max_examples=40, deadline=None)
@given(st.permutations(range(6)), st.lists(st.floats(1e-3, 1e8), min_size=6, max_size=6))
def test_sums_do_not_depend_on_the_order_of_arrival(order: list[int], values: list[float]) -> None:
    """Bit for bit the sum in micro-batch order."""
    held = store()
    held.begin(0, {CONV: range(6), NORM: [1, 4]})
    for micro in order:
        layers = [CONV, NORM] if micro in (1, 4) else [CONV]
        held.accumulate(layers, micro, grads(held, values[micro]), values[micro] / 3)
    total, weight = 0.0, 0.0
    for value in values:
        total, weight = total + value, weight + value / 3
    arrays, weights = held.sums(0, [CONV, NORM])
    assert np.array_equal(arrays["conv.b"], [total, total])
    assert arrays["norm.w"] == values[1] + values[4]
    assert weights == {CONV: weight, NORM: values[1] / 3 + values[4] / 3}


def test_gradients_that_come_in_are_never_written(kind: str) -> None:
    held = store(kind)
    held.begin(0, {CONV: [0, 1, 2]})
    shared = grads(held, 1.0)
    for micro in range(3):
        held.accumulate([CONV], micro, shared, 1.0)
    assert float(shared["conv.b"][0]) == 1.0
    assert held.sums(0, [CONV])[0]["conv.b"].tolist() == [3.0, 3.0]


def test_report_is_of_the_mean_unscaled_gradient(kind: str) -> None:
    held = store(kind)
    held.begin(3, {CONV: [7, 8], NORM: [8]})
    held.accumulate([CONV], 7, grads(held, 8.0), 1.0)
    held.accumulate([CONV, NORM], 8, grads(held, 16.0), 3.0)
    report = held.report(3, loss_scale=2.0)
    assert report.finite
    assert report.layers == {CONV: (4.0, 8 * 3.0**2), NORM: (3.0, pytest.approx((16 / 3 / 2) ** 2))}
    held.update(3, [CONV], loss_scale=2.0)
    assert held.report(3, loss_scale=2.0) == report


def test_squares_are_added_in_float64() -> None:
    held = LayerStore({"a": ["w"]}, {}, OptimizerSpec((Rule(name="sgd", lr=1.0),), {"w": 0}))
    held.load({"w": np.zeros(3, np.float32)})
    held.begin(0, {"a": [0]})
    held.accumulate(["a"], 0, {"w": np.full(3, 1e30, np.float32)}, 1.0)
    assert held.report(0).layers["a"][1] == pytest.approx(3e60, rel=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_report_names_the_layer_that_is_not_finite(kind: str, bad: float) -> None:
    held = store(kind)
    held.begin(0, {CONV: [0, 1], NORM: [0, 1]})
    for micro in (0, 1):
        spoiled = grads(held, 1.0)
        spoiled["conv.b"][1] = bad if micro else -bad
        held.accumulate([CONV, NORM], micro, spoiled, 1.0)
    report = held.report(0)
    assert (report.finite, report.nonfinite) == (False, (CONV,))
    assert report.layers == {CONV: (2.0, 0.0), NORM: (2.0, 1.0)}


def test_update_divides_by_weight_and_loss_scale_then_clips(kind: str) -> None:
    held = store(kind)
    held.begin(0, {CONV: [0], NORM: [0]})
    held.accumulate([CONV, NORM], 0, grads(held, 12.0), 3.0)
    held.update(0, [CONV], lr=0.5, clip=0.25, loss_scale=4.0)
    held.update(0, [NORM])
    held.confirm(0)
    params = held.export().params
    assert params["conv.b"].tolist() == pytest.approx([-0.1 * 0.5 * 0.25] * 2)
    assert float(params["norm.w"]) == pytest.approx(1 - 0.1 * 4)
    assert held.version([CONV]) == held.version([NORM]) == 1


def test_a_layer_of_weight_zero_is_skipped_even_by_weight_decay() -> None:
    held = store(weight_decay=0.5, momentum=0.9)
    held.begin(0, {CONV: [0], NORM: [0]})
    held.accumulate([CONV], 0, grads(held, 0.0), 0.0)
    held.accumulate([NORM], 0, grads(held, 1.0), 1.0)
    held.update(0, [CONV, NORM])
    held.confirm(0)
    exported = held.export()
    assert np.array_equal(exported.params["conv.w"], START["conv.w"])
    assert set(exported.optimizer) == {"norm.w//count", "norm.w//momentum"}


@pytest.mark.parametrize("updated", [[], [NORM], [CONV, NORM]])
def test_rollback_puts_everything_back(kind: str, updated: list[str]) -> None:
    """Whatever layers were updated, and although the next step's forwards have written buffers."""
    held = store(kind, momentum=0.9)
    run(held, 0, 0)
    held.confirm(0)
    before, weights = snapshot(held), held.round_weights()
    held.begin(1, {CONV: [1], NORM: [1]})
    forward(held)
    held.accumulate([CONV, NORM], 1, grads(held, 5.0), 2.0)
    for layer in updated:
        held.update(1, [layer])
    held.begin(2, {CONV: [2], NORM: [2]})
    forward(held)
    held.accumulate([NORM], 2, grads(held, 5.0), 2.0)
    held.rollback(1)
    assert same(snapshot(held), before)
    assert held.round_weights() == weights
    assert held.version([CONV]) == held.version([NORM]) == 1
    with pytest.raises(RunError, match="expects no gradient of micro-batch 2"):
        held.accumulate([CONV], 2, grads(held, 5.0), 2.0)


def test_after_a_rollback_the_next_step_is_as_if_nothing_had_been(kind: str) -> None:
    straight, detour = store(kind, momentum=0.9), store(kind, momentum=0.9)
    run(straight, 0, 0)
    straight.confirm(0)
    run(straight, 2, 5, 3.0)
    straight.confirm(2)
    run(detour, 0, 0)
    detour.confirm(0)
    run(detour, 1, 1, 9.0)
    detour.rollback(1)
    run(detour, 2, 2, 3.0)
    detour.rollback(2)
    run(detour, 2, 5, 3.0)
    detour.confirm(2)
    assert same(snapshot(straight), snapshot(detour))
    assert straight.round_weights() == detour.round_weights() == {CONV: 4.0, NORM: 4.0}


def test_a_step_may_be_confirmed_before_it_is_applied() -> None:
    early, late = store(), store()
    for held in (early, late):
        held.begin(0, {CONV: [0], NORM: [0]})
        forward(held)
        held.accumulate([CONV, NORM], 0, grads(held, 1.0), 1.0)
    early.confirm(0)
    with pytest.raises(RunError, match="cannot be exported before step 0 is applied"):
        early.export()
    early.update(0, [CONV])
    with pytest.raises(RunError, match="cannot be taken back before step 0, which is confirmed, is applied"):
        early.rollback(1)
    early.update(0, [NORM])
    late.update(0, [CONV, NORM])
    late.confirm(0)
    assert same(snapshot(early), snapshot(late))
    run(early, 1, 1)
    early.rollback(1)
    assert same(snapshot(early), snapshot(late))
    assert early.round_weights() == {CONV: 1.0, NORM: 1.0}
    early.reset_round()
    assert early.round_weights() == {CONV: 0.0, NORM: 0.0}


def test_replicas_sums_replace_the_own_ones(kind: str) -> None:
    """Two replicas with 1 and 3 units update as one node with all 4; a replica without samples follows."""
    joint, left, right, idle = (store(kind, momentum=0.9) for _ in range(4))
    joint.begin(0, {CONV: [0, 1]})
    left.begin(0, {CONV: [0]})
    right.begin(0, {CONV: [1]})
    idle.begin(0, {CONV: []})
    for held, micro, value, weight in (
        (joint, 0, 1.0, 1.0),
        (joint, 1, 6.0, 3.0),
        (left, 0, 1.0, 1.0),
        (right, 1, 6.0, 3.0),
    ):
        held.accumulate([CONV], micro, grads(held, value), weight)
    parts = [held.sums(0, [CONV]) for held in (left, right, idle)]
    total: dict[str, np.ndarray] = {}
    for arrays, _ in parts:
        for name, array in arrays.items():
            total[name] = total.get(name, 0.0) + array
    weight = sum(weights[CONV] for _, weights in parts)
    for held in (left, right, idle):
        held.set_sums(0, total, {CONV: weight})
        assert held.report(0) == joint.report(0)
    for held in (joint, left, right, idle):
        held.update(0, [CONV])
        held.confirm(0)
    assert all(same(snapshot(held), snapshot(joint)) for held in (left, right, idle))


def test_an_update_that_fails_changes_nothing() -> None:
    def explode(*args: Any) -> Any:
        raise ZeroDivisionError

    held = LayerStore(LAYERS, BUFFERS, OptimizerSpec((), {}), update=explode)
    held.load(START, MEANS)
    before = snapshot(held)
    held.begin(0, {CONV: [0], NORM: [0]})
    held.accumulate([CONV], 0, grads(held, 1.0), 1.0)
    with pytest.raises(RunError, match="step 0 lacks the gradients of micro-batches 0 at layer 'norm'"):
        held.update(0, [CONV, NORM])
    with pytest.raises(ZeroDivisionError):
        held.update(0, [CONV])
    assert same(snapshot(held), before)
    assert held.version([CONV]) == 0


def test_updates_wait_for_the_step_before() -> None:
    held = store()
    run(held, 0, 0)
    held.begin(1, {CONV: [1]})
    held.accumulate([CONV], 1, grads(held, 1.0), 1.0)
    with pytest.raises(RunError, match="step 1 cannot be applied before step 0 is confirmed"):
        held.update(1, [CONV])
    with pytest.raises(RunError, match="step 0 has been applied to layer 'conv' already"):
        held.update(0, [CONV])
    for action in (held.export, held.reset_optimizer, lambda: held.load(START)):
        with pytest.raises(RunError, match="before step 0 is confirmed or taken back"):
            action()  # type: ignore[operator]
    held.confirm(0)
    held.update(1, [CONV])
    with pytest.raises(RunError, match="step 0 cannot be taken back: step 0 is confirmed"):
        held.rollback(0)
    held.rollback(1)
    with pytest.raises(RunError, match="step 0 has begun already"):
        held.begin(0, {})
    held.abandon()
    held.begin(0, {})


def test_gradients_that_nobody_expects_are_refused() -> None:
    held = store()
    held.begin(0, {CONV: [0, 1], NORM: [0]})
    held.accumulate([CONV], 0, grads(held, 1.0), 1.0)
    with pytest.raises(RunError, match="layer 'conv' expects no gradient of micro-batch 0"):
        held.accumulate([NORM, CONV], 0, grads(held, 1.0), 1.0)
    held.accumulate([NORM], 0, grads(held, 1.0), 1.0)  # the refused call changed nothing
    with pytest.raises(RunError, match="layer 'head' is not on this node, which has conv, norm"):
        held.accumulate(["head"], 1, {}, 1.0)
    with pytest.raises(RunError, match="step 4 is not in flight here"):
        held.report(4)


def test_a_frozen_parameter_and_one_without_gradient_stay() -> None:
    spec = spec_from_config({"name": "sgd", "lr": 0.1, "weight_decay": 0.1}, ["conv.w", "norm.w"])
    held = LayerStore(LAYERS, BUFFERS, spec, frozen=["conv.b"], to_native=tensor)
    held.load(START, MEANS)
    assert [held.params[name].requires_grad for name in START] == [True, False, True]
    held.begin(0, {CONV: [0], NORM: [0]})
    held.accumulate([CONV, NORM], 0, {"norm.w": tensor(np.ones(()), False), "conv.w": None}, 1.0)
    held.update(0, [CONV, NORM])
    held.confirm(0)
    assert held.export().params["conv.w"].tolist() == START["conv.w"].tolist()
    assert [held.params[name].requires_grad for name in START] == [True, False, True]


def test_state_goes_out_and_into_another_kind_of_store(kind: str) -> None:
    source, twin = store(kind, momentum=0.9), store("torch" if kind == "numpy" else "numpy", momentum=0.9)
    run(source, 0, 0)
    source.confirm(0)
    exported = source.export()
    twin.load(*exported)
    assert same(snapshot(twin), snapshot(source))
    forward(source)
    assert float(exported.buffers["norm.mean"][0]) == 1.0  # not the buffer that runners write
    run(twin, 1, 1)
    twin.rollback(1)
    assert same(snapshot(twin), {**snapshot(source), "1/norm.mean": np.ones(2), "1/norm.count": np.asarray(1)})
    assert set(source.export([NORM]).params) == {"norm.w"}
    twin.reset_optimizer()
    assert twin.export().optimizer == {}


def test_what_is_loaded_is_checked() -> None:
    held = store(momentum=0.9)
    before = snapshot(held)
    for arguments, message in (
        ({"params": {"conv.x": np.ones(1)}}, "parameter 'conv.x' is not on this node"),
        ({"params": {"conv.b": np.ones(3)}}, r"'conv.b' has shape \(3,\), but \(2,\) is held"),
        ({"params": {"conv.b": np.ones(2, np.float32)}}, "dtype float32, but float64 is held"),
        ({"buffers": {"conv.b": np.ones(2)}}, "buffer 'conv.b' is not on this node"),
        ({"optimizer": {"x//count": np.asarray(1)}}, "parameter 'x'"),
        (
            {"optimizer": {"conv.b//count": np.asarray(1), "conv.b//momentum": np.ones(5)}},
            r"momentum of 'conv.b' has shape \(5,\), not \(2,\)",
        ),
    ):
        with pytest.raises(RunError, match=message):
            held.load(**arguments)  # type: ignore[arg-type]
    assert same(snapshot(held), before)


def test_a_tied_parameter_belongs_to_the_first_layer_that_names_it() -> None:
    spec = spec_from_config({"name": "sgd", "lr": 1.0}, ["emb"])
    held = LayerStore({"in": ["emb"], "out": ["emb"]}, {}, spec)
    held.load({"emb": np.zeros(2)})
    held.begin(0, {"in": [0], "out": [0]})
    held.accumulate(["in", "out"], 0, {"emb": np.ones(2)}, 1.0)
    assert held.report(0).layers == {"in": (1.0, 2.0), "out": (1.0, 0.0)}
    held.update(0, ["in", "out"])
    held.confirm(0)
    assert held.export().params["emb"].tolist() == [-1.0, -1.0]
