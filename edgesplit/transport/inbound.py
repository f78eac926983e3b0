"""The receiving end of one stream: order, repeats, holes, and whole messages. No I/O, no clock."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from edgesplit.transport.frames import Frame, Proof

Memory = np.ndarray[Any, np.dtype[np.uint8]]

SMALL = 4096
"""Bytes that are copied in less time than it takes to look where they lie."""


class Whole(NamedTuple):
    """A message's body; ``proven``: a holder of the run's key has signed all of it."""

    body: memoryview
    proven: bool


class Spoiled(NamedTuple):
    """Chunks that make no message; they are dropped."""

    reason: str


class Bodies:
    """Memory for messages of several chunks, used again when nobody holds a view of it: fresh memory is dear.

    Args:
        most: bytes to keep.

    Attributes:
        unfinished: bytes that have come of messages that are not whole yet, in all streams.
        ahead: bytes of chunks that came too early, in all streams.
    """

    def __init__(self, most: int = 64 << 20) -> None:
        self._most = most
        self.unfinished = 0
        self.ahead = 0
        # Each with a weak reference to the array that was lent last: it dies with the last view of it.
        self._kept: deque[tuple[Memory, weakref.ref[Memory]]] = deque()

    def take(self, size: int) -> memoryview:
        """Return writable memory of ``size`` bytes with anything in it."""
        for index, (memory, lent) in enumerate(self._kept):
            if size <= len(memory) <= 2 * size and lent() is None:
                del self._kept[index]
                return self._lend(memory, size)
        # Not zeroed: a page is taken when a piece arrives, whatever total a chunk claims.
        memory = np.empty(size, np.uint8)
        return self._lend(memory, size) if size <= self._most else memory.data

    def _lend(self, memory: Memory, size: int) -> memoryview:
        lent = memory[:size]
        self._kept.append((memory, weakref.ref(lent)))
        while sum(len(memory) for memory, _ in self._kept) > self._most:
            self._kept.popleft()
        return lent.data


class Inbound:
    """Chunks from one life of a peer.

    Args:
        most_ahead: bytes and chunks of this stream that may wait for those before them.
        bodies: shared by all streams.
        most_ahead_of_all: bytes of all streams that may wait so.

    Attributes:
        boot: that life.
        mark: all up to this number have arrived.
        fresh_bytes, fresh_frames: arrived since the last acknowledgement was sent.
    """

    def __init__(
        self, boot: int, most_ahead: tuple[int, int], bodies: Bodies, most_ahead_of_all: int = 1 << 62
    ) -> None:
        self.boot = boot
        self.mark = 0
        self.fresh_bytes = 0
        self.fresh_frames = 0
        self._ahead: dict[int, Frame] = {}
        self._ahead_bytes = 0
        self._most_ahead, self._most_ahead_of_all = most_ahead, most_ahead_of_all
        self._bodies = bodies
        self._body: memoryview | None = None
        self._filled = 0
        self._due = 0  # the part that comes next
        self._proven = False

    @property
    def gap(self) -> int:
        """How many chunks after the mark are missing although later ones came."""
        return min(self._ahead) - self.mark - 1 if self._ahead else 0

    def repeated(self, frame: Frame) -> bool:
        """Whether this chunk has been here before."""
        return frame.seq <= self.mark or frame.seq in self._ahead

    def hold(self, frame: Frame) -> None:
        """Keep a chunk that came too early, if there is room; it is sent again otherwise."""
        most_bytes, most_frames = self._most_ahead
        fits = self._bodies.ahead + len(frame.payload) <= self._most_ahead_of_all
        if fits and frame.seq <= self.mark + most_frames and self._ahead_bytes + len(frame.payload) <= most_bytes:
            self._ahead[frame.seq] = frame
            self._wait(len(frame.payload))

    def _wait(self, size: int) -> None:
        self._ahead_bytes += size
        self._bodies.ahead += size

    def _fill(self, size: int) -> None:
        """Note that so many bytes of the message under way are there."""
        self._bodies.unfinished += size - self._filled
        self._filled = size

    def drop(self) -> None:
        """Let go of all that is kept: the life is over."""
        self._wait(-self._ahead_bytes)
        self._fill(0)
        self._ahead.clear()
        self._body = None

    def take(self, frame: Frame) -> list[Whole | Spoiled]:
        """Take the next chunk and those that waited for it; returns the bodies of the messages they complete."""
        results: list[Whole | Spoiled] = []
        following: Frame | None = frame
        while following is not None:
            self.mark += 1
            self.fresh_bytes += len(following.payload)
            self.fresh_frames += 1
            result = self._assemble(following)
            if result is not None:
                results.append(result)
            following = self._ahead.pop(self.mark + 1, None)
            if following is not None:
                self._wait(-len(following.payload))
        return results

    def _assemble(self, frame: Frame) -> Whole | Spoiled | None:
        if frame.part == 0:
            self._proven, self._due, self._body = True, 0, None
            self._fill(0)
            try:
                # Memory of its own either way, in which arrays are aligned.
                self._body = _aligned(frame.payload) if frame.parts == 1 else self._bodies.take(frame.total)
            except MemoryError:
                return Spoiled(f"a message of {frame.total} bytes is more than this machine has memory for")
        body, end, last = self._body, self._filled + len(frame.payload), frame.part == frame.parts - 1
        if (
            body is None
            or frame.part != self._due
            or frame.total != len(body)
            or (end != len(body) if last else end > len(body))
        ):
            self._body, self._due = None, 0
            self._fill(0)
            return Spoiled(f"piece {frame.part} of {frame.parts} ends at byte {end} of {frame.total}: it does not fit")
        if frame.parts > 1:
            body[self._filled : end] = frame.payload
        self._fill(end)
        self._due += 1
        self._proven &= frame.proof == Proof.WHOLE
        if not last:
            return None
        self._body = None
        self._fill(0)
        return Whole(body.toreadonly(), self._proven)


def _aligned(payload: memoryview) -> memoryview:
    """The same bytes where arrays can be used as they lie: the packet itself, if it lies well, or a copy."""
    if len(payload) > SMALL and np.frombuffer(payload, np.float64, 1).flags.aligned:
        return payload
    return memoryview(bytes(payload))
