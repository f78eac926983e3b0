"""One node's end of the network as a state machine: messages in and out, packets out and in. No I/O, no clock.

What lies between :class:`Reliable` and :class:`Presence` on one side and a network on the other: encoding, cutting,
parsing, bundles, what a status means for the streams, and counting. A shell (:mod:`edgesplit.transport.mqtt`, or a
simulated network) gives it packets and the time and performs its effects in their order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from edgesplit.errors import FrameError, TransportError
from edgesplit.transport import frames, reliable
from edgesplit.transport.base import DATA_KINDS, Message
from edgesplit.transport.bundle import bundle, unbundle
from edgesplit.transport.frames import LIMITS, Bytes, Chunk, Frame, Limits
from edgesplit.transport.guard import DENIED, Guard
from edgesplit.transport.key import Key
from edgesplit.transport.presence import CLOSED, Presence, Status
from edgesplit.transport.reliable import Denied, Publish, Reached, Rejected, Reliable, Settings

LOOK_S, LOOK_MOST_S = 0.1, 0.5
"""Between two looks at who has gone silent: at least, and at most."""


class Announce(NamedTuple):
    """Effect: publish ``data`` as this node's status."""

    data: bytes
    retain: bool


class Deliver(NamedTuple):
    """Effect: put ``message``, of ``size`` bytes, another node's or a change of its liveness, into the inbox."""

    message: Message
    size: int = 0


Effect = Publish | Announce | Deliver | Reached


class Outgoing(NamedTuple):
    """A message (or several in a bundle) ready to be cut: its kind, the segments of its body, their bytes.

    ``bulk``: it commands nothing, so a MAC need not cover it.
    """

    kind: str
    segments: Sequence[Bytes]
    size: int
    bulk: bool


