"""Which of a run's topics the broker lets this user use: one message on each, and only what comes back is proven.

A publish that an access rule refuses is acknowledged like any other under MQTT 3.1.1. Under MQTT 5 the broker may say
so, but only for QoS 1.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass

from edgesplit.doctor.finding import Finding
from edgesplit.doctor.look import WAIT_S, Look
from edgesplit.errors import TransportTimeout
from edgesplit.task import COORDINATOR
from edgesplit.transport.caller import Caller
from edgesplit.transport.presence import CLOSED, Status

UNHEARD = "never acknowledged"


@dataclass(frozen=True, slots=True)
class Probe:
    """One kind of topic.

    Attributes:
        name: of the finding.
        topic: what is published to.
        watched: what is subscribed to, to see it come back.
        writer, reader: the nodes that do.
        reads, writes: which of the two a node needs; the other is only for the proof.
        retained: it must lie there for who comes later.
    """

    name: str
    topic: str
    watched: str
    writer: str
    reader: str
    reads: bool
    writes: bool
    retained: bool = False


@dataclass(slots=True)
class Seen:
    """What a probe has shown; None where nothing was refused."""

    subscribing: str | None = None
    publishing: str | None = None
    came: bool = False
    kept: bool = True


def probes(look: Look) -> Iterator[Probe]:
    """The topics that a node of the run uses."""
    node, other, status = look.node, look.other, "status"
    inbox, others = look.topic(node), look.topic(other)
    yield Probe("inbox", inbox, inbox, node, node, True, True)
    yield Probe("another's inbox", others, others, node, other, False, True)
    yield Probe("coordinator's inbox", look.topic(COORDINATOR), look.topic(COORDINATOR), node, node, False, True)
    yield Probe("own status", look.topic(node, status), look.topic(node, status), node, node, True, True, True)
    yield Probe("statuses of others", look.topic(other, status), look.topic("+", status), other, node, True, False)


def lobby_probe(look: Look) -> Probe:
    """How a node that was not told its run finds it. For a run of the doctor's own: a coordinator's status is shown."""
    topic, watched = look.topic(COORDINATOR, "status"), f"{look.prefix}/+/{COORDINATOR}/status"
    return Probe("lobby", topic, watched, COORDINATOR, look.node, True, False, True)


def examine_topics(look: Look, own_run: bool) -> list[Finding]:
    """Probe every kind of topic.

    Args:
        own_run: the run is the doctor's, so that it may play the coordinator.

    Raises:
        TransportError: the broker cannot be reached any more.
    """
    findings = [judge(look, probe, try_out(look, probe)) for probe in probes(look)]
    if own_run:
        probe = lobby_probe(look)
        return [*findings, judge(look, probe, try_out(look, probe))]
    return [*findings, _lobby_of(look)]


def try_out(look: Look, probe: Probe) -> Seen:
    """Publish on the probe's topic and see what comes back."""
    seen, mark = Seen(), secrets.token_hex(8)
    status = probe.topic.endswith("/status")
    # To those who watch, an offline status of a boot that was never online says nothing.
    payload = Status("offline", int(mark, 16) or 1, time.time(), CLOSED).to_json() if status else mark.encode()
    with look.call(probe.reader) as reader, look.call(probe.writer) as writer:
        seen.subscribing = reader.subscribe(probe.watched)
        try:
            seen.publishing = writer.ask(probe.topic, payload, retain=status)
        except TransportTimeout:
            seen.publishing = UNHEARD
        if seen.subscribing is None and seen.publishing in (None, UNHEARD):
            seen.came = came(reader, payload)
        if probe.retained and seen.came:
            with look.call(probe.reader) as later:
                later.subscribe(probe.watched)
                seen.kept = came(later, payload)
        if status and seen.publishing is None:
            writer.ask(probe.topic, b"", retain=True)
    return seen


def came(reader: Caller, payload: bytes) -> bool:
    """Whether just this message comes."""
    deadline = time.monotonic() + WAIT_S
    while (got := reader.take(deadline - time.monotonic())) is not None:
        if got.payload == payload:
            return True
    return False


def judge(look: Look, probe: Probe, seen: Seen) -> Finding:
    """Say what a probe has shown, and what to allow."""
    verdict, ok, why = _verdict(probe, seen, look.version)
    needed = "read and write" if probe.reads and probe.writes else "read" if probe.reads else "write"
    hint = f"this user must be allowed to {needed} {look.rule(probe.watched if needed == 'read' else probe.topic)}"
    if ok:
        hint = f"{hint}: try it as a user who may do both" if verdict != "ok" else ""
    shown = probe.topic if probe.topic == probe.watched else f"{probe.topic} (seen through {probe.watched})"
    values = {"topic": probe.topic, "watched": probe.watched, "verdict": verdict}
    return Finding(probe.name, ok, f"{shown}: {verdict}{f' ({why})' if why else ''}", hint, values)


def _verdict(probe: Probe, seen: Seen, version: str) -> tuple[str, bool, str]:
    if seen.came:
        return ("ok", True, "") if seen.kept else ("not retained", False, "it came, but is not kept for those who join")
    if seen.publishing is not None and probe.writes:
        return "publish refused", False, seen.publishing
    if seen.subscribing is not None and probe.reads:
        return "subscribe refused", False, seen.subscribing
    if seen.publishing is not None:
        return "not proven", True, f"this user may not write there, so that there is nothing to see: {seen.publishing}"
    if seen.subscribing is not None:
        return "not proven", True, f"nobody to see it come: the subscription is refused, {seen.subscribing}"
    if version != "5":
        return "publish swallowed", False, "or its way back: MQTT 3.1.1 acknowledges what an access rule refuses"
    if probe.reads:
        return "publish swallowed", False, "the broker acknowledged it, so it is reading that a rule refuses"
    return "not proven", True, "the broker acknowledged it, and this user may not read there"


def _lobby_of(look: Look) -> Finding:
    """In a run that may be somebody's the doctor does not play the coordinator."""
    watched = f"{look.prefix}/+/{COORDINATOR}/status"
    with look.call() as reader:
        refused = reader.subscribe(watched)
        found = refused is None and reader.take(WAIT_S) is not None
    verdict = "subscribe refused" if refused is not None else "ok" if found else "not proven"
    why = "" if found else f" ({refused or 'no coordinator has a status there now'})"
    hint = (
        f"this user must be allowed to read {watched}, or each node be told its run: --run"
        if refused is not None
        else ""
    )
    values = {"topic": watched, "watched": watched, "verdict": verdict}
    return Finding("lobby", refused is None, f"{watched}: {verdict}{why}", hint, values)
