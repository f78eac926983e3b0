"""What the processes of a simulated run do: the node's machine with integers for an engine, and the coordinator."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

from edgesplit.codecs import Packed
from edgesplit.coordinator import Coordinator
from edgesplit.effects import Effect, Failed, NodeChanged, Noted, Replied, StepDone
from edgesplit.member import Begin, Heed, Member
from edgesplit.node import NodeMachine, Work
from edgesplit.plan import Plan
from edgesplit.protocol import Commit, Send
from edgesplit.recovery import Line
from edgesplit.sheets import Draft
from edgesplit.task import COORDINATOR
from edgesplit.transport.base import Message
from tests.virtual.fleet import Case, Disk, IntEngine
from tests.virtual.process import Out, Write


class NodeProgram:
    """One life of a node: it joins, is assigned its part, and works; the time that this takes.

    On its disk: what it has kept, to come back to.
    """

    def __init__(self, name: str, case: Case, disk: dict[str, Any], *, life: int, rng: Random, slow: float) -> None:
        self.name, self._case, self._rng, self._slow = name, case, rng, slow
        self._disk = disk
        for kept in disk.values():
            kept.crash(rng)
        self._member = Member(name, str(life))
        self.engine: IntEngine | None = None
        self.machine: NodeMachine | None = None
        self._inbox: deque[Message] = deque()
        self._busy_until = math.inf
        self._sends: Sequence[Send] | None = None  # of the work that is being done

    def on_start(self, now: float) -> Sequence[Out]:
        return [self._member.greet()]

    def on_message(self, message: Message, now: float) -> Sequence[Out]:
        self._inbox.append(message)
        return self._go(now) if self._sends is None else ()

    def next_deadline(self) -> float:
        return self._busy_until

    def on_tick(self, now: float) -> Sequence[Out]:
        sends, self._sends, self._busy_until = self._sends or (), None, math.inf
        return [*sends, *self._go(now)]

    def waits_for(self) -> object:
        return self.machine.waiting_for() if self.machine is not None else "its assignment"

    def _go(self, now: float) -> Sequence[Out]:
        sends: list[Out] = []
        while self._inbox:
            sends += self._receive(self._inbox.popleft(), now)
        while self.machine is not None and (work := self.machine.next()) is not None:
            made = self.do(work)
            if self._slow:
                self._sends, self._busy_until = made, now + self._slow * self._rng.random()
                break
            sends += made
        return sends

    def _receive(self, message: Message, now: float) -> list[Out]:
        sends: list[Out] = []
        for effect in self._member.receive(message, now):
            if isinstance(effect, Send):
                sends.append(effect)
            elif isinstance(effect, Begin):
                sends.append(self._begin(effect.message))
            elif isinstance(effect, Heed) and self.machine is not None:
                self.machine.receive(effect.message)
        return sends

    def _begin(self, message: Message) -> Send:
        told = message.meta
        case = replace(self._case, plan=Plan.from_json(told["plan"])) if "plan" in told else self._case
        self.engine = IntEngine(self.name, case, told["loss_scale"], self._journal(case.plan), self.engine)
        self.machine = self.engine.machine(told["barrier"])
        self.machine.term = message.term
        meta = {"request": told["request"], **self.engine.told()}
        return Send(COORDINATOR, Message(kind="assigned", sender=self.name, meta=meta))

    def _journal(self, plan: Plan) -> Disk:
        """What was kept of the same layers; of others it is of no use."""
        layers = str(plan.layers_of(self.name))
        for other in [key for key in self._disk if key != layers]:
            del self._disk[other]
        return self._disk.setdefault(layers, Disk())

    def do(self, work: Work) -> Sequence[Send]:
        assert self.machine is not None
        assert self.engine is not None
        return self.machine.done(work, self.engine.execute(work))


@dataclass(frozen=True)
class Train:
    """An order of the script: issue these sheets one right after the other; answered with their steps."""

    sheets: Sequence[Sequence[Draft]]
    evaluate: bool = False


@dataclass(frozen=True)
class Ask:
    """An order of the script: ask nodes for something; answered with their replies."""

    kind: str
    to: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Packed]]]


@dataclass(frozen=True)
class Resume:
    """An order of the script: take up a run that has stopped; answered with nothing."""

    line: Line
    term: int
    micro: int


@dataclass(frozen=True)
class Save:
    """An order of the script: write something to the disk."""

    do: Callable[[], None]


Order = Train | Ask | Resume | Save
Script = Generator[Order, Any, None]


class CoordinatorProgram:
    """One life of the coordinator, and a script in place of a session. It begins when all nodes have said hello.

    Args:
        note: writes down what a successor needs; None: there will be none.
        told: each commit that it decides on.
        changed: what becomes of the nodes.
        pause: seconds between two looks at the clock.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        script: Script,
        *,
        note: Callable[[Mapping[str, Any]], None] | None = None,
        told: Callable[[Commit], None] = lambda commit: None,
        changed: Callable[[NodeChanged], None] = lambda change: None,
        pause: float = math.inf,
    ) -> None:
        self._changed, self._pause, self._look_at = changed, pause, 0.0
        self.coordinator, self.done = coordinator, False
        self._script, self._write_down, self._told = script, note, told
        self._order: Order | None = None
        self._steps: list[StepDone] = []
        self._reply: Mapping[str, Message] | None = None

    def on_start(self, now: float) -> Sequence[Out]:
        return ()

    def on_message(self, message: Message, now: float) -> Sequence[Out]:
        self._check_answer(message)
        outs = self._act(self.coordinator.receive(message, now))
        if self._order is None and self._missing():
            return outs
        if not self.coordinator.busy and not self.done:
            outs += self._proceed(now)
        return outs

    def _check_answer(self, message: Message) -> None:
        """No answer to one question is taken for one to another."""
        c, number = self.coordinator, message.meta.get("request")
        for question in [*c.questions.open.values(), *([c.questions.recovery] if c.questions.recovery else [])]:
            if number == question.asking and message.sender in question.asked:
                assert message.kind == f"{question.asked[message.sender][0]}ed", (
                    f"{message.kind} answers {question.asked}"
                )

    def _missing(self) -> list[str]:
        """Who has not joined, as in Conductor.join."""
        return [node for node in self.coordinator.plan.nodes() if not self.coordinator.roster.here(node)]

    def next_deadline(self) -> float:
        return self._look_at if self._pause < math.inf else math.inf

    def on_tick(self, now: float) -> Sequence[Out]:
        self._look_at = now + self._pause
        return self._act(self.coordinator.tick(now))

    def waits_for(self) -> object:
        return f"the hello of {self._missing()}" if self._order is None else (self._order, self.coordinator.missing())

    def _proceed(self, now: float) -> list[Out]:
        """Go on with the script until something is to be waited for."""
        outs: list[Out] = []
        while not self.coordinator.busy:
            answer = self._reply if isinstance(self._order, Ask) else self._steps
            self._steps, self._reply = [], None
            try:
                self._order = self._script.send(answer if self._order is not None else None)
            except StopIteration:
                self.done = True
                break
            outs += self._begin(self._order, now)
        return outs

    def _begin(self, order: Order, now: float) -> list[Out]:
        coordinator = self.coordinator
        if isinstance(order, Save):
            return [Write(order.do)]
        if isinstance(order, Ask):
            return self._act(coordinator.request(order.kind, order.to, now)[1])
        if isinstance(order, Resume):
            return self._act(coordinator.resume(order.line, order.term, order.micro, now))
        issued = [self._act(coordinator.issue(d, now, evaluate=order.evaluate)) for d in order.sheets if d]
        return [out for outs in issued for out in outs]

    def _act(self, effects: Sequence[Effect]) -> list[Out]:
        outs: list[Out] = []
        for effect in effects:
            if isinstance(effect, Send):
                if effect.message.kind == "commit":
                    self._told(Commit.of(effect.message.meta))
                outs.append(effect)
            elif isinstance(effect, StepDone):
                self._steps.append(effect)
            elif isinstance(effect, Replied):
                self._reply = effect.replies
            elif isinstance(effect, Noted) and self._write_down is not None:
                outs.append(Write(partial(self._write_down, effect.record)))
            elif isinstance(effect, NodeChanged):
                self._changed(effect)
            elif isinstance(effect, Failed):
                raise effect.error
        return outs
