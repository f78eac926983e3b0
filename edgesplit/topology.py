"""Who is where: nodes, the links between them, and the way a message takes.

No YAML and no pydantic at import, so that a device's process does without them: :meth:`Topology.load` fetches the
reader of files when it is called, and what travels is :meth:`Topology.to_dict`.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from edgesplit.attendance import hours_of
from edgesplit.errors import TopologyError, did_you_mean
from edgesplit.task import COORDINATOR

DEVICE = "device"
"""The lowest tier: its nodes hold the private data."""

USUAL_ORDER = (DEVICE, "edge", "metro", "cloud")
"""Settles the order of tiers that no chain of parents connects."""

NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, kw_only=True)
class Node:
    """A named participant on one machine.

    Attributes:
        name: letters, digits, ``.``, ``_`` and ``-``.
        tier: ``device``, ``edge``, ``cloud`` or a name of your own.
        parent: the node above, where its uplink ends.
        gflops: 10^9 floating-point operations a second; None: not known.
        memory_mb: 10^6 bytes it may use; None: no limit known.
        up_mbps, down_mbps: 10^6 bits a second to and from the parent; infinite: no limit.
        latency_ms: of the link to the parent, one way.
        processes: ranks of a cloud node's group.
        runtime: what computes there.
        profile: name of a board's profile.
        threads: compute threads; None: the run's.
        config: what the task's data functions get as ``Shard.config``.
        hours: of a device: when it takes part, see :func:`hours_of`; None: always.
        max_mb_per_round: of a device: 10^6 bytes that it may send and get in a round; None: any.
    """

    name: str
    tier: str
    parent: str | None = None
    gflops: float | None = None
    memory_mb: float | None = None
    up_mbps: float = math.inf
    down_mbps: float = math.inf
    latency_ms: float = 0.0
    processes: int = 1
    runtime: str = "torch"
    profile: str | None = None
    threads: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    hours: str | None = None
    max_mb_per_round: float | None = None

    def __post_init__(self) -> None:
        _check_name(self.name, "node")
        _check_name(self.tier, f"node {self.name!r}: tier")
        if self.name == COORDINATOR:
            raise TopologyError(f"a node cannot be named {COORDINATOR!r}: that is the process that owns the run")
        where = f"node {self.name!r}"
        for key in ("parent", "runtime", "profile"):
            if not isinstance(getattr(self, key), str | None):
                raise TopologyError(f"{where}: {key} is {getattr(self, key)!r}, must be text")
        if not isinstance(self.config, Mapping):
            raise TopologyError(f"{where}: config is {self.config!r}, must be a mapping")
        for key in ("gflops", "memory_mb"):
            if getattr(self, key) is not None:
                _check_number(getattr(self, key), where, key)
        _check_number(self.up_mbps, where, "up_mbps", infinite=True)
        _check_number(self.down_mbps, where, "down_mbps", infinite=True)
        _check_number(self.latency_ms, where, "latency_ms", zero=True)
        _check_count(self.processes, where, "processes")
        if self.threads is not None:
            _check_count(self.threads, where, "threads")
        if self.max_mb_per_round is not None:
            _check_number(self.max_mb_per_round, where, "max_mb_per_round")
        if self.hours is not None:
            hours_of(self.hours)
        if self.tier != DEVICE and (self.hours is not None or self.max_mb_per_round is not None):
            raise TopologyError(f"{where} is no device: hours and max_mb_per_round are for devices, remove them")


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a connection: ``mbps`` in 10^6 bits a second (infinite: no limit), ``latency_s`` one way."""

    src: str
    dst: str
    mbps: float = math.inf
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        where = f"link {self.src} -> {self.dst}"
        _check_name(self.src, "link from node")
        _check_name(self.dst, "link to node")
        if self.src == self.dst:
            raise TopologyError(f"{where} connects a node with itself: remove it")
        _check_number(self.mbps, where, "mbps", infinite=True)
        _check_number(self.latency_s, where, "latency_s", zero=True)

    def seconds(self, nbytes: float) -> float:
        """Time until the last of ``nbytes`` has arrived over an idle link."""
        return self.latency_s + nbytes * 8e-6 / self.mbps


@dataclass(frozen=True, slots=True)
class Admission:
    """How devices join that no file names.

    Attributes:
        parents: the nodes that they may be under; the one with the fewest devices gets the next.
        token_file: the tokens that let a device in, one a line, or a device's name and its own token.
        max: how many may join; None: any number.
    """

    parents: tuple[str, ...]
    token_file: str
    max: int | None = None


