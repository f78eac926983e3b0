"""The largest packet that a broker lets through: found by trying, whatever it says of itself."""

from __future__ import annotations

import time
from typing import NamedTuple

from edgesplit.doctor.finding import Finding
from edgesplit.doctor.look import WAIT_S, Look
from edgesplit.errors import TransportTimeout
from edgesplit.transport.caller import Caller
from edgesplit.transport.mqtt import PACKET

FIRST, MOST = 1 << 10, 4 << 20
"""Bytes of the smallest and the largest packet that are tried; the transport sends none of more than 256 KiB."""

SLOW_S = 2.0
"""Where a packet takes longer than this, no larger one is tried: it is the link that limits."""

MARK = b"after it"


class Largest(NamedTuple):
    """The outcome: bytes of the largest packet that came back, and why the next larger one did not."""

    passed: int
    why: str


class Packets:
    """Sends packets of chosen sizes to itself on one topic, each with a small one after it.

    Packets of a connection keep their order: where the small one comes alone, the large one was swallowed.
    """

    def __init__(self, look: Look) -> None:
        self._look = look
        self._topic = look.topic(look.node)
        self._caller: Caller | None = None
        self.why = ""

    def passes(self, size: int) -> bool:
        """Whether a packet of ``size`` bytes comes back.

        Raises:
            TransportError: not even the small one does, or the broker cannot be reached any more.
        """
        caller = self._connected()
        caller.publish(self._topic, bytes(payload_of(size, self._topic, caller.version)))
        caller.publish(self._topic, MARK)
        came, deadline = False, time.monotonic() + WAIT_S + size / 1e5
        while (got := caller.take(deadline - time.monotonic())) is not None:
            if got.payload == MARK:
                self.why = self.why if came else "the broker swallows a larger one"
                return came
            came = True
        if caller.lost is None:
            raise TransportTimeout(
                f"nothing that is published on {self._topic} comes back: see what the topics' findings say"
            )
        self.why = "the broker closes the connection at a larger one"
        return False

    def close(self) -> None:
        """Leave the broker."""
        if self._caller is not None:
            self._caller.close()

    def _connected(self) -> Caller:
        if self._caller is None or self._caller.lost is not None:
            self.close()
            self._caller = self._look.call()
            self._caller.subscribe(self._topic)
        return self._caller


def largest(look: Look) -> Largest:
    """Find the largest packet that passes: four times as large while it does, then by bisection.

    Raises:
        TransportError: not even the smallest passes.
    """
    packets = Packets(look)
    try:
        return _largest(packets)
    finally:
        packets.close()


def _largest(packets: Packets) -> Largest:
    good, bad = 0, FIRST
    while True:
        start = time.monotonic()
        if not packets.passes(bad):
            break
        good, bad = bad, 4 * bad
        if bad > MOST:
            return Largest(good, "larger ones were not tried")
        if time.monotonic() - start > SLOW_S:
            return Largest(good, "larger ones were not tried: the link is slow")
    while bad - good > 1:
        middle = (good + bad) // 2
        if packets.passes(middle):
            good = middle
        else:
            bad = middle
    return Largest(good, packets.why)


def packet_limit(look: Look, chunk: int) -> Finding:
    """Compare what passes with what CONNACK names.

    Args:
        chunk: bytes of the pieces that the transport cuts messages into at this broker; 0: it does not start there.

    Raises:
        TransportError: not even the smallest packet passes.
    """
    with look.call() as caller:
        named = caller.packet_limit
    found = largest(look)
    said = f"CONNACK names {named:,}" if named else "CONNACK names no limit"
    text = f"{found.passed:,} bytes come back, {found.why}; {said}"
    if chunk:
        text += f"; messages of any size pass, in chunks of {chunk:,} bytes"
    hint = ""
    if found.passed < min(named, MOST):
        hint = f"the broker names {named:,} bytes and takes {found.passed:,}: correct one of the two settings"
    elif found.passed < PACKET:
        hint = f"where you can, allow packets of {PACKET:,} bytes: each costs time, whatever is in it"
    values = {"largest_bytes": found.passed, "connack_bytes": named, "chunk_bytes": chunk, "why": found.why}
    return Finding("packet limit", True, text, hint, values)


def payload_of(packet: int, topic: str, version: str) -> int:
    """Return how many bytes of payload make a PUBLISH packet (QoS 0) of ``packet`` bytes, or the next smaller one."""
    for digits in range(1, 5):  # those of the remaining length, 7 bits each
        remaining = packet - 1 - digits
        if remaining < 1 << 7 * digits:
            return remaining - 2 - len(topic) - (1 if version == "5" else 0)
    return packet - 6 - 2 - len(topic) - (1 if version == "5" else 0)