class Endpoint:
    """Sends, receives, and knows who is there.

    ``now`` is a monotonic clock, ``wall`` seconds since the epoch. Not thread-safe but for :meth:`pack`, :meth:`cut`
    (one at a time) and :meth:`parse`, the three that take long.

    Args:
        run, node: valid names.
        boot: a number that no other life of this node has, 1 to 2^63.
        heartbeat: seconds between refreshes of the status.
        grace, silence: see :class:`Presence`.
        key: the run's: what is sent is signed with it.
        key_required: believe nothing that is not signed with it; otherwise nothing of those that have signed before.

    Attributes:
        rejected: packets and messages from the network that were dropped because they are none.
    """

    def __init__(
        self,
        run: str,
        node: str,
        boot: int,
        *,
        heartbeat: float = 2.0,
        grace: float = 2.0,
        silence: float = 30.0,
        settings: Settings | None = None,
        limits: Limits = LIMITS,
        key: Key | None = None,
        key_required: bool = True,
    ) -> None:
        self.node, self.boot, self.rejected = node, boot, 0
        self.run_hash = frames.run_hash(run)
        self._limits, self._heartbeat = limits, heartbeat
        self._link = Reliable(run, node, boot, settings, key)
        self._guard = Guard(key, required=key_required)
        self._presence = Presence(grace, silence)
        self._traffic: defaultdict[str, int] = defaultdict(int)
        self._beat_at = self._look_at = 0.0

    # Sending

    def pack(self, node: str, messages: Sequence[Message]) -> Outgoing:
        """Encode messages for ``node``; their arrays are not copied yet.

        Raises:
            FrameError: a message cannot travel.
            TransportError: it is another's, or the name is wrong.
        """
        message = bundle(messages)
        if message.sender != self.node:
            raise TransportError(f"{self.node!r} cannot send a message of {message.sender!r}")
        if not frames.valid_name(node):
            raise TransportError(f"node name {node!r} must be 1 to 64 of A-Z a-z 0-9 . _ -")
        segments = frames.encode(message, self._limits)
        bulk = all(each.kind in DATA_KINDS for each in messages)
        return Outgoing(message.kind, segments, sum(len(segment) for segment in segments), bulk)

    def cut(self, node: str, outgoing: Outgoing, chunk_size: int) -> Iterator[Chunk]:
        """Yield chunks, each to be sent before the next is asked for: the first flies while the last is cut."""
        yield from frames.split(outgoing.segments, chunk_size, self.node, signed=self.signs, whole=not outgoing.bulk)
        self._traffic[node] += outgoing.size

    @property
    def signs(self) -> bool:
        """Whether this node holds the run's key."""
        return self._guard.key is not None

    def send(self, node: str, chunk: Chunk, now: float) -> Sequence[Effect]:
        """Queue a chunk for another node; what the window allows goes out at once."""
        return _published(self._link.send(node, [chunk], now))

    def to_self(self, outgoing: Outgoing) -> Sequence[Effect]:
        """Deliver a copy of what this node sends to itself."""
        body = memoryview(b"".join(outgoing.segments))
        return [Deliver(part) for part in unbundle(frames.decode(body, self.node, self._limits))]

    def room(self, node: str) -> Sequence[Effect]:
        """Tell a node, whose frames were not taken for some time, to send again what it has not seen acknowledged."""
        return _published(self._link.resync(node))

    def hello(self, node: str, now: float) -> Sequence[Effect]:
        """Ask a node to show that it is there; :class:`Reached` follows when it answers."""
        return _published(self._link.hello(node, now))

    # Receiving

    def parse(self, data: Bytes) -> Frame:
        """Check a packet from this node's topic; the frame is a view of ``data``.

        Raises:
            FrameError: it is none; it has been counted.
        """
        try:
            return frames.parse(data, self.run_hash, self._limits, self._guard.key)
        except FrameError:
            self.rejected += 1
            raise

    def received(self, frame: Frame, now: float) -> Sequence[Effect]:
        """Take what :meth:`parse` made of a packet."""
        if frame.sender == self.node:
            return []
        if not self._guard.admits(frame):
            self.rejected += 1
            return [*_published(self._link.deny(frame, now)), *_delivered(self._guard.refused(frame, now))]
        self._presence.seen(frame.sender, now)
        effects: list[Effect] = []
        for effect in self._link.received(frame, now):
            if isinstance(effect, reliable.Deliver):
                effects += self._opened(effect)
            elif isinstance(effect, Denied):
                effects += _delivered(self._guard.tell(effect.peer, DENIED))
            elif isinstance(effect, Rejected):
                self.rejected += 1
            else:
                effects.append(effect)
        return effects

    def read(self, data: bytes | bytearray) -> Status:
        """Check the payload of a status topic.

        Raises:
            FrameError: it is none; it has been counted.
        """
        try:
            return Status.of_json(data)
        except FrameError:
            self.rejected += 1
            raise

    def heard(self, node: str, status: Status, retained: bool, now: float, wall: float) -> Sequence[Effect]:
        """Take another node's status; ``retained`` if it lay at the broker."""
        return self._report(self._presence.heard(node, status, retained, now, wall), now)

    # Time and the connection

    def tick(self, now: float, wall: float) -> Sequence[Effect]:
        """Do what is due."""
        effects: list[Effect] = []
        if now >= self._beat_at:
            effects.append(self.announce(now, wall))
        if self._link.next_deadline() <= now:
            effects += _published(self._link.tick(now))
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            effects += self._report(self._presence.tick(now), now)
        return effects

    def next_deadline(self) -> float:
        """When :meth:`tick` is to be called again."""
        return min(self._link.next_deadline(), self._beat_at, self._look_at - LOOK_S + LOOK_MOST_S)

    def reconnected(self, now: float, wall: float) -> Sequence[Effect]:
        """The network is back: what was in flight either way may be lost, and the others' silence was ours."""
        announced = self.announce(now, wall)
        self._presence.reconnected(now)
        return [announced, *_published(self._link.reconnected(now))]

    def closing(self, wall: float) -> Sequence[Effect]:
        """Say goodbye: the acknowledgements that still wait, a last status, and a cleared one for who comes later."""
        effects = list(_published(self._link.closing()))
        return [*effects, Announce(self.status("offline", wall, CLOSED), retain=False), Announce(b"", retain=True)]

    def announce(self, now: float, wall: float) -> Announce:
        """Refresh the status."""
        self._beat_at = now + self._heartbeat
        return Announce(self.status("online", wall), retain=True)

    def status(self, state: str, wall: float, reason: str = "") -> bytes:
        """Return a status of this life as its topic carries it; also for the last will."""
        return Status(state, self.boot, wall, reason).to_json()

    # Questions

    def missing(self) -> dict[str, int]:
        """How many chunks each node has not acknowledged, but for those that have left."""
        return {node: n for node, n in self._link.unacknowledged().items() if not self._presence.left(node)}

    def forget(self, node: str) -> None:
        """Drop what is waiting for a node that will not come back."""
        self._link.forget(node)

    def away(self, node: str) -> bool:
        """Whether a node was there and is not now."""
        return self._presence.away(node)

    def last_seen(self, node: str) -> float | None:
        """When something was last heard of a node, on the clock of ``now``; None: never."""
        return self._presence.last_seen(node)

    def traffic(self) -> Mapping[str, int]:
        """Bytes sent so far, by receiver; what is sent again does not count."""
        return dict(self._traffic)

    # Inside

    def _opened(self, arrived: reliable.Deliver) -> Sequence[Effect]:
        """One that is malformed must not take along those that arrived with it."""
        try:
            parts = unbundle(frames.decode(arrived.body, arrived.sender, self._limits))
        except FrameError:
            self.rejected += 1
            return []
        size = len(arrived.body) // len(parts)
        believed = [Deliver(part, size) for part in parts if self._guard.believes(part, whole=arrived.proven)]
        self.rejected += len(parts) - len(believed)
        return believed

    def _report(self, statuses: Iterable[Message], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for status in statuses:
            if status.meta["state"] == "online":
                effects += _published(self._link.online(status.sender, int(status.meta["boot"], 16), now))
            else:
                self._link.offline(status.sender)
            effects.append(Deliver(status))
        return effects


def _delivered(message: Message | None) -> list[Effect]:
    return [] if message is None else [Deliver(message)]


def _published(effects: list[reliable.Effect]) -> list[Publish]:
    """Effects of calls that make nothing but these."""
    return effects  # type: ignore[return-value]
