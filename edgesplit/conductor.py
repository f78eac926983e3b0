"""The shell around the coordinator's state machine: its inbox, its clock, and what happens when a run must end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from edgesplit.codecs import Packed
from edgesplit.coordinator import Coordinator
from edgesplit.effects import Effect, Failed, NodeChanged, Noted, Offended, Replied, StepDone
from edgesplit.errors import (
    EdgesplitError,
    FrameError,
    RunError,
    ScheduleError,
    TransportError,
    TransportTimeout,
    did_you_mean,
)
from edgesplit.observe.audit import Audit
from edgesplit.observe.recorder import Recorder
from edgesplit.plan import Plan
from edgesplit.protocol import Send
from edgesplit.recovery import Line
from edgesplit.schedule import Action, Event
from edgesplit.sheets import Draft
from edgesplit.task import COORDINATOR
from edgesplit.transport.base import Message, Transport

Asked = Mapping[str, tuple[Mapping[str, Any], Mapping[str, Packed]]]
Admit = Callable[[str, Mapping[str, Any], Plan], Plan]

TURN_S = 0.25
"""How long the coordinator waits for a message before it looks at the clock and at its local processes."""

MUTE_S = 10.0
"""How long after its status says online a node may take to be heard."""

MOST_NAMED = 16
"""Nodes named in an error, at most."""

MOST_STRANGERS = 256
"""Nodes that the run does not have and that are told so, at most."""

MOST_FACTS, LONGEST_FACT = 64, 256
"""What a node may say of itself when it joins: so many values, and texts of so many characters."""


class Conductor:
    """Runs the coordinator over a transport.

    Args:
        coordinator: the state machine.
        transport: opened for the node ``coordinator``.
        recorder: gets the nodes' events.
        watch: called every :data:`TURN_S`; raises where a local process has died that cannot be started again.
        on_node: called with each change of a node.
        note: writes down what a successor would need.
        admit: ``(node, hello, plan) ->`` the plan with a node that it does not name; raises where it may not join.
        clock: a monotonic clock in seconds.
        audit: keeps what nodes did that they may not.
        say: told, in a line, of nodes that are there and cannot take part.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        transport: Transport,
        recorder: Recorder,
        *,
        watch: Callable[[], None] = lambda: None,
        on_node: Callable[[NodeChanged], None] = lambda change: None,
        note: Callable[[Mapping[str, Any]], None] = lambda record: None,
        admit: Admit | None = None,
        audit: Audit | None = None,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.coordinator, self.transport, self.recorder = coordinator, transport, recorder
        self._watch, self._on_node, self._note, self._clock, self._say = watch, on_node, note, clock, say
        self._admit = admit
        self._inbox = transport.mailbox(COORDINATOR)
        self.audit = audit or Audit(None)
        self._rejected: dict[str, int] = {}
        self._running = False
        self.hellos: dict[str, Mapping[str, Any]] = {}
        self._online: dict[str, float] = {}
        self._refused: dict[str, str] = {}
        self.traffic: dict[str, Mapping[str, int]] = {}
        self._problems: dict[str, str] = {}  # why nodes cannot keep their state
        self._strangers: set[str] = set()

    def join(self, nodes: Sequence[str], timeout: float) -> None:
        """Wait until every node has said hello.

        Raises:
            TransportTimeout: some have not within ``timeout`` seconds; names them.
        """
        deadline = self._clock() + timeout
        while missing := [node for node in nodes if not self.coordinator.roster.here(node)]:
            left = deadline - self._clock()
            if left <= 0:
                names = ", ".join(self._named(node) for node in missing)
                raise TransportTimeout(
                    f"no word from {names} within {timeout:g} s: start 'edgesplit node NAME --broker URL' there, "
                    "or look at its log"
                )
            message = self._get(min(left, TURN_S))
            if message is not None:
                self._raise_failed(self._take(message))
                if message.kind == "status" and message.meta.get("state") == "offline":
                    self._online.pop(message.sender, None)
            self._watch()
            self._refuse_mute(missing)

    def _named(self, node: str) -> str:
        return f"{node!r} ({self._refused[node]})" if node in self._refused else repr(node)

    def _refuse_mute(self, missing: Sequence[str]) -> None:
        """Raise where a node is online, but what it says does not arrive."""
        now = self._clock()
        mute = [node for node in missing if now - self._online.get(node, now) > MUTE_S]
        if mute:
            why = self._refused.get(mute[0]) or (
                "online, but nothing that it sends arrives: "
                "does the broker let nodes publish to the coordinator's topic, and the coordinator read it?"
            )
            raise TransportTimeout(f"{', '.join(map(repr, mute))}: {why}")

    def ask(self, kind: str, to: Asked) -> Mapping[str, Message]:
        """Ask nodes for something and return their answers."""
        self._refuse_nested()
        number, effects = self.coordinator.request(kind, to, self._clock())
        for effect in self._run(effects):
            if isinstance(effect, Replied) and effect.request == number:
                return effect.replies
        raise TransportError(f"{kind} ended without its answers")

    def steps(self, drafts: Sequence[Draft], *, evaluate: bool = False) -> Iterator[StepDone]:
        """Issue steps and yield each as it ends."""
        self._refuse_nested()
        for effect in self._run(self.coordinator.issue(drafts, self._clock(), evaluate=evaluate)):
            if isinstance(effect, StepDone):
                yield effect

    def note(self, record: Mapping[str, Any]) -> None:
        """Write something down for a successor."""
        self._note({**record, "term": self.coordinator.term})

    def say(self, text: str) -> None:
        """Tell people something, in a line."""
        self._say(text)

    def idle(self, seconds: float) -> None:
        """Wait, and hear meanwhile what nodes say."""
        self._refuse_nested()
        deadline = self._clock() + seconds
        while (left := deadline - self._clock()) > 0:
            message = self._get(min(left, TURN_S))
            if message is not None:
                for _ in self._act(self._take(message)):
                    continue
            self._watch()

    def spent(self) -> dict[str, float]:
        """Bytes that each node has sent and got so far, as the nodes last told."""
        told = {**self.traffic, COORDINATOR: self.transport.traffic(COORDINATOR)}
        total: dict[str, float] = {}
        for source, sent in told.items():
            for to, count in sent.items():
                for node in (source, to):
                    total[node] = total.get(node, 0.0) + count
        return total

    def offend(self, node: str, what: str, value: Any = None) -> None:
        """Note what a node did, between two rounds; see :meth:`Coordinator.offend`."""
        self._refuse_nested()
        for _ in self._act(self.coordinator.offend(node, what, self._clock(), value)):
            continue

    def resume(self, line: Line, term: int, micro: int) -> None:
        """Take up a run with a fleet that has been told its part; see :meth:`Coordinator.resume`."""
        self._refuse_nested()
        for _ in self._run(self.coordinator.resume(line, term, micro, self._clock())):
            continue

    def _run(self, effects: Sequence[Effect]) -> Iterator[Effect]:
        """Act on effects and go on until nothing is open."""
        self._running = True
        try:
            yield from self._act(effects)
            while self.coordinator.busy:
                message = self._get(TURN_S)
                if message is not None:
                    yield from self._act(self._take(message))
                self._watch()
                self._note_rejected()
                yield from self._act(self.coordinator.tick(self._clock()))
        finally:
            self._running = False

    def _note_rejected(self) -> None:
        """Write down that this end has dropped frames."""
        count = getattr(self.transport, "rejected", 0)
        if count > self._rejected.get(COORDINATOR, 0):
            self._rejected[COORDINATOR] = count
            self.audit.note(COORDINATOR, "frames and messages that it did not take", count)

    def _where(self) -> str:
        return "is in the middle of a round" if self._running else "is between two rounds"

    def _refuse_nested(self) -> None:
        """One thing at a time: a callback that asks for more would take the running round's steps away."""
        if self._running:
            raise RunError("steps are running: wait for the round's end (from a callback: use on_round)")

    def _act(self, effects: Sequence[Effect]) -> Iterator[Effect]:
        for effect in effects:
            if isinstance(effect, Send):
                self.transport.send(effect.to, effect.message)
            elif isinstance(effect, NodeChanged):
                self._on_node(effect)
                if effect.state == "waits":
                    notice = {"text": f"the run {self._where()}: {effect.reason}"}
                    self.transport.send(effect.node, Message(kind="notice", sender=COORDINATOR, meta=notice))
            elif isinstance(effect, Noted):
                self._note(effect.record)
            elif isinstance(effect, Offended):
                self.audit.note(effect.node, effect.what, effect.value)
                if effect.out:
                    self._say(f"{effect.node}: {effect.what}")
            elif not isinstance(effect, Failed):
                yield effect
        self._raise_failed(effects)

    @staticmethod
    def _raise_failed(effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Failed):
                raise effect.error

    def _get(self, timeout: float) -> Message | None:
        try:
            return self._inbox.get(timeout, "the nodes")
        except TransportTimeout:
            return None

    def _take(self, message: Message) -> Sequence[Effect]:
        if message.kind == "hello" and not self._greet(message):
            return []
        if message.kind == "refused":
            if message.sender in self.coordinator.known:
                self._refused[message.sender] = str(message.meta.get("reason"))
                self._say(f"{message.sender}: {message.meta.get('reason')}")
            return []
        online = message.kind == "status" and message.meta.get("state") == "online"
        if online and message.sender in self.coordinator.known:
            self._online.setdefault(message.sender, self._clock())
        now = self._clock()
        try:
            self._record(message)
            return self.coordinator.receive(message, now)
        except FrameError as error:  # who sent it is waited for, and named if nothing better comes
            return self.coordinator.malformed(message, str(error), now)

    def _greet(self, message: Message) -> bool:
        """Note a node's hello; return whether the run has such a node."""
        if message.sender in self.coordinator.known:
            self.hellos[message.sender] = _facts(message.meta)
            return True
        if message.sender in self._strangers or len(self._strangers) >= MOST_STRANGERS:
            return False
        if self._admit is not None:
            return self._let_in(self._admit, message)
        self._strangers.add(message.sender)
        nodes = self.coordinator.wanted.nodes()
        names = ", ".join(map(repr, nodes[:MOST_NAMED])) + (" and others" if len(nodes) > MOST_NAMED else "")
        near = did_you_mean(message.sender, nodes)
        self._stop_one(message.sender, f"the run has no node {message.sender!r}{near}: its nodes are {names}")
        return False

    def _let_in(self, admit: Admit, message: Message) -> bool:
        """Give a node that no file names a place, from the next round on; one that may not join is told why."""
        try:
            self.coordinator.want(admit(message.sender, message.meta, self.coordinator.wanted))
        except EdgesplitError as error:
            self._strangers.add(message.sender)
            self._stop_one(message.sender, str(error))
            return False
        self.hellos[message.sender] = _facts(message.meta)
        return True

    def _stop_one(self, node: str, error: str | None) -> None:
        meta = {} if error is None else {"error": error}
        self.transport.send(node, Message(kind="stop", sender=COORDINATOR, term=self.coordinator.term, meta=meta))

    def _record(self, message: Message) -> None:
        if message.sender not in self.coordinator.known:
            return
        if isinstance(problem := message.meta.get("keeping"), str) and self._problems.get(message.sender) != problem:
            self._problems[message.sender] = problem
            self._on_node(NodeChanged(message.sender, "forgetful", problem))
        if type(count := message.meta.get("rejected")) is int and count > self._rejected.get(message.sender, 0):
            self._rejected[message.sender] = count
            self.audit.note(message.sender, "frames and messages that it did not take", count)
        if isinstance(traffic := message.meta.get("traffic"), dict):
            known = self.coordinator.known | {COORDINATOR}
            self.traffic[message.sender] = {to: n for to, n in traffic.items() if to in known and type(n) is int}
        rows = message.meta.get("events") or []
        if not isinstance(rows, list):
            raise FrameError(f"{message.kind!r} of {message.sender!r} tells of events that are no list")
        for event in [_event(message, row) for row in rows]:
            self.recorder.add(event)
            self.coordinator.steps.observe(event)

    def stop(self, nodes: Sequence[str], timeout: float, error: str | None = None) -> dict[str, str]:
        """Tell the nodes to stop, and ``error`` if that is why.

        Returns:
            What each that answered within ``timeout`` seconds was waiting for.
        """
        waiting: dict[str, str] = {}
        answered: set[str] = set()
        deadline = self._clock() + timeout
        try:
            for node in nodes:
                self._stop_one(node, error)
            while len(answered) < len(nodes) and (left := deadline - self._clock()) > 0:
                message = self._get(left)
                if message is None or message.sender not in nodes:
                    continue
                if message.kind in {"stopped", "failed"}:
                    with suppress(FrameError):
                        self._record(message)
                    answered.add(message.sender)
                    if message.meta.get("waiting_for"):
                        waiting[message.sender] = str(message.meta["waiting_for"])
                elif message.kind == "status" and message.meta.get("state") == "offline":
                    answered.add(message.sender)
        except EdgesplitError:
            return waiting  # the network itself is gone: nobody can answer
        return waiting


def _facts(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain and short ones of the values that a node says of itself."""
    short = {name: value[:LONGEST_FACT] if isinstance(value, str) else value for name, value in meta.items()}
    plain = [(n, v) for n, v in short.items() if isinstance(v, str | int | float | None) and len(n) <= LONGEST_FACT]
    return dict(plain[:MOST_FACTS])


def _event(message: Message, row: Any) -> Event:
    """Read an event that a node tells of. Raises FrameError where it is none."""
    match row:
        case [str(name), int() | float() as start, int() | float() as end, int(step), int(version)]:
            try:
                if math.isfinite(start) and math.isfinite(end) and len(name) <= LONGEST_FACT:
                    return Event(message.sender, Action.parse(name), float(start), float(end), step, version)
            except (ScheduleError, OverflowError, ValueError):
                pass
    raise FrameError(f"{message.kind!r} of {message.sender!r} tells of an event {str(row)[:80]}, which is none")
