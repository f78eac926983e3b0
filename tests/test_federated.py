from __future__ import annotations

import gc
import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.server.strategy import FedAvg as OldFedAvg
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file, save_file

from edgesplit.errors import ExperimentError, RunError
from edgesplit.federated import STRATEGIES, Federation, Group, Reply, Request, TransportGrid, average, make_strategy
from edgesplit.federated.grid import enable_messages, from_record, node_id, to_record

Arrays = Mapping[str, np.ndarray]
NODES = ("pi-1", "pi-2", "pi-3", "pi-4")


@pytest.fixture(scope="module", autouse=True)
def small_collections() -> Iterator[None]:
    """Some strategies collect garbage for every reply; what the test session itself holds need not be walked."""
    gc.freeze()
    yield
    gc.unfreeze()


def trained(seed: int, scale: float = 0.1) -> Callable[[list[Request]], list[Reply]]:
    """Training that moves each node's arrays by numbers that follow from the seed and the node."""

    def train(requests: list[Request]) -> list[Reply]:
        return [
            Reply(r.node, r.group, {n: moved(seed, r.node, n, a, scale) for n, a in r.arrays.items()}, weight(r.node))
            for r in requests
        ]

    return train


def moved(seed: int, node: str, name: str, array: np.ndarray, scale: float = 0.1) -> np.ndarray:
    if array.dtype.kind not in "fc":
        return array
    draw = np.random.default_rng([seed, *node.encode(), *name.encode()])
    return (array + scale * draw.normal(size=array.shape)).astype(array.dtype)


def weight(node: str) -> float:
    return {"pi-1": 12, "pi-2": 7.25, "pi-3": 1, "pi-4": 30}[node]


def model(dtype: Any = np.float64) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(3)
    return {"1.weight": draw.normal(size=(3, 4)).astype(dtype), "1.scale": np.array(0.5, dtype)}


def rounds(federation: Federation, groups: dict[str, Group], numbers: Iterable[int]) -> dict[str, Group]:
    """Run rounds; return the groups with their new arrays."""
    for number in numbers:
        results = federation.run_round(number, groups, trained(number))
        groups = {k: Group(g.nodes, results[k].arrays if k in results else g.arrays) for k, g in groups.items()}
    return groups


# the grid


def test_a_grid_offers_all_that_flower_asks_of_one() -> None:
    grid = TransportGrid(NODES, lambda requests: [])
    assert isinstance(grid, Grid)
    assert [node.node_id for node in grid.get_nodes()] == [node_id(name) for name in NODES]
    with pytest.raises(RunError, match="no flower run"):
        _ = grid.run


def test_node_ids_are_the_same_in_every_process() -> None:
    assert node_id("pi-1") == int(hashlib.sha256(b"pi-1").hexdigest()[:16], 16) // 2 == 5583247455447837078
    assert len({node_id(f"pi-{i}") for i in range(10_000)}) == 10_000
    assert all(0 < node_id(f"pi-{i}") < 2**63 for i in range(100))


DTYPES = st.sampled_from(["f8", "f4", "f2", "i8", "i4", "u1", "?", "c8"])


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=5), DTYPES.flatmap(lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, min_side=0)))
    )
)
def test_arrays_survive_the_way_through_flower_exactly(arrays: dict[str, np.ndarray]) -> None:
    seen: list[Request] = []

    def exchange(requests: list[Request]) -> list[Reply]:
        seen.extend(requests)
        return [Reply(r.node, r.group, r.arrays, 1) for r in requests]

    grid = TransportGrid(["a", "b"], exchange)
    content = RecordDict({"arrays": to_record(arrays), "config": ConfigRecord({"server-round": 3})})
    messages = [grid.create_message(content, "train", node_id(name), "layers 0-2") for name in ("b", "a")]
    replies = grid.send_and_receive(messages, timeout=1)
    assert [(r.node, r.group, r.config) for r in seen] == [(n, "layers 0-2", {"server-round": 3}) for n in ("b", "a")]
    assert [m.metadata.src_node_id for m in replies] == [node_id("b"), node_id("a")]
    for message, request in zip(replies, seen, strict=True):
        for found in (request.arrays, from_record(message.content["arrays"])):
            assert {n: (x.dtype, x.shape, x.tobytes()) for n, x in found.items()} == {
                n: (x.dtype, x.shape, x.tobytes()) for n, x in arrays.items()
            }


