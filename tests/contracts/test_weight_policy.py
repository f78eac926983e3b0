"""The weight policy's contract: it equals one process that replays the recorded order by the paper's rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgesplit.errors import RunError
from edgesplit.optimizers import OptimizerSpec, Rule
from edgesplit.weights import Latest, LayerStore, Stash

LR, MOMENTUM = 0.01, 0.9
Entry = tuple[str, int, int]  # (op, stage, micro)


def one_f_one_b(stages: int, micros: int) -> list[Entry]:
    """PipeDream's steady state: stage s runs ``stages - s`` forwards ahead, then a backward, its update, a forward."""
    local = []
    for stage in range(stages):
        warmup = min(stages - stage, micros)
        order = [("F", micro) for micro in range(warmup)]
        for micro in range(micros):
            order += [("B", micro), ("U", micro)]
            order += [("F", micro + warmup)] if micro + warmup < micros else []
        local.append(order)
    return interleave(local, [])


def interleave(local: list[list[tuple[str, int]]], choices: list[int]) -> list[Entry]:
    """One global order of the stages' orders that respects who waits for whom, as ``choices`` decide."""
    stages, done, order = len(local), set(), []
    left = [list(actions) for actions in local]
    while any(left):
        ready = [s for s in range(stages) if left[s] and waits_for(left[s][0], s, stages) <= done]
        stage = ready[choices.pop() % len(ready) if choices else 0]
        op, micro = left[stage].pop(0)
        done.add((op, stage, micro))
        order.append((op, stage, micro))
    return order


def waits_for(action: tuple[str, int], stage: int, stages: int) -> set[Entry]:
    op, micro = action
    if op == "F":
        return {("F", stage - 1, micro)} if stage else set()
    if op == "B":
        return {("B", stage + 1, micro)} if stage + 1 < stages else {("F", stage, micro)}
    return set()


def data(micros: int, width: int, seed: int) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Micro-batches of 1 to 3 samples, targets, and each stage's first weights."""
    random = np.random.default_rng(seed)
    x = [random.normal(size=(1 + micro % 3, width)) for micro in range(micros)]
    return x, [random.normal(size=a.shape) for a in x], [random.normal(size=(width, width)) * 0.4 for _ in range(4)]


def replay(order: list[Entry], stages: int, x: Any, y: Any, start: Any) -> tuple[list[np.ndarray], list[int]]:
    """The rule of PipeDream, section 3.3, on a chain of linear stages with a squared loss.

    Every stage keeps the list of all weights it ever had. A forward of micro-batch m uses the last of them; the
    backward of m multiplies by the weights that m's forward used at this stage; the mean gradient of m moves the last
    ones, with plain momentum. Delays are counted as weights that appeared in between.
    """
    history = [[start[s]] for s in range(stages)]
    velocity = [np.zeros_like(start[s]) for s in range(stages)]
    used: dict[tuple[int, int], int] = {}
    acts: dict[tuple[int, int], np.ndarray] = {(0, m): a for m, a in enumerate(x)}
    back: dict[tuple[int, int], np.ndarray] = {}
    grads: dict[tuple[int, int], np.ndarray] = {}
    delays = []
    for op, s, m in order:
        if op == "F":
            used[s, m] = len(history[s]) - 1
            acts[s + 1, m] = acts[s, m] @ history[s][-1]
        elif op == "B":
            upstream = 2 * (acts[s + 1, m] - y[m]) if s == stages - 1 else back[s + 1, m]
            grads[s, m] = acts[s, m].T @ upstream / len(x[m])
            back[s, m] = upstream @ history[s][used[s, m]].T
            delays.append(len(history[s]) - 1 - used[s, m])
        else:
            velocity[s] = MOMENTUM * velocity[s] + grads[s, m]
            history[s].append(history[s][-1] - LR * velocity[s])
    return [h[-1] for h in history], delays


def stage_stores(stages: int, start: list[np.ndarray], rule: Rule) -> list[LayerStore]:
    stores = []
    for s in range(stages):
        store = LayerStore({f"l{s}": [f"w{s}"]}, {}, OptimizerSpec((rule,), {f"w{s}": 0}))
        store.load({f"w{s}": start[s]})
        stores.append(store)
    return stores


