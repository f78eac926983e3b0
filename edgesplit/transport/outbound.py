"""The sending end of one stream: what is kept, what may fly, what must be sent again. No I/O, no clock.

Methods return the numbers of the chunks to publish now.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgesplit.transport.frames import Chunk

MOST_AGAIN = 64
"""Chunks sent again at once, at most."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds until a chunk is sent again: ``first`` before a round trip was measured, ``least`` to ``most`` after.

    Generous: a busy peer is not a lost one.
    """

    first: float = 2.0
    least: float = 1.0
    most: float = 15.0


@dataclass(slots=True)
class _Sent:
    """A chunk that is kept: when it was last sent, how often, and whether its memory may wait to be written yet."""

    chunk: Chunk
    at: float = -math.inf
    times: int = 0
    lent: bool = False


class Outbound:
    """Chunks to one life of a peer, numbered from 1 by queueing order.

    Those of a message are kept until all of it is acknowledged: a peer that starts anew needs it from its beginning.

    Attributes:
        boot: the peer's life that the stream is for; 0: not known yet, nothing is sent.
        window: bytes and chunks that the peer allows in flight.
        due: when to call :meth:`timed_out`.
    """

    def __init__(self, patience: Patience) -> None:
        self.boot = 0
        self.window = (0, 0)
        self.due = math.inf
        self._patience = patience
        self._kept: dict[int, _Sent] = {}
        self._first = 1  # the first kept
        self._last = 0
        self._acked = 0
        self._next = 1  # the first to be sent; those before it are in flight
        self._highest = 0  # the last that was ever sent: what may be acknowledged
        self._flying = 0
        self._timeouts = 0
        self._lost_to = 0
        self._again_from = 0
        self._burst = 1
        self._round_trip = 0.0
        self._deviation = 0.0

    @property
    def outstanding(self) -> int:
        """Chunks that are not acknowledged."""
        return self._last - self._acked

    @property
    def waiting(self) -> bool:
        """Whether there are chunks that are not in flight."""
        return self._next <= self._last

    @property
    def flying(self) -> int:
        """Bytes in flight."""
        return self._flying

    def queue(self, chunks: Sequence[Chunk]) -> None:
        """Add the chunks of one message."""
        for chunk in chunks:
            self._last += 1
            self._kept[self._last] = _Sent(chunk)

    def chunk(self, number: int, now: float) -> Chunk:
        """Return a chunk to be published now: its header may be written, the one given before is left as it is."""
        sent = self._kept[number]
        if sent.lent:
            sent.chunk = sent.chunk._replace(data=bytearray(sent.chunk.data))
        sent.lent = True
        sent.at = now
        sent.times += 1
        return sent.chunk

    def bind(self, boot: int) -> None:
        """The peer has this life: messages that an earlier one has not acknowledged completely begin a new stream."""
        if boot != self.boot:
            kept = [_Sent(sent.chunk, lent=sent.lent) for sent in self._kept.values()]
            self.boot = boot
            self._kept = dict(enumerate(kept, 1))
            self._first, self._last, self._acked, self._highest = 1, len(kept), 0, 0
            self._rewind()

    def pump(self, now: float) -> Iterator[int]:
        """Send what the window allows; one chunk always, so that a small window slows down but does not stop."""
        while self.boot and self._next <= self._last:
            size = len(self._kept[self._next].chunk.data)
            flying = self._next - 1 - self._acked
            if flying and (self._flying + size > self.window[0] or flying >= self.window[1]):
                break
            self._flying += size
            self._next += 1
            self._highest = max(self._highest, self._next - 1)
            if not flying:
                self.due = now + self._wait()
            yield self._next - 1

    def acknowledged(self, mark: int, gap: int, now: float) -> Iterator[int]:
        """All up to ``mark`` have arrived, and the ``gap`` after it have not although later ones have."""
        if not self._acked <= mark <= self._highest:
            return  # an old one, or nonsense
        if mark > self._acked:
            self._advance(mark, now)
            yield from self._recover()
        # A copy that was sent a moment ago may still be on its way.
        pause = max(2 * self._round_trip, 0.05)
        for number in range(mark + 1, min(mark + gap + 1, self._next)):
            if now - self._kept[number].at >= pause:
                yield number

    def timed_out(self, now: float) -> Iterator[int]:
        """Send the oldest chunk again, alone: if the peer is only slow, that is all that was wasted."""
        self._timeouts += 1
        self.due = now + self._wait()
        self._lost_to, self._again_from, self._burst = self._next - 1, self._acked + 2, 1
        yield self._acked + 1

    def again(self, now: float) -> Iterator[int]:
        """What was in flight may be lost: send it again."""
        self._rewind()
        yield from self.pump(now)

    def _rewind(self) -> None:
        self._next, self._flying = self._acked + 1, 0
        self._timeouts, self._lost_to, self.due = 0, 0, math.inf

    def _advance(self, mark: int, now: float) -> None:
        newest = self._kept[mark]
        if newest.times == 1:  # of a repeated one it is not known which copy arrived (Karn's rule)
            self._measure(now - newest.at)
        for number in range(self._acked + 1, mark + 1):
            chunk = self._kept[number].chunk
            if number < self._next:
                self._flying -= len(chunk.data)
            if chunk.part == chunk.parts - 1:
                for done in range(self._first, number + 1):
                    del self._kept[done]
                self._first = number + 1
        self._acked, self._timeouts = mark, 0
        self._next = max(self._next, mark + 1)  # what was to be sent again has arrived after all
        self.due = now + self._wait() if mark < self._next - 1 else math.inf

    def _recover(self) -> Iterator[int]:
        """After a timeout each acknowledgement shows that chunks get through again: send twice as many as before."""
        if self._acked >= self._lost_to:
            self._lost_to = 0
            return
        self._burst = min(2 * self._burst, MOST_AGAIN)
        start = max(self._again_from, self._acked + 1)
        self._again_from = min(start + self._burst, self._lost_to + 1)
        yield from range(start, self._again_from)

    def _measure(self, sample: float) -> None:
        """Smoothed round trip and deviation, as TCP keeps them (RFC 6298)."""
        if self._round_trip:
            self._deviation += (abs(sample - self._round_trip) - self._deviation) / 4
            self._round_trip += (sample - self._round_trip) / 8
        else:
            self._round_trip, self._deviation = sample, sample / 2

    def _wait(self) -> float:
        usual = self._round_trip + 4 * self._deviation if self._round_trip else self._patience.first
        return min(max(usual, self._patience.least) * 2.0 ** min(self._timeouts, 10), self._patience.most)
