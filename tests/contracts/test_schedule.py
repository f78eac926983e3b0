"""What every schedule must do, on hundreds of random plans: trees, meshes, U-shapes, unequal shares, empty devices."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgesplit.costs import UnitCosts
from edgesplit.methods import METHODS, order_of, orders
from edgesplit.plan import Plan, Route, Stage
from edgesplit.schedule import Action, Micro, Step, even_steps
from edgesplit.simulate import simulate

SYNCHRONOUS = ("gpipe", "breadth-first", "1f1b")


@st.composite
def routes_of(draw, layers):
    """Routes with cuts, lengths and servers of their own; servers may come in any order, so a mesh is possible."""
    servers = [f"s{i}" for i in range(draw(st.integers(0, 4)))]
    routes = []
    for index in range(draw(st.integers(1, 4))):
        device = f"d{index}"
        most = min(len(servers), layers - 1)
        path = [device, *draw(st.permutations(servers))[: draw(st.integers(0, most))]]
        if 1 < len(path) < layers and draw(st.booleans()):
            path.append(device)
        cuts = sorted(draw(st.permutations(range(1, layers)))[: len(path) - 1])
        bounds = [0, *cuts, layers]
        stages = (Stage(node, bounds[i], bounds[i + 1]) for i, node in enumerate(path))
        routes.append(Route(device, tuple(stages)))
    return tuple(routes)


@st.composite
def cases(draw):
    layers = draw(st.integers(1, 6))
    plan = Plan(tuple(f"l{i}" for i in range(layers)), draw(routes_of(layers)))
    steps, number = [], draw(st.integers(0, 5))
    for index in range(draw(st.integers(1, 3))):
        shares = {route.device: draw(st.integers(0, 6)) for route in plan.routes}
        dealt = draw(st.permutations([device for device, share in shares.items() for _ in range(share)]))
        steps.append(Step(index, tuple(Micro(number + i, d, i, i + 1) for i, d in enumerate(dealt)), {}))
        number += len(dealt)
    return plan, steps


def wanted(plan, steps, ops):
    paths = {route.device: route.stages for route in plan.routes}
    return Counter(
        (stage.node, Action(op, index, micro.micro))
        for step in steps
        for micro in step.micros
        for index, stage in enumerate(paths[micro.device])
        for op in ops
    )


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", [*SYNCHRONOUS, "pipedream"])
@settings(max_examples=60, deadline=None)
@given(case=cases(), window=st.sampled_from([1, 1, 2, 4]))
def test_each_stage_runs_each_micro_batch_once_and_nothing_deadlocks(name, split, case, window):
    plan, steps = case
    method = METHODS[name]
    found = orders(method, plan, steps, split_backward=split)
    run = Counter((node, a) for node, order in found.items() for a in order if a.op != "U")
    assert run == wanted(plan, steps, "FIW" if split else "FB")
    costs = UnitCosts(latency=0.3)
    timeline = simulate(found, plan, steps, costs, window=window, synchronous=method.synchronous)
    assert len(timeline.events) == sum(map(len, found.values()))


@pytest.mark.parametrize("update_all", [False, True])
@pytest.mark.parametrize("name", SYNCHRONOUS)
@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_each_layer_is_updated_once_a_step_after_its_last_backward(name, update_all, case):
    plan, steps = case
    paths = {route.device: route.stages for route in plan.routes}
    device_of = {micro.micro: micro.device for step in steps for micro in step.micros}
    step_of = {micro.micro: step.step for step in steps for micro in step.micros}
    for node, order in orders(name, plan, steps, update_all=update_all).items():
        assert order == order_of(name, plan, steps, node, update_all=update_all)
        assert [step_of[a.micro] for a in order] == sorted(step_of[a.micro] for a in order)
        for step in steps:
            mine = [a for a in order if step_of[a.micro] == step.step]
            updated: list[int] = []
            for at, action in enumerate(mine):
                if action.op != "U":
                    continue
                assert action.micro == step.micros[-1].micro
                updated += layers_updated(plan, node, action.stage)
                later = {
                    layer for a in mine[at:] if a.op in "FB" for layer in range(*paths[device_of[a.micro]][a.stage][1:])
                }
                assert later.isdisjoint(layers_updated(plan, node, action.stage))
            assert len(updated) == len(set(updated))
            passed = {layer for a in mine if a.op == "B" for layer in range(*paths[device_of[a.micro]][a.stage][1:])}
            assert passed <= set(updated)
            if update_all and step.micros:
                assert set(updated) == set(plan.layers_of(node))


def layers_updated(plan, node, stage):
    """The rule again, layer by layer: the latest stage under which the node hosts it."""
    latest: dict[int, int] = {}
    for route in plan.routes:
        for index, (host, start, stop) in enumerate(route.stages):
            if host == node:
                for layer in range(start, stop):
                    latest[layer] = max(latest.get(layer, -1), index)
    return [layer for layer, index in latest.items() if index == stage]


@settings(max_examples=25, deadline=None)
@given(nodes=st.integers(2, 5), loops=st.integers(2, 4), groups=st.integers(1, 4), split=st.booleans())
def test_rings_run_interleaved_and_breadth_first(nodes, loops, groups, split):
    stages = nodes * loops
    names = ["d0", *(f"s{i}" for i in range(1, nodes))]
    route = Route("d0", tuple(Stage(names[i % nodes], i, i + 1) for i in range(stages)))
    plan = Plan(tuple(f"l{i}" for i in range(stages)), (route,))
    steps = even_steps(plan, groups * nodes, steps=2)
    for name in ("interleaved", "breadth-first"):
        found = orders(name, plan, steps, split_backward=split)
        run = Counter((node, a) for node, order in found.items() for a in order if a.op != "U")
        assert run == wanted(plan, steps, "FIW" if split else "FB")
        simulate(found, plan, steps)
