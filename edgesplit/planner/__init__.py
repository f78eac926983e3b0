"""One function, :func:`plan`, over planners that each decide where to cut; one algorithm a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from edgesplit.errors import PlanError, did_you_mean
from edgesplit.plan import Plan, Route, Stage
from edgesplit.planner import even, manual
from edgesplit.topology import DEVICE, Topology

Cut = int | str
"""Where the next stage begins: the index or the name of its first layer."""


class LayerCost(Protocol):
    """What planners ask of a profile's layer; seconds and bytes are of as many samples as the profile says."""

    @property
    def name(self) -> str:
        """The layer's name."""
        ...

    @property
    def forward_s(self) -> float:
        """Seconds of the forward."""
        ...

    @property
    def input_grad_s(self) -> float:
        """Seconds of the input's gradient."""
        ...

    @property
    def weight_grad_s(self) -> float:
        """Seconds of the weights' gradients."""
        ...

    @property
    def param_bytes(self) -> int:
        """Bytes of its parameters."""
        ...

    @property
    def trainable_bytes(self) -> int:
        """Bytes of those that are trained."""
        ...

    @property
    def stash_bytes(self) -> float:
        """Bytes kept from forward to backward."""
        ...


class Profile(Protocol):
    """A measured chain."""

    @property
    def layers(self) -> Sequence[LayerCost]:
        """The chain's layers, in order."""
        ...

    def to_json(self) -> Mapping[str, Any]:
        """Plain JSON values, for the plan to carry."""
        ...


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a planner gets.

    Attributes:
        layers: names of the chain's layers.
        costs: the same layers measured; None: nothing is known but their names.
        nodes: device -> the nodes of its route, one a stage; the number of stages is the same for all.
        topology: the nodes' speed and memory.
        cuts: what the user asked for, for all devices; cuts_by_device: for some.
        state_arrays: optimizer arrays the size of a parameter (0 SGD, 1 momentum, 2 Adam).
        live: forwards, each of the profile's samples, that a stage holds at most.
    """

    layers: tuple[str, ...]
    costs: Sequence[LayerCost] | None
    nodes: Mapping[str, tuple[str, ...]]
    topology: Topology
    cuts: Sequence[Cut] | None
    cuts_by_device: Mapping[str, Sequence[Cut]]
    state_arrays: int
    live: int

    @property
    def stages(self) -> int:
        """Stages of each route."""
        return len(next(iter(self.nodes.values())))

    def memory_mb(self, layers: set[int], ranges: Sequence[tuple[int, int]]) -> float:
        """10^6 bytes for ``layers`` (parameters, gradients, optimizer state) and the stashes of ``ranges``."""
        if self.costs is None:
            return 0.0
        held = sum(self.costs[layer].param_bytes for layer in layers)
        held += sum(self.costs[layer].trainable_bytes for layer in layers) * (1 + self.state_arrays)
        stash = sum(self.costs[layer].stash_bytes for start, stop in ranges for layer in range(start, stop))
        return (held + stash * self.live) / 1e6


PLANNERS: dict[str, Callable[[Problem], Mapping[str, Sequence[int]]]] = {"manual": manual.cut, "even": even.cut}
"""Name -> a function that says, for each device, before which layers its route is cut."""


def plan(
    layers: Profile | Sequence[str],
    topology: Topology,
    *,
    planner: str = "even",
    tiers: Sequence[str] | None = None,
    cuts: Sequence[Cut] | None = None,
    cuts_by_device: Mapping[str, Sequence[Cut]] | None = None,
    state_arrays: int = 0,
    live: int = 1,
) -> Plan:
    """Decide which layers run where.

    Args:
        layers: a profile, or just the names of the chain's layers.
        topology: the fleet.
        planner: a name of :data:`PLANNERS`.
        tiers: of the stages of a route; a node is the device's ancestor of that tier. ``[device, edge, device]``
            is U-shaped, ``[device]`` is plain federated learning. None: every tier of the topology, from below.
        cuts, cuts_by_device: for ``manual``: the layers (index or name) with which the next stages begin.
        state_arrays: optimizer arrays the size of a parameter: 0 for SGD, 1 with momentum, 2 for Adam.
        live: forwards, each of the profile's samples, that a stage holds at most, for the memory: with a profile of
            one sample, live micro-batches times their size.

    Raises:
        PlanError: an unknown planner, a device without an ancestor of a tier, cuts that cannot be, or a node whose
            ``memory_mb`` the plan would exceed.
    """
    if planner not in PLANNERS:
        known = ", ".join(PLANNERS)
        raise PlanError(f"planner {planner!r} is not known{did_you_mean(planner, PLANNERS)}: use one of {known}")
    if planner != "manual" and (cuts is not None or cuts_by_device):
        raise PlanError(f"planner {planner!r} finds the cuts itself: remove cuts, or use planner 'manual'")
    names, costs = _names(layers)
    wanted = tuple(tiers if tiers is not None else topology.tier_order)
    nodes = {device.name: _route_nodes(device.name, wanted, topology) for device in topology.devices()}
    problem = Problem(
        layers=names,
        costs=costs,
        nodes=nodes,
        topology=topology,
        cuts=cuts,
        cuts_by_device=cuts_by_device or {},
        state_arrays=state_arrays,
        live=live,
    )
    if len(names) < problem.stages:
        raise PlanError(f"the chain has {len(names)} layers, too few for {problem.stages} stages: name fewer tiers")
    found = PLANNERS[planner](problem)
    routes = []
    for device, route_nodes in nodes.items():
        ranges = pairwise([0, *found[device], len(names)])
        stages = (Stage(node, *span) for node, span in zip(route_nodes, ranges, strict=True))
        routes.append(Route(device, tuple(stages)))
    made = Plan(
        names,
        tuple(routes),
        topology=topology.to_dict(),
        profile=None if costs is None or isinstance(layers, Sequence) else layers.to_json(),
        options={"planner": planner, "tiers": list(wanted), "state_arrays": state_arrays, "live": live},
    )
    _check_memory(made, problem)
    return made


def _names(layers: Profile | Sequence[str]) -> tuple[tuple[str, ...], Sequence[LayerCost] | None]:
    if isinstance(layers, Sequence):
        return tuple(layers), None
    return tuple(layer.name for layer in layers.layers), layers.layers


def _route_nodes(device: str, tiers: tuple[str, ...], topology: Topology) -> tuple[str, ...]:
    if not tiers:
        raise PlanError("tiers is empty: name at least 'device'")
    if tiers[0] != DEVICE:
        raise PlanError(f"tiers begin with {tiers[0]!r}, must begin with {DEVICE!r}: raw data stays on the device")
    for below, above in pairwise(tiers):
        if below == above:
            raise PlanError(f"tiers name {below!r} twice in a row: leave one out")
    nodes = []
    for tier in tiers:
        if tier not in topology.tier_order:
            near = did_you_mean(tier, topology.tier_order)
            raise PlanError(f"no node has tier {tier!r}{near}: the topology has {', '.join(topology.tier_order)}")
        node = topology.ancestor(device, tier)
        if node is None:
            raise PlanError(f"device {device!r} has no {tier!r} above it: give it such a parent, or name other tiers")
        nodes.append(node)
    return tuple(nodes)


def _check_memory(made: Plan, problem: Problem) -> None:
    for node in made.nodes():
        limit = problem.topology.nodes[node].memory_mb
        if limit is None or problem.costs is None:
            continue
        hosted = made.hosted(node)
        ranges = [span for spans in hosted.values() for span in sorted(spans)]
        layers = made.layers_of(node)
        needed = problem.memory_mb(set(layers), ranges)
        if needed > limit:
            raise PlanError(
                f"layers {_spans(layers)} need {_mb(needed, limit)} MB on {node!r}, which has {_mb(limit, limit)}: "
                "move a cut or raise micros"
            )


def _spans(layers: Sequence[int]) -> str:
    """``4-9`` or ``0-1, 6-7``."""
    spans: list[list[int]] = []
    for layer in layers:
        if spans and layer == spans[-1][1] + 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _mb(value: float, limit: float) -> str:
    return f"{value:,.0f}" if limit >= 100 else f"{value:,.3g}"
