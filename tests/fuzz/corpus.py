"""Real frames of a real run: every kind of message, whole and in chunks, signed and not, several in one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from edgesplit.assembly import Model
from edgesplit.fleet import Threads
from edgesplit.plan import Plan
from edgesplit.task import COORDINATOR, Task
from edgesplit.transport.key import Key
from tests.cases import RULES, open_session, points_task, tree
from tests.fuzz.network import Network

KEY = Key(bytes(range(32)))
SIZES = [24, 16, 8, 16]
NODES = ("d1", "d2", "d3", "d4", "e1", "e2", "c", COORDINATOR)
OPTIONS: dict[str, Any] = {"batch_size": 8, "micros": 2, "rounds": 2, "evaluate": {"every": 2, "where": ["device"]}}


class Recorded(NamedTuple):
    """The frames of a run in their order, each with whom it went to; and the weights at its end."""

    frames: list[tuple[str, bytes]]
    weights: dict[str, np.ndarray[Any, Any]]


def fleet(network: Network) -> Callable[[Model], dict[str, Any]]:
    """Nodes as threads over a network, for :func:`tests.cases.open_session`."""

    def wire(model: Model) -> dict[str, Any]:
        threads = Threads(network.connect, lambda assignment: model.kit)
        return {"transport": network.connect(COORDINATOR), "fleet": threads}

    return wire


def case() -> tuple[Plan, Task]:
    """A tree with a shared middle and end, in which all kinds of messages travel."""
    task = points_task(SIZES)
    return tree(task, [1, 4]), task


def run_over(network: Network, begun: Callable[[], None] = lambda: None) -> dict[str, np.ndarray[Any, Any]]:
    """Run the case over a network; ``begun`` is called when the fleet has joined."""
    plan, task = case()
    try:
        with open_session(plan, task, fleet(network), **OPTIONS, **RULES["clipped momentum"]) as session:
            begun()
            session.fit()
            return session.weights()
    finally:
        network.close()


@cache
def recorded(*, signed: bool) -> Recorded:
    """Run the case and keep its frames; once a process."""
    frames: list[tuple[str, bytes]] = []
    weights = run_over(Network(KEY if signed else None, lambda to, data: frames.append((to, data))))
    return Recorded(frames, weights)