def drive(order: list[Entry], policies: list[Stash], x: Any, y: Any) -> list[int]:
    """Run the order through the policies, as an engine does."""
    stages, delays = len(policies), []
    acts: dict[tuple[int, int], np.ndarray] = {(0, m): a for m, a in enumerate(x)}
    back: dict[tuple[int, int], np.ndarray] = {}
    for op, s, m in order:
        policy, name = policies[s], f"w{s}"
        if op == "F":
            _, weights = policy.weights(m, "F")
            acts[s + 1, m] = acts[s, m] @ weights[name]
        elif op == "B":
            upstream = 2 * (acts[s + 1, m] - y[m]) if s == stages - 1 else back[s + 1, m]
            _, weights = policy.weights(m, "B")
            back[s, m] = upstream @ weights[name].T
            delays.append(policy.delay(m))
            policy.accumulate(m, {name: acts[s, m].T @ upstream}, policy.delay(m), float(len(x[m])))
        else:
            assert policy.apply(0, m, 1.0) == policy.version
    return delays


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 99), st.lists(st.integers(0, 10), max_size=80))
def test_stash_equals_the_replay(stages: int, micros: int, seed: int, choices: list[int]) -> None:
    x, y, start = data(micros, 3, seed)
    local = [[(op, m) for op, s, m in one_f_one_b(stages, micros) if s == stage] for stage in range(stages)]
    order = interleave(local, list(choices))
    want, want_delays = replay(order, stages, x, y, start)
    stores = stage_stores(stages, start, Rule(name="sgd", lr=LR, momentum=MOMENTUM))
    policies = [Stash(store, store.layers) for store in stores]
    assert drive(order, policies, x, y) == want_delays
    for s, store in enumerate(stores):
        np.testing.assert_allclose(store.export().params[f"w{s}"], want[s], rtol=1e-12, atol=1e-12)
        assert store.round_weights() == {f"l{s}": float(sum(map(len, x)))}
        assert policies[s].held == ()


def test_delays_are_those_of_the_paper_and_versions_are_few() -> None:
    """In the steady state stage s of n lags by n - 1 - s updates and holds at most n - s versions."""
    stores = stage_stores(4, [np.ones((3, 3))] * 4, Rule(name="sgd", lr=LR))
    policies = [Stash(store, store.layers) for store in stores]
    most = [0] * 4
    for entry in one_f_one_b(4, 9):
        drive_one(entry, policies)
        most = [max(m, len(policies[s].held)) for s, m in enumerate(most)]
    assert [max(policy.delays) for policy in policies] == [3, 2, 1, 0]
    assert [policy.delays[3 - s] for s, policy in enumerate(policies)] == [6, 7, 8, 9]
    assert most == [4, 3, 2, 1]


def drive_one(entry: Entry, policies: list[Stash]) -> None:
    op, s, m = entry
    if op == "F":
        policies[s].weights(m, "F")
    elif op == "B":
        policies[s].weights(m, "B")
        policies[s].accumulate(m, {f"w{s}": np.ones((3, 3))}, policies[s].delay(m), 1.0)
    else:
        policies[s].apply(0, m, 1.0)


def test_stash_skips_what_is_not_finite_and_what_weighs_nothing() -> None:
    (store,) = stage_stores(1, [np.ones((2, 2))], Rule(name="sgd", lr=LR, weight_decay=0.1))
    policy = Stash(store, ["l0"])
    for micro, value, weight in ((0, np.nan, 1.0), (1, 0.0, 0.0), (2, 4.0, 2.0)):
        policy.weights(micro, "F")
        policy.accumulate(micro, {"w0": np.full((2, 2), value)}, policy.delay(micro), weight)
        policy.apply(0, micro, 1.0, loss_scale=2.0)
    assert (policy.version, policy.skipped) == (1, 1)
    np.testing.assert_allclose(store.export().params["w0"], 1 - LR * (1.0 + 0.1))
    assert store.round_weights() == {"l0": 2.0}


def test_stash_refuses_clipping_and_what_it_does_not_hold() -> None:
    (store,) = stage_stores(1, [np.ones((2, 2))], Rule(name="sgd", lr=LR))
    policy = Stash(store, ["l0"])
    with pytest.raises(RunError, match="drop clip_norm"):
        policy.apply(0, 0, 1.0, clip=0.5)
    with pytest.raises(RunError, match="no gradient of micro-batch 0 is here"):
        policy.apply(0, 0, 1.0)
    with pytest.raises(RunError, match="micro-batch 5 has no live forward here"):
        policy.weights(5, "B")


