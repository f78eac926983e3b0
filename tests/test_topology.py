"""Topologies: files in, expanded nodes out; every mistake is one line."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgesplit.errors import TopologyError
from edgesplit.topology import Link, Node, Topology

HOME = """
nodes:
  cloud: {tier: cloud, gflops: 9000, memory_mb: 64000}
  edge:  {tier: edge, count: 2, parent: cloud, gflops: 400, up_mbps: 200, down_mbps: 200, latency_ms: 8}
  pi:
    {tier: device, count: 4, parent: edge, spread: round-robin, config: {path: "data/{name}.npz", tags: ["{name}", 1]}}
  gw-1:  {tier: device, parent: edge-1, gflops: 6, memory_mb: 2000, up_mbps: 20, down_mbps: 40, latency_ms: 3}
links:
  - {between: [edge-1, edge-2], up_mbps: 100, down_mbps: 50, latency_ms: 5}
broker: {at: edge-1}
"""


def load(tmp_path: Path, text: str) -> Topology:
    path = tmp_path / "home.yaml"
    path.write_text(text, encoding="utf-8")
    return Topology.load(path)


def ends(links: tuple[Link, ...]) -> list[str]:
    return [f"{link.src}>{link.dst}" for link in links]


@pytest.fixture
def home(tmp_path: Path) -> Topology:
    return load(tmp_path, HOME)


def test_groups_are_expanded_in_the_order_of_the_file(home: Topology) -> None:
    assert list(home.nodes) == ["cloud", "edge-1", "edge-2", "pi-1", "pi-2", "pi-3", "pi-4", "gw-1"]
    assert [node.name for node in home.devices()] == ["pi-1", "pi-2", "pi-3", "pi-4", "gw-1"]
    assert [node.parent for node in home.devices()] == ["edge-1", "edge-2", "edge-1", "edge-2", "edge-1"]
    assert home.nodes["pi-3"].config == {"path": "data/pi-3.npz", "tags": ["pi-3", 1]}


def test_tiers_and_ancestors(home: Topology) -> None:
    assert home.tier_order == ("device", "edge", "cloud")
    assert [home.ancestor("pi-2", tier) for tier in home.tier_order] == ["pi-2", "edge-2", "cloud"]
    assert home.ancestor("cloud", "edge") is None


def test_rates_and_latency_have_a_direction(home: Topology) -> None:
    assert home.path("gw-1", "edge-1") == (Link("gw-1", "edge-1", 20, 0.003),)
    assert home.path("edge-1", "gw-1") == (Link("edge-1", "gw-1", 40, 0.003),)
    assert home.path("edge-1", "edge-2") == (Link("edge-1", "edge-2", 100, 0.005),)
    assert home.path("edge-2", "edge-1") == (Link("edge-2", "edge-1", 50, 0.005),)
    assert home.path("pi-1", "pi-1") == ()
    assert home.path("gw-1", "edge-1")[0].seconds(250_000) == pytest.approx(0.003 + 2e6 / 20e6)
    assert home.path("pi-1", "edge-1")[0].seconds(10**12) == 0.0  # no limit was given


def test_messages_go_by_way_of_the_broker(home: Topology) -> None:
    assert ends(home.hops("pi-1", "edge-1")) == ["pi-1>edge-1"]
    assert ends(home.hops("edge-1", "cloud")) == ["edge-1>cloud"]
    assert ends(home.hops("pi-2", "edge-2")) == ["pi-2>edge-2", "edge-2>edge-1", "edge-1>edge-2"]
    assert home.hops("pi-2", "pi-2") == ()
    direct = Topology(home.nodes, home.links)
    assert ends(direct.hops("pi-2", "edge-2")) == ["pi-2>edge-2"]


def test_the_fewest_links_then_the_least_latency() -> None:
    nodes = [Node(name="d", tier="device"), *(Node(name=name, tier="edge") for name in "abc")]
    links = [
        Link("d", "a", latency_s=0.1),
        Link("a", "c", latency_s=0.1),
        Link("d", "b", latency_s=0.0),
        Link("b", "c", latency_s=0.1),
    ]
    assert ends(Topology.of(nodes, links).path("d", "c")) == ["d>b", "b>c"]
    assert ends(Topology.of(nodes, [*links, Link("d", "c", latency_s=9)]).path("d", "c")) == ["d>c"]
    with pytest.raises(TopologyError, match=r"^no link leads from 'c' to 'd': give one a parent, or add an entry"):
        Topology.of(nodes, links).path("c", "d")


def test_block_spread_keeps_neighbours_together(tmp_path: Path) -> None:
    text = "nodes: {edge: {tier: edge, count: 2}, d: {tier: device, count: 5, parent: edge, spread: block}}"
    found = load(tmp_path, text)
    assert [node.parent for node in found.devices()] == ["edge-1", "edge-1", "edge-1", "edge-2", "edge-2"]


def test_round_robin_goes_on_over_the_entries(tmp_path: Path) -> None:
    text = "nodes: {edge: {tier: edge, count: 2}, " + "".join(
        f"{name}: {{tier: device, parent: edge}}, " for name in ("a", "b", "c")
    )
    found = load(tmp_path, text + "}")
    assert [node.parent for node in found.devices()] == ["edge-1", "edge-2", "edge-1"]


def test_more_tiers_are_ordered_by_the_chains_of_parents(tmp_path: Path) -> None:
    text = """
