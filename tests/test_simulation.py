"""The whole protocol on a virtual clock: real coordinator and nodes, random plans, delays and failures; no thread."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from random import Random

import pytest

from edgesplit.effects import StepDone
from edgesplit.errors import ScheduleError
from edgesplit.methods import METHODS, check, predict
from edgesplit.node import Run
from edgesplit.plan import Plan
from edgesplit.schedule import Event, Micro, even_steps
from edgesplit.sheets import Agenda, Cutting, Draft, evaluation
from edgesplit.verdict import LossScale
from tests.virtual import Case, Fleet, Oracle, present, route, unwrap, wrap

# --- random fleets --------------------------------------------------------------------------------------------------


def draw_plan(rng: Random) -> Plan:
    """A chain, a tree, a U-shape, devices that hold everything, routes of different lengths or cuts, or a loop."""
    layers = rng.randint(5, 7)
    count = rng.randint(2, 4)
    devices = [f"d{i}" for i in range(count)]
    edge = {device: f"e{rng.randrange(2)}" for device in devices}
    paths: dict[str, list[str]]
    match rng.choice(["chain", "u", "loop", "tree", "tree", "star", "u-tree", "u-star", "devices", "mixed", "uneven"]):
        case "chain":
            paths = {"d0": [["d0", "n1", "n2", "n3"][i] for i in range(rng.randint(1, 4))]}
        case "u":
            paths = {"d0": rng.choice(["d0 c d0", "d0 e c d0"]).split()}
        case "loop":
            paths = {"d0": rng.choice(["d0 c d0 c", "d0 c d0 c d0", "d0 e c d0 e c"]).split()}
        case "tree":
            paths = {d: [d, edge[d], "c"] for d in devices}
        case "star":
            paths = {d: [d, "c"] for d in devices}
        case "u-tree":
            paths = {d: [d, edge[d], "c", d] for d in devices}
        case "u-star":
            paths = {d: [d, "c", d] for d in devices}
        case "devices":
            paths = {d: [d] for d in devices}
        case "uneven":
            paths = {d: [d, "c"] if i % 2 else [d, edge[d], "c"] for i, d in enumerate(devices)}
        case _:
            paths = {d: rng.choice([[d], [d, "c"], [d, edge[d], "c"], [d, "c", d]]) for d in devices}
    layers = max(layers, *(len(nodes) for nodes in paths.values()), 1)
    same = rng.random() < 0.6
    cuts: dict[int, list[int]] = {}
    routes = []
    for nodes in paths.values():
        if not (same and len(nodes) in cuts):
            cuts[len(nodes)] = sorted(rng.sample(range(1, layers), len(nodes) - 1))
        routes.append(route(nodes, cuts[len(nodes)], layers))
    return Plan(tuple(f"l{i}" for i in range(layers)), tuple(routes))


def draw_shared_plan(rng: Random) -> Plan:
    """A tree, perhaps U-shaped, whose edges share, and perhaps the two nodes above them, too."""
    layers = rng.randint(5, 7)
    edges, tops = [f"e{i}" for i in range(rng.randint(2, 4))], rng.choice([["c"], ["c"], ["m0", "m1"]])
    end = rng.choice([[], [], ["c"], None])
    paths = []
    for i in range(rng.randint(2, 5)):
        device = f"d{i}"
        last = [device] if end is None else end if tops != ["c"] else []
        paths.append([device, edges[i % len(edges)], tops[i % len(tops)], *last])
    cuts = sorted(rng.sample(range(1, layers), len(paths[0]) - 1))
    at = rng.choice([1, len(edges)])  # one group, or one that some have no part in
    peers = (tuple(edges[at - 1 :]), tuple(tops)) if rng.random() < 0.8 else (tuple(edges[:2]),)
    return Plan(tuple(f"l{i}" for i in range(layers)), tuple(route(p, cuts, layers) for p in paths), peers=peers)


class AnyWay:
    """In place of a Router: any way that the plan leaves."""

    def __init__(self, rng: Random) -> None:
        self._rng, self.abroad = rng, 0

    def routes(self, plan: Plan, micros: Sequence[Micro], absent: Collection[str] = ()) -> list[int]:
        ways = [self._rng.randrange(plan.ways(micro.device)) for micro in micros]
        self.abroad += sum(way > 0 for way in ways)
        return ways

    def observe(self, event: Event, samples: int) -> None:
        assert samples > 0

    def adopt(self, plan: Plan) -> None:
        assert plan.peers


def draw_shared_case(rng: Random) -> Case:
    while True:
        case = draw_case(rng, SYNCHRONOUS, draw_shared_plan)
        if case.every_step:
            return case


def draw_case(rng: Random, methods: Sequence[str], draw: Callable[[Random], Plan] = draw_plan) -> Case:
    while True:
        plan = draw(rng)
        every_step = rng.random() < 0.5
        scale = rng.choice([LossScale(), LossScale(), LossScale(8.0), LossScale(4.0, dynamic=True, growth_interval=2)])
        cutting = rng.choice([Cutting(rng.randint(1, 4)), Cutting(rng.randint(1, 4)), Cutting(None, rng.randint(1, 3))])
        case = Case(
            plan=plan,
            cutting=cutting,
            method=rng.choice(list(methods)),
            window=rng.choice([1, 1, 2, 3]),
            split_backward=rng.random() < 0.3,
            every_step=every_step,
            clip=rng.choice([None, 5.0]),
            scale=scale,
            frozen=frozenset(layer for layer in range(len(plan.layers)) if rng.random() < 0.15),
            poison={
                step: frozenset(node for node in plan.nodes() if rng.random() < 0.3)
                for step in range(30)
                if rng.random() < 0.25
            },
        )
        options = {
            "every": "step" if every_step else "round",
            "clip_norm": case.clip,
            "loss_scale": "dynamic" if scale.value != 1 else None,
            "split_backward": case.split_backward,
            "window": case.window,
            "micros": cutting.micros or 2,
        }
        try:
            check(case.method, plan, options)
        except ScheduleError:
            continue
        if case.method != "interleaved" or cutting.micros is not None:
            return case


def draw_sizes(rng: Random, case: Case) -> dict[str, list[int]]:
    """Samples in each batch, by device: unequal, of some devices none, of some batches none."""
    devices = [r.device for r in case.plan.routes]
    some = [0, 1, 2, 3, 4, 5, 5] if case.method != "interleaved" else [case.cutting.micros or 1, 9]
    while True:
        sizes = {d: [rng.choice(some) for _ in range(rng.choice([0, 1, 2, 3, 3]))] for d in devices}
        if any(map(any, sizes.values())):
            return sizes


# --- a run ----------------------------------------------------------------------------------------------------------


def drafts_of(rng: Random, agenda: Agenda, devices: Sequence[str]) -> list[Draft]:
    taking_part = sorted(rng.sample(list(devices), rng.randint(1, len(devices))))
    if rng.random() < 0.5:
        return agenda.round(taking_part, epochs=1)
    if not any(agenda.sizes[device] for device in taking_part):
        return []
    return agenda.round(taking_part, steps=rng.randint(1, 4))


def in_pieces(rng: Random, drafts: list[Draft]) -> list[list[Draft]]:
    at = rng.randint(0, len(drafts)) if rng.random() < 0.3 else 0
    return [drafts[:at], drafts[at:]] if at else [drafts]


def aggregate(fleet: Fleet, oracle: Oracle) -> None:
    """Fetch, compare with the oracle, mix the replicas, load."""
    nodes = fleet.case.plan.nodes()
    held = fleet.ask("fetch", {node: ({}, {}) for node in nodes})
    values = {(node, int(name)): value for node in nodes for name, value in unwrap(held[node]).items()}
    weights = {(node, layer): w for node in nodes for layer, w in held[node].meta["weights"]}
    assert values == oracle.weights
    assert {key: w for key, w in weights.items() if w} == {key: w for key, w in oracle.total.items() if w}
    if fleet.case.every_step:
        assert all(len({values[n, layer] for n in ns}) == 1 for layer, ns in fleet.case.plan.replicas().items())
    mixed = oracle.aggregate()
    mine = {n: {str(la): v for la, v in mixed.items() if n in oracle.shared[la]} for n in nodes}
    fleet.ask("load", {node: ({"reset_round": True}, wrap(**mine[node])) for node in nodes})


def compare(fleet: Fleet, oracle: Oracle, drafts: Sequence[Draft], done: Sequence[StepDone]) -> None:
    """Replay the drafts and compare what was said of each step."""
    assert [step.step for step in done] == [draft.step for draft in drafts]
    for draft, step in zip(drafts, done, strict=True):
        clip = fleet.clips.get(draft.step, 1.0)
        counts, loss, total, norm = oracle.step(draft, clip)
        assert step.applied == counts
        assert step.samples == sum(share.samples for share in draft.shares.values())
        assert step.weight == total
        if counts:
            assert step.loss == loss / total if total else math.isnan(step.loss)
            if fleet.case.clip is not None:
                assert clip == pytest.approx(min(1.0, fleet.case.clip / (norm + 1e-6)), rel=1e-9, abs=0.0)


def simulate(seed: int, methods: Sequence[str], rounds: int = 2, *, share: bool = False) -> Fleet:
    rng = Random(seed)
    case = draw_shared_case(rng) if share else draw_case(rng, methods)
    fleet, oracle = Fleet(case, rng), Oracle(case)
    if share and rng.random() < 0.8:
        fleet.coordinator.steps.router = AnyWay(rng)  # type: ignore[assignment]
    devices = [r.device for r in case.plan.routes]
    agenda = Agenda(draw_sizes(rng, case), lambda step: 1 + step % 3)
    test_sizes = draw_sizes(rng, case)
    for _ in range(rounds):
        drafts = drafts_of(rng, agenda, devices)
        compare(fleet, oracle, drafts, fleet.train(*in_pieces(rng, drafts)))
        if rng.random() < 0.4:
            tests = list(evaluation(test_sizes, agenda.step))
            found = fleet.train(tests, evaluate=True)
            assert [{d: v["m"] for d, v in step.metrics.items()} for step in found] == [
                oracle.evaluate(draft) for draft in tests
            ]
        if rng.random() < 0.8:
            aggregate(fleet, oracle)
    aggregate(fleet, oracle)
    fleet.settle()
    for node in fleet.nodes.values():
        assert not any((node.engine.undo, node.engine.live, node.engine.sums))
    return fleet


SYNCHRONOUS = [name for name, method in METHODS.items() if method.synchronous]


@pytest.mark.parametrize("block", range(8))
def test_any_fleet_under_any_delays_computes_what_one_process_does(block: int) -> None:
    skipped = 0
    for seed in range(30 * block, 30 * block + 30):
        with noted(seed):
            skipped += simulate(seed, SYNCHRONOUS).coordinator.skipped
    assert skipped > 10


@pytest.mark.parametrize("block", range(4))
def test_whoever_of_those_that_share_takes_a_micro_batch_it_computes_what_one_process_does(block: int) -> None:
    skipped, abroad = 0, 0
    for seed in range(30 * block, 30 * block + 30):
        with noted(seed):
            fleet = simulate(seed, SYNCHRONOUS, share=True)
        skipped += fleet.coordinator.skipped
        runs = (work for node in fleet.nodes.values() for _, work in node.ran if isinstance(work, Run))
        abroad += sum(run.micro is not None and run.micro.route > 0 for run in runs)
    assert skipped > 10
    assert abroad > 1000


def test_a_ring() -> None:
    for seed in range(10):
        with noted(seed):
            simulate(seed, ["interleaved"])


@contextmanager
def noted(seed: int) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise


# --- asynchronous ---------------------------------------------------------------------------------------------------


def simulate_asynchronous(seed: int) -> None:
    """Every update of every micro-batch is made once in every layer on its way, and nothing is left over."""
    rng = Random(seed)
    case = draw_case(rng, ["pipedream"])
    fleet, oracle = Fleet(case, rng), Oracle(case)
    devices = [r.device for r in case.plan.routes]
    agenda = Agenda(draw_sizes(rng, case))
    wanted: Counter[tuple[str, int, int]] = Counter()
    for _ in range(3):
        drafts = drafts_of(rng, agenda, devices)
        done = fleet.train(*in_pieces(rng, drafts))
        assert [step.step for step in done] == [draft.step for draft in drafts]
        for draft, step in zip(drafts, done, strict=True):
            wanted += oracle.updates([draft])
            nodes = {place.node for device in present(draft) for place in case.plan.route(device).stages}
            assert step.applied == (not nodes & case.poison.get(draft.step, frozenset()))
        fleet.ask("fetch", {node: ({}, {}) for node in case.plan.nodes()})
    fleet.settle()
    found: Counter[tuple[str, int, int]] = Counter()
    for name, node in fleet.nodes.items():
        assert set(node.engine.counted.values()) <= {1}
        found.update((name, step, layer) for _, _, step, layer in node.engine.counted)
        assert not any((node.engine.live, node.engine.pending))
    assert found == wanted


def test_asynchronous_updates_are_made_once_each() -> None:
    for seed in range(40):
        with noted(seed):
            simulate_asynchronous(seed)


# --- the simulator by which a step is predicted ---------------------------------------------------------------------


def test_the_predictor_deadlocks_on_none_of_these_plans() -> None:
    for seed in range(100):
        case = draw_case(Random(seed), SYNCHRONOUS)
        steps = even_steps(case.plan, case.cutting.micros or 2, steps=2)
        predict(
            case.method,
            case.plan,
            steps,
            window=case.window,
            split_backward=case.split_backward,
            update_all=case.every_step,
            commit_s=0.1,
            wait_commit=True,
        )
    # A node that is stage 1 of one route and stage 2 of another, which halts in the middle of a step.
    plan = Plan(("l0", "l1", "l2"), (route(["d0", "c"], [1], 3), route(["d1", "e", "c"], [1, 2], 3)))
    predict("1f1b", plan, even_steps(plan, 2, steps=2), commit_s=0.1, wait_commit=True)