def send(grid: TransportGrid, *nodes: str, kind: str = "train", content: RecordDict | None = None) -> list[Message]:
    content = content or RecordDict({"arrays": to_record({"w": np.ones(2)})})
    return grid.send_and_receive([grid.create_message(content, kind, node_id(n), "g") for n in nodes])


def test_replies_come_in_the_order_of_the_requests() -> None:
    def slow_first(requests: list[Request]) -> list[Reply]:
        return [Reply(r.node, r.group, r.arrays, 1) for r in reversed(requests)]

    replies = send(TransportGrid(NODES, slow_first), *NODES)
    assert [m.metadata.src_node_id for m in replies] == [node_id(n) for n in NODES]


def test_a_lost_node_has_no_reply() -> None:
    grid = TransportGrid(NODES, lambda requests: [Reply(r.node, r.group, r.arrays, 1) for r in requests[1:]])
    assert [m.metadata.src_node_id for m in send(grid, "pi-1", "pi-2")] == [node_id("pi-2")]
    assert grid.pull_messages(["1", "2"]) == []


def test_replies_that_nobody_asked_for_are_refused() -> None:
    def reply(*pairs: tuple[str, str]) -> TransportGrid:
        return TransportGrid(NODES, lambda requests: [Reply(n, g, {"w": np.ones(2)}, 1) for n, g in pairs])

    with pytest.raises(RunError, match="'pi-2' replied for group 'g', which it was not asked for"):
        send(reply(("pi-2", "g")), "pi-1")
    with pytest.raises(RunError, match="'pi-1' replied for group 'h'"):
        send(reply(("pi-1", "h")), "pi-1")
    with pytest.raises(RunError, match="'pi-1' replied twice"):
        send(reply(("pi-1", "g"), ("pi-1", "g")), "pi-1")


def test_messages_that_we_cannot_carry_are_refused() -> None:
    grid = TransportGrid(NODES, lambda requests: [])
    with pytest.raises(RunError, match="'evaluate' to 'pi-1'"):
        send(grid, "pi-1", kind="evaluate")
    with pytest.raises(RunError, match="not in this group"):
        send(grid, "pi-9")
    with pytest.raises(RunError, match="two requests to one node"):
        send(grid, "pi-1", "pi-1")
    two = RecordDict({"a": to_record({"w": np.ones(2)}), "b": to_record({"w": np.ones(2)})})
    with pytest.raises(RunError, match="2 records of arrays"):
        send(grid, "pi-1", content=two)


def test_an_unknown_flower_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, None)
    monkeypatch.setitem(__import__("sys").modules, "flwr.supercore.task_identity", None)
    with pytest.raises(ExperimentError, match=r"flwr 1\.\d+.* makes messages in a way .* install 'flwr>=1.42"):
        enable_messages()


def test_flowers_own_identity_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 77)
    enable_messages()
    assert (TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id) == (77, 77, 77)


