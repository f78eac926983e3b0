"""A plan without some of its nodes, and what changes hands from one plan to another. No I/O."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from edgesplit.plan import Plan, Route, Stage


def without(plan: Plan, lost: Collection[str]) -> Plan | None:
    """Return the plan without the nodes that are lost; None: some layers would be left without anybody.

    A lost device's route is left out. In the other routes a lost node's stage goes to a sibling: a node of the same
    tier and, where the topology names parents, of the same parent, that runs the same layers as that stage already.
    """
    if not lost:
        return plan
    routes = []
    load = dict.fromkeys(plan.nodes(), 0)
    for route in plan.routes:
        for stage in route.stages:
            load[stage.node] += 1
    for route in plan.routes:
        if route.device in lost:
            continue
        stages = []
        for index, stage in enumerate(route.stages):
            if stage.node in lost:
                siblings = _siblings(plan, index, stage, {*lost, *(s.node for s in route.stages)})
                if not siblings:
                    return None
                node = min(siblings, key=lambda name: (load[name], name))
                load[node] += 1
                stage = Stage(node, stage.start, stage.stop)
            stages.append(stage)
        routes.append(Route(route.device, tuple(stages)))
    left = {stage.node for route in routes for stage in route.stages}
    if not routes or any(not set(nodes) & left for nodes in plan.replicas().values()):
        return None
    return replace(plan, routes=tuple(routes))


def _siblings(plan: Plan, index: int, stage: Stage, barred: Collection[str]) -> list[str]:
    places = _places(plan)
    found = {
        other.stages[index].node
        for other in plan.routes
        if index < len(other.stages) and other.stages[index][1:] == stage[1:]
    }
    return sorted(name for name in found if name not in barred and places.get(name) == places.get(stage.node))


def _places(plan: Plan) -> dict[str, tuple[str, str | None]]:
    """Node -> its tier and parent, where the plan carries a topology."""
    rows = (plan.topology or {}).get("nodes", [])
    return {row["name"]: (row["tier"], row.get("parent")) for row in rows}


def moved(before: Plan, after: Plan) -> dict[str, tuple[int, ...]]:
    """Return the layers that each node of ``after`` has to be given, since it does not hold them yet."""
    known = set(before.nodes())
    return {
        node: tuple(la for la in after.layers_of(node) if node not in known or la not in before.layers_of(node))
        for node in after.nodes()
    }
