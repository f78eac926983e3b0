"""Nodes that hold the same layers share the micro-batches: who may stand in for whom, and who gets which. No I/O.

After SWARM (Ryabinin et al., ICML 2023, section 3.2): the node with the least accumulated expected time gets the next
micro-batch. There the work never stops; here a step ends for all at once, so the accounts are settled at each step and
a node's own time for the micro-batch counts: one that would end last gets nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from edgesplit.costs import LayerTimes
from edgesplit.errors import ExperimentError, TopologyError, did_you_mean
from edgesplit.plan import Plan
from edgesplit.schedule import Event, Micro
from edgesplit.topology import DEVICE, Topology

ALPHA = 0.1
"""What a new measurement counts for in the running mean of a node's seconds per sample."""

PROBING = 0.02
"""A node that is too slow for any work is tried again when that costs this part of the time since the last try."""

AHEAD = 2
"""Steps that are published before they have ended: one that runs, and one so that no node waits for its sheet."""


def with_peers(plan: Plan, tiers: Sequence[str]) -> Plan:
    """Return the plan with the nodes that may stand in for one another: those of a tier below one parent.

    Whether two of them do is :meth:`Plan.choices`'s to say; so the peers also hold for another plan of the topology.

    Args:
        tiers: ``pipeline.share``.

    Raises:
        ExperimentError: a tier has no nodes that could share anything.
    """
    if not tiers:
        return plan
    if plan.topology is None:
        raise ExperimentError("pipeline.share needs a topology: plan with es.plan(task, topology)")
    topology = Topology.from_dict(plan.topology)
    found = {tier: _groups(topology, tier) for tier in tiers}
    shared = replace(plan, peers=tuple(group for groups in found.values() for group in groups))
    sharing = shared.sharing()
    for tier in tiers:
        if tier not in topology.tier_order:
            near = did_you_mean(tier, topology.tier_order)
            raise ExperimentError(f"pipeline.share names {tier!r}, which is no tier of the topology{near}")
        if not any(topology.nodes[node].tier == tier for node in sharing):
            raise ExperimentError(
                f"pipeline.share names {tier!r}, but no two of its nodes run the same layers below one parent, "
                "and nothing else: leave it out, or plan them alike"
            )
    return shared


def _groups(topology: Topology, tier: str) -> list[tuple[str, ...]]:
    """The nodes of a tier that have one parent and reach each other."""
    groups: list[list[str]] = []
    for node in topology.nodes.values():
        if node.tier != tier or tier == DEVICE:
            continue
        for group in groups:
            if topology.nodes[group[0]].parent == node.parent and _connected(topology, group[0], node.name):
                group.append(node.name)
                break
        else:
            groups.append([node.name])
    return [tuple(group) for group in groups if len(group) > 1]


def _connected(topology: Topology, a: str, b: str) -> bool:
    try:
        return bool(topology.hops(a, b) and topology.hops(b, a))
    except TopologyError:
        return False


def expected_seconds(plan: Plan) -> dict[str, float]:
    """Return seconds per sample of the nodes that share, forward and backward, where profile and topology tell."""
    if plan.topology is None or plan.profile is None:
        return {}
    times = LayerTimes(plan.profile, Topology.from_dict(plan.topology))
    found: dict[str, float] = {}
    for route in plan.routes:
        for stage, nodes in zip(route.stages, plan.choices(route.device), strict=True):
            if len(nodes) > 1:
                found |= {n: sum(times.seconds(n, op, stage.start, stage.stop) for op in "FB") for n in nodes}
    return found


@dataclass
class _Mean:
    """A running mean, corrected for having begun at nothing."""

    total: float = 0.0
    weight: float = 0.0

    @property
    def value(self) -> float:
        return self.total / self.weight

    def note(self, value: float) -> None:
        self.total += ALPHA * (value - self.total)
        self.weight += ALPHA * (1.0 - self.weight)

    def fade(self) -> None:
        """Keep the value until there is a new one, which then counts alone."""
        self.total, self.weight = self.total * 1e-12, self.weight * 1e-12


