"""A virtual fleet whose nodes crash: they lose their memory, their inbox, and some of what was under way."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from edgesplit.codecs import Packed
from edgesplit.effects import Effect, NodeChanged
from edgesplit.protocol import Send
from edgesplit.task import COORDINATOR
from edgesplit.transport.base import Message
from tests.virtual import Case, Fleet, IntEngine, Node, unwrap, wrap
from tests.virtual import initial as weight_at_start
from tests.virtual.fleet import Disk


@dataclass
class Process(Node):
    """A node's process: what it knows of the run begins with its assignment."""

    life: int = 0
    disk: Disk = field(default_factory=Disk)
    up: bool = True
    missed: list[Message] = field(default_factory=list)  # to be sent to its next life


class CrashingFleet(Fleet):
    """Nodes join, are assigned and loaded as in a real run; any of them may crash at any event.

    Args:
        rate: of crashes, an event.
        most: crashes at most.
    """

    def __init__(self, case: Case, rng: Random, *, rate: float = 0.01, most: int = 3) -> None:
        super().__init__(case, rng, check=False)
        self.coordinator.on_lost = "wait"
        self.coordinator.patience = float("inf")
        self.nodes: dict[str, Process] = {name: Process(None, None) for name in case.plan.nodes()}  # type: ignore[assignment,arg-type]
        self.rate, self.left, self.crashes = rate, 0, 0
        self.changes: list[NodeChanged] = []
        self._lives: dict[tuple[str, str], int] = {}  # (to, sender) -> the newest life that was heard of
        self._held: dict[str, dict[str, int]] = {}
        self.given: list[dict[str, dict[str, int]]] = [{}]  # what each node got, by load
        self.coordinator.spare = lambda node: wrap(**self.given[self.coordinator.line.base.load][node])
        for name in self.nodes:
            self.hello(name)
        self.ask("assign", {name: ({}, {}) for name in self.nodes})
        self.left = most
        self.ask("load", {name: ({}, {}) for name in self.nodes})

    # -- a crash and what comes after it

    def hello(self, name: str) -> None:
        node = self.nodes[name]
        message = Message(kind="hello", sender=name, meta={"life": node.life})
        self._send(name, Send(COORDINATOR, message), self.now)

    def crash(self, name: str) -> None:
        node = self.nodes[name]
        self.crashes += 1
        self.left -= 1
        node.disk.crash(self._rng)
        if self._rng.random() < 0.1:
            node.disk = Disk()  # it comes back on another board
        # Of what it had sent to each, a part arrives; of what it had been sent, what was not acknowledged comes again.
        cut = {to: self._rng.random() for to in (*self.nodes, COORDINATOR)}
        gone: dict[str, bool] = defaultdict(bool)
        events = []
        for event in sorted(self._events):
            to, message = event[2:]
            if message is not None and message.sender == name and to != name:
                gone[to] |= self._rng.random() < cut[to]
                if gone[to]:
                    continue
            if to == name:
                if message is not None:
                    node.missed.append(message)
                continue
            events.append(event)
        acked = self._rng.randint(0, len(node.inbox))
        node.missed = [*list(node.inbox)[acked:], *node.missed]
        self._events = events
        heapq.heapify(self._events)
        node.inbox.clear()
        node.up, node.machine, node.engine, node.busy_until = False, None, None, 0.0  # type: ignore[assignment]
        node.life += 1
        heapq.heappush(self._events, (self.now + 30 * self._rng.random(), next(self._count), f"start {name}", None))
        if self._rng.random() < 0.7:  # else it is back before anybody has noticed
            status = Message(kind="status", sender=name, meta={"state": "offline", "reason": "test"})
            heapq.heappush(self._events, (self.now + 5, next(self._count), COORDINATOR, status))

    def start(self, name: str) -> None:
        node = self.nodes[name]
        node.up = True
        self.hello(name)
        missed, node.missed = node.missed, []
        for message in missed:
            self._send(message.sender, Send(name, message), self.now)

    # -- instead of the base's

    def _turn(self) -> Sequence[Effect]:
        if self.left and self._rng.random() < self.rate:
            up = [name for name, node in self.nodes.items() if node.up]
            if up:
                self.crash(self._rng.choice(up))
                return []
        to = self._events[0][2]
        if to.startswith("start "):
            self.now = heapq.heappop(self._events)[0]
            self.start(to[6:])
            return []
        message = self._events[0][3]
        if to in self.nodes and message is not None and not self.nodes[to].up:
            heapq.heappop(self._events)
            self.nodes[to].missed.append(message)
            return []
        effects = super()._turn()
        self.changes += [effect for effect in effects if isinstance(effect, NodeChanged)]
        return effects

    def _work(self, name: str, node: Any) -> None:
        if not node.up:
            return
        while node.inbox:
            message = node.inbox.popleft()
            if message.kind == "assign":
                node.engine = IntEngine(name, self.case, self.case.scale.value, node.disk)
                node.machine = node.engine.machine(self.barrier)
                node.machine.term = message.term
                self._terms[name] = message.term
                node.ran.clear()
                reply = {"request": message.meta["request"], **node.engine.told()}
                self._send(name, Send(COORDINATOR, Message(kind="assigned", sender=name, meta=reply)), self.now)
            elif node.machine is not None:
                node.machine.receive(message)
        if node.machine is not None:
            super()._work(name, node)

    def ask(self, kind: str, to: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Packed]]]) -> Mapping[str, Message]:
        if kind == "load":
            initial = {n: {str(la): weight_at_start(la) for la in self.case.plan.layers_of(n)} for n in self.nodes}
            told = {
                node: {n: int.from_bytes(p.data, "little") for n, p in arrays.items()}
                for node, (_, arrays) in to.items()
            }
            self.given.append({n: self._held[n] | told[n] for n in to} if self._held else initial)
        replies = super().ask(kind, to)
        if kind == "fetch":
            self._held = {node: unwrap(reply) for node, reply in replies.items()}
        return replies