@dataclass(frozen=True)
class Topology:
    """Nodes by name in the order of the file, and how they are connected.

    Attributes:
        nodes: name -> node.
        links: directed links beside those between a node and its parent.
        broker_at: the node whose host runs the broker; None: messages go the direct way.
        admit: how further devices join; None: they do not. It is no part of :meth:`to_dict`.

    Raises:
        TopologyError: it describes no fleet; the message names the node and says what to do.
    """

    nodes: Mapping[str, Node]
    links: tuple[Link, ...] = ()
    broker_at: str | None = None
    admit: Admission | None = None

    def __post_init__(self) -> None:
        for key, node in self.nodes.items():
            if key != node.name:
                raise TopologyError(f"node {node.name!r} is listed under the name {key!r}: use one name")
        for node in self.nodes.values():
            if node.parent is not None and node.parent not in self.nodes:
                raise unknown_parent(node.name, node.parent, self.nodes)
        self._refuse_parent_cycle()
        if not any(node.tier == DEVICE for node in self.nodes.values()):
            raise TopologyError(f"no node has tier {DEVICE!r}, so nobody holds data: give one that tier")
        if self.tier_order[0] != DEVICE:
            raise TopologyError(
                f"tier {self.tier_order[0]!r} lies below {DEVICE!r}, which must be the lowest: turn the parents round"
            )
        self._check_links()
        if self.broker_at is not None and self.broker_at not in self.nodes:
            near = did_you_mean(self.broker_at, self.nodes)
            raise TopologyError(f"the broker is at {self.broker_at!r}, which is not a node{near}")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read ``home.yaml``.

        Raises:
            TopologyError: one line, beginning with the file's name.
        """
        from edgesplit.topology_file import read_topology  # pydantic and YAML stay off the device's path

        found = read_topology(Path(path))
        return cls(found.nodes, found.links, found.broker_at, found.admit)

    @classmethod
    def of(cls, nodes: Iterable[Node], links: Sequence[Link] = (), broker_at: str | None = None) -> Self:
        """Make a topology of a list of nodes, in order."""
        by_name: dict[str, Node] = {}
        for node in nodes:
            if node.name in by_name:
                raise TopologyError(f"two nodes are named {node.name!r}: rename one")
            by_name[node.name] = node
        return cls(by_name, tuple(links), broker_at)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`; checks everything, trusts nothing."""
        _check_keys(data, {"nodes", "links", "broker_at"}, {"nodes"}, "topology")
        nodes = [Node(**_fields(Node, entry)) for entry in _entries(data["nodes"], "nodes")]
        links = [Link(**_fields(Link, entry)) for entry in _entries(data.get("links", []), "links")]
        broker_at = data.get("broker_at")
        if broker_at is not None:
            _check_name(broker_at, "the broker's node")
        return cls.of(nodes, links, broker_at)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: every node as it is after expansion; an infinite rate is null."""
        return {
            "nodes": [_to_json(node) for node in self.nodes.values()],
            "links": [_to_json(link) for link in self.links],
            "broker_at": self.broker_at,
        }

    def devices(self) -> tuple[Node, ...]:
        """The nodes that hold data, in the order of the file."""
        return tuple(node for node in self.nodes.values() if node.tier == DEVICE)

    @cached_property
    def tier_order(self) -> tuple[str, ...]:
        """Tiers from the lowest up: a parent's tier comes after its child's."""
        above: dict[str, set[str]] = {node.tier: set() for node in self.nodes.values()}
        for node in self.nodes.values():
            if node.parent is not None and self.nodes[node.parent].tier != node.tier:
                above[node.tier].add(self.nodes[node.parent].tier)
        rank = {tier: (_usual(tier), place) for place, tier in enumerate(above)}
        order: list[str] = []
        while len(order) < len(above):
            left = [tier for tier in above if tier not in order]
            lowest = [tier for tier in left if not any(tier in above[other] for other in left)]
            if not lowest:
                raise TopologyError(self._tier_cycle(left, above))
            order.append(min(lowest, key=rank.__getitem__))
        return tuple(order)

    def ancestor(self, node: str, tier: str) -> str | None:
        """The nearest node of ``tier`` on the chain of parents, beginning with ``node`` itself; None: there is none."""
        at: str | None = self._known(node)
        while at is not None and self.nodes[at].tier != tier:
            at = self.nodes[at].parent
        return at

    def path(self, a: str, b: str) -> tuple[Link, ...]:
        """The links from ``a`` to ``b``: the fewest, then the least latency, then the first by name.

        Raises:
            TopologyError: one of them is not a node, or nothing connects them.
        """
        key = (self._known(a), self._known(b))
        if key not in self._paths:
            self._paths[key] = self._search(a, b)
        return self._paths[key]

    def hops(self, a: str, b: str) -> tuple[Link, ...]:
        """The links that a message from ``a`` to ``b`` takes: by way of the broker's host where one is set.

        A node on the broker's host has no hop on that side; a message to oneself has none.
        """
        if self.broker_at is None or a == b:
            return self.path(a, b)
        return self.path(a, self.broker_at) + self.path(self.broker_at, b)

    @cached_property
    def _paths(self) -> dict[tuple[str, str], tuple[Link, ...]]:
        return {}

    @cached_property
    def _outgoing(self) -> dict[str, list[Link]]:
        outgoing: dict[str, list[Link]] = {name: [] for name in self.nodes}
        for link in (*self._parent_links(), *self.links):
            outgoing[link.src].append(link)
        return outgoing

    def _parent_links(self) -> list[Link]:
        links = []
        for node in self.nodes.values():
            if node.parent is not None:
                links.append(Link(node.name, node.parent, node.up_mbps, node.latency_ms / 1000))
                links.append(Link(node.parent, node.name, node.down_mbps, node.latency_ms / 1000))
        return links

    def _search(self, a: str, b: str) -> tuple[Link, ...]:
        done: set[str] = set()
        queue: list[tuple[int, float, tuple[str, ...], tuple[Link, ...]]] = [(0, 0.0, (a,), ())]
        while queue:
            hops, latency, names, links = heapq.heappop(queue)
            if names[-1] == b:
                return links
            if names[-1] in done:
                continue
            done.add(names[-1])
            for link in self._outgoing[names[-1]]:
                if link.dst not in done:
                    entry = (hops + 1, latency + link.latency_s, (*names, link.dst), (*links, link))
                    heapq.heappush(queue, entry)
        raise TopologyError(f"no link leads from {a!r} to {b!r}: give one a parent, or add an entry to links")

    def _known(self, name: str) -> str:
        if name not in self.nodes:
            raise TopologyError(f"{name!r} is not a node{did_you_mean(name, self.nodes)}")
        return name

    def _refuse_parent_cycle(self) -> None:
        clear: set[str] = set()
        for name in self.nodes:
            chain: list[str] = []
            at: str | None = name
            while at is not None and at not in clear:
                if at in chain:
                    cycle = [*chain[chain.index(at) :], at]
                    raise TopologyError(
                        f"parents go in a circle: {' -> '.join(cycle)}: one of them needs another parent"
                    )
                chain.append(at)
                at = self.nodes[at].parent
            clear.update(chain)

    def _tier_cycle(self, left: list[str], above: dict[str, set[str]]) -> str:
        # Each tier that is left has another one below it: going down must come back to where one has been.
        chain = [left[0]]
        while chain[-1] not in chain[:-1]:
            chain.append(next(tier for tier in left if chain[-1] in above[tier]))
        cycle = chain[chain.index(chain[-1]) :][::-1]
        return f"tiers lie above each other in a circle: {' -> '.join(cycle)}: a parent's tier must be a higher one"

    def _check_links(self) -> None:
        ends = {(link.src, link.dst) for link in self._parent_links()}
        for link in self.links:
            for end in (link.src, link.dst):
                if end not in self.nodes:
                    near = did_you_mean(end, self.nodes)
                    raise TopologyError(f"link {link.src} -> {link.dst} ends at {end!r}, which is not a node{near}")
            if (link.src, link.dst) in ends:
                raise TopologyError(f"{link.src!r} and {link.dst!r} are linked twice: keep one link")
            ends.add((link.src, link.dst))


def unknown_parent(node: str, parent: str, known: Iterable[str]) -> TopologyError:
    """The error for a parent that is not there."""
    return TopologyError(f"node {node!r} has parent {parent!r}, which is not a node{did_you_mean(parent, known)}")


def _usual(tier: str) -> float:
    return USUAL_ORDER.index(tier) if tier in USUAL_ORDER else USUAL_ORDER.index("edge") + 0.5


def _check_name(name: object, what: str) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise TopologyError(f"{what} {name!r}: a name is made of letters, digits, '.', '_' and '-'")


def _check_number(value: object, where: str, key: str, *, zero: bool = False, infinite: bool = False) -> None:
    bound = "a number of at least 0" if zero else "a number above 0"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TopologyError(f"{where}: {key} is {value!r}, must be {bound}")
    fits = value >= 0 if zero else value > 0
    if not fits or (math.isinf(value) and not infinite):
        raise TopologyError(f"{where}: {key} is {value:g}, must be {bound}")


def _check_count(value: object, where: str, key: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TopologyError(f"{where}: {key} is {value!r}, must be a whole number of at least 1")


def _check_keys(entry: Mapping[str, Any], known: set[str], needed: set[str], where: str) -> None:
    for key in entry:
        if key not in known:
            raise TopologyError(f"{where}: unknown key {key!r}{did_you_mean(key, known)}")
    for key in sorted(needed - set(entry)):
        raise TopologyError(f"{where}: {key!r} is missing")


def _entries(value: object, where: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        raise TopologyError(f"topology: {where} must be a list of mappings")
    return value


def _fields(kind: type[Node | Link], entry: Mapping[str, Any]) -> dict[str, Any]:
    needed = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    _check_keys(entry, {f.name for f in fields(kind)}, needed, kind.__name__.lower())
    return {key: math.inf if value is None and key.endswith("mbps") else value for key, value in entry.items()}


def _to_json(part: Node | Link) -> dict[str, Any]:
    values = {f.name: getattr(part, f.name) for f in fields(part)}
    for key in ("hours", "max_mb_per_round"):
        if values.get(key, 0) is None:
            del values[key]
    return {key: None if key.endswith("mbps") and math.isinf(value) else value for key, value in values.items()}
