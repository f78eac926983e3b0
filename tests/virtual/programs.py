"""What the processes of a simulated run do: the node's machine with integers for an engine, and the coordinator."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from edgesplit.codecs import Packed
from edgesplit.coordinator import Coordinator, Effect, Failed, Replied, StepDone
from edgesplit.node import Work
from edgesplit.protocol import Commit, Send
from edgesplit.sheets import Draft
from edgesplit.task import COORDINATOR
from edgesplit.transport.base import Message
from tests.virtual.fleet import Case, IntEngine

HELLO = "hello"


class NodeProgram:
    """One node's machine and engine, and the time that its work takes. Keeps nothing on its disk yet."""

    def __init__(
        self, name: str, case: Case, disk: dict[str, Any], *, barrier: bool, scale: float, rng: Random, slow: float
    ) -> None:
        self.name, self.disk = name, disk
        self.engine = IntEngine(name, case, scale)
        self.machine = self.engine.machine(barrier)
        self._rng, self._slow = rng, slow
        self._busy_until = math.inf
        self._sends: Sequence[Send] | None = None  # of the work that is being done

    def on_start(self, now: float) -> Sequence[Send]:
        return [Send(COORDINATOR, Message(kind=HELLO, sender=self.name))]

    def on_message(self, message: Message, now: float) -> Sequence[Send]:
        if message.kind == "status":
            return ()
        self.machine.receive(message)
        return self._go(now) if self._sends is None else ()

    def next_deadline(self) -> float:
        return self._busy_until

    def on_tick(self, now: float) -> Sequence[Send]:
        sends, self._sends, self._busy_until = self._sends or (), None, math.inf
        return [*sends, *self._go(now)]

    def waits_for(self) -> object:
        return self.machine.waiting_for()

    def _go(self, now: float) -> Sequence[Send]:
        sends: list[Send] = []
        while (work := self.machine.next()) is not None:
            made = self.do(work)
            if self._slow:
                self._sends, self._busy_until = made, now + self._slow * self._rng.random()
                break
            sends += made
        return sends

    def do(self, work: Work) -> Sequence[Send]:
        return self.machine.done(work, self.engine.execute(work))


@dataclass(frozen=True)
class Train:
    """An order of the script: issue these sheets one right after the other; answered with their steps."""

    sheets: Sequence[Sequence[Draft]]


@dataclass(frozen=True)
class Ask:
    """An order of the script: ask nodes for something; answered with their replies."""

    kind: str
    to: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Packed]]]


Script = Generator[Train | Ask, Any, None]


class CoordinatorProgram:
    """The coordinator, and a script in place of a session. It begins when all nodes have said hello.

    Args:
        heed: hear of lost nodes; a coordinator that cannot go on without one then ends the run.
    """

    def __init__(self, coordinator: Coordinator, script: Script, *, heed: bool = False) -> None:
        self.coordinator, self.done = coordinator, False
        self.committed: dict[int, bool] = {}
        self.clips: dict[int, float] = {}
        self._script, self._heed = script, heed
        self._missing = set(coordinator.plan.nodes())
        self._order: Train | Ask | None = None
        self._steps: list[StepDone] = []
        self._reply: Mapping[str, Message] | None = None

    def on_start(self, now: float) -> Sequence[Send]:
        return ()

    def on_message(self, message: Message, now: float) -> Sequence[Send]:
        if message.kind == "status" and not self._heed:
            return ()
        if message.kind == HELLO:
            self._missing.discard(message.sender)
            return self._proceed(now) if not self._missing and self._order is None else ()
        sends = self._act(self.coordinator.receive(message, now))
        if not self.coordinator.busy and self._order is not None and not self.done:
            sends += self._proceed(now)
        return sends

    def next_deadline(self) -> float:
        return math.inf

    def on_tick(self, now: float) -> Sequence[Send]:
        return self._act(self.coordinator.tick(now))

    def waits_for(self) -> object:
        return self._order if not self._missing else f"the hello of {sorted(self._missing)}"

    def _proceed(self, now: float) -> list[Send]:
        """Go on with the script until something is to be waited for."""
        sends: list[Send] = []
        while not self.coordinator.busy:
            answer = self._steps if isinstance(self._order, Train) else self._reply
            self._steps, self._reply = [], None
            try:
                self._order = self._script.send(answer if self._order is not None else None)
            except StopIteration:
                self.done = True
                break
            if isinstance(self._order, Train):
                for drafts in self._order.sheets:
                    sends += self._act(self.coordinator.issue(drafts, now))
            else:
                sends += self._act(self.coordinator.request(self._order.kind, self._order.to, now)[1])
        return sends

    def _act(self, effects: Sequence[Effect]) -> list[Send]:
        sends: list[Send] = []
        for effect in effects:
            if isinstance(effect, Send):
                if effect.message.kind == "commit":
                    self._note(Commit.of(effect.message.meta))
                sends.append(effect)
            elif isinstance(effect, StepDone):
                self._steps.append(effect)
            elif isinstance(effect, Replied):
                self._reply = effect.replies
        for effect in effects:
            if isinstance(effect, Failed):
                raise effect.error
        return sends

    def _note(self, told: Commit) -> None:
        assert self.committed.setdefault(told.step, told.apply) == told.apply, "one verdict on a step"
        assert self.clips.setdefault(told.step, told.clip) == told.clip