# strategies by name


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("fedavgg", {}, r"no strategy 'fedavgg' \(did you mean 'fedavg'\?\): choose from bulyan, "),
        ("fedadam", {"etta": 1}, r"'fedadam' has no argument 'etta' \(did you mean 'eta'\?\): it takes beta_1, "),
        ("fedtrimmedavg", {"beta": 0.7}, "refuses its arguments {'beta': 0.7}"),
        ("fedavg", {"fraction_train": 0.5}, "no effect here: every replica .* data.per_round"),
        ("fedavg", {"weighted_by_key": "n"}, "no effect here"),
        ("fedprox", {}, "cannot run here: its clients add a proximal term"),
        (flower.FedAvg(), {"min_train_nodes": 2}, r"give them to FedAvg\(\.\.\.\) itself"),
        (flower.FedAvg, {}, r"is a class: pass an object, FedAvg\(\.\.\.\)"),
        (OldFedAvg(), {}, "pass a name or an object of flwr.serverapp.strategy"),
    ],
)
def test_refused_at_construction(name: Any, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        Federation(name, args)


def test_arguments_reach_the_strategy() -> None:
    strategy = make_strategy("fedadam", {"eta": 0.5})
    assert isinstance(strategy, flower.FedAdam)
    assert strategy.eta == 0.5


def test_an_object_is_copied() -> None:
    mine = flower.FedAdam()
    rounds(Federation(mine), {"g": Group(NODES, model())}, [1])
    assert mine.m_t is None


# what a strategy may not do


class Sends(flower.FedAvg):
    """Starts its clients from other arrays."""

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        other = ArrayRecord({name: Array(array.numpy() * 2 + 1) for name, array in arrays.items()})
        return super().configure_train(server_round, other, config, grid)


class Draws(flower.FedAvg):
    """Keeps a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = np.random.default_rng(0)


def private(kind: str, inner: Any = None, clients: int = 4) -> Any:
    strategy = getattr(flower, f"DifferentialPrivacy{kind}")
    if "Adaptive" in kind:
        return strategy(inner or flower.FedAvg(), 0.0, clients)
    return strategy(inner or flower.FedAvg(), 0.0, 1e6, clients)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (flower.FedProx(proximal_mu=0.1), "FedProx sets 'proximal-mu' for its clients"),
        (private("ClientSideFixedClipping"), "over FedAvg sets 'clipping_norm' for its clients"),
        (private("ClientSideAdaptiveClipping"), "sets 'clipping_norm' for its clients"),
        (flower.QFedAvg(0.1), "QFedAvg failed on group 'g' .*train_loss"),
        (flower.FedXgbBagging(), "FedXgbBagging failed"),
        (flower.Bulyan(num_malicious_nodes=1), "gives no result from 4 nodes of group 'g': it needs more"),
        (flower.FedAvg(fraction_train=0.5), "asks 2 of the 4 nodes .* data.per_round"),
        (flower.FedAvg(fraction_train=0.0), "asks 0 of the 4 nodes"),
        (flower.FedAvg(min_available_nodes=9), "needs 9 nodes, and group 'g' has 4"),
        (private("ServerSideFixedClipping", flower.FedAvg(min_train_nodes=9)), "needs 9 nodes"),
        (flower.FedAvg(weighted_by_key="n"), "Missing required key `n`"),
        (Sends(), "starts its clients from other arrays"),
    ],
)
def test_refused_before_the_first_step(strategy: Any, message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        Federation(strategy).check({"g": Group(NODES, model())})


def test_a_state_that_cannot_be_saved_is_an_error() -> None:
    federation = Federation(Draws())
    groups = {"g": Group(NODES, model())}
    federation.check(groups)
    with pytest.raises(ExperimentError, match=r"Draws keeps 'draws' \(a Generator\), which cannot be saved"):
        federation.check(groups, checkpoint=True)
    rounds(federation, groups, [1])
    with pytest.raises(RunError, match="cannot be saved"):
        federation.state()


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_check_changes_nothing(name: str) -> None:
    federation = Federation(name)
    federation.check({"g": Group(NODES, model())}, checkpoint=True)
    assert federation.state() == {}


# rounds


def exact_mean(arrays: list[np.ndarray], weights: list[float]) -> np.ndarray:
    total = sum(Fraction(w) for w in weights)
    flat = zip(*(a.ravel() for a in arrays), strict=True)
    sums = [sum(Fraction(float(v)) * Fraction(w) for v, w in zip(values, weights, strict=True)) for values in flat]
    return np.array([float(s / total) for s in sums]).reshape(arrays[0].shape)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 10_000), st.floats(1e-3, 1e4)), min_size=2, max_size=6), st.integers(0, 99))
def test_fedavg_is_the_weighted_mean(weights: list[float], seed: int) -> None:
    nodes = tuple(f"n{i}" for i in range(len(weights)))
    draw = np.random.default_rng(seed)
    sent = {n: {"w": draw.normal(size=(5,)), "h": draw.normal(size=3).astype(np.float32)} for n in nodes}
    group = Group(nodes, {"w": np.zeros(5), "h": np.zeros(3, np.float32)})
    result = Federation().run_round(
        1, {"g": group}, lambda rs: [Reply(r.node, "g", sent[r.node], w) for r, w in zip(rs, weights, strict=True)]
    )["g"]
    for name, bound in (("w", 1e-15), ("h", 6e-8)):  # float32: half a unit in the last place
        expected = exact_mean([sent[n][name] for n in nodes], weights)
        scale = np.max([np.abs(sent[n][name]) for n in nodes], axis=0)
        assert result.arrays[name].dtype == group.arrays[name].dtype
        assert (np.abs(result.arrays[name] - expected) <= bound * scale).all()


def test_all_groups_go_in_one_exchange_and_small_ones_in_none() -> None:
    calls: list[list[tuple[str, str]]] = []

    def train(requests: list[Request]) -> list[Reply]:
        calls.append([(r.node, r.group) for r in requests])
        assert all(dict(r.config) == {"server-round": 4} for r in requests)
        assert requests[0].arrays["1.weight"].dtype == np.float32
        return [Reply(r.node, r.group, r.arrays, 1, {"loss": 1.0 + len(r.node)}) for r in requests]

    groups = {
        "layers 0-2": Group(NODES, model(np.float32)),
        "layers 3-5": Group(("edge-1", "edge-2"), {"4.weight": np.ones(2)}),
        "layers 6-7": Group(("cloud",), {"6.weight": np.ones(2)}),
        "pooling": Group(NODES, {}),
        "counters": Group(NODES, {"n": np.array(3)}),
    }
    results = Federation("krum").run_round(4, groups, train)
    assert calls == [[*((n, "layers 0-2") for n in NODES), ("edge-1", "layers 3-5"), ("edge-2", "layers 3-5")]]
    assert set(results) == {"layers 0-2", "layers 3-5"}
    assert results["layers 3-5"].metrics == {"loss": 7.0}


def test_training_runs_also_where_nothing_is_replicated() -> None:
    calls: list[list[Request]] = []

    def train(requests: list[Request]) -> list[Reply]:
        calls.append(requests)
        return []

    assert Federation().run_round(1, {"g": Group(("cloud",), model())}, train) == {}
    assert calls == [[]]


def test_a_node_without_samples_does_not_count() -> None:
    def train(requests: list[Request]) -> list[Reply]:
        values = {"pi-1": (1.0, 3), "pi-2": (99.0, 0), "pi-3": (2.0, 1)}  # pi-4 is lost
        return [Reply(n, "g", {"w": np.full(2, v)}, w) for n, (v, w) in values.items()]

    result = Federation().run_round(1, {"g": Group(NODES, {"w": np.zeros(2)})}, train)["g"]
    np.testing.assert_array_equal(result.arrays["w"], [1.25, 1.25])


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_group_without_samples_keeps_its_arrays(name: str) -> None:
    group = Group(NODES, model())
    result = Federation(name).run_round(1, {"g": group}, lambda rs: [Reply(r.node, "g", r.arrays, 0) for r in rs])
    assert result["g"].arrays is group.arrays


def test_integer_parameters_stay() -> None:
    group = Group(NODES, {"w": np.ones(2), "table": np.arange(3)})
    result = Federation("fedmedian").run_round(1, {"g": group}, trained(1))["g"]
    np.testing.assert_array_equal(result.arrays["table"], np.arange(3))
    assert list(result.arrays) == ["w", "table"]


@pytest.mark.parametrize(
    ("arrays", "count", "message"),
    [
        ({"w": np.ones(2)}, 1, "node 'pi-2' has not sent array 'b' of group 'g'"),
        ({"w": np.ones(2), "b": np.ones(1), "c": np.ones(1)}, 1, "node 'pi-2' has sent an unknown array 'c'"),
        (
            {"w": np.ones(3), "b": np.ones(1)},
            1,
            r"node 'pi-2' sent 'w' as float64 \(3,\); group 'g' has float64 \(2,\)",
        ),
        ({"w": np.ones(2, np.float32), "b": np.ones(1)}, 1, "node 'pi-2' sent 'w' as float32"),
        ({"w": np.array([1, np.nan]), "b": np.ones(1)}, 1, "node 'pi-2' sent a value of 'w' that is not finite"),
        ({"w": np.ones(2), "b": np.array([-np.inf])}, 1, "node 'pi-2' sent a value of 'b' that is not finite"),
        ({"w": np.ones(2), "b": np.ones(1)}, math.nan, "node 'pi-2' reports weight nan"),
        ({"w": np.ones(2), "b": np.ones(1)}, -1, "node 'pi-2' reports weight -1"),
    ],
)
def test_replies_that_do_not_fit_are_refused_by_name(arrays: Arrays, count: float, message: str) -> None:
    group = Group(("pi-1", "pi-2"), {"w": np.zeros(2), "b": np.zeros(1)})

    def train(requests: list[Request]) -> list[Reply]:
        return [Reply("pi-1", "g", group.arrays, 1), Reply("pi-2", "g", arrays, count)]

    with pytest.raises(RunError, match=message):
        Federation().run_round(1, {"g": group}, train)


def test_a_result_that_is_not_finite_is_refused() -> None:
    federation = Federation("fedavgm", {"server_learning_rate": 1e300})
    with pytest.raises(RunError, match=r"FedAvgM gives a value of '1\..*' that is not finite, in round 1"):
        federation.run_round(1, {"g": Group(NODES, model(np.float32))}, trained(1))
    with pytest.raises(RunError, match="count from 1"):
        federation.run_round(0, {}, trained(1))


def test_flower_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    level = logging.getLogger("flwr").level
    rounds(Federation("fedadam"), {"g": Group(NODES, model())}, [1])
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("flwr").level == level


# strategies against their papers


def replies_of(number: int, arrays: Arrays, name: str) -> np.ndarray:
    return np.stack([moved(number, node, name, arrays[name]) for node in NODES])


def test_fedadam_follows_reddi() -> None:
    """Algorithm 2 of arXiv:2003.00295 with Flower's bias correction, four rounds."""
    eta, b1, b2, tau = 0.1, 0.9, 0.99, 1e-3
    ours = rounds(Federation("fedadam", {"eta": eta}), {"g": Group(NODES, model())}, range(1, 5))["g"].arrays
    x = {n: a.astype(np.float64) for n, a in model().items()}
    m, v = {n: 0 * a for n, a in x.items()}, {n: 0 * a for n, a in x.items()}
    counts = np.array([weight(n) for n in NODES])
    for number in range(1, 5):
        start = dict(x)
        for name in x:
            mean = np.average(replies_of(number, start, name), axis=0, weights=counts)
            delta = mean - start[name]
            m[name] = b1 * m[name] + (1 - b1) * delta
            v[name] = b2 * v[name] + (1 - b2) * delta**2
            rate = eta * math.sqrt(1 - b2 ** (number + 1)) / (1 - b1 ** (number + 1))
            x[name] = start[name] + rate * m[name] / (np.sqrt(v[name]) + tau)
    for name, value in x.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_robust_strategies_follow_their_rule(dtype: Any) -> None:
    group = {"g": Group(NODES, model(dtype))}
    start = group["g"].arrays
    for name in start:
        stack = replies_of(1, start, name)
        median = rounds(Federation("fedmedian"), group, [1])["g"].arrays[name]
        np.testing.assert_allclose(median, np.median(stack.astype(np.float64), axis=0).astype(dtype), rtol=0, atol=0)
        trimmed = rounds(Federation("fedtrimmedavg", {"beta": 0.25}), group, [1])["g"].arrays[name]
        expected = np.sort(stack.astype(np.float64), axis=0)[1:3].mean(axis=0)
        np.testing.assert_allclose(trimmed, expected, rtol=1e-15 if dtype is np.float64 else 6e-8)


def test_krum_finds_the_closest_even_where_float32_cancels() -> None:
    """Replicas that differ in the seventh digit: Flower's distances, in float32, would all be rounding."""
    draw = np.random.default_rng(0)
    start = {"w": draw.normal(size=1000).astype(np.float32) * 100}
    nodes = tuple(f"n{i}" for i in range(7))
    sent = {
        n: (start["w"] + np.float32(3e-4) * draw.normal(size=1000) * (1 + i)).astype("f4") for i, n in enumerate(nodes)
    }
    stack = np.stack([sent[n].astype(np.float64) for n in nodes])
    distances = np.sort(((stack[:, None] - stack[None]) ** 2).sum(axis=2), axis=1)
    best = nodes[int(np.argmin(distances[:, 1 : 1 + 7 - 1 - 2].sum(axis=1)))]
    result = Federation("krum", {"num_malicious_nodes": 1}).run_round(
        1, {"g": Group(nodes, start)}, lambda rs: [Reply(r.node, "g", {"w": sent[r.node]}, 5) for r in rs]
    )
    np.testing.assert_array_equal(result["g"].arrays["w"], sent[best])


def test_differential_privacy_on_the_server_clips_each_replica() -> None:
    clip = 0.05
    strategy = flower.DifferentialPrivacyServerSideFixedClipping(flower.FedAvg(), 0.0, clip, 4)
    start = {"w": np.arange(6.0)}
    found = rounds(Federation(strategy), {"g": Group(NODES, start)}, [1])["g"].arrays["w"]
    moves = replies_of(1, start, "w") - start["w"]
    clipped = moves * np.minimum(1, clip / np.linalg.norm(moves, axis=1))[:, None]
    expected = start["w"] + np.average(clipped, axis=0, weights=[weight(n) for n in NODES])
    np.testing.assert_allclose(found, expected, rtol=1e-9)


# state


STATEFUL = {
    "fedavgm": {"server_momentum": 0.9, "server_learning_rate": 0.7},
    "fedadam": {},
    "fedyogi": {},
    "fedadagrad": {},
}


def through_a_file(federation: Federation, path: Path) -> dict[str, np.ndarray]:
    state = federation.state()
    if not state:
        return state
    save_file({name: np.asarray(array) for name, array in state.items()}, path / "strategy.safetensors")
    return load_file(path / "strategy.safetensors")


def assert_equal(a: Arrays, b: Arrays) -> None:
    assert set(a) == set(b)
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_resumed_run_repeats_the_rounds(name: str, tmp_path: Path) -> None:
    def fresh() -> Federation:
        return Federation(name, STATEFUL.get(name))

    groups = {"a": Group(NODES, model(np.float32)), "b": Group(NODES[:3], {"2.bias": np.ones(3)})}
    straight = rounds(fresh(), groups, range(1, 5))
    first = fresh()
    middle = rounds(first, groups, range(1, 3))
    second = fresh()
    second.load_state(through_a_file(first, tmp_path))
    assert_equal(second.state(), first.state())  # a checkpoint before the next round loses nothing
    resumed = rounds(second, middle, range(3, 5))
    for key in groups:
        assert_equal(resumed[key].arrays, straight[key].arrays)
    assert bool(first.state()) == (name in STATEFUL)
    if name in STATEFUL:
        forgetful = rounds(fresh(), middle, range(3, 5))
        assert any((forgetful["a"].arrays[n] != straight["a"].arrays[n]).any() for n in model())


@pytest.mark.parametrize("name", STATEFUL)
def test_state_follows_the_parameters_into_other_groups(name: str) -> None:
    """Two groups that become one, in the middle of a run: the elementwise strategies do not notice."""
    whole, half = model(), {"2.bias": np.ones(3)}
    straight = rounds(Federation(name, STATEFUL[name]), {"g": Group(NODES, {**whole, **half})}, range(1, 5))
    federation = Federation(name, STATEFUL[name])
    parts = rounds(federation, {"a": Group(NODES, whole), "b": Group(NODES, half)}, range(1, 3))
    joined = {"g": Group(NODES, {**parts["a"].arrays, **parts["b"].arrays})}
    assert_equal(rounds(federation, joined, range(3, 5))["g"].arrays, straight["g"].arrays)


def test_a_group_with_half_a_state_starts_afresh(caplog: pytest.LogCaptureFixture) -> None:
    federation = Federation("fedadam")
    parts = rounds(federation, {"a": Group(NODES, model())}, [1])
    joined = {"g": Group(NODES, {**parts["a"].arrays, "2.bias": np.ones(3)})}
    with caplog.at_level(logging.WARNING, logger="edgesplit"):
        found = rounds(federation, joined, [2])
    assert "group g: no saved" in caplog.text
    assert_equal(found["g"].arrays, rounds(Federation("fedadam"), joined, [2])["g"].arrays)


def test_numbers_are_part_of_the_state(tmp_path: Path) -> None:
    groups = {"g": Group(NODES, {"w": np.arange(4.0)})}

    def adaptive() -> Federation:
        strategy = flower.DifferentialPrivacyServerSideAdaptiveClipping
        return Federation(strategy(flower.FedAdam(), 0.0, 4, initial_clipping_norm=0.2))

    straight = rounds(adaptive(), groups, range(1, 5))
    first, second = adaptive(), adaptive()
    middle = rounds(first, groups, range(1, 3))
    assert "0.clipping_norm|number|g" in first.state()
    second.load_state(through_a_file(first, tmp_path))
    assert_equal(rounds(second, middle, range(3, 5))["g"].arrays, straight["g"].arrays)


def test_the_state_of_another_strategy_is_refused() -> None:
    federation = Federation("fedadam")
    rounds(federation, {"g": Group(NODES, model())}, [1])
    with pytest.raises(RunError, match="which FedAvg has not: resume with the strategy"):
        Federation("fedavg").load_state(federation.state())
    with pytest.raises(RunError, match="resume with the strategy"):
        Federation("fedavg").load_state({"nonsense": np.ones(1)})


# averages


def replies(*values: tuple[Any, float], dtype: Any = np.float64) -> list[Reply]:
    return [Reply(f"n{i}", "g", {"x": np.asarray(v, dtype)}, w) for i, (v, w) in enumerate(values)]


def test_average_of_floats_is_weighted_and_of_integers_the_maximum() -> None:
    np.testing.assert_array_equal(average(replies((1, 3), (2, 1), (50, 0)))["x"], 1.25)
    found = average(replies((3, 1), (7, 2), (9, 0), dtype=np.int64))["x"]
    assert (found, found.dtype, found.shape) == (9, np.int64, ())
    np.testing.assert_array_equal(average(replies(([True, False], 1), ([False, False], 2), dtype=bool))["x"], [1, 0])
    np.testing.assert_array_equal(average(replies((1, 0), (2, 0)))["x"], 1.5)


def test_what_replicas_agree_on_stays_bit_for_bit() -> None:
    mask = np.triu(np.full((3, 3), -np.inf), 1)
    np.testing.assert_array_equal(average(replies((mask, 1), (mask, 2)))["x"], mask)
    tenth = np.float32(0.1)
    assert average(replies((tenth, 3), (tenth, 7), (tenth, 11), dtype=np.float32))["x"] == tenth


def test_averages_refuse_what_does_not_fit() -> None:
    with pytest.raises(RunError, match="nothing to average"):
        average([])
    with pytest.raises(RunError, match=r"node 'n1' sent 'x' as float64 \(2,\)"):
        average(replies((1, 1), ([1, 2], 1)))
    with pytest.raises(RunError, match="node 'n1' sent a value of 'x' that is not finite"):
        average(replies((1, 1), (math.nan, 1)))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(0.1, 100)), min_size=1, max_size=6))
def test_average_is_the_mean(values: list[tuple[float, float]]) -> None:
    expected = exact_mean([np.array(v) for v, _ in values], [w for _, w in values])
    assert abs(average(replies(*values))["x"] - expected) <= 1e-15 * max(abs(v) for v, _ in values)
