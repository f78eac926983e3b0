"""Planners: where they cut, against brute force, and what they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgesplit.errors import PlanError
from edgesplit.plan import Plan, Stage
from edgesplit.planner import plan
from edgesplit.planner.even import partition
from edgesplit.topology import Node, Topology

EIGHT = tuple(f"layer{i}" for i in range(8))


@dataclass(frozen=True)
class Cost:
    name: str
    forward_s: float = 1.0
    input_grad_s: float = 1.0
    weight_grad_s: float = 1.0
    param_bytes: int = 0
    trainable_bytes: int = 0
    stash_bytes: float = 0


@dataclass(frozen=True)
class Measured:
    layers: tuple[Cost, ...]

    def to_json(self) -> Mapping[str, Any]:
        return {"layers": [layer.name for layer in self.layers]}


def fleet(**more: dict[str, Any]) -> Topology:
    """Two devices under two edge servers under a cloud; ``more``: name -> attributes."""
    parents = {"cloud": ("cloud", None), "e1": ("edge", "cloud"), "e2": ("edge", "cloud")}
    parents |= {"d1": ("device", "e1"), "d2": ("device", "e2")}
    nodes = [
        Node(name=name, tier=tier, parent=parent, **more.get(name, {})) for name, (tier, parent) in parents.items()
    ]
    return Topology.of(nodes)


def stages(found: Plan, device: str) -> list[tuple[str, int, int]]:
    return [(stage.node, stage.start, stage.stop) for stage in found.route(device).stages]


def test_manual_cuts_by_index_and_name() -> None:
    found = plan(EIGHT, fleet(), planner="manual", cuts=[3, "layer6"])
    assert stages(found, "d1") == [("d1", 0, 3), ("e1", 3, 6), ("cloud", 6, 8)]
    assert stages(found, "d2") == [("d2", 0, 3), ("e2", 3, 6), ("cloud", 6, 8)]


def test_manual_cuts_of_one_device() -> None:
    found = plan(EIGHT, fleet(), planner="manual", cuts=[3, 6], cuts_by_device={"d2": [1, 2]})
    assert stages(found, "d1") == [("d1", 0, 3), ("e1", 3, 6), ("cloud", 6, 8)]
    assert stages(found, "d2") == [("d2", 0, 1), ("e2", 1, 2), ("cloud", 2, 8)]
    both = plan(EIGHT, fleet(), planner="manual", cuts_by_device={"d1": [3, 6], "d2": [1, 2]})
    assert both.routes == found.routes


@pytest.mark.parametrize(
    ("tiers", "nodes"),
    [
        (["device"], ["d1"]),
        (["device", "cloud"], ["d1", "cloud"]),
        (["device", "edge", "device"], ["d1", "e1", "d1"]),
        (["device", "edge", "device", "edge"], ["d1", "e1", "d1", "e1"]),
    ],
)
def test_tiers_say_which_nodes(tiers: list[str], nodes: list[str]) -> None:
    found = plan(EIGHT, fleet(), tiers=tiers)
    assert [stage.node for stage in found.route("d1").stages] == nodes


def test_even_without_a_profile_counts_layers() -> None:
    assert stages(plan(EIGHT, fleet(), tiers=["device", "cloud"]), "d1") == [("d1", 0, 4), ("cloud", 4, 8)]


def test_even_weighs_measured_time() -> None:
    costs = tuple(
        Cost(name, forward_s=seconds, input_grad_s=0, weight_grad_s=0)
        for name, seconds in zip("abcd", [1, 1, 1, 9], strict=True)
    )
    assert stages(plan(Measured(costs), fleet(), tiers=["device", "cloud"]), "d1") == [("d1", 0, 3), ("cloud", 3, 4)]


def test_even_counts_speed_where_all_is_known() -> None:
    slow: dict[str, Any] = {"gflops": 1}
    known = fleet(d1={"gflops": 5}, d2=slow, cloud={"gflops": 3})
    assert stages(plan(EIGHT, known, tiers=["device", "cloud"]), "d1") == [("d1", 0, 2), ("cloud", 2, 8)]
    partly = fleet(d2=slow, cloud={"gflops": 3})
    assert stages(plan(EIGHT, partly, tiers=["device", "cloud"]), "d1") == [("d1", 0, 4), ("cloud", 4, 8)]


def test_even_keeps_to_memory() -> None:
    costs = tuple(Cost(name, param_bytes=10**6, trainable_bytes=10**6, stash_bytes=10**6) for name in EIGHT)
    # A layer takes 2 MB (parameters, gradients) and two stashes of 1 MB.
    tight = fleet(d1={"memory_mb": 100}, d2={"memory_mb": 8})
    found = plan(Measured(costs), tight, tiers=["device", "cloud"], live=2)
    assert stages(found, "d1") == [("d1", 0, 2), ("cloud", 2, 8)]


def test_a_full_node_is_named_with_figures() -> None:
    costs = tuple(Cost(name, 1, 1, 1, 500_000_000, 500_000_000, 16_666_667) for name in EIGHT)
    small = fleet(e1={"memory_mb": 8000}, e2={"memory_mb": 9000})
    with pytest.raises(PlanError) as caught:
        plan(Measured(costs), small, planner="manual", cuts=[1, 7], state_arrays=1)
    line = "layers 1-6 need 9,100 MB on 'e1', which has 8,000: move a cut or raise micros"
    assert str(caught.value) == line


def test_a_node_of_two_stages_holds_both() -> None:
    costs = tuple(Cost(name, param_bytes=10**6, trainable_bytes=10**6) for name in EIGHT)
    small = fleet(d1={"memory_mb": 5})
    with pytest.raises(PlanError) as caught:
        plan(Measured(costs), small, planner="manual", tiers=["device", "edge", "device"], cuts=[2, 7])
    assert str(caught.value) == "layers 0-1, 7 need 6 MB on 'd1', which has 5: move a cut or raise micros"


def test_what_is_frozen_has_no_gradient() -> None:
    costs = tuple(Cost(name, param_bytes=10**6) for name in EIGHT)
    small = fleet(d1={"memory_mb": 5})
    found = plan(Measured(costs), small, planner="manual", tiers=["device", "cloud"], cuts=[5], state_arrays=2)
    assert stages(found, "d1") == [("d1", 0, 5), ("cloud", 5, 8)]


def test_a_replica_counts_once_however_many_devices_share_it() -> None:
    nodes = [
        Node(name="e", tier="edge", memory_mb=2),
        *(Node(name=f"d{i}", tier="device", parent="e") for i in range(3)),
    ]
    costs = (Cost("a"), Cost("b", param_bytes=10**6, trainable_bytes=10**6))
    found = plan(Measured(costs), Topology.of(nodes))
    assert found.layers_of("e") == (1,)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"planner": "evn"}, "planner 'evn' is not known (did you mean 'even'?): use one of manual, even"),
        (
            {"planner": "even", "cuts": [3, 6]},
            "planner 'even' finds the cuts itself: remove cuts, or use planner 'manual'",
        ),
        ({"planner": "manual"}, "planner 'manual' has no cuts for 'd1': give cuts, or use planner 'even'"),
        (
            {"planner": "manual", "cuts_by_device": {"d1": [1, 2]}},
            "planner 'manual' has no cuts for 'd2': give cuts, or use planner 'even'",
        ),
        (
            {"planner": "manual", "cuts": [1, 2], "cuts_by_device": {"d": [1, 2]}},
            "cuts_by_device names 'd', which is not a device (did you mean 'd2'?)",
        ),
        (
            {"planner": "manual", "cuts": [1, 2], "cuts_by_device": {"d1": [1, 2], "d2": [1, 2]}},
            "cuts has no effect, as cuts_by_device names every device: remove it",
        ),
        (
            {"planner": "manual", "cuts": [3, 9]},
            "cut 9 is out of range: the chain has 8 layers, cuts are 1 to 7",
        ),
        (
            {"planner": "manual", "cuts": [0, 3]},
            "cut 0 is out of range: the chain has 8 layers, cuts are 1 to 7",
        ),
        (
            {"planner": "manual", "cuts": [6, 3]},
            "cut 3 comes after cut 6: cuts must ascend, each stage needs a layer",
        ),
        (
            {"planner": "manual", "cuts": [3, 3]},
            "cut 3 comes after cut 3: cuts must ascend, each stage needs a layer",
        ),
        ({"planner": "manual", "cuts": [3]}, "1 cuts [3] were given, 3 stages need 2"),
        (
            {"planner": "manual", "cuts": [3, "layr6"]},
            "cut 'layr6' is not a layer (did you mean 'layer6'?)",
        ),
        ({"tiers": []}, "tiers is empty: name at least 'device'"),
        ({"tiers": ["edge"]}, "tiers begin with 'edge', must begin with 'device': raw data stays on the device"),
        ({"tiers": ["device", "edge", "edge"]}, "tiers name 'edge' twice in a row: leave one out"),
        (
            {"tiers": ["device", "clod"]},
            "no node has tier 'clod' (did you mean 'cloud'?): the topology has device, edge, cloud",
        ),
    ],
)
def test_what_cannot_be_planned(options: dict[str, Any], line: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan(EIGHT, fleet(), **options)
    assert str(caught.value) == line


def test_a_device_without_such_a_parent_is_named() -> None:
    nodes = [Node(name="e", tier="edge"), Node(name="d1", tier="device", parent="e"), Node(name="d2", tier="device")]
    with pytest.raises(PlanError) as caught:
        plan(EIGHT, Topology.of(nodes))
    assert str(caught.value) == "device 'd2' has no 'edge' above it: give it such a parent, or name other tiers"


def test_too_few_layers() -> None:
    with pytest.raises(PlanError, match=r"^the chain has 2 layers, too few for 3 stages: name fewer tiers$"):
        plan(["a", "b"], fleet())


def test_a_plan_carries_what_it_was_made_from() -> None:
    costs = tuple(Cost(name) for name in EIGHT)
    found = plan(Measured(costs), fleet(), live=4)
    assert found.topology is not None
    assert Topology.from_dict(found.topology) == fleet()
    assert found.profile == {"layers": list(EIGHT)}
    assert found.options == {"planner": "even", "tiers": ["device", "edge", "cloud"], "state_arrays": 0, "live": 4}
    assert Plan.from_json(found.to_json()) == found
    assert plan(EIGHT, fleet()).profile is None


times = st.integers(0, 20).map(float)  # sums of whole numbers are exact, so that equal is equal


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(times, min_size=1, max_size=8),
    st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=1, max_size=4),
    st.sets(st.tuples(st.integers(0, 3), st.integers(0, 7))),
)
def test_partition_equals_brute_force(costs: list[float], speeds: list[float], banned: set[tuple[int, int]]) -> None:
    """``banned``: layers that a stage has no room for."""

    def fits(stage: int, start: int, stop: int) -> bool:
        return not any((stage, layer) in banned for layer in range(start, stop))

    def judge(cuts: tuple[int, ...]) -> tuple[float, float] | None:
        runs = list(enumerate(pairwise([0, *cuts, len(costs)])))
        if not all(fits(stage, *run) for stage, run in runs):
            return None
        seconds = [sum(costs[start:stop]) / speeds[stage] for stage, (start, stop) in runs]
        return max(seconds), sum(time * time for time in seconds)

    found = partition(costs, speeds, fits) if len(speeds) <= len(costs) else None
    judged = [judge(cuts) for cuts in combinations(range(1, len(costs)), len(speeds) - 1)]
    possible = [verdict for verdict in judged if verdict is not None]
    if found is None:
        assert not possible
    else:
        assert judge(found) == min(possible)


def test_stages_are_plain_data() -> None:
    assert plan(EIGHT, fleet(), tiers=["device"]).route("d1").stages == (Stage("d1", 0, 8),)
