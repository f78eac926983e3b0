"""The fleet equals one process over a real broker too: mosquitto, and the embedded one."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

from edgesplit.assembly import Model
from edgesplit.fleet import Threads
from edgesplit.task import COORDINATOR
from edgesplit.transport.broker import EmbeddedBroker
from edgesplit.transport.mqtt import MqttTransport
from tests.brokers import Mosquitto
from tests.cases import (
    METHODS,
    PLANS,
    RULES,
    SIZES,
    Loader,
    Wire,
    alternating,
    by_rounds,
    chain,
    digits,
    english,
    equal,
    identical,
    one_process,
    points_task,
    run,
    seeded,
    tree,
    uneven,
)
from tests.oracle import train_single
from tests.test_pipedream import check as check_pipedream

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("one_thread")]
UNEQUAL = [30, 11, 0, 23]


def over(url: str) -> Wire:
    """Nodes as threads, each with a connection of its own."""

    def wire(model: Model) -> dict[str, Any]:
        name = f"t{secrets.token_hex(6)}"
        fleet = Threads(lambda node: MqttTransport(url, run=name, node=node), lambda assignment: model.kit)
        return {"transport": MqttTransport(url, run=name, node=COORDINATOR), "fleet": fleet}

    return wire


@pytest.fixture
def wire(mosquitto: Mosquitto) -> Wire:
    return over(mosquitto.url)


@pytest.mark.parametrize(
    ("shape", "method", "size", "rule"), alternating(["three nodes", "four nodes", "U-shape"], METHODS, SIZES)
)
def test_one_replica_a_layer(wire: Wire, shape: str, method: str, size: str, rule: str) -> None:
    samples, batch, micros = SIZES[size]
    task = points_task([samples])
    plan = PLANS[shape](task)
    options = {"method": method, "micros": micros, "batch_size": batch, "steps_per_round": 5, **RULES[rule]}
    ran = run(plan, task, wire, **options)
    equal(ran, one_process(task, rule, Loader(task, [plan.routes[0].device], batch).steps(5)))


@pytest.mark.parametrize(("samples", "batch", "micros"), [(96, 48, 4), (100, 50, 8), (98, 48, 4)])
def test_a_looping_route(wire: Wire, samples: int, batch: int, micros: int) -> None:
    task = points_task([samples])
    plan = chain(task, [1, 3, 5], ["a", "b", "a", "b"])
    options = {"method": "interleaved", "micros": micros, "batch_size": batch, "steps_per_round": 5}
    ran = run(plan, task, wire, **options, **RULES["momentum"])
    equal(ran, one_process(task, "momentum", Loader(task, ["a"], batch).steps(5)))


def test_in_float32_bit_for_bit_as_over_memory(wire: Wire) -> None:
    task = points_task(UNEQUAL)
    plan = tree(task, [1, 3, 5])
    keywords = {"dtype": "float32", "micros": 3, "batch_size": 8, "rounds": 2, **RULES["clipped AdamW"]}
    over_mqtt, over_memory = run(plan, task, wire, **keywords), run(plan, task, **keywords)
    assert over_mqtt.losses == over_memory.losses
    assert identical(over_mqtt.weights, over_memory.weights)


@pytest.mark.parametrize(("method", "cuts", "size", "rule"), alternating(METHODS, [[1, 4], [1, 3, 5]], SIZES), ids=str)
def test_replicas_with_every_step(wire: Wire, method: str, cuts: list[int], size: str, rule: str) -> None:
    samples, batch, micros = uneven(size)
    task = points_task(samples)
    plan = tree(task, cuts)
    options = {"every": "step", "micros": micros, "batch_size": batch, "steps_per_round": 5, **RULES[rule]}
    ran = run(plan, task, wire, method=method, **options)
    equal(ran, one_process(task, rule, Loader(task, [r.device for r in plan.routes], batch).steps(5)))


@pytest.mark.parametrize(("method", "cuts", "rule"), alternating(METHODS, [[3, 6], [3, 6, 8]]), ids=str)
def test_the_cnn_on_a_tree_with_every_step(wire: Wire, method: str, cuts: list[int], rule: str) -> None:
    task = digits([14, 9, 0, 12])
    plan = tree(task, cuts)
    options = {"method": method, "every": "step", "micros": 2, "batch_size": 6, "steps_per_round": 5}
    ran = run(plan, task, wire, **options, **RULES[rule])
    equal(ran, one_process(task, rule, Loader(task, [r.device for r in plan.routes], 6).steps(5)))


@pytest.mark.parametrize("cuts", [[1, 2], [1, 2, 3]], ids=["tree", "U-shape"])
@pytest.mark.parametrize("method", METHODS)
def test_the_transformer_on_a_tree_with_every_step(wire: Wire, method: str, cuts: list[int]) -> None:
    task = english([14, 9, 0, 12])
    plan = tree(task, cuts)
    ran = run(plan, task, wire, method=method, every="step", micros=2, batch_size=6, steps_per_round=5)
    loader = Loader(task, [r.device for r in plan.routes], 6)
    equal(ran, train_single(task, loader.steps(5), model=seeded(task)))


@pytest.mark.parametrize(("rule", "state"), [("sgd", "keep"), ("momentum", "average")])
def test_replicas_with_one_step_a_round(wire: Wire, rule: str, state: str) -> None:
    task = points_task(UNEQUAL)
    plan = tree(task, [1, 4])
    options = {"optimizer_state": state, "rounds": 5, "steps_per_round": 1, "micros": 3, "batch_size": 8}
    ran = run(plan, task, wire, **options, **RULES[rule])
    equal(ran, one_process(task, rule, Loader(task, [r.device for r in plan.routes], 8).steps(5)))


@pytest.mark.parametrize("rule", ["clipped AdamW", "momentum"])
def test_federated_rounds_equal_the_rule_of_the_design(wire: Wire, rule: str) -> None:
    task = points_task(UNEQUAL)
    plan = tree(task, [1, 4])
    loader = Loader(task, [r.device for r in plan.routes], 8)
    rounds = [list(loader.epoch()) for _ in range(2)]
    ran = run(plan, task, wire, rounds=2, micros=3, batch_size=8, **RULES[rule])
    equal(ran, by_rounds(task, plan, rounds, rule))


@pytest.mark.parametrize("rule", ["clipped AdamW", "momentum"], ids=["barrier", "optimistic"])
def test_a_bad_step_is_skipped(wire: Wire, rule: str) -> None:
    task = points_task([24, 24, 8, 16], poisoned={0: [7], 1: [11]})
    plan = tree(task, [1, 3, 5])
    options = {"every": "step", "micros": 3, "batch_size": 8, "rounds": 2, "max_skipped": 9}
    ran = run(plan, task, wire, **options, **RULES[rule])
    assert 2 <= sum(not step.applied for step in ran.steps) <= 4
    loader = Loader(task, [r.device for r in plan.routes], 8)
    equal(ran, one_process(task, rule, [*loader.epoch(), *loader.epoch()]))


@pytest.mark.parametrize("window", [1, 2])
def test_pipedream_equals_its_rule(wire: Wire, window: int) -> None:
    task = points_task([30])
    check_pipedream(chain(task, [1, 3, 5]), task, wire, "momentum", window=window)
    task = points_task([30, 9, 0, 14])
    check_pipedream(tree(task, [1, 4]), task, wire, "momentum", rounds=2, window=window)


def test_over_the_embedded_broker(embedded_broker: EmbeddedBroker) -> None:
    task = points_task(UNEQUAL)
    plan = tree(task, [1, 4])
    options = {"every": "step", "micros": 3, "batch_size": 8, "steps_per_round": 5}
    ran = run(plan, task, over(embedded_broker.url), **options, **RULES["clipped AdamW"])
    equal(ran, one_process(task, "clipped AdamW", Loader(task, [r.device for r in plan.routes], 8).steps(5)))
