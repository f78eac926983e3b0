"""Every message once and in order over a network that loses, repeats, delays and reorders: a state machine.

No socket, clock, thread or random number in here: events come in as calls with the time, effects come out as lists.
MQTT is taken for a lossy datagram service; a broker acknowledges what it then loses. So the two ends of each stream
number, acknowledge and re-send chunks themselves, and the receiver says how much may be in flight to it.

A stream is the chunks from one life of a node (its *boot*, a random number) to one life of another. The sender learns
the receiver's boot with a hello that has a fresh number echoed, so a late answer of a dead process cannot mislead it;
when the receiver starts anew, what it has not acknowledged completely begins again as a new stream. The receiver ranks
the boots of a sender by their first hello; since a node says hello before it sends data, the highest is the living one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from edgesplit.transport import frames
from edgesplit.transport.frames import Chunk, Flag, Frame
from edgesplit.transport.inbound import Bodies, Inbound, Spoiled
from edgesplit.transport.key import Key
from edgesplit.transport.outbound import Outbound, Patience

_PATIENCE = Patience()

MOST_DEAD = 65_536


@dataclass(frozen=True, slots=True)
class Settings:
    """How much may be in flight, and how patient an end is; times in seconds.

    Attributes:
        window_bytes, window_frames: the most one sender may have in flight to this node.
        inbox_bytes, inbox_frames: what all senders together may have in flight to it; they share it alike, each
            keeping at least one chunk. Below what a broker queues (1,000 packets).
        ack_delay: an acknowledgement waits this long for data to ride on.
        patience: until a chunk is sent again.
        hello_first, hello_most: between hellos to a peer that does not answer; doubles from first to most.
        peers: more senders than this are not listened to.
        ahead_bytes: of all senders' chunks that may wait for those before them.
        unfinished_bytes: what may have come of messages that are not whole yet, of all senders; a chunk beyond that is
            not taken, so that it is sent again.
    """

    window_bytes: int = 4 << 20
    window_frames: int = 256
    inbox_bytes: int = 32 << 20
    inbox_frames: int = 800
    ack_delay: float = 0.05
    patience: Patience = _PATIENCE
    hello_first: float = 0.25
    hello_most: float = 2.0
    peers: int = 16_384
    ahead_bytes: int = 64 << 20
    unfinished_bytes: int = 16 << 30


class Publish(NamedTuple):
    """Effect: publish ``data`` to ``peer``'s inbox. It is the shell's from now on: it does not change."""

    peer: str
    data: bytearray


class Deliver(NamedTuple):
    """Effect: a whole message of ``sender`` has arrived; ``body`` is for :func:`frames.decode`.

    ``proven``: a holder of the run's key has signed all of it.
    """

    sender: str
    body: memoryview
    proven: bool


class Reached(NamedTuple):
    """Effect: ``peer`` has answered a hello."""

    peer: str


class Denied(NamedTuple):
    """Effect: ``peer`` is there but does not let this node in."""

    peer: str


class Rejected(NamedTuple):
    """Effect: ``sender`` sent chunks that make no message; they are dropped."""

    sender: str
    reason: str


Effect = Publish | Deliver | Reached | Denied | Rejected


@dataclass(slots=True)
class _Greeting:
    """A hello to a peer: its number, when to repeat it (infinity: it was answered), and the pause before that."""

    nonce: int = 0
    due: float = math.inf
    wait: float = 0.0

    @property
    def pending(self) -> bool:
        return self.due < math.inf


class Reliable:
    """Both ends of a node's streams to and from its peers.

    Args:
        run: the run's name.
        node: this node's.
        boot: a number that no other life of this node has, not 0.
        key: the run's, with which all chunks are signed.
    """

    def __init__(
        self, run: str, node: str, boot: int, settings: Settings | None = None, key: Key | None = None
    ) -> None:
        self._key = key
        self._run = frames.run_hash(run)
        self._node = node
        self._boot = boot
        self._settings = settings or Settings()
        self._outs: dict[str, Outbound] = {}
        self._greetings: dict[str, _Greeting] = {}
        self._active: set[str] = set()  # peers with chunks outstanding or a hello pending
        self._ins: dict[str, Inbound] = {}
        self._bodies = Bodies()
        self._ranks: dict[str, deque[int]] = {}
        # Lives whose chunks have been taken and are over: recorded ones must not come to life again, however many
        # hellos were recorded too.
        self._dead: dict[tuple[str, int], None] = {}
        self._ack_due: dict[str, float] = {}
        self._told: dict[str, float] = {}
        self._sharers: set[str] = set()
        self._told_sharers = 1
        self._window = self._share_of_inbox()

    # Events

    def send(self, peer: str, chunks: Sequence[Chunk], now: float) -> list[Effect]:
        """Queue a message's chunks for ``peer``, in one call or several; what the window allows goes out at once."""
        out = self._out(peer)
        out.queue(chunks)
        self._active.add(peer)
        if not out.boot and not self._greetings[peer].pending:
            return [self._hello(peer, now)]
        return list(self._publish(peer, out.pump(now), now))

    def hello(self, peer: str, now: float) -> list[Effect]:
        """Ask ``peer`` to show that it is there; :class:`Reached` follows when it answers."""
        self._out(peer)
        return [self._hello(peer, now)]

    def received(self, frame: Frame, now: float) -> list[Effect]:
        """Take a parsed chunk."""
        if frame.flags & Flag.HELLO:
            return list(self._welcome(frame, now))
        if frame.to_boot != self._boot:
            return list(self._say_boot(frame, now))
        if frame.flags & Flag.WELCOME:
            return list(self._bind(frame, now))
        effects: list[Effect] = []
        out = self._outs.get(frame.sender)
        if out is not None and out.boot == frame.boot:
            out.window = (frame.window_bytes, frame.window_frames)
            if out.outstanding:
                effects += self._acknowledged(frame, out, now)
        elif out is not None:
            effects += self._suspect(frame.sender, out, now)
        if frame.flags & Flag.DATA:
            effects += self._data(frame, now)
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Do what is due: acknowledgements, hellos, sending again."""
        effects: list[Effect] = [self._ack(peer) for peer, due in list(self._ack_due.items()) if due <= now]
        for peer in sorted(self._active):
            if self._greetings[peer].due <= now:
                effects.append(self._hello(peer, now))
            if self._outs[peer].due <= now:
                effects += self._publish(peer, self._outs[peer].timed_out(now), now)
        return effects

    def reconnected(self, now: float) -> list[Effect]:
        """The network is back: what was in flight either way may be lost."""
        effects: list[Effect] = [self._ack(peer, Flag.RESYNC) for peer in self._ins]
        for peer in sorted(self._active):
            if self._greetings[peer].pending:
                self._greetings[peer].wait = 0.0
                effects.append(self._hello(peer, now))
            effects += self._publish(peer, self._outs[peer].again(now), now)
        return effects

    def resync(self, peer: str) -> list[Effect]:
        """Have ``peer`` send again what was in flight to this node."""
        return [self._ack(peer, Flag.RESYNC)] if peer in self._ins else []

    def deny(self, frame: Frame, now: float) -> list[Effect]:
        """Tell the sender of a hello that it is not let in: a welcome to nothing."""
        if not frame.flags & Flag.HELLO or not self._may_tell(frame.sender, now):
            return []
        return [self._control(frame.sender, Flag.WELCOME, frame.boot, ack=frame.seq, window=(0, 0))]

    def online(self, peer: str, boot: int, now: float) -> list[Effect]:
        """A life of ``peer`` is known to be there: if anything is waiting for it, do not wait before greeting it."""
        if peer not in self._active or self._outs[peer].boot == boot:
            return []
        self._greetings[peer].wait = 0.0
        return [self._hello(peer, now)]

    def closing(self) -> list[Effect]:
        """Return the acknowledgements that are still waiting, for a node that leaves."""
        return [self._ack(peer) for peer in list(self._ack_due)]

    def offline(self, peer: str) -> None:
        """``peer`` has gone: others get its share of the inbox until it sends again."""
        self._sharers.discard(peer)
        self._window = self._share_of_inbox()
        self._told_sharers = max(min(self._told_sharers, len(self._sharers)), 1)

    def forget(self, peer: str) -> None:
        """Drop what is waiting for ``peer``."""
        self._outs.pop(peer, None)
        self._greetings.pop(peer, None)
        self._active.discard(peer)

    # Questions

    def next_deadline(self) -> float:
        """When :meth:`tick` has something to do; infinity if nothing is waited for."""
        due = min(self._ack_due.values(), default=math.inf)
        for peer in self._active:
            due = min(due, self._outs[peer].due, self._greetings[peer].due)
        return due

    def unacknowledged(self) -> dict[str, int]:
        """How many chunks each peer has not acknowledged; peers with none are left out."""
        return {peer: self._outs[peer].outstanding for peer in sorted(self._active) if self._outs[peer].outstanding}

    # Greeting

    def _out(self, peer: str) -> Outbound:
        if peer not in self._outs:
            self._outs[peer] = Outbound(self._settings.patience)
            self._greetings[peer] = _Greeting()
        return self._outs[peer]

    def _hello(self, peer: str, now: float) -> Publish:
        greeting = self._greetings[peer]
        if not greeting.pending:
            greeting.nonce += 1  # the same number while it is repeated, or no answer of a far peer would ever match
        greeting.wait = min(max(2 * greeting.wait, self._settings.hello_first), self._settings.hello_most)
        greeting.due = now + greeting.wait
        self._active.add(peer)
        return self._control(peer, Flag.HELLO, 0, seq=greeting.nonce)

    def _welcome(self, frame: Frame, now: float) -> Iterator[Effect]:
        peer = frame.sender
        if peer not in self._ranks and len(self._ranks) >= self._settings.peers:
            return
        ranks = self._ranks.setdefault(peer, deque(maxlen=8))
        if frame.boot not in ranks:
            ranks.append(frame.boot)
        yield self._control(peer, Flag.WELCOME, frame.boot, ack=frame.seq)
        if peer in self._outs and self._outs[peer].boot != frame.boot:
            yield from self._suspect(peer, self._outs[peer], now)

    def _suspect(self, peer: str, out: Outbound, now: float) -> Iterator[Effect]:
        """A chunk of another life of the peer than the known one: a new one, or the late word of a dead one. Ask."""
        if out.boot and not self._greetings[peer].pending:
            yield self._hello(peer, now)

    def _say_boot(self, frame: Frame, now: float) -> Iterator[Effect]:
        """A chunk meant for an earlier life of this node: show the present one, so that the sender says hello."""
        if self._may_tell(frame.sender, now):
            yield self._control(frame.sender, 0, frame.boot)

    def _may_tell(self, peer: str, now: float) -> bool:
        """Whether to answer what is not a peer's: not more often than it would ask."""
        due = self._told.get(peer, -math.inf) + self._settings.hello_first
        if now < due or (peer not in self._told and len(self._told) >= self._settings.peers):
            return False
        self._told[peer] = now
        return True

    def _bind(self, frame: Frame, now: float) -> Iterator[Effect]:
        peer = frame.sender
        greeting = self._greetings.get(peer)
        if greeting is None or not greeting.pending or frame.ack != greeting.nonce:
            return
        if not frame.window_frames:
            yield Denied(peer)  # and go on asking: it may be given the key
            return
        greeting.due, greeting.wait = math.inf, 0.0
        out = self._outs[peer]
        out.window = (frame.window_bytes, frame.window_frames)
        out.bind(frame.boot)
        yield Reached(peer)
        yield from self._publish(peer, out.pump(now), now)
        self._rest(peer, out)

    # Sending

    def _publish(self, peer: str, numbers: Iterable[int], now: float) -> Iterator[Effect]:
        out, back = self._outs[peer], self._ins.get(peer)
        for number in numbers:
            flags, ack, gap = Flag.DATA, 0, 0
            if back is not None and back.boot == out.boot:
                flags, ack, gap = Flag.DATA | Flag.ACK, back.mark, back.gap
                self._settle(peer, back)
            chunk = out.chunk(number, now)
            window = self._window
            yield Publish(
                peer,
                frames.seal(
                    chunk, flags, self._run, self._node, self._boot, out.boot, number, ack, window, gap, self._key
                ),
            )

    def _acknowledged(self, frame: Frame, out: Outbound, now: float) -> Iterator[Effect]:
        peer = frame.sender
        if frame.flags & Flag.ACK:
            yield from self._publish(peer, out.acknowledged(frame.ack, frame.gap, now), now)
        if frame.flags & Flag.RESYNC:
            yield from self._publish(peer, out.again(now), now)
        if out.waiting:
            yield from self._publish(peer, out.pump(now), now)
        self._rest(peer, out)

    def _rest(self, peer: str, out: Outbound) -> None:
        if not out.outstanding and not self._greetings[peer].pending:
            self._active.discard(peer)

    # Receiving

    def _data(self, frame: Frame, now: float) -> Iterator[Effect]:
        peer = frame.sender
        stream = self._stream(frame)
        if stream is None:
            return
        if peer not in self._sharers:
            yield from self._share(peer)
        if stream.repeated(frame):
            self._ack_due[peer] = now  # its acknowledgement was lost, or is on its way
        elif frame.seq > stream.mark + 1:
            known = stream.gap
            stream.hold(frame)
            if known:
                self._ack_due.setdefault(peer, now + self._settings.ack_delay)
            else:
                yield self._ack(peer)  # at once: it names the hole
        elif frame.parts == 1 or self._bodies.unfinished + len(frame.payload) <= self._settings.unfinished_bytes:
            had_hole = stream.gap > 0
            for result in stream.take(frame):
                yield Rejected(peer, result.reason) if isinstance(result, Spoiled) else Deliver(peer, *result)
            window_bytes, window_frames = self._window
            if had_hole or 4 * stream.fresh_bytes >= window_bytes or 4 * stream.fresh_frames >= window_frames:
                yield self._ack(peer)
            else:
                self._ack_due.setdefault(peer, now + self._settings.ack_delay)

    def _stream(self, frame: Frame) -> Inbound | None:
        """The stream that a chunk belongs to; None where it is one of a life that has ended."""
        stream = self._ins.get(frame.sender)
        if stream is not None and stream.boot == frame.boot:
            return stream
        ranks = list(self._ranks.get(frame.sender, ()))
        if frame.boot not in ranks:
            return None
        if stream is not None and stream.boot in ranks and ranks.index(frame.boot) < ranks.index(stream.boot):
            return None
        if (frame.sender, frame.boot) in self._dead:
            return None
        if stream is not None:
            stream.drop()
            self._dead[frame.sender, stream.boot] = None
            if len(self._dead) > MOST_DEAD:
                del self._dead[next(iter(self._dead))]
        settings = self._settings
        stream = self._ins[frame.sender] = Inbound(
            frame.boot,
            (2 * settings.window_bytes, 2 * settings.window_frames),
            self._bodies,
            settings.ahead_bytes,
        )
        self._ack_due.pop(frame.sender, None)
        return stream

    def _share(self, peer: str) -> Iterator[Effect]:
        """Count one more sender; when there are half as many again, tell all, or an idle one's burst is too much."""
        self._sharers.add(peer)
        self._window = self._share_of_inbox()
        if 2 * len(self._sharers) >= 3 * self._told_sharers:
            self._told_sharers = len(self._sharers)
            yield from [self._ack(other) for other in self._ins if other != peer]

    def _ack(self, peer: str, flags: int = 0) -> Publish:
        stream = self._ins[peer]
        self._settle(peer, stream)
        return self._control(peer, Flag.ACK | flags, stream.boot, ack=stream.mark, gap=stream.gap)

    def _settle(self, peer: str, stream: Inbound) -> None:
        stream.fresh_bytes = stream.fresh_frames = 0
        self._ack_due.pop(peer, None)

    def _control(
        self,
        peer: str,
        flags: int,
        to_boot: int,
        *,
        seq: int = 0,
        ack: int = 0,
        gap: int = 0,
        window: tuple[int, int] | None = None,
    ) -> Publish:
        chunk = frames.empty_chunk(self._node, signed=self._key is not None)
        window = self._window if window is None else window
        return Publish(
            peer,
            frames.seal(chunk, flags, self._run, self._node, self._boot, to_boot, seq, ack, window, gap, self._key),
        )

    def _share_of_inbox(self) -> tuple[int, int]:
        """This node's inbox divided among its senders."""
        settings, sharers = self._settings, max(len(self._sharers), 1)
        return (
            min(settings.window_bytes, settings.inbox_bytes // sharers),
            max(min(settings.window_frames, settings.inbox_frames // sharers), 1),
        )
