"""What both sides of the transport's benchmark do with it: stream arrays one way, or send one there and back.

The application has a thread of its own, as a node that computes has: what arrives is handed over to it.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import numpy as np

from edgesplit.errors import RunError

Array = np.ndarray[Any, np.dtype[np.uint8]]

WAIT_S = 60.0
"""For one message; a block takes less than a second."""

IDLE_S = 86_400.0

STREAM, LAST, PING = "stream", "last", "ping"
DONE, PONG, WRONG = "done", "pong", "wrong"
KINDS = (STREAM, LAST, PING, DONE, PONG, WRONG)
NOTHING = np.zeros(1, np.uint8)


class End(Protocol):
    """What the application needs of either side: arrays go in, whole arrays come out, in order."""

    chunk: int

    def send(self, kind: str, data: Array) -> None:
        """Send an array; it may change afterwards."""

    def receive(self, timeout: float) -> tuple[str, Array]:
        """Return the next array and its kind; raises TransportTimeout."""


def stream(end: End, size: int, count: int) -> float:
    """Send arrays and wait until the other end has all; return the seconds."""
    data, start = np.zeros(size, np.uint8), time.perf_counter()
    for number in range(count):
        data[0] = data[-1] = number % 251
        end.send(STREAM if number < count - 1 else LAST, data)
    _expect(end, DONE)
    return time.perf_counter() - start


def trips(end: End, size: int, count: int) -> list[float]:
    """Send an array there and back, several times; return the seconds of each."""
    data, taken = np.zeros(size, np.uint8), []
    for number in range(count):
        data[0] = number % 251
        start = time.perf_counter()
        end.send(PING, data)
        back = _expect(end, PONG)
        taken.append(time.perf_counter() - start)
        if back[0] != data[0] or len(back) != size:
            raise RunError(f"round trip {number} brought something else back: {len(back)} bytes")
    return taken


def _expect(end: End, wanted: str) -> Array:
    kind, data = end.receive(WAIT_S)
    if kind != wanted:
        raise RunError(f"the other end answers {kind!r}, not {wanted!r}: it did not get what was sent")
    return data


def answer(end: End) -> None:
    """Be the other end: look at each array that comes, and answer the last of a stream and every ping."""
    number, good = 0, True
    while True:
        kind, data = end.receive(IDLE_S)
        if kind == PING:
            end.send(PONG, data)
            continue
        good = good and data[0] == data[-1] == number % 251
        number += 1
        if kind == LAST:
            end.send(DONE if good else WRONG, NOTHING)
            number, good = 0, True
