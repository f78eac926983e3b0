"""How fast a broker is: a small packet there and back, what holds small packets up, and a large message.

Two plain connections on one topic: the inbox of the node whose rules are to hold.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from edgesplit.doctor.finding import Finding
from edgesplit.doctor.look import Look
from edgesplit.errors import TransportTimeout
from edgesplit.transport.caller import Caller, Got

ROUND_TRIPS = 50
STALLED_TRIPS = 10
"""Of the variants that may wait 40 or 80 ms each time."""

STALL_MS = 20.0
"""A round trip that is longer by this than the same without Nagle's algorithm has it in it."""

TRIP_BYTES = 1 << 10
LARGE_BYTES = 16_000_000
WAIT_S = 10.0
LARGE_WAIT_S = 60.0

PING, PONG = b"i", b"o"
NODELAY_HINT = (
    "the broker holds small packets back until the one before is acknowledged (Nagle's algorithm); "
    "in mosquitto.conf: set_tcp_nodelay true"
)


class Trips(NamedTuple):
    """Milliseconds of a round trip (medians).

    Attributes:
        best: as the transport does it: QoS 0, TCP_NODELAY, TCP_QUICKACK.
        no_delay: with QoS 1, whose acknowledgements make small packets wait for each other; TCP_NODELAY alone.
        plain: with QoS 1 and neither.
    """

    best: float
    no_delay: float
    plain: float


def measure_trips(look: Look) -> Trips:
    """Measure round trips of :data:`TRIP_BYTES`.

    Raises:
        TransportError: what is sent does not come back.
    """
    return Trips(
        _median_ms(look, ROUND_TRIPS, 0, no_delay=True, quick_ack=True),
        _median_ms(look, STALLED_TRIPS, 1, no_delay=True, quick_ack=False),
        _median_ms(look, STALLED_TRIPS, 1, no_delay=False, quick_ack=False),
    )


def judge_trips(trips: Trips) -> list[Finding]:
    """Say how long a round trip takes and what would make it shorter."""
    text = f"1 KiB to another connection and back {trips.best:.2f} ms (median of {ROUND_TRIPS}, as edgesplit sends)"
    stalled = trips.no_delay - trips.best > STALL_MS
    delay = (
        f"an ordinary client with QoS 1 takes {trips.no_delay:.2f} ms with it and {trips.plain:.2f} ms without; "
        "edgesplit sets it, and sends with QoS 0"
    )
    values = {"ms": trips.best}
    variants = {"no_delay_ms": trips.no_delay, "plain_ms": trips.plain, "broker_stalls": stalled}
    return [
        Finding("round trip", True, text, values=values),
        Finding("tcp_nodelay", True, delay, NODELAY_HINT if stalled else "", variants),
    ]


def throughput(look: Look, packet: int) -> Finding:
    """Send one large message in packets of ``packet`` bytes from one connection to another.

    Raises:
        TransportTimeout: it does not arrive completely; says how much did.
    """
    topic = look.topic(look.node)
    with look.call() as reader, look.call() as writer:
        reader.subscribe(topic)
        start, left, came = time.perf_counter(), LARGE_BYTES, 0
        while left > 0:
            writer.publish(topic, bytes(min(packet, left)))
            left -= packet
        deadline = time.monotonic() + LARGE_WAIT_S
        while came < LARGE_BYTES:
            got = reader.take(deadline - time.monotonic())
            if got is None:
                why = reader.lost or writer.lost or f"no more within {LARGE_WAIT_S:g} s"
                raise TransportTimeout(f"of {LARGE_BYTES:,} bytes on {topic} {came:,} arrived ({why})")
            came += len(got.payload)
        speed = LARGE_BYTES / 1e6 / (time.perf_counter() - start)
    text = f"{LARGE_BYTES / 1e6:g} MB in packets of {packet:,} bytes at {speed:,.0f} MB/s"
    return Finding("throughput", True, text, values={"mb_per_s": speed, "packet_bytes": packet})


def _median_ms(look: Look, times: int, qos: int, *, no_delay: bool, quick_ack: bool) -> float:
    with (
        look.call(answer=partial(_echo, qos), no_delay=no_delay, quick_ack=quick_ack) as echo,
        look.call(no_delay=no_delay, quick_ack=quick_ack) as caller,
    ):
        for one in (echo, caller):
            one.subscribe(look.topic(look.node))
        return statistics.median(_trips(caller, look.topic(look.node), times, qos)) * 1e3


def _echo(qos: int, caller: Caller, got: Got) -> None:
    if got.payload[:1] == PING:
        caller.publish(got.topic, PONG + got.payload[1:], qos=qos)


def _trips(caller: Caller, topic: str, times: int, qos: int) -> Iterator[float]:
    for number in range(times + 1):
        start, body = time.perf_counter(), number.to_bytes(4, "big") + bytes(TRIP_BYTES - 5)
        caller.publish(topic, PING + body, qos=qos)
        deadline = time.monotonic() + WAIT_S
        while (got := caller.take(deadline - time.monotonic())) is not None and got.payload != PONG + body:
            pass
        if got is None:
            raise TransportTimeout(f"a packet of 1 KiB on {topic} did not come back within {WAIT_S:g} s")
        if number:  # the first warms up
            yield time.perf_counter() - start
