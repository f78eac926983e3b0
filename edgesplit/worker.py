"""The shell around a node: its inbox, its state machine, its engine. One compute thread; never two actions at once."""

from __future__ import annotations

import heapq
import secrets
import time
import traceback
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from edgesplit.emulation import Emulator
from edgesplit.engine import Engine
from edgesplit.errors import EdgesplitError, RunError, Spoiled, TransportError, TransportTimeout, notes
from edgesplit.journal import Journal
from edgesplit.kit import Kit
from edgesplit.member import Begin, End, Member, Notice
from edgesplit.node import NodeMachine, Run, Work
from edgesplit.plan import Plan
from edgesplit.protocol import Assignment, Send
from edgesplit.schedule import Event
from edgesplit.task import COORDINATOR
from edgesplit.transport.base import DATA_KINDS, Inbox, Message, Transport

PROBE_S = 10.0
"""How long a node waits for its neighbours' transports to answer: a broker's rule may swallow a topic silently."""


MOST_DUE = 65_536
"""Messages that an emulated link holds, at most; more arrive at once."""


class Worker:
    """Runs one node until the coordinator says stop.

    Args:
        name: the node.
        transport: how it reaches the others.
        kit: an assignment's Task made ready.
        patience: seconds without any message, while something is awaited, that end it.
        facts: what its hello says of it (process id, versions).
        on_step: called with each step that this node has done its part of.
        state: a directory of its own, where it keeps what it needs to come back after a crash; None: it keeps nothing.
        prove: makes the proof that a node of this life may join, for one that no file names.
        say: told, in a line, what the coordinator lets people know.
        coordinator_s: how long, in seconds, it stays when the coordinator is gone.
        clock: seconds since the epoch; the same for all nodes of a host.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        kit: Callable[[Assignment], Kit],
        *,
        patience: float = 300.0,
        facts: Mapping[str, Any] | None = None,
        on_step: Callable[[], None] = lambda: None,
        state: Path | None = None,
        coordinator_s: float = 60.0,
        prove: Callable[[str], str] | None = None,
        say: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name, self.patience = name, patience
        self._transport, self._kit, self._clock = transport, kit, clock
        self._on_step, self._state, self._say = on_step, state, say
        life = secrets.token_hex(8)
        known = {**(facts or {}), **({"admission": prove(life)} if prove is not None else {})}
        self._member = Member(name, life, known, coordinator_s=coordinator_s)
        self._journal: Journal | None = None
        self._machine: NodeMachine | None = None
        self._engine: Engine | None = None
        self._emulator: Emulator | None = None
        self._events: list[Event] = []
        self._due: list[tuple[float, int, Message]] = []  # data messages that the emulated link has not delivered yet
        self._taken = 0
        self._stopped = self._spoiled = False
        self._told_error: str | None = None

    def run(self) -> None:
        """Take part in a run to its end.

        Raises:
            EdgesplitError: the node cannot go on, and the coordinator has been told; or that has told of an error.
        """
        inbox = self._transport.mailbox(self.name)
        self._tell(self._member.greet())
        try:
            while not self._stopped:
                self._turn(inbox)
        except Exception as error:
            if (stop := _stop_in(inbox)) is None:
                self._last_words("failed", {"error": _one_line(error), "waiting_for": self._waiting_for()})
                raise
            self._stop(stop)  # the run has ended already, and this is the echo of its end
        finally:
            if self._journal is not None:  # what was kept is of use until the run has ended as it should
                self._journal.close(remove=self._stopped and self._told_error is None)
        if self._told_error is not None:
            raise RunError(self._told_error)

    def _turn(self, inbox: Inbox) -> None:
        while (message := inbox.poll()) is not None and not self._stopped:
            self._receive(message)
        self._deliver_due()
        if self._spoiled and self._machine is not None and self._machine.halted:
            self._spoiled = False
        work = self._machine.next() if self._machine and not self._stopped and not self._spoiled else None
        if work is not None:
            self._do(work)
        elif not self._stopped:
            self._wait(inbox)

    def _wait(self, inbox: Inbox) -> None:
        what = self._waiting_for()
        self._overslept(0.0)
        # What goes wrong with a message that has come is another matter than that none comes.
        if not self._due:
            try:
                message = inbox.get(self._patience_left(), what or "the coordinator")
            except TransportTimeout:
                self._member.check(time.monotonic())
                # As long as the coordinator is there, it is the one to judge; the transport tells when it is not.
                if (what is not None and self._member.coordinator is None) or inbox.failed:
                    raise
            else:
                self._receive(message)
            return
        pause = self._due[0][0] - self._clock()
        if pause > 0:
            try:
                message = inbox.get(pause, "an emulated link")
            except TransportError:
                if inbox.failed:
                    raise
                self._overslept(self._clock() - self._due[0][0])
            else:
                self._receive(message)

    def _patience_left(self) -> float:
        return min(self._member.deadline() - time.monotonic(), self.patience)

    def _overslept(self, seconds: float) -> None:
        if self._emulator is not None:
            self._emulator.late = max(seconds, 0.0)

    # -- messages

    def _receive(self, message: Message) -> None:
        for effect in self._member.receive(message, time.monotonic()):
            if isinstance(effect, Send):
                self._tell(effect)
            elif isinstance(effect, Begin):
                self._assign(effect.message)
            elif isinstance(effect, End):
                self._stop(effect.message)
            elif isinstance(effect, Notice):
                self._say(f"{self.name}: {effect.text}")
            else:
                self._heed(effect.message)

    def _heed(self, message: Message) -> None:
        if message.kind in DATA_KINDS and self._emulator is not None and len(self._due) < MOST_DUE:
            due = self._emulator.due(message)
            self._taken += 1
            heapq.heappush(self._due, (due, self._taken, message))
        elif self._machine is not None:
            self._machine.receive(message)

    def _deliver_due(self) -> None:
        while self._machine is not None and self._due and self._due[0][0] <= self._clock():
            self._machine.receive(heapq.heappop(self._due)[2])

    def _assign(self, message: Message) -> None:
        assignment = Assignment.of(message.meta)
        kit = self._kit(assignment)
        if kit.fingerprint != assignment.fingerprint:
            raise RunError(
                f"the task on {self.name!r} is not the coordinator's "
                f"(fingerprint {kit.fingerprint[:12]}, not {assignment.fingerprint[:12]}): copy the same code to both"
            )
        self._open_journal(assignment, kit)
        before = self._engine
        if before is not None and before.assignment.run != assignment.run:
            before = None
        self._spoiled = False
        self._engine = Engine(self.name, assignment, kit, self._journal, before)
        if not assignment.again:  # else its topics are proven, and a neighbour may be starting anew as well
            self._transport.probe(self._engine.neighbours(), PROBE_S)
        self._machine = self._engine.machine()
        self._machine.term = message.term
        if assignment.emulate is not None:
            self._emulator = Emulator(self.name, assignment.emulate)
        told = {"sizes": self._engine.sizes(), **self._engine.kept()}
        self._tell(self._word("assigned", {"request": message.meta.get("request"), **told}))

    def _open_journal(self, assignment: Assignment, kit: Kit) -> None:
        if self._journal is not None:
            self._journal.close()
        if self._state is not None:
            layers = Plan.from_json(assignment.plan).layers_of(self.name)
            self._journal = Journal(self._state, run=assignment.run, layers=f"{kit.fingerprint} {layers}")

    def _stop(self, message: Message) -> None:
        meta = {"request": message.meta.get("request"), "waiting_for": self._waiting_for(), **self._take_events()}
        self._last_words("stopped", meta)
        self._stopped = True
        if message.meta.get("error") is not None:
            self._told_error = str(message.meta["error"])

    # -- work

    def _do(self, work: Work) -> None:
        machine, engine = self._machine, self._engine
        if machine is None or engine is None:
            raise RunError(f"{self.name!r} has no assignment")
        start = self._clock()
        try:
            outcome = engine.execute(work)
        except Spoiled as spoiled:
            self._spoiled = True  # the coordinator says how to go on
            meta = {"device": spoiled.device, "step": spoiled.step, "what": str(spoiled)}
            self._transport.send(COORDINATOR, Message(kind="offence", sender=self.name, term=machine.term, meta=meta))
            return
        if isinstance(work, Run):
            if self._emulator is not None:
                self._emulator.pace(work, start, self._clock, time.sleep)
            event = Event(self.name, work.action, start, self._clock(), work.step.step, outcome.version)
            self._events.append(event)
        for to, sends in groupby(machine.done(work, outcome), key=lambda send: send.to):
            self._transport.send(to, *(self._finished(send) for send in sends))

    def _finished(self, send: Send) -> Message:
        """Return the message with what only the shell knows."""
        message = send.message
        if message.kind == "report":
            self._on_step()
        if message.kind in {"report", "fetched"}:
            told: dict[str, Any] = {"traffic": dict(self._transport.traffic(self.name))}
            if rejected := getattr(self._transport, "rejected", 0) + (self._machine.dropped if self._machine else 0):
                told["rejected"] = rejected
            message = _with_meta(message, self._take_events() | told)
        if self._emulator is not None and message.kind in DATA_KINDS:
            message = self._emulator.stamp(send.to, message, self._clock())
        return message

    def _take_events(self) -> dict[str, Any]:
        events, self._events = self._events, []
        return {"events": [[str(e.action), e.start, e.end, e.step, e.version] for e in events]}

    def _word(self, kind: str, meta: Mapping[str, Any]) -> Send:
        return Send(COORDINATOR, Message(kind=kind, sender=self.name, meta=meta))

    def _tell(self, send: Send) -> None:
        self._transport.send(send.to, send.message)

    def _last_words(self, kind: str, meta: Mapping[str, Any]) -> None:
        try:
            self._tell(self._word(kind, meta))
            self._transport.flush(5.0)
        except TransportError:
            return  # the coordinator is gone or the network is: there is nobody left to tell

    def _waiting_for(self) -> str | None:
        return self._machine.waiting_for() if self._machine else "its assignment"


def _stop_in(inbox: Inbox) -> Message | None:
    """Return the coordinator's stop if it is among what has come."""
    try:
        while (message := inbox.poll()) is not None:
            if message.sender == COORDINATOR and message.kind == "stop":
                return message
    except TransportError:
        return None
    return None


def _with_meta(message: Message, extra: Mapping[str, Any]) -> Message:
    return Message(
        kind=message.kind,
        sender=message.sender,
        term=message.term,
        meta={**message.meta, **extra},
        arrays=message.arrays,
    )


def _one_line(error: BaseException) -> str:
    if isinstance(error, EdgesplitError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}{notes(error)}{where}"
