"""Nodes that share micro-batches: who may, who gets which, and that what is computed stays as in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise, product
from random import Random
from typing import Any

import pytest

from edgesplit.coordinator import Coordinator
from edgesplit.costs import UnitCosts
from edgesplit.errors import ExperimentError, FrameError, PlanError
from edgesplit.launch import predicted_step
from edgesplit.methods import METHODS, orders, predict
from edgesplit.node import NodeMachine
from edgesplit.options import options
from edgesplit.plan import Plan, Route, Stage
from edgesplit.protocol import Report, Send, Sheet
from edgesplit.replanning import without
from edgesplit.schedule import Action, Event, Micro, even_steps
from edgesplit.sharing import AHEAD, Router, expected_seconds, with_peers
from edgesplit.sheets import Cutting, Draft, Share
from edgesplit.simulate import simulate
from edgesplit.topology import Link, Node, Topology
from edgesplit.transport.base import Message
from tests.cases import (
    RULES,
    Loader,
    Ran,
    Steps,
    digits,
    english,
    equal,
    one_process,
    open_session,
    points_task,
    seeded,
)
from tests.oracle import train_single
from tests.test_simulation import AnyWay, draw_shared_plan

pytestmark = pytest.mark.usefixtures("one_thread")


def fleet(
    edges: int, devices: int, cuts: Sequence[int] = (1, 3), layers: int = 4, ends: Sequence[str] = ("c",)
) -> Plan:
    """Devices -> edges, in turn -> cloud; the edges share."""
    bounds = [0, *cuts, layers]
    routes = []
    for i in range(devices):
        nodes = [f"d{i + 1}", f"e{i % edges + 1}", *(f"d{i + 1}" if end == "device" else end for end in ends)]
        stages = (Stage(node, a, b) for node, (a, b) in zip(nodes, pairwise(bounds), strict=True))
        routes.append(Route(nodes[0], tuple(stages)))
    peers = (tuple(f"e{i + 1}" for i in range(edges)),)
    return Plan(tuple(f"l{i}" for i in range(layers)), tuple(routes), peers=peers)


# --- the ways that a plan leaves ------------------------------------------------------------------------------------


def test_the_ways_are_all_choices_and_the_first_is_the_route() -> None:
    plan = fleet(3, 4)
    assert plan.choices("d2") == (("d2",), ("e2", "e1", "e3"), ("c",))
    assert plan.path("d2") == plan.route("d2").stages
    assert [plan.path("d2", way)[1] for way in range(plan.ways("d2"))] == [Stage(e, 1, 3) for e in ("e2", "e1", "e3")]
    assert ("d2", "e3") in plan.links()
    for way in (3, -1, 10**30):
        with pytest.raises(PlanError, match="3 ways"):
            plan.path("d2", way)


def test_ways_of_two_shared_stages_are_their_product() -> None:
    for seed in range(200):
        plan = draw_shared_plan(Random(seed))
        for route in plan.routes:
            ways = [plan.path(route.device, way) for way in range(plan.ways(route.device))]
            assert [tuple(stage.node for stage in way) for way in ways] == list(product(*plan.choices(route.device)))
            for way in ways:  # each is a route that a plan may have
                Plan(plan.layers, (Route(route.device, way),))
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.bare().peers == plan.peers


def test_a_node_that_does_anything_else_does_not_share() -> None:
    route = fleet(2, 2).routes[1]
    other = Route("d3", (Stage("d3", 0, 2), Stage("e2", 2, 4)))
    for more in ((other,), (Route("d3", (Stage("d3", 0, 1), Stage("x", 1, 2), Stage("e2", 2, 4))),)):
        plan = replace(fleet(3, 3), routes=(fleet(3, 3).routes[0], route, *more))
        assert plan.choices("d1")[1] == ("e1",)
        assert plan.choices("d2")[1] == ("e2",)


def test_a_plan_without_a_node_has_no_way_over_it() -> None:
    left = without(fleet(3, 4), ["e2"])
    assert left is not None
    assert left.choices("d2")[1] == ("e3", "e1")
    assert left.sharing() == {"e1", "e3"}
    alone = without(left, ["e3"])
    assert alone is not None
    assert not alone.sharing()


def test_under_another_plan_what_was_measured_of_other_layers_is_forgotten() -> None:
    router = Router()
    router.adopt(fleet(3, 3))
    for node, seconds in (("e1", 1.0), ("e2", 2.0)):
        router.observe(Event(node, Action("F", 1, 0), 0.0, seconds), 1)
    left = without(fleet(3, 3), ["e3"])
    assert left is not None
    router.adopt(left)
    assert [router.seconds(node) for node in ("e1", "e2")] == [1.0, 2.0]
    router.adopt(fleet(2, 2, (1, 2)))
    assert [router.seconds(node) for node in ("e1", "e2")] == [1.0, 1.0]


@pytest.mark.parametrize("peers", [[["e1"], ["e1"]], [["e1", "e1"]], "e1", [3], [[1]]])
def test_peers_that_are_none(peers: Any) -> None:
    with pytest.raises(PlanError):
        Plan.from_json(fleet(2, 2).to_json() | {"peers": peers})


def home(*nodes: Node, links: Sequence[Link] = ()) -> dict[str, Any]:
    devices = [Node(name=f"d{i}", tier="device", parent=f"e{i}") for i in (1, 2)]
    return Topology.of([*nodes, *devices], links).to_dict()


CLOUD = Node(name="c", tier="cloud")


def edges(*parents: str | None) -> list[Node]:
    return [Node(name=f"e{i}", tier="edge", parent=parent) for i, parent in enumerate(parents, start=1)]


def test_those_below_one_parent_share() -> None:
    bare = replace(fleet(2, 2), peers=())
    plan = with_peers(replace(bare, topology=home(CLOUD, *edges("c", "c"))), ["edge"])
    assert plan.choices("d1")[1] == ("e1", "e2")
    assert with_peers(bare, []) is bare


@pytest.mark.parametrize(
    ("nodes", "tiers", "said"),
    [
        ([CLOUD, *edges("c", "c")], ["egde"], "no tier of the topology.*'edge'"),
        ([CLOUD, *edges("c", "c")], ["edge", "cloud"], "names 'cloud', but no two"),
        ([CLOUD, Node(name="c2", tier="cloud"), *edges("c", "c2")], ["edge"], "names 'edge', but no two"),
        ([CLOUD, *edges(None, None)], ["edge"], "names 'edge', but no two"),
        ([CLOUD, *edges("c", "c")], ["device"], "names 'device', but no two"),
    ],
)
def test_tiers_that_cannot_share(nodes: list[Node], tiers: list[str], said: str) -> None:
    plan = replace(fleet(2, 2), peers=(), topology=home(*nodes))
    with pytest.raises(ExperimentError, match=said):
        with_peers(plan, tiers)


def test_sharing_needs_a_topology_and_a_common_step() -> None:
    task = points_task([9, 9])
    plan = replace(fleet(2, 2, layers=6), layers=tuple(n for n, _ in task.model().named_children()), peers=())
    with pytest.raises(ExperimentError, match="needs a topology"):
        open_session(plan, task, share=["edge"], every="step", **RULES["sgd"])
    for asked, said in ({"share": ["edge"]}, "every: step"), ({"share": ["device"], "every": "step"}, "stays on it"):
        with pytest.raises(ExperimentError, match=said):
            open_session(plan, task, **asked, **RULES["sgd"])  # type: ignore[arg-type]


# --- who gets which -------------------------------------------------------------------------------------------------

SPEEDS = {"e1": 4.0, "e2": 2.0, "e3": 1.0, "e4": 1.0}
"""Samples a second."""


class Clock:
    """Steps of a fleet whose edges are all that takes time; each begins when the one before has ended."""

    def __init__(self, plan: Plan, router: Any, per_step: int) -> None:
        self.plan, self.router, self.now, self.done, self.per_step = plan, router, 0.0, 0, per_step

    def step(self, speeds: dict[str, float], absent: Collection[str] = ()) -> Counter[str]:
        devices = [route.device for route in self.plan.routes]
        micros = [Micro(self.done + i, devices[i % len(devices)], 0, 1) for i in range(self.per_step)]
        ways = self.router.routes(self.plan, micros, absent)
        free = dict.fromkeys(speeds, self.now)
        for micro, way in zip(micros, ways, strict=True):
            node = self.plan.path(micro.device, way)[1].node
            for op, part in (("F", 1 / 3), ("B", 2 / 3)):
                start, free[node] = free[node], free[node] + part / speeds[node]
                self.router.observe(Event(node, Action(op, 1, micro.micro), start, free[node]), 1)  # type: ignore[arg-type]
        self.now, self.done = max(free.values()), self.done + len(micros)
        return Counter(self.plan.path(m.device, way)[1].node for m, way in zip(micros, ways, strict=True))


class RoundRobin:
    def routes(self, plan: Plan, micros: Sequence[Micro], absent: Collection[str] = ()) -> list[int]:
        return [0] * len(micros)

    def observe(self, event: Event, samples: int) -> None:
        pass


def rate(clock: Clock, steps: int, speeds: dict[str, float] = SPEEDS) -> float:
    begin, before = clock.now, clock.done
    for _ in range(steps):
        clock.step(speeds)
    return (clock.done - before) / (clock.now - begin)


@pytest.mark.parametrize("per_step", [8, 32])
def test_speeds_of_4_2_1_1_are_used_up(per_step: int) -> None:
    plan = fleet(4, 4)
    assert rate(Clock(plan, RoundRobin(), per_step), 10) == pytest.approx(4.0)
    clock = Clock(plan, Router(), per_step)
    assert rate(clock, 1) == pytest.approx(4.0)  # nothing is known yet: all count alike
    assert rate(clock, 50) >= 0.95 * 8.0
    foreseen = Clock(plan, Router({node: 1 / speed for node, speed in SPEEDS.items()}), per_step)
    assert foreseen.step(SPEEDS) == {node: per_step / 8 * speed for node, speed in SPEEDS.items()}


def test_one_that_becomes_slow_is_routed_around_and_found_again() -> None:
    clock = Clock(fleet(4, 4), Router(), 32)
    equal = dict.fromkeys(SPEEDS, 1.0)
    rate(clock, 10, equal)
    slow = equal | {"e2": 0.02}
    for _ in range(5):
        clock.step(slow)
    rates = [rate(clock, 40, slow) for _ in range(5)]
    assert max(rates) > 0.9 * 3.0
    assert rate(clock, 400, slow) >= 0.9 * 3.0, "trying it again costs little"
    assert clock.step(slow)["e2"] <= 1
    rate(clock, 300, equal)
    assert clock.step(equal) == dict.fromkeys(SPEEDS, 8), "it is itself again"


def test_one_that_is_absent_gets_nothing_unless_all_are() -> None:
    clock = Clock(fleet(4, 4), Router(), 32)
    rate(clock, 3)
    for _ in range(100):
        assert set(clock.step(SPEEDS, {"e1", "e3"})) == {"e2", "e4"}
    assert clock.step(SPEEDS, set(SPEEDS)).total() == 32


def test_most_stay_at_home_and_the_choice_is_the_same_each_time() -> None:
    plan = fleet(4, 8)
    micros = [micro for step in even_steps(plan, 2) for micro in step.micros]
    assert Router().routes(plan, micros) == [0] * 16
    uneven = {"e1": 1.0, "e2": 1.0, "e3": 1.0, "e4": 3.0}
    found = Router(uneven).routes(plan, micros)
    taken = Counter(plan.path(m.device, way)[1].node for m, way in zip(micros, found, strict=True))
    assert taken == {"e1": 5, "e2": 5, "e3": 5, "e4": 1}
    assert found.count(0) == 13
    assert Router(uneven).routes(plan, micros) == found


def test_unequal_micro_batches_count_by_their_samples() -> None:
    plan = fleet(2, 2)
    micros = [Micro(0, "d1", 0, 9), Micro(1, "d2", 0, 3), Micro(2, "d1", 9, 12), Micro(3, "d2", 3, 6)]
    found = Router().routes(plan, micros)
    load = Counter[str]()
    for micro, way in zip(micros, found, strict=True):
        load[plan.path(micro.device, way)[1].node] += micro.stop - micro.start
    assert load == {"e1": 9, "e2": 9}


def test_measurements_that_cannot_be_are_left_out() -> None:
    router = Router({"e1": 2.0, "e2": 1.0})
    for start, end in ((1.0, 1.0), (2.0, 1.0), (0.0, float("inf")), (float("nan"), 1.0)):
        router.observe(Event("e1", Action("F", 1, 0), start, end), 1)
    assert router.seconds("e1") == 2.0
    router.observe(Event("e1", Action("F", 1, 0), 0.0, 1.0), 10)
    router.observe(Event("e1", Action("B", 1, 0), 0.0, 2.0), 10)
    assert router.seconds("e1") == pytest.approx(0.3)
    assert router.seconds("e2") == pytest.approx(0.15), "at the pace at which the other has turned out"


def test_a_nodes_first_step_counts_until_there_is_another() -> None:
    router = Router()
    for step, seconds, known in ((3, 9.0, 9.0), (3, 9.0, 9.0), (4, 1.0, 1.0), (4, 2.0, 29 / 19), (5, 2.0, 461 / 271)):
        router.observe(Event("e1", Action("F", 1, 0), 0.0, seconds, step=step), 1)
        assert router.seconds("e1") == pytest.approx(known)


def test_what_profile_and_topology_say_is_expected() -> None:
    layers = [{"name": f"l{i}", "forward_s": 1.0, "input_grad_s": 2.0, "weight_grad_s": 1.0} for i in range(4)]
    nodes = [replace(node, gflops=gflops) for node, gflops in zip(edges("c", "c"), (100.0, 50.0), strict=True)]
    plan = replace(fleet(2, 2), topology=home(CLOUD, *nodes), profile={"gflops": 100.0, "layers": layers})
    assert expected_seconds(plan) == {"e1": 8.0, "e2": 16.0}
    assert expected_seconds(replace(plan, profile=None)) == {}
    assert expected_seconds(replace(plan, peers=())) == {}


# --- the coordinator ------------------------------------------------------------------------------------------------


def drafts(count: int) -> list[Draft]:
    return [Draft(step, {f"d{i}": Share(0, step, 4) for i in (1, 2)}) for step in range(count)]


def sheets(effects: Sequence[Any], node: str = "e1") -> list[int]:
    sends = [e.message for e in effects if isinstance(e, Send) and e.to == node and e.message.kind == "sheet"]
    return [step.step for message in sends for step in Sheet.of(message.meta).steps]


def report(coordinator: Coordinator, step: int) -> list[Any]:
    effects: list[Any] = []
    for node in coordinator.plan.nodes():
        meta = Report(step, layers=dict.fromkeys(coordinator.plan.layers_of(node), (1.0, 1.0))).meta()
        effects += coordinator.receive(Message(kind="report", sender=node, term=coordinator.term, meta=meta), 0.0)
    return effects


def test_steps_are_published_one_ahead_of_what_runs() -> None:
    coordinator = Coordinator(fleet(2, 2), Cutting(2), add_replicas=True)
    assert sheets(coordinator.issue(drafts(5), 0.0)) == list(range(AHEAD))
    assert [sheets(report(coordinator, step)) for step in range(5)] == [[2], [3], [4], [], []]
    assert not coordinator.busy
    without = Coordinator(replace(fleet(2, 2), peers=()), Cutting(2), add_replicas=True)
    assert sheets(without.issue(drafts(5), 0.0)) == list(range(5))


def test_what_is_measured_matters_for_the_next_step_but_one() -> None:
    coordinator = Coordinator(fleet(2, 2), Cutting(2), add_replicas=True)
    coordinator.issue(drafts(5), 0.0)
    for micro, (node, seconds) in enumerate([("e1", 1.0), ("e2", 9.0), ("e1", 1.0), ("e2", 9.0)]):
        for op in "FB":
            coordinator.steps.observe(Event(node, Action(op, 1, micro), 0.0, seconds, step=0))  # type: ignore[arg-type]
    for event in (
        Event("e1", Action("F", 1, 999), 0.0, 99.0, step=0),
        Event("e1", Action("F", 1, 0), 0.0, 99.0, step=7),
    ):
        coordinator.steps.observe(event)  # of no step that is open
    effects = report(coordinator, 0)
    (message,) = (e.message for e in effects if isinstance(e, Send) and e.to == "c" and e.message.kind == "sheet")
    (step,) = Sheet.of(message.meta).steps
    assert {coordinator.plan.path(m.device, m.route)[1].node for m in step.micros} == {"e1"}


def test_a_node_that_is_lost_gets_nothing_new() -> None:
    coordinator = Coordinator(fleet(2, 2), Cutting(2), add_replicas=True, on_lost="wait")
    coordinator.receive(Message(kind="status", sender="e2", meta={"state": "offline"}), 0.0)
    effects = coordinator.issue(drafts(1), 0.0)
    (message,) = (e.message for e in effects if isinstance(e, Send) and e.to == "c")
    (step,) = Sheet.of(message.meta).steps
    assert {coordinator.plan.path(m.device, m.route)[1].node for m in step.micros} == {"e1"}


def test_a_sheet_with_a_way_that_is_none_is_refused() -> None:
    plan = fleet(2, 2)
    machine = NodeMachine("e1", plan, order=lambda steps: [])
    for way, fits in ((1, True), (2, False), (-1, False), ("1", False), (True, False)):
        micro = [0, "d1", 0, 4, way]
        step = {"step": 0, "lr": 1.0, "batches": {"d1": [0, 0]}, "micros": [micro]}
        message = Message(kind="sheet", sender="coordinator", meta={"steps": [step]})
        if fits:
            machine.receive(message)
            continue
        with pytest.raises(FrameError, match="malformed"):
            machine.receive(message)


# --- schedules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", [name for name, m in METHODS.items() if "replicas" in m.allows])
def test_no_choice_of_ways_deadlocks(name: str, split: bool) -> None:
    for seed in range(60):
        rng = Random(seed)
        plan = draw_shared_plan(rng)
        shares = {route.device: rng.randint(0, 5) for route in plan.routes}
        any_way = AnyWay(rng)
        steps = [
            replace(step, micros=tuple(m._replace(route=w) for m, w in zip(step.micros, ways, strict=True)))
            for step in even_steps(plan, shares, steps=2)
            for ways in [any_way.routes(plan, step.micros)]
        ]
        synchronous = METHODS[name].synchronous
        found = orders(name, plan, steps, split_backward=split, update_all=synchronous)
        run = Counter((node, a) for node, order in found.items() for a in order if a.op != "U")
        assert run == Counter(
            (stage.node, Action(op, index, micro.micro))
            for step in steps
            for micro in step.micros
            for index, stage in enumerate(plan.path(micro.device, micro.route))
            for op in ("FIW" if split else "FB")
        )
        window = rng.choice([1, 1, 2, 4])
        timeline = simulate(found, plan, steps, UnitCosts(latency=0.3), window=window, synchronous=synchronous)
        assert len(timeline.events) == sum(map(len, found.values()))


# --- the fleet equals one process -----------------------------------------------------------------------------------


def of_task(task: Any, plan: Plan) -> Plan:
    return replace(plan, layers=tuple(name for name, _ in task.model().named_children()))


def any_way(plan: Plan, task: Any, seed: int = 0, **keywords: Any) -> Ran:
    """Train with any ways at all."""
    watch, router = Steps(), AnyWay(Random(seed))
    with open_session(plan, task, every="step", **keywords) as session:
        session._conductor.coordinator.steps.router = router  # type: ignore[assignment]
        rounds = session.fit(callbacks=[watch])
        weights = session.weights()
    assert router.abroad > len(watch.done)
    return Ran(watch.done, weights, list(rounds))


@pytest.mark.parametrize(("count", "method"), [(2, "1f1b"), (3, "gpipe"), (4, "breadth-first")])
@pytest.mark.parametrize("ends", [("c",), ("c", "device"), ()], ids=["tree", "U-shape", "edges have the loss"])
@pytest.mark.parametrize("rule", ["clipped AdamW", "momentum"])
def test_any_ways_equal_one_process(count: int, method: str, ends: tuple[str, ...], rule: str) -> None:
    task = points_task([30, 11, 0, 23])
    plan = of_task(task, fleet(count, 4, (1, 3, 5)[: len(ends) + 1], 6, ends))
    ran = any_way(plan, task, method=method, micros=3, batch_size=8, steps_per_round=5, rounds=2, **RULES[rule])
    equal(ran, one_process(task, rule, Loader(task, [r.device for r in plan.routes], 8).steps(10)))


@pytest.mark.parametrize("options", [{"window": 2, "split_backward": True}, {"loss_scale": 64.0}], ids=str)
def test_any_ways_in_other_orders_equal_one_process(options: dict[str, Any]) -> None:
    task = points_task([30, 11, 0, 23])
    plan = of_task(task, fleet(4, 4, (1, 4), 6))
    ran = any_way(plan, task, micros=3, batch_size=8, steps_per_round=5, **options, **RULES["clipped AdamW"])
    equal(ran, one_process(task, "clipped AdamW", Loader(task, [r.device for r in plan.routes], 8).steps(5)))


def test_one_device_over_three_edges_equals_one_process() -> None:
    """A chain whose middle three nodes share: the other two are there for devices without data."""
    task = points_task([48, 0, 0])
    plan = of_task(task, fleet(3, 3, (1, 4), 6))
    ran = any_way(plan, task, micros=6, batch_size=24, steps_per_round=5, **RULES["momentum"])
    equal(ran, one_process(task, "momentum", Loader(task, ["d1", "d2", "d3"], 24).steps(5)))


@pytest.mark.parametrize("ends", [("c",), ("c", "device")], ids=["tree", "U-shape"])
def test_the_demos_by_any_ways_equal_one_process(ends: tuple[str, ...]) -> None:
    task = digits([14, 9, 0, 12])
    plan = of_task(task, fleet(2, 4, (3, 6, 8)[: len(ends) + 1], 9, ends))
    ran = any_way(plan, task, micros=2, batch_size=6, steps_per_round=5, **RULES["clipped AdamW"])
    equal(ran, one_process(task, "clipped AdamW", Loader(task, [r.device for r in plan.routes], 6).steps(5)))
    text = english([14, 9, 0, 12])
    plan = of_task(text, fleet(2, 4, (1, 2, 3)[: len(ends) + 1], 4, ends))
    loader = Loader(text, [r.device for r in plan.routes], 6)
    equal(
        any_way(plan, text, micros=2, batch_size=6, steps_per_round=5),
        train_single(text, loader.steps(5), model=seeded(text)),
    )


def test_the_option_lets_the_tier_share_by_what_is_measured() -> None:
    task = points_task([48, 48])
    plan = of_task(task, replace(fleet(2, 2, (1, 4), 6), peers=(), topology=home(CLOUD, *edges("c", "c"))))
    watch = Steps()
    with open_session(
        plan, task, every="step", share=["edge"], micros=4, batch_size=8, steps_per_round=6, **RULES["momentum"]
    ) as session:
        session.fit(callbacks=[watch])
        router = session._conductor.coordinator.steps.router
        assert isinstance(router, Router)
        assert 0 < router.seconds("e1") < 1
        assert session.plan.peers == (("e1", "e2"),)
        ran = Ran(watch.done, session.weights())
    equal(ran, one_process(task, "momentum", Loader(task, ["d1", "d2"], 8).steps(6)))


class Unequal(UnitCosts):
    """Edges of the speeds above, a forward half of a backward; the others take next to no time."""

    def seconds(self, node: str, action: Action) -> float:
        whole = 1 / SPEEDS[node] if node in SPEEDS else 0.015
        return {"F": whole / 3, "B": whole * 2 / 3}.get(action.op, 0.0)


@pytest.mark.parametrize("ends", [(), ("c",)], ids=["edges have the loss", "tree"])
@pytest.mark.parametrize("method", ["gpipe", "1f1b"])
def test_orders_leave_nobody_idle_who_got_his_share_by_speed(method: str, ends: tuple[str, ...]) -> None:
    plan = fleet(4, 4, (1, 3)[: len(ends) + 1], 4, ends)
    router = Router({node: 1 / speed for node, speed in SPEEDS.items()})
    steps = [
        replace(step, micros=tuple(m._replace(route=w) for m, w in zip(step.micros, ways, strict=True)))
        for step in even_steps(plan, 8, steps=5)
        for ways in [router.routes(plan, step.micros)]
    ]
    costs = Unequal(latency=0.005)
    found = predict(method, plan, steps, costs, update_all=True, commit_s=0.01, wait_commit=True)
    assert 5 * 32 / max(event.end for event in found.events) >= 0.95 * 8.0


def test_the_prediction_of_a_run_shares_too() -> None:
    layers = [
        {"name": f"l{i}", "forward_s": 0.1, "input_grad_s": 0.1, "weight_grad_s": 0.1, "cut_bytes": {}}
        for i in range(4)
    ]
    nodes = [
        replace(CLOUD, gflops=1e6),
        *(replace(node, gflops=gflops) for node, gflops in zip(edges("c", "c"), (300.0, 100.0), strict=True)),
    ]
    profile = {"gflops": 100.0, "layers": layers, "target_bytes": 0.0}
    rows = home(*nodes)
    rows["nodes"] = [row | ({"gflops": 1e6} if row["tier"] == "device" else {}) for row in rows["nodes"]]
    plan = replace(fleet(2, 2), peers=(), topology=rows, profile=profile)
    both = {"batch_size": 8, "micros": 8, "every": "step", **RULES["sgd"]}
    found = [predicted_step(plan, options(**both, share=share)) for share in ([], ["edge"])]
    assert found[0] == pytest.approx(8 * 0.6, rel=0.05)
    assert found[1] == pytest.approx(4 * 0.6, rel=0.1)