class Router:
    """Chooses the way of each micro-batch, by what its nodes are known to need.

    Args:
        expected: seconds per sample of nodes that nothing was measured of; where it is not known they count alike.
    """

    def __init__(self, expected: Mapping[str, float] | None = None) -> None:
        self._expected = dict(expected or {})
        self._means: dict[str, dict[str, _Mean]] = {}  # node -> op
        self._hosted: dict[str, Mapping[int, set[tuple[int, int]]]] = {}
        self._first: dict[str, int] = {}  # node -> the step in which it was measured first
        self._warm: set[str] = set()
        self._idle: dict[str, float] = {}  # node -> seconds of work of the others since it was given any

    def adopt(self, plan: Plan) -> None:
        """Learn from a plan what to expect; forget what was measured of nodes that run other layers than before."""
        self._expected |= expected_seconds(plan)
        for node in plan.sharing():
            hosted = plan.hosted(node)
            if self._hosted.setdefault(node, hosted) != hosted:
                self._hosted[node] = hosted
                self._means.pop(node, None)
                self._first.pop(node, None)
                self._warm.discard(node)

    def observe(self, event: Event, samples: int) -> None:
        """Take a measurement: an action of a micro-batch of so many samples. What cannot be is left out.

        A node's first step counts until there is another: all that is done once for all is done in it.
        """
        seconds = event.end - event.start
        if event.action.op != "U" and samples > 0 and 0.0 < seconds < math.inf:
            means = self._means.setdefault(event.node, {})
            if event.node not in self._warm and self._first.setdefault(event.node, event.step) != event.step:
                self._warm.add(event.node)
                for mean in means.values():
                    mean.fade()
            means.setdefault(event.action.op, _Mean()).note(seconds / samples)

    def seconds(self, node: str) -> float:
        """Return the seconds per sample, forward and backward, that are expected of a node."""
        if node in self._means:
            return sum(mean.value for mean in self._means[node].values())
        # What was foreseen, at the pace at which the others have turned out.
        paces = [self.seconds(other) / self._expected.get(other, 1.0) for other in self._means]
        return self._expected.get(node, 1.0) * (median(paces) if paces else 1.0)

    def routes(self, plan: Plan, micros: Sequence[Micro], absent: Collection[str] = ()) -> list[int]:
        """Choose the ways of a step's micro-batches, see :meth:`Plan.path`.

        Args:
            absent: nodes that get nothing, unless all that could do the work are.
        """
        taken: dict[tuple[int, int], str] = {}  # (position, stage) -> node
        stages: dict[frozenset[str], list[tuple[int, int]]] = {}
        for position, micro in enumerate(micros):
            for index, nodes in enumerate(plan.choices(micro.device)):
                if len(nodes) > 1:
                    stages.setdefault(frozenset(nodes), []).append((position, index))
        for passing in stages.values():
            first, index = passing[0]
            nodes = plan.choices(micros[first].device)[index]
            here = [node for node in nodes if node not in absent] or list(nodes)
            own = [plan.choices(micros[position].device)[index][0] for position, index in passing]
            samples = [micros[position].stop - micros[position].start for position, _ in passing]
            taken |= dict(zip(passing, self._deal(here, own, samples), strict=True))
        return [self._number(plan, micro, position, taken) for position, micro in enumerate(micros)]

    @staticmethod
    def _number(plan: Plan, micro: Micro, position: int, taken: Mapping[tuple[int, int], str]) -> int:
        number = 0
        for index, nodes in enumerate(plan.choices(micro.device)):
            number = number * len(nodes) + (nodes.index(taken[position, index]) if len(nodes) > 1 else 0)
        return number

    def _deal(self, nodes: Sequence[str], own: Sequence[str], samples: Sequence[int]) -> list[str]:
        """Deal the micro-batches of one stage: their number by the nodes' speeds, then in turn."""
        cost = {node: self.seconds(node) for node in sorted(nodes)}
        load = dict.fromkeys(cost, 0.0)
        quota: Counter[tuple[int, str]] = Counter()
        for size in sorted(samples, reverse=True):
            best = min(load, key=lambda node: load[node] + size * cost[node])
            load[best] += size * cost[best]
            quota[size, best] += 1
        self._try_again(load, cost, quota)
        return _by_turns(own, samples, quota)

    def _try_again(self, load: dict[str, float], cost: Mapping[str, float], quota: Counter[tuple[int, str]]) -> None:
        """Give a node that gets nothing one micro-batch, now and then: it may be faster than it was."""
        longest = max(load, key=load.__getitem__)
        smallest = min((size for (size, node), count in quota.items() if node == longest and count), default=0)
        most = load[longest]
        self._idle |= {node: 0.0 if work else self._idle.get(node, 0.0) + most for node, work in load.items()}
        due = [node for node in load if not load[node] and PROBING * self._idle[node] > smallest * cost[node]]
        if due and smallest:
            quota[smallest, longest] -= 1
            quota[smallest, due[0]] += 1
            self._idle[due[0]] = 0.0
            for mean in self._means.get(due[0], {}).values():
                mean.fade()


def _by_turns(own: Sequence[str], samples: Sequence[int], quota: Counter[tuple[int, str]]) -> list[str]:
    """Spread each node's share evenly over the step; within a round of all nodes those go first that stay at home."""
    counts = Counter({node: 0 for _, node in quota})
    for (_, node), count in quota.items():
        counts[node] += count
    turns = {node: 0.5 / count for node, count in counts.items() if count}
    found = []
    for size, home in zip(samples, own, strict=True):
        open_ = [node for node in turns if quota[size, node] > 0]
        node = min(open_, key=turns.__getitem__)
        if home in open_ and turns[home] < turns[node] + len(turns) / len(samples):
            node = home
        quota[size, node] -= 1
        turns[node] += 1 / counts[node]
        found.append(node)
    return found
