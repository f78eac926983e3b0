"""Plans: what they answer, what they refuse, and their JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgesplit.errors import PlanError
from edgesplit.plan import Plan, Route, Stage
from edgesplit.topology import Node, Topology

LAYERS = ("conv1", "relu1", "conv2", "relu2", "flatten", "linear")


def route(device: str, *stages: tuple[str, int, int]) -> Route:
    return Route(device, tuple(Stage(*stage) for stage in stages))


TREE = Plan(
    LAYERS,
    (
        route("pi-1", ("pi-1", 0, 2), ("edge-1", 2, 4), ("cloud", 4, 6)),
        route("pi-2", ("pi-2", 0, 1), ("edge-1", 1, 4), ("cloud", 4, 6)),
        route("pi-3", ("pi-3", 0, 2), ("cloud", 2, 6)),
        route("pi-4", ("pi-4", 0, 2), ("edge-1", 2, 4), ("cloud", 4, 6)),
    ),
)
U_SHAPE = Plan(LAYERS, (route("pi", ("pi", 0, 2), ("edge", 2, 5), ("pi", 5, 6)),))


def test_nodes_come_by_stage() -> None:
    assert TREE.nodes() == ("pi-1", "pi-2", "pi-3", "pi-4", "edge-1", "cloud")
    assert U_SHAPE.nodes() == ("pi", "edge")
    assert (TREE.stages, U_SHAPE.stages) == (3, 3)


def test_last_nodes_compute_the_loss() -> None:
    assert TREE.last_nodes() == ("cloud",)
    assert U_SHAPE.last_nodes() == ("pi",)


def test_what_a_node_hosts() -> None:
    assert TREE.hosted("edge-1") == {1: {(1, 4), (2, 4)}}
    assert TREE.hosted("cloud") == {1: {(2, 6)}, 2: {(4, 6)}}
    assert U_SHAPE.hosted("pi") == {0: {(0, 2)}, 2: {(5, 6)}}
    assert TREE.layers_of("edge-1") == (1, 2, 3)
    assert U_SHAPE.layers_of("pi") == (0, 1, 5)
    assert TREE.layers_of("nobody") == ()


def test_replicas_are_by_layer_in_the_order_of_nodes() -> None:
    assert TREE.replicas() == {
        0: ("pi-1", "pi-2", "pi-3", "pi-4"),
        1: ("pi-1", "pi-3", "pi-4", "edge-1"),
        2: ("edge-1", "cloud"),
        3: ("edge-1", "cloud"),
        4: ("cloud",),
        5: ("cloud",),
    }


def test_the_route_of_a_device() -> None:
    assert TREE.route("pi-3").stages == (Stage("pi-3", 0, 2), Stage("cloud", 2, 6))
    with pytest.raises(PlanError, match=r"^no route is of device 'pi-5' \(did you mean 'pi-\d'\?\)$"):
        TREE.route("pi-5")


def test_it_prints_as_a_table() -> None:
    nodes = [Node(name="cloud", tier="cloud"), Node(name="edge-1", tier="edge")]
    nodes += [Node(name=f"pi-{i}", tier="device") for i in range(1, 5)]
    plan = Plan(LAYERS, TREE.routes, topology=Topology.of(nodes).to_dict())
    assert str(plan).splitlines() == [
        "6 layers, 4 devices, 6 nodes",
        "devices     stage  node           tier    layers  names",
        "pi-1, pi-4  0      (each device)  device  0-1     conv1..relu1",
        "            1      edge-1         edge    2-3     conv2..relu2",
        "            2      cloud          cloud   4-5     flatten..linear",
        "pi-2        0      pi-2           device  0       conv1",
        "            1      edge-1         edge    1-3     relu1..relu2",
        "            2      cloud          cloud   4-5     flatten..linear",
        "pi-3        0      pi-3           device  0-1     conv1..relu1",
        "            1      cloud          cloud   2-5     conv2..linear",
    ]


def test_many_like_devices_share_a_block() -> None:
    plan = Plan(("a",), tuple(route(f"d{i}", (f"d{i}", 0, 1)) for i in range(9)))
    assert str(plan).splitlines()[0] == "1 layer, 9 devices, 9 nodes"
    assert str(plan).splitlines()[2] == "d0, d1, ... (9)  0      (each device)  -     0       a"


@pytest.mark.parametrize(
    ("routes", "line"),
    [
        ((), "the plan has no routes: give it at least one device"),
        ((route("d"),), "the route of 'd' has no stages: give it at least one"),
        (
            (route("d", ("e", 0, 6)),),
            "the route of 'd' begins on 'e': the first layers stay on the device itself",
        ),
        (
            (route("d", ("d", 0, 2), ("e", 3, 6)),),
            "the route of 'd' goes on at layer 3 on 'e', must go on at 2: close the gap",
        ),
        (
            (route("d", ("d", 0, 2), ("e", 1, 6)),),
            "the route of 'd' goes on at layer 1 on 'e', must go on at 2: close the gap",
        ),
        (
            (route("d", ("d", 0, 2), ("e", 2, 2), ("f", 2, 6)),),
            "the route of 'd' has no layers on 'e' (2 to 2): leave that stage out",
        ),
        (
            (route("d", ("d", 0, 2), ("e", 2, 5)),),
            "the route of 'd' ends after layer 4, the chain has 6 layers: it must run all of them",
        ),
        (
            (route("d", ("d", 0, 2), ("e", 2, 7)),),
            "the route of 'd' ends after layer 6, the chain has 6 layers: it must run all of them",
        ),
        (
            (route("d", ("d", 0, 2), ("d", 2, 6)),),
            "the route of 'd' has two stages in a row on 'd': join them",
        ),
        ((route("d", ("d", 0, 6)),) * 2, "device 'd' has two routes: keep one"),
    ],
)
def test_routes_that_cannot_be(routes: tuple[Route, ...], line: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(LAYERS, routes)
    assert str(caught.value) == line


def test_layers_that_cannot_be() -> None:
    with pytest.raises(PlanError, match=r"^the chain has no layers: nothing to place$"):
        Plan((), TREE.routes)
    with pytest.raises(PlanError, match=r"^two layers are named 'a': rename one$"):
        Plan(("a", "b", "a"), TREE.routes)


def changed(**parts: Any) -> dict[str, Any]:
    return {**TREE.to_json(), **parts}


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ([], "plan: is [], must be a mapping"),
        ({"version": 1, "layers": []}, "plan: 'routes' is missing"),
        (changed(version=2), "the plan has version 2, this edgesplit reads 1: plan again"),
        (changed(rotes=1), "plan: unknown key 'rotes' (did you mean 'routes'?)"),
        (changed(layers="abc"), "plan: layers is 'abc', must be a list"),
        (changed(layers=[1]), "plan: layer is 1, must be text"),
        (changed(routes=[3]), "route: is 3, must be a mapping"),
        (
            changed(routes=[{"device": "d", "stages": [["d", 0]]}]),
            "plan: a stage is ['d', 0], must be [node, start, stop]",
        ),
        (
            changed(routes=[{"device": "d", "stages": [["d", False, True]]}]),
            "plan: a stage is ['d', False, True], must be [node, start, stop]",
        ),
        (changed(topology=[1]), "plan: topology is [1], must be a mapping or null"),
        (changed(options="x"), "plan: options is 'x', must be a mapping or null"),
    ],
)
def test_json_is_checked(data: Any, line: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(data)
    assert str(caught.value) == line


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    TREE.save(path)
    assert Plan.load(path) == TREE
    path.write_text("{", encoding="utf-8")
    with pytest.raises(PlanError, match=r"^plan.json: not JSON: "):
        Plan.load(path)
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(PlanError, match=r"^plan.json: plan: 'layers' is missing$"):
        Plan.load(path)
    with pytest.raises(PlanError, match=r"^cannot read '.*': No such file or directory$"):
        Plan.load(tmp_path / "nowhere.json")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    layers = tuple(f"layer{i}" for i in range(draw(st.integers(1, 8))))
    routes = []
    for device in range(draw(st.integers(1, 4))):
        cuts = sorted(draw(st.sets(st.integers(1, len(layers) - 1)))) if len(layers) > 1 else []
        bounds = [0, *cuts, len(layers)]
        nodes = [f"d{device}"]
        for _ in cuts:
            nodes.append(draw(st.sampled_from([node for node in (f"d{device}", "e", "c") if node != nodes[-1]])))
        routes.append(
            route(f"d{device}", *((node, bounds[i], bounds[i + 1]) for i, node in enumerate(nodes))),
        )
    mappings = st.dictionaries(st.text(max_size=3), values, max_size=3)
    return Plan(layers, tuple(routes), draw(st.none() | mappings), draw(st.none() | mappings), draw(mappings))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_json_round_trip(plan: Plan) -> None:
    again = Plan.from_json(json.loads(json.dumps(plan.to_json(), allow_nan=False)))
    assert again == plan
    assert str(again) == str(plan)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_the_views_agree(plan: Plan) -> None:
    held = {(layer, node) for node in plan.nodes() for layer in plan.layers_of(node)}
    assert held == {(layer, node) for layer, nodes in plan.replicas().items() for node in nodes}
    on_routes = {
        (layer, stage.node) for each in plan.routes for stage in each.stages for layer in range(stage.start, stage.stop)
    }
    assert held == on_routes
    assert set(plan.last_nodes()) <= set(plan.nodes())
