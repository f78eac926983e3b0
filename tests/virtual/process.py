"""A process of the virtual world: an :class:`Endpoint` on its link, and a program that it delivers to."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

from edgesplit.errors import FrameError
from edgesplit.protocol import Send
from edgesplit.transport.base import Message
from edgesplit.transport.endpoint import Announce, Deliver, Effect, Endpoint
from edgesplit.transport.reliable import Publish, Settings
from tests.virtual.world import RUN, WALL, Client, World


class Write(NamedTuple):
    """Among the messages that a program sends: something that it does to its disk in that moment."""

    do: Callable[[], None]
    to: str = ""


Out = Send | Write


class Program(Protocol):
    """What a process runs: messages and the time go in, messages come out.

    A program that is to survive a crash keeps what it needs in the ``disk`` (a dict) that it was made with.
    """

    def on_start(self, now: float) -> Sequence[Out]:
        """The process is connected for the first time."""
        ...

    def on_message(self, message: Message, now: float) -> Sequence[Out]: ...

    def next_deadline(self) -> float: ...

    def on_tick(self, now: float) -> Sequence[Out]: ...

    def waits_for(self) -> object:
        """What it waits for, to be named where a run is stuck."""
        ...


class Process:
    """One life of a node.

    Checks on its own that every message of each sender comes once and in order: a message's ``sent`` is its number in
    the stream from one life of its sender to this node.
    """

    def __init__(
        self, world: World, name: str, client: Client, program: Program, chunk_size: int, settings: Settings
    ) -> None:
        self.world, self.name, self.client, self.program = world, name, client, program
        self.endpoint = Endpoint(RUN, name, world.rng.getrandbits(63) + 1, settings=settings)
        self.will = self.endpoint.status("offline", WALL + world.now + client.skew)
        self.connected = self.started = False
        self.connected_at = math.inf
        self.life = world.lives[name]
        self.delivered: dict[str, int] = {}
        self._sent: dict[str, int] = {}
        self._chunk_size = chunk_size
        self._inbox: deque[Message] = deque()
        self._armed = math.inf

    def waits_for(self) -> object:
        return self.program.waits_for(), self.endpoint.missing()

    # What the world brings

    def packet(self, data: bytes) -> None:
        if not self.started:
            return  # a node answers when it knows that its name is its own
        try:
            frame = self.endpoint.parse(data)
        except FrameError:
            return
        self._perform(self.endpoint.received(frame, self.world.now))
        self._work()

    def status(self, node: str, data: bytes, retained: bool) -> None:
        now = self.world.now
        status = self.endpoint.read(data)
        self._perform(self.endpoint.heard(node, status, retained, now, WALL + now + self.client.skew))
        self._work()

    def up(self) -> None:
        now = self.world.now
        self.connected, self.connected_at = True, now
        self._perform(self.endpoint.reconnected(now, WALL + now + self.client.skew))
        if not self.started:
            self.started = True
            self._send(self.program.on_start(now))
        self._work()

    def down(self) -> None:
        self.connected = False

    # Inside

    def _work(self) -> None:
        inbox, program, now = self._inbox, self.program, self.world.now
        while inbox and not self.client.dead:
            sends = program.on_message(inbox.popleft(), now)
            if sends:
                self._send(sends)
        if self.client.dead:
            return
        # Not connected, an endpoint has no time: the shell is busy connecting.
        due = self.endpoint.next_deadline() if self.connected else math.inf
        due = min(due, program.next_deadline())
        if due < self._armed:
            self._armed = due
            self.world.at(due, self._wake, due)

    def _wake(self, armed: float) -> None:
        if armed != self._armed or self.client.dead:
            return
        self._armed, now = math.inf, self.world.now
        if self.connected and self.endpoint.next_deadline() <= now:
            self._perform(self.endpoint.tick(now, WALL + now + self.client.skew))
        if self.program.next_deadline() <= now and not self.client.dead:
            self._send(self.program.on_tick(now))
        self._work()

    def _send(self, sends: Sequence[Out]) -> None:
        """Send and write in this order; the process may crash before any of it."""
        endpoint, world, now = self.endpoint, self.world, self.world.now
        for to, group in groupby(sends, key=lambda send: send.to):
            outs = list(group)
            messages = [self._numbered(to, out.message) for out in outs if isinstance(out, Send)]
            if world.aims:
                world.about_to_send(self.name, messages)
            if self.client.dead:
                return
            for out in outs:
                if isinstance(out, Write):
                    out.do()
            if messages:
                for chunk in endpoint.cut(to, endpoint.pack(to, messages), self._chunk_size):
                    self._perform(endpoint.send(to, chunk, now))

    def _numbered(self, to: str, message: Message) -> Message:
        self._sent[to] = number = self._sent.get(to, self.life << 32) + 1
        object.__setattr__(message, "sent", float(number))  # before it is encoded; a copy of each would cost
        return message

    def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if type(effect) is Publish:
                if self.connected:
                    self.world.publish(self.client, effect.peer, effect.data)
            elif type(effect) is Deliver:
                self._deliver(effect.message)
            elif type(effect) is Announce and self.connected:
                self.world.announce(self.client, effect.data, effect.retain)

    def _deliver(self, message: Message) -> None:
        if message.kind != "status":
            self._check_turn(message.sender, int(message.sent))
        elif message.meta["state"] == "offline":
            self._check_gone(message.sender, int(message.meta["boot"], 16))
        self._inbox.append(message)

    def _check_gone(self, node: str, boot: int) -> None:
        """When all is well, nobody who is there is said to have gone."""
        now, other = self.world.now, self.world.processes[node]
        there = other.connected and now - max(other.connected_at, self.world.faults.calm) > 5.0
        assert not (there and boot == other.endpoint.boot), f"{self.name}: {node} is there, and said to be lost"

    def _check_turn(self, sender: str, number: int) -> None:
        """A message comes after the one before it; one of a new life of its sender begins at 1."""
        last = self.delivered.get(sender)
        if number != (last or 0) + 1:
            what = f"{self.name}: message {number:#x} of {sender} after {last}"
            first_here = last is None and self.world.lives[self.name] > 1  # others have gone to an earlier life
            assert first_here or number & (1 << 32) - 1 == 1, what
            assert last is None or number >> 32 > last >> 32, what
        self.delivered[sender] = number
