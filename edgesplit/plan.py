"""A plan: which layers of the chain run on which node, for the micro-batches of each device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Self

from edgesplit.errors import PlanError, did_you_mean

VERSION = 1
"""Of the JSON form."""


class Stage(NamedTuple):
    """Layers ``start`` to ``stop`` (exclusive) on ``node``."""

    node: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Route:
    """The path of one device's micro-batches; the first stage's node is the device itself."""

    device: str
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class Plan:
    """Routes of layer ranges over a chain.

    Attributes:
        layers: names of the chain's layers, in order.
        routes: one per device.
        topology, profile: what it was planned from, as plain JSON values (None where made by hand).
        options: what the planner was told, as plain JSON values.
        peers: groups of nodes that share the micro-batches of a stage, see :meth:`choices`; names of nodes that are on
            no route count for nothing.

    Raises:
        PlanError: the routes do not run every layer once, in order, or a node has two groups of peers.
    """

    layers: tuple[str, ...]
    routes: tuple[Route, ...]
    topology: Mapping[str, Any] | None = None
    profile: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    peers: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlanError("the chain has no layers: nothing to place")
        if len(set(self.layers)) < len(self.layers):
            twice = next(name for name in self.layers if self.layers.count(name) > 1)
            raise PlanError(f"two layers are named {twice!r}: rename one")
        if not self.routes:
            raise PlanError("the plan has no routes: give it at least one device")
        seen: set[str] = set()
        for route in self.routes:
            if route.device in seen:
                raise PlanError(f"device {route.device!r} has two routes: keep one")
            seen.add(route.device)
            _check_route(route, len(self.layers))
        named = [node for group in self.peers for node in group]
        if len(set(named)) < len(named):
            twice = next(node for node in named if named.count(node) > 1)
            raise PlanError(f"node {twice!r} is twice among the peers: name it once")

    @cached_property
    def _by_device(self) -> dict[str, Route]:
        return {route.device: route for route in self.routes}

    @cached_property
    def stages(self) -> int:
        """Stages of the longest route."""
        return max(len(route.stages) for route in self.routes)

    def route(self, device: str) -> Route:
        """The route of a device's micro-batches."""
        if device not in self._by_device:
            raise PlanError(f"no route is of device {device!r}{did_you_mean(device, self._by_device)}")
        return self._by_device[device]

    # -- the ways that a micro-batch may take

    def choices(self, device: str) -> tuple[tuple[str, ...], ...]:
        """Return the nodes that may run each stage of a device's route, the plan's own first.

        The others are its peers: those that run the same layers as the same stage, where that is all that either does.
        """
        if device not in self._choices:
            self._choices[device] = tuple(
                (stage.node, *self._stand_ins(index, stage)) for index, stage in enumerate(self.route(device).stages)
            )
        return self._choices[device]

    def _stand_ins(self, index: int, stage: Stage) -> list[str]:
        alone = {index: {(stage.start, stage.stop)}}
        group = next((group for group in self.peers if stage.node in group), ())
        if not group or self.hosted(stage.node) != alone:
            return []
        return [node for node in group if node != stage.node and self.hosted(node) == alone]

    def sharing(self) -> frozenset[str]:
        """Return the nodes that share a stage with others."""
        if not self.peers:
            return frozenset()
        stages = (nodes for route in self.routes for nodes in self.choices(route.device))
        return frozenset(node for nodes in stages if len(nodes) > 1 for node in nodes)

    def ways(self, device: str) -> int:
        """How many paths the micro-batches of a device may take."""
        return prod(map(len, self.choices(device)))

    def path(self, device: str, route: int = 0) -> tuple[Stage, ...]:
        """Return the stages that a micro-batch of a device passes.

        Args:
            route: which of the device's ways, in the order of the product of its :meth:`choices`; 0: its route.

        Raises:
            PlanError: there is no such way, or no such device.
        """
        if (device, route) not in self._paths:
            choices, left, nodes = self.choices(device), route, []
            for here in reversed(choices):
                left, at = divmod(left, len(here))
                nodes.append(here[at])
            if left:
                raise PlanError(f"micro-batches of {device!r} have {self.ways(device)} ways, not one numbered {route}")
            stages = zip(self.route(device).stages, reversed(nodes), strict=True)
            self._paths[device, route] = tuple(stage._replace(node=node) for stage, node in stages)
        return self._paths[device, route]

    @cached_property
    def _choices(self) -> dict[str, tuple[tuple[str, ...], ...]]:
        return {}

    @cached_property
    def _paths(self) -> dict[tuple[str, int], tuple[Stage, ...]]:
        return {}

    def links(self) -> dict[tuple[str, str], None]:
        """The pairs of nodes that one micro-batch passes one after the other, whichever way it takes, in order."""
        return {
            pair: None
            for route in self.routes
            for here, there in pairwise(self.choices(route.device))
            for pair in product(here, there)
        }

    # -- who holds what

    def nodes(self) -> tuple[str, ...]:
        """All nodes: those of stage 0 in the order of routes, then what stage 1 adds, and so on."""
        found: dict[str, None] = {}
        for stage in range(self.stages):
            for route in self.routes:
                if stage < len(route.stages):
                    found[route.stages[stage].node] = None
        return tuple(found)

    def last_nodes(self) -> tuple[str, ...]:
        """The nodes that compute the loss, in the order of routes."""
        return tuple(dict.fromkeys(route.stages[-1].node for route in self.routes))

    def hosted(self, node: str) -> dict[int, set[tuple[int, int]]]:
        """Stage -> the ranges ``(start, stop)`` that ``node`` runs as that stage of any route."""
        return {index: set(ranges) for index, ranges in sorted(self._hosted.get(node, {}).items())}

    @cached_property
    def _hosted(self) -> dict[str, dict[int, set[tuple[int, int]]]]:
        found: dict[str, dict[int, set[tuple[int, int]]]] = {}
        for route in self.routes:
            for index, (node, start, stop) in enumerate(route.stages):
                found.setdefault(node, {}).setdefault(index, set()).add((start, stop))
        return found

    def bare(self) -> Plan:
        """Return the plan without topology, profile and options: what nodes need of it."""
        return Plan(self.layers, self.routes, peers=self.peers)

    def layers_of(self, node: str) -> tuple[int, ...]:
        """Indices of the layers that ``node`` holds, ascending."""
        ranges = (found for stage in self.hosted(node).values() for found in stage)
        return tuple(sorted({layer for start, stop in ranges for layer in range(start, stop)}))

    def replicas(self) -> dict[int, tuple[str, ...]]:
        """Layer index -> the nodes that hold it, in the order of :meth:`nodes`; one node: it has no replicas."""
        holders: dict[int, dict[str, None]] = {layer: {} for layer in range(len(self.layers))}
        for route in self.routes:
            for node, start, stop in route.stages:
                for layer in range(start, stop):
                    holders[layer][node] = None
        place = {node: index for index, node in enumerate(self.nodes())}
        return {layer: tuple(sorted(nodes, key=place.__getitem__)) for layer, nodes in holders.items()}

    def tiers(self) -> dict[str, str]:
        """Return the tier of each node; empty where the plan carries no topology."""
        rows = (self.topology or {}).get("nodes", [])
        return {row["name"]: row["tier"] for row in rows}

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        peers = {"peers": [list(group) for group in self.peers]} if self.peers else {}
        return {
            "version": VERSION,
            "layers": list(self.layers),
            "routes": [
                {"device": route.device, "stages": [list(stage) for stage in route.stages]} for route in self.routes
            ],
            "topology": self.topology,
            "profile": self.profile,
            "options": dict(self.options),
            **peers,
        }

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """The inverse of :meth:`to_json`; checks everything, trusts nothing.

        Raises:
            PlanError: not a plan, or of another version.
        """
        others = frozenset({"topology", "profile", "options", "peers"})
        data = _mapping(data, "plan", {"version", "layers", "routes"}, others)
        if data["version"] != VERSION:
            raise PlanError(f"the plan has version {data['version']!r}, this edgesplit reads {VERSION}: plan again")
        layers = tuple(_text(name, "layer") for name in _list(data["layers"], "layers"))
        routes = tuple(_read_route(route) for route in _list(data["routes"], "routes"))
        parts = {key: data.get(key) for key in ("topology", "profile")}
        for key, part in (*parts.items(), ("options", data.get("options"))):
            if part is not None and not isinstance(part, Mapping):
                raise PlanError(f"plan: {key} is {part!r}, must be a mapping or null")
        groups = (_list(group, "peers") for group in _list(data.get("peers", []), "peers"))
        peers = tuple(tuple(_text(node, "peer") for node in group) for group in groups)
        return cls(layers, routes, **parts, options=data.get("options") or {}, peers=peers)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what :meth:`save` wrote.

        Raises:
            PlanError: there is no such file, or it holds no plan.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(f"cannot read {str(path)!r}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise PlanError(
                f"{Path(path).name}: not JSON: {error}: a plan is what 'edgesplit plan -o' writes, or a run's plan.json"
            ) from None
        try:
            return cls.from_json(data)
        except PlanError as error:
            raise PlanError(f"{Path(path).name}: {error}") from None

    def __str__(self) -> str:
        """A table: like routes share a block, a line a stage."""
        tiers = _tiers(self.topology)
        groups: dict[tuple[Stage, ...], list[str]] = {}
        for route in self.routes:
            like = tuple(stage._replace(node="") if stage.node == route.device else stage for stage in route.stages)
            groups.setdefault(like, []).append(route.device)
        rows = [("devices", "stage", "node", "tier", "layers", "names")]
        for stages, devices in groups.items():
            for index, (node, start, stop) in enumerate(stages):
                rows.append(
                    (
                        "" if index else _shorten(devices),
                        str(index),
                        node or (devices[0] if len(devices) == 1 else "(each device)"),
                        tiers.get(node or devices[0], "-"),
                        str(start) if stop == start + 1 else f"{start}-{stop - 1}",
                        self.layers[start] if stop == start + 1 else f"{self.layers[start]}..{self.layers[stop - 1]}",
                    )
                )
        widths = [max(len(row[column]) for row in rows) for column in range(6)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        counts = (("layer", self.layers), ("device", self.routes), ("node", self.nodes()))
        head = ", ".join(_count(len(found), word) for word, found in counts)
        return "\n".join([head, *lines])


def _check_route(route: Route, layers: int) -> None:
    where = f"the route of {route.device!r}"
    if not route.stages:
        raise PlanError(f"{where} has no stages: give it at least one")
    if route.stages[0].node != route.device:
        raise PlanError(f"{where} begins on {route.stages[0].node!r}: the first layers stay on the device itself")
    at = 0
    for stage in route.stages:
        if stage.start != at:
            raise PlanError(
                f"{where} goes on at layer {stage.start} on {stage.node!r}, must go on at {at}: close the gap"
            )
        if stage.stop <= stage.start:
            raise PlanError(
                f"{where} has no layers on {stage.node!r} ({stage.start} to {stage.stop}): leave that stage out"
            )
        at = stage.stop
    if at != layers:
        raise PlanError(f"{where} ends after layer {at - 1}, the chain has {layers} layers: it must run all of them")
    for before, after in pairwise(route.stages):
        if before.node == after.node:
            raise PlanError(f"{where} has two stages in a row on {after.node!r}: join them")


def _read_route(data: Any) -> Route:
    data = _mapping(data, "route", {"device", "stages"})
    stages = []
    for stage in _list(data["stages"], "stages"):
        match stage:
            case [str(node), int(start), int(stop)] if not isinstance(start, bool) and not isinstance(stop, bool):
                stages.append(Stage(node, start, stop))
            case _:
                raise PlanError(f"plan: a stage is {stage!r}, must be [node, start, stop]")
    return Route(_text(data["device"], "device"), tuple(stages))


def _mapping(data: Any, what: str, needed: set[str], optional: frozenset[str] = frozenset()) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise PlanError(f"{what}: is {data!r}, must be a mapping")
    for key in data:
        if key not in needed | optional:
            raise PlanError(f"{what}: unknown key {key!r}{did_you_mean(str(key), needed | optional)}")
    for key in sorted(needed - set(data)):
        raise PlanError(f"{what}: {key!r} is missing")
    return data


def _list(data: Any, what: str) -> list[Any]:
    if not isinstance(data, list):
        raise PlanError(f"plan: {what} is {data!r}, must be a list")
    return data


def _text(data: Any, what: str) -> str:
    if not isinstance(data, str):
        raise PlanError(f"plan: {what} is {data!r}, must be text")
    return data


def _tiers(topology: Mapping[str, Any] | None) -> dict[str, str]:
    """Node -> tier, as far as the embedded topology says."""
    nodes = topology.get("nodes") if topology else None
    found = nodes if isinstance(nodes, list) else []
    return {str(node.get("name")): str(node.get("tier")) for node in found if isinstance(node, Mapping)}


def _shorten(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]}, ... ({len(names)})"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")
