"""The replicas of layers, at a round's end: which there are, which count and for how much, their means. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgesplit.federated import Reply, average
from edgesplit.holding import Arrays, Held, Names
from edgesplit.offences import Judged, as_most, judge
from edgesplit.plan import Plan

Groups = Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]]
"""Key -> layers, and the nodes that hold them for the same devices."""


def groups_of(plan: Plan) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Group the layers that the same nodes hold for the same devices: key -> (layers, nodes).

    Within a group the same micro-batches pass every layer of a node, so that one weight is right for all of them.
    """
    passing: dict[int, dict[str, set[str]]] = {layer: {} for layer in range(len(plan.layers))}
    for route in plan.routes:
        for stage in route.stages:
            for layer in range(stage.start, stage.stop):
                passing[layer].setdefault(stage.node, set()).add(route.device)
    found: dict[tuple[tuple[str, tuple[str, ...]], ...], list[int]] = {}
    order = {node: i for i, node in enumerate(plan.nodes())}
    for layer, nodes in passing.items():
        key = tuple((node, tuple(sorted(nodes[node]))) for node in sorted(nodes, key=order.__getitem__))
        found.setdefault(key, []).append(layer)
    return {
        f"layers {','.join(map(str, layers))}": (tuple(layers), tuple(node for node, _ in key))
        for key, layers in found.items()
    }


@dataclass
class Judgement:
    """What was found of a round's replicas.

    Attributes:
        judged: group and node -> the replica as it counts.
        as_most: of replicas that must be equal: group -> a node whose is as most are.
        offences: node -> what it did, and what was found.
    """

    judged: dict[tuple[str, str], Judged] = field(default_factory=dict)
    as_most: dict[str, str] = field(default_factory=dict)
    offences: dict[str, tuple[str, Any]] = field(default_factory=dict)


def must_be_equal(groups: Groups, held: Mapping[str, Held], names: Names, devices: Collection[str]) -> Judgement:
    """Find replicas that are not as most are, where every step has made them one."""
    found = Judgement()
    for key, (layers, nodes) in groups.items():
        params, _ = names.of(layers)
        parts = {node: held[node].part("param", params) for node in nodes if node in held}
        found.as_most[key], others = as_most(parts)
        found.offences |= {node: ("its replica is not the others'", None) for node in others if node in devices}
    return found


def judge_all(
    groups: Groups,
    held: Mapping[str, Held],
    names: Names,
    before: Arrays,
    *,
    norm: float | None,
    most: Mapping[str, float],
    devices: Collection[str],
) -> Judgement:
    """Clip, or leave out of all means, what devices have made of their replicas.

    Args:
        before: the model's parameters at the round's beginning.
        norm, most: see :func:`edgesplit.offences.judge`.
        devices: whose offences are of interest.
    """
    found = Judgement()
    for key, (layers, nodes) in groups.items():
        params, buffers = names.of(layers)
        here = [node for node in nodes if node in held]
        replicas = {n: (held[n].part("param", params), held[n].weights.get(layers[0], 0.0)) for n in here}
        judged = judge(replicas, {name: before[name] for name in params}, norm=norm, most=most)
        for node, one in judged.items():
            if not all(np.isfinite(array).all() for array in held[node].part("buffer", buffers).values()):
                one = Judged(one.arrays, 0.0, "its buffers are not finite")
            found.judged[key, node] = one
            if one.what is not None and node in devices:
                found.offences.setdefault(node, (one.what, one.value))
    return found


def mean_of(group: str, parts: Mapping[str, Arrays], weights: Mapping[str, float]) -> Arrays:
    """Return the mean of what nodes hold, by their weights; where none has any, of all alike."""
    active = [node for node in parts if weights[node] > 0] or list(parts)
    replies = [Reply(node, group, parts[node], weights[node]) for node in active]
    return average(replies) if any(reply.arrays for reply in replies) else {}
