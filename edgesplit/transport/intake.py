"""Takes MQTT packets out of a stream of bytes: each comes to lie in memory of its own, copied once by the system.

No I/O: whoever reads a socket asks where the bytes go, puts them there and says how many came.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

HEAD = 4096
"""Bytes that are read at most where the next packet's length is not known; small packets come several at a time."""

ALIGN = 16
"""Where a publish is longer than what is read at once, its payload begins at a multiple of this in memory, so that
arrays can be used where they lie."""

NOTHING = memoryview(b"")
_PUBLISH = 0x30


class Packet(NamedTuple):
    """A packet's first byte, and what follows its length, in memory that is the receiver's from now on."""

    command: int
    data: memoryview


class Intake:
    """The packets of one connection.

    Args:
        five: they are of MQTT 5, where the length of properties stands before a payload.
    """

    def __init__(self, *, five: bool) -> None:
        self._five = five
        self._head = memoryview(bytearray(HEAD))
        self._filled = 0
        self._packet: Packet | None = None  # one that was longer than what had been read, and what is missing of it
        self._missing = NOTHING

    def room(self) -> memoryview:
        """Return where the next bytes go; there is always room for one."""
        return self._head[self._filled :] if self._packet is None else self._missing

    def took(self, count: int) -> list[Packet]:
        """So many bytes are there now; return the packets that are whole.

        Raises:
            ValueError: this is not MQTT.
        """
        if self._packet is not None:
            self._missing = self._missing[count:]
            if not self._missing:
                packet, self._packet = self._packet, None
                return [packet]
            return []
        self._filled += count
        at, whole = 0, []
        while (found := self._begun(at)) is not None:
            at, packet, missing = found
            if missing:
                self._packet, self._missing = packet, missing
            else:
                whole.append(packet)
        self._filled -= at
        if self._filled:
            self._head[: self._filled] = bytes(self._head[at : at + self._filled])
        return whole

    def _begun(self, at: int) -> tuple[int, Packet, memoryview] | None:
        """The packet that begins here: where the next does, and memory that is to be filled yet; None: too short."""
        head, end = self._head, self._filled
        length, shift, start = 0, 0, at + 1
        while True:
            if start >= end:
                return None
            byte = head[start]
            length |= (byte & 127) << shift
            start, shift = start + 1, shift + 7
            if byte < 128:
                break
            if shift > 21:
                raise ValueError("a packet's length has more than four bytes")
        if start + length <= end:
            return start + length, Packet(head[at], memoryview(bytes(head[start : start + length]))), NOTHING
        before = 0
        if head[at] & 0xF0 == _PUBLISH and length > 2:
            if start + 2 > end:
                return None
            before = 2 + int.from_bytes(head[start : start + 2], "big") + self._five
        shifted = -before % ALIGN
        data = np.empty(shifted + length, np.uint8).data[shifted:]  # not zeroed
        here = end - start
        data[:here] = head[start:end]
        return end, Packet(head[at], data), data[here:]