def test_dropped_forwards_free_their_versions() -> None:
    (store,) = stage_stores(1, [np.ones((2, 2))], Rule(name="sgd", lr=LR))
    policy = Stash(store, ["l0"])
    for micro in range(3):
        policy.weights(micro, "F")
        if micro == 0:
            policy.weights(7, "F")
            policy.accumulate(0, {"w0": np.ones((2, 2))}, policy.delay(0), 1.0)
            policy.apply(0, 0, 1.0)
    assert policy.held == (0, 1)
    policy.drop([7])
    assert policy.held == (1,)
    policy.drop()
    assert policy.held == ()


def test_latest_equals_one_step_on_the_joint_batch() -> None:
    """Two stages on one node, micro-batches of unequal size, against the gradient of the mean over all samples."""
    x, y, start = data(4, 3, 1)
    spec = OptimizerSpec((Rule(name="sgd", lr=LR),), {"w0": 0, "w1": 0})
    store = LayerStore({"a": ["w0"], "b": ["w1"]}, {}, spec)
    store.load({"w0": start[0], "w1": start[1]})
    first, second = Latest(store, ["a"]), Latest(store, ["b"])
    store.begin(0, {"a": range(4), "b": range(4)})
    for micro in range(4):
        version, weights = first.weights(micro, "F")
        hidden = x[micro] @ weights["w0"]
        error = 2 * (hidden @ second.weights(micro, "F")[1]["w1"] - y[micro])
        assert version == second.weights(micro, "B")[0] == 0
        second.accumulate(micro, {"w1": hidden.T @ error}, second.delay(micro), float(len(x[micro])))
        upstream = error @ first.weights(micro, "B")[1]["w1"].T
        first.accumulate(micro, {"w0": x[micro].T @ upstream}, first.delay(micro), float(len(x[micro])))
    assert (second.apply(0, 3, 1.0), first.version) == (1, 0)
    assert first.apply(0, 3, 1.0) == 1
    store.confirm(0)

    joint_x, joint_y = np.concatenate(x), np.concatenate(y)
    error = 2 * (joint_x @ start[0] @ start[1] - joint_y) / len(joint_x)
    params = store.export().params
    np.testing.assert_allclose(params["w1"], start[1] - LR * (joint_x @ start[0]).T @ error, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(params["w0"], start[0] - LR * joint_x.T @ error @ start[1].T, rtol=1e-12, atol=1e-13)


def test_latest_refuses_an_order_that_needs_versions() -> None:
    (store,) = stage_stores(1, [np.ones((2, 2))], Rule(name="sgd", lr=LR))
    policy = Latest(store, ["l0"])
    store.begin(0, {"l0": [0]})
    policy.weights(0, "F")
    policy.weights(1, "F")
    policy.accumulate(0, {"w0": np.ones((2, 2))}, 0, 1.0)
    policy.apply(0, 0, 1.0)
    with pytest.raises(RunError, match="saw version 0 forward and would see 1 backward"):
        policy.weights(1, "B")
    with pytest.raises(RunError, match="comes 1 updates late"):
        policy.accumulate(1, {}, policy.delay(1), 1.0)
    policy.drop([1])
    with pytest.raises(RunError, match="no live forward"):
        policy.delay(1)


def test_stash_tells_versions_of_overlapping_stages_apart() -> None:
    """Layers that another stage of the same node updates too: equal newest numbers, different weights."""
    params = {"a": ["a.w"], "b": ["b.w"]}
    spec = OptimizerSpec((Rule(name="sgd", lr=1.0),), {"a.w": 0, "b.w": 0})
    store = LayerStore(params, {}, spec)
    store.load({"a.w": np.zeros(1), "b.w": np.zeros(1)})
    both, only_b = Stash(store, ["a", "b"]), Stash(store, ["b"])
    for policy, micro in ((only_b, 1), (both, 2)):
        policy.weights(micro, "F")
    only_b.accumulate(1, {"b.w": np.ones(1)}, 0, 1.0)
    only_b.apply(0, 1, 1.0)  # b is at 1, a at 0
    both.weights(3, "F")
    store.apply(["a"], {"a.w": np.ones(1)}, 1.0)  # the newest number is 1 as before
    both.weights(4, "F")
    seen = {micro: {n: float(a[0]) for n, a in both.weights(micro, "B")[1].items()} for micro in (2, 3, 4)}
    assert seen == {2: {"a.w": 0, "b.w": 0}, 3: {"a.w": 0, "b.w": -1}, 4: {"a.w": -1, "b.w": -1}}
