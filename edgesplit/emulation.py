"""Playing the topology's links and nodes on faster ones (``emulate: true``): arithmetic only, nobody sleeps in here.

A message is stamped by its sender with the time at which it has left the sender's first link; the receiver works out
when it has come over the rest, and delivers it then. So a link that several senders share in the middle of a way is
shared in each receiver's books only. An action takes as long as the profile, scaled to the node's ``gflops``, says; an
error where the real work keeps needing more than half of that, because then the emulation is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from edgesplit.costs import LayerTimes
from edgesplit.errors import RunError
from edgesplit.plan import Plan
from edgesplit.schedule import Action, Micro
from edgesplit.topology import Link, Topology
from edgesplit.transport.base import Message

_OPS = ("F", "B", "I", "W")
SLACK = 0.5
"""The real work may take this part of its target."""

IN_A_ROW = 5
"""So many actions of one op and stage beyond it are an error: fewer are this machine's other work."""


class Run(Protocol):
    """A node's work: an action, and its micro-batch where it has one."""

    @property
    def action(self) -> Action:
        """What runs."""
        ...

    @property
    def micro(self) -> Micro | None:
        """None for an update."""
        ...


@dataclass
class LinkPacer:
    """A message's times over links that each carry one message at a time, first come, first served."""

    free: dict[tuple[str, str], float] = field(default_factory=dict)

    def leave(self, hop: Link, at: float, nbytes: float) -> float:
        """Put a message on ``hop`` at time ``at``; return when its last bit has arrived at the other end."""
        key = (hop.src, hop.dst)
        begin = max(at, self.free.get(key, -math.inf))
        self.free[key] = end = begin + nbytes * 8e-6 / hop.mbps
        return end + hop.latency_s

    def arrive(self, hops: Sequence[Link], at: float, nbytes: float) -> float:
        """The same over several hops, store and forward."""
        for hop in hops:
            at = self.leave(hop, at, nbytes)
        return at


def check_real(real: float, target: float, node: str, action: object) -> None:
    """Refuse to play a node that is not slow enough for this machine.

    Args:
        real, target: seconds that the action took, and is to take.

    Raises:
        RunError: the real work took more than half of its target; names node and action.
    """
    if real > target * SLACK:
        raise RunError(
            f"{node!r} cannot be emulated here: {action} really took {real:.3g} s, more than half of the "
            f"{target:.3g} s that it is to take: use a slower gflops, larger micro-batches or fewer nodes a machine"
        )


def describe(node: str, plan: Plan, profile: Any, topology: Topology) -> dict[str, Any]:
    """What ``node`` needs to play its part, as plain JSON values for its assignment.

    Args:
        profile: a profile or its JSON, as in :class:`edgesplit.costs.LayerTimes`.
    """
    times = LayerTimes(profile, topology)
    ranges = {found for stages in plan.hosted(node).values() for found in stages}
    choices = {route.device: plan.choices(route.device) for route in plan.routes}
    passing = [route for route in plan.routes if any(node in nodes for nodes in choices[route.device])]
    peers = {other for route in passing for nodes in choices[route.device] for other in nodes if other != node}
    return {
        "seconds": [
            [start, stop, *(times.seconds(node, op, start, stop) for op in _OPS)] for start, stop in sorted(ranges)
        ],
        "routes": {
            route.device: [
                [stage.start, stage.stop] if node in nodes else None
                for stage, nodes in zip(route.stages, choices[route.device], strict=True)
            ]
            for route in passing
        },
        "out": {peer: [_hop(hop) for hop in topology.hops(node, peer)] for peer in sorted(peers)},
        "in": {peer: [_hop(hop) for hop in topology.hops(peer, node)] for peer in sorted(peers)},
    }


def _hop(hop: Link) -> list[Any]:
    return [hop.src, hop.dst, None if math.isinf(hop.mbps) else hop.mbps, hop.latency_s]


def _read_hops(rows: Sequence[Sequence[Any]]) -> list[Link]:
    return [Link(src, dst, math.inf if mbps is None else mbps, latency) for src, dst, mbps, latency in rows]


class Emulator:
    """One node's part in an emulation.

    Args:
        node: its name.
        part: what :func:`describe` made.

    Attributes:
        late: by how many seconds the node has just woken too late, because this machine was busy; its next action or
            message counts from when it should have woken. Without that the oversleeping of many actions adds up.
    """

    def __init__(self, node: str, part: Mapping[str, Any]) -> None:
        self.node = node
        self._seconds = {
            (start, stop, op): spent
            for start, stop, *row in part["seconds"]
            for op, spent in zip(_OPS, row, strict=True)
        }
        self._ranges = part["routes"]
        self._out = {peer: _read_hops(rows)[:1] for peer, rows in part["out"].items()}
        self._in = {peer: _read_hops(rows)[1:] for peer, rows in part["in"].items()}
        self._sending, self._receiving = LinkPacer(), LinkPacer()
        self.late = 0.0
        self._beyond: dict[tuple[str, int], int] = {}  # op and stage -> actions in a row that took too long

    def stamp(self, to: str, message: Message, now: float) -> Message:
        """Return the message stamped with the time at which it leaves this node's first link towards ``to``."""
        return replace(message, sent=self._sending.arrive(self._out[to], now - self.late, message.nbytes))

    def due(self, message: Message) -> float:
        """When a stamped message may be delivered here."""
        return self._receiving.arrive(self._in[message.sender], message.sent, message.nbytes)

    def target(self, run: Run) -> float:
        """Seconds that an action is to take; an update is not paced."""
        if run.micro is None or run.action.op == "U":
            return 0.0
        start, stop = self._ranges[run.micro.device][run.action.stage]
        return float(self._seconds[start, stop, run.action.op]) * (run.micro.stop - run.micro.start)

    def pace(self, run: Run, start: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        """Let time pass until an action that began at ``start`` has taken its target.

        Raises:
            RunError: the real work took more than half of the target, for :data:`IN_A_ROW` actions in a row.
        """
        target = self.target(run)
        if not target:
            return
        key = (run.action.op, run.action.stage)
        real = clock() - start
        self._beyond[key] = self._beyond.get(key, 0) + 1 if real > target * SLACK else 0
        if self._beyond[key] >= IN_A_ROW:
            check_real(real, target, self.node, run.action)
        end = start - self.late + target
        slept = False
        while (left := end - clock()) > 0:
            sleep(left)
            slept = True
        self.late = clock() - end if slept else 0.0