nodes:
  top: {tier: sky}
  fog: {tier: fog, parent: top}
  relay: {tier: device, parent: fog}
  leaf: {tier: device, parent: relay}
"""
    found = load(tmp_path, text)
    assert found.tier_order == ("device", "fog", "sky")
    assert [found.ancestor("leaf", tier) for tier in found.tier_order] == ["leaf", "fog", "top"]


def test_unconnected_tiers_come_in_the_usual_order() -> None:
    nodes = [Node(name=tier, tier=tier) for tier in ("cloud", "metro", "device", "edge")]
    assert Topology.of(nodes).tier_order == ("device", "edge", "metro", "cloud")


DEVICE = "nodes: {d: {tier: device}}"
WRONG = [
    (
        "nodes: {edge: {tier: edge}, pi: {tier: device, count: 2, parent: edg}}",
        "node 'pi-1' has parent 'edg', which is not a node (did you mean 'edge'?)",
    ),
    (
        "nodes: {a: {tier: edge, parent: b}, b: {tier: edge, parent: c}, c: {tier: edge, parent: b}}",
        "parents go in a circle: b -> c -> b: one of them needs another parent",
    ),
    (
        "nodes: {a: {tier: edge, parent: b}, b: {tier: cloud, parent: c}, c: {tier: edge}, d: {tier: device}}",
        "tiers lie above each other in a circle: edge -> cloud -> edge: a parent's tier must be a higher one",
    ),
    (
        "nodes: {d: {tier: device}, x: {tier: sensor, parent: d}}",
        "tier 'sensor' lies below 'device', which must be the lowest: turn the parents round",
    ),
    ("nodes: {edge: {tier: edge}}", "no node has tier 'device', so nobody holds data: give one that tier"),
    ("nodes: {}", "no node has tier 'device', so nobody holds data: give one that tier"),
    (
        "nodes: {pi-1: {tier: device}, pi: {tier: device, count: 2}}",
        "'pi' and 'pi-1' both make a node 'pi-1': rename one",
    ),
    (
        "nodes: {a: {tier: device, count: 1}, a-1: {tier: device, count: 1}}",
        "'a' makes a node 'a-1', which is the name of a group: rename one",
    ),
    (
        "nodes: {coordinator: {tier: device}}",
        "a node cannot be named 'coordinator': that is the process that owns the run",
    ),
    (
        "nodes: {my pi: {tier: device}}",
        "node 'my pi': a name is made of letters, digits, '.', '_' and '-'",
    ),
    ("nodes: {d: {tier: device, gflops: 0}}", "nodes.d.gflops is 0, must be above 0.0"),
    ("nodes: {d: {tier: device, memory_mb: -1}}", "nodes.d.memory_mb is -1, must be above 0.0"),
    ("nodes: {d: {tier: device, gflops: .nan}}", "nodes.d.gflops is nan, must be a finite number"),
    ("nodes: {d: {tier: device, up_mbps: .nan}}", "nodes.d.up_mbps is nan, must be above 0.0"),
    ("nodes: {d: {tier: device, latency_ms: .inf}}", "nodes.d.latency_ms is inf, must be a finite number"),
    ("nodes: {d: {tier: device, latency_ms: -1}}", "nodes.d.latency_ms is -1, must be at least 0.0"),
    ("nodes: {d: {tier: device, gflops: fast}}", "nodes.d.gflops is 'fast', must be a number"),
    ("nodes: {d: {tier: device, count: 0}}", "nodes.d.count is 0, must be at least 1"),
    ("nodes: {d: {tier: device, threads: true}}", "nodes.d.threads is True, must be a whole number"),
    ("nodes: {d: {tier: device, parnt: x}}", "nodes.d.parnt: unknown key (did you mean 'parent'?)"),
    ("nodes: {d: {}}", "nodes.d.tier is missing"),
    ("nodes: {d: device}", "nodes.d is 'device', must be a mapping"),
    ("node: {d: {tier: device}}", "node: unknown key (did you mean 'nodes'?)"),
    ("[]", "is [], must be a mapping"),
    ("", "is None, must be a mapping"),
    (
        "nodes: {d: {tier: device, latency_ms: 3}}",
        "node 'd' has no parent, so latency_ms has no effect: remove it, or name a parent",
    ),
    (
        "nodes: {e: {tier: edge}, d: {tier: device, parent: e, spread: block}}",
        "node 'd': spread has no effect without count and a parent with count: remove it",
    ),
    (
        "nodes: {e: {tier: edge}, d: {tier: device, parent: e, spread: blok}}",
        "nodes.d.spread is 'blok', must be 'round-robin' or 'block' (did you mean 'block'?)",
    ),
    (DEVICE + "\nlinks: [{between: [d, e]}]", "link d -> e ends at 'e', which is not a node"),
    (DEVICE + "\nlinks: [{between: [d]}]", "links.0.between has 1 entries, must have at least 2"),
    (DEVICE + "\nlinks: [{between: [d, d]}]", "link d -> d connects a node with itself: remove it"),
    (
        "nodes: {e: {tier: edge}, d: {tier: device, parent: e}}\nlinks: [{between: [e, d]}]",
        "'e' and 'd' are linked twice: keep one link",
    ),
    (
        "nodes: {e: {tier: edge, count: 2}, d: {tier: device}}\nlinks: [{between: [d, e]}]",
        "links.0.between: 'e' is a group: name one of its nodes, for example 'e-1'",
    ),
    (
        "nodes: {dd: {tier: device}}\nbroker: {at: d}",
        "the broker is at 'd', which is not a node (did you mean 'dd'?)",
    ),
    (
        "nodes: {e: {tier: edge, count: 2}, d: {tier: device}}\nbroker: {at: e}",
        "broker.at: 'e' is a group: name one of its nodes, for example 'e-1'",
    ),
    (
        DEVICE + "\nadmit: {tier: device, parent: d, token_fil: x}",
        "admit.token_fil: unknown key (did you mean 'token_file'?)",
    ),
    (
        "nodes: {d: {tier: device, runtime: onnx}}",
        "nodes.d.runtime: onnx is not supported yet in this version: nodes compute with torch",
    ),
    (
        "nodes: {d: {tier: device, profile: pi-4}}",
        "nodes.d.profile: pi-4 is not supported yet in this version: give gflops and memory_mb",
    ),
    (
        "nodes: {d: {tier: device, processes: 2}}",
        "nodes.d.processes: 2 is not supported yet in this version: a node is one process",
    ),
]


@pytest.mark.parametrize(("text", "line"), WRONG)
def test_a_mistake_is_one_clear_line(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(TopologyError) as caught:
        load(tmp_path, text)
    assert str(caught.value) == f"home.yaml: {line}"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "nodes:\n  d: {tier: device}\n  e: {tier: edge}\n  d: {tier: device}\n",
            "home.yaml:4: key 'd' is there twice (first on line 2): remove one",
        ),
        ("nodes:\n  no: {tier: device}\n", "home.yaml:2: key 'no' is not text: put it in quotes"),
        ("nodes:\n  d: {tier: device\n", "home.yaml:3: not YAML: expected ',' or '}', but got '<stream end>'"),
        ("nodes: &a {d: *a}\n", "home.yaml:1: not YAML: found unconstructable recursive node"),
        ("&a {nodes: *a}\n", "home.yaml:1: not YAML: found unconstructable recursive node"),
        (
            "nodes: !!python/name:os []\n",
            "home.yaml:1: not YAML: could not determine a constructor for the tag 'tag:yaml.org,2002:python/name:os'",
        ),
    ],
)
def test_yaml_is_read_strictly(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(TopologyError) as caught:
        load(tmp_path, text)
    assert str(caught.value) == line


def test_merged_keys_may_be_set_anew(tmp_path: Path) -> None:
    text = "nodes:\n  d: &d {tier: device, gflops: 5e-1, config: {day: 2024-01-02}}\n  e: {<<: *d, gflops: 1e3}\n"
    found = load(tmp_path, text)
    assert [node.gflops for node in found.devices()] == [0.5, 1000.0]
    assert found.nodes["e"].config == {"day": "2024-01-02"}


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"^cannot read '.*nowhere.yaml': No such file or directory$"):
        Topology.load(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({}, "topology: 'nodes' is missing"),
        ({"nodes": {}}, "topology: nodes must be a list of mappings"),
        ({"nodes": [], "lnks": []}, "topology: unknown key 'lnks' (did you mean 'links'?)"),
        ({"nodes": [{"name": "a"}]}, "node: 'tier' is missing"),
        ({"nodes": [{"name": "a", "tier": "device"}] * 2}, "two nodes are named 'a': rename one"),
        (
            {"nodes": [{"name": "a", "tier": "device", "gflops": math.nan}]},
            "node 'a': gflops is nan, must be a number above 0",
        ),
        ({"nodes": [{"name": "a", "tier": "device", "parent": []}]}, "node 'a': parent is [], must be text"),
        ({"nodes": [{"name": "a", "tier": "device", "parent": [1]}]}, "node 'a': parent is [1], must be text"),
        (
            {"nodes": [{"name": "a", "tier": "device", "processes": 0}]},
            "node 'a': processes is 0, must be a whole number of at least 1",
        ),
        (
            {"nodes": [{"name": "a", "tier": "device"}], "links": [{"src": "a", "dst": 3}]},
            "link to node 3: a name is made of letters, digits, '.', '_' and '-'",
        ),
    ],
)
def test_what_travels_is_checked_too(data: dict[str, Any], line: str) -> None:
    with pytest.raises(TopologyError) as caught:
        Topology.from_dict(data)
    assert str(caught.value) == line


def test_unknown_names_are_refused(home: Topology) -> None:
    with pytest.raises(TopologyError, match=r"^'edge-3' is not a node \(did you mean 'edge-2'\?\)$"):
        home.path("pi-1", "edge-3")


def test_round_trip_of_a_file(home: Topology) -> None:
    text = json.dumps(home.to_dict(), allow_nan=False, sort_keys=True)
    assert Topology.from_dict(json.loads(text)) == home
    assert list(Topology.from_dict(json.loads(text)).nodes) == list(home.nodes)


def test_a_device_imports_neither_yaml_nor_pydantic() -> None:
    code = "import sys, edgesplit.topology, edgesplit.plan; print({'yaml', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


RELAXED = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
rates = st.sampled_from([0.1, 20, 1e6, math.inf])
delays = st.sampled_from([0.0, 1.0, 2.0, 5.0])  # in binary fractions of a second their sums are compared exactly


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    tiers = ["cloud", "edge", "device"]
    nodes: list[Node] = []
    for level, tier in enumerate(tiers):
        above = [node.name for node in nodes if node.tier == (tiers[level - 1] if level else None)]
        for place in range(draw(st.integers(1, 3))):
            parent = draw(st.none() | st.sampled_from(above)) if above else None
            nodes.append(
                Node(
                    name=f"{tier}{place}",
                    tier=tier,
                    parent=parent,
                    gflops=draw(st.sampled_from([None, 0.3, 400])),
                    up_mbps=draw(rates),
                    down_mbps=draw(rates),
                    latency_ms=draw(delays) * 125,
                    config=draw(st.sampled_from([{}, {"path": "x", "n": [1, None]}])),
                )
            )
    order = draw(st.permutations(nodes))
    linked = {(node.name, node.parent) for node in nodes} | {(node.parent, node.name) for node in nodes}
    pairs = [(a.name, b.name) for a in nodes for b in nodes if a != b and (a.name, b.name) not in linked]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=5))
    links = [Link(a, b, draw(rates), draw(delays) / 8) for a, b in chosen]
    return Topology.of(order, links, draw(st.none() | st.sampled_from([node.name for node in nodes])))


@RELAXED
@given(topologies())
def test_json_round_trip(topology: Topology) -> None:
    again = Topology.from_dict(json.loads(json.dumps(topology.to_dict(), allow_nan=False)))
    assert again == topology
    assert [node.name for node in again.devices()] == [node.name for node in topology.devices()]


@RELAXED
@given(topologies())
def test_paths_are_the_cheapest_that_there_are(topology: Topology) -> None:
    edges = [(link.src, link.dst, link.latency_s) for link in topology.links]
    for node in topology.nodes.values():
        if node.parent:
            edges += [
                (node.name, node.parent, node.latency_ms / 1000),
                (node.parent, node.name, node.latency_ms / 1000),
            ]
    for a in topology.nodes:
        best = {a: (0, 0.0)}
        for _ in topology.nodes:  # Bellman and Ford
            for src, dst, latency in edges:
                if src in best:
                    cost = (best[src][0] + 1, best[src][1] + latency)
                    best[dst] = min(best.get(dst, cost), cost)
        for b in topology.nodes:
            if b in best:
                path = topology.path(a, b)
                assert (len(path), sum(link.latency_s for link in path)) == best[b]
                assert [a, *(link.dst for link in path)] == [*(link.src for link in path), b]
            else:
                with pytest.raises(TopologyError, match="no link leads"):
                    topology.path(a, b)


@RELAXED
@given(topologies())
def test_a_parents_tier_comes_later(topology: Topology) -> None:
    order = topology.tier_order
    assert sorted(order) == sorted({node.tier for node in topology.nodes.values()})
    for node in topology.nodes.values():
        if node.parent:
            assert order.index(node.tier) < order.index(topology.nodes[node.parent].tier)
