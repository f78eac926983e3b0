"""Everything that is asked of a broker, in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from edgesplit.doctor.access import examine_topics
from edgesplit.doctor.finding import Finding
from edgesplit.doctor.look import Look
from edgesplit.doctor.packets import packet_limit
from edgesplit.doctor.speed import judge_trips, measure_trips, throughput
from edgesplit.doctor.statuses import Retained, clear, judge_clocks, judge_retained, listen
from edgesplit.errors import TransportError
from edgesplit.transport.access import VERSIONS, Access
from edgesplit.transport.frames import valid_name
from edgesplit.transport.mqtt import SHORTER, MqttTransport


def examine_broker(
    broker: str | Access,
    name: str = "broker",
    *,
    run: str | None = None,
    node: str | None = None,
    clear_stale: bool = False,
) -> list[Finding]:
    """Look at a broker; ``name`` is that of the first finding, the only one where no connection comes about.

    Args:
        broker: its url, or the url and how to get in.
        run: whose topics are tried; None: one of the doctor's own.
        node: the node whose topics are tried, where access rules go by name; None: one of the doctor's own.
        clear_stale: clear the retained statuses of runs that are long dead.
    """
    try:
        look = _look(broker, run, node)
        versions = {version: _speaks(look, version) for version in VERSIONS}
        spoken = [version for version, error in versions.items() if error is None]
        wanted = look.access.mqtt or (spoken or VERSIONS)[0]
        if (error := versions[wanted]) is not None:
            raise error
    except TransportError as error:
        return [Finding(name, False, str(error))]
    look = replace(look, version=wanted)
    findings = [Finding(name, True, f"{look.access.url}: reachable"), _versions(spoken)]
    try:
        findings += _rest(look, own_run=run is None, clear_stale=clear_stale)
    except TransportError as error:
        findings.append(Finding("examination", False, f"it ended early: {error}"))
    return findings


def _look(broker: str | Access, run: str | None, node: str | None) -> Look:
    look = Look(access=broker if isinstance(broker, Access) else Access(broker))
    look = replace(look, run=run or look.run, node=node or look.node)
    for what, name in (("run", look.run), ("node", look.node)):
        if not valid_name(name):
            raise TransportError(f"{what} name {name!r} must be 1 to 64 of A-Z a-z 0-9 . _ -: it becomes a topic")
    return look


def _speaks(look: Look, version: str) -> TransportError | None:
    try:
        replace(look, version=version).call().close()
    except TransportError as error:
        return error
    return None


def _versions(spoken: list[str]) -> Finding:
    text, hint = " and ".join(spoken), ""
    if "5" not in spoken:
        hint = "under 3.1.1 a broker cannot say that an access rule refuses something, nor how large a packet may be"
    return Finding("mqtt versions", True, text, hint, {"versions": spoken})


def _rest(look: Look, *, own_run: bool, clear_stale: bool) -> Iterator[Finding]:
    found = listen(look)
    if found.nodes.get(look.run, {}).get(look.node) is not None and f"{look.run}/{look.node}" in found.living():
        text = f"{look.node!r} is at work in run {look.run!r}: its topics are left alone"
        yield Finding("topics", False, text, "stop it first, or look without --run or --node")
    else:
        topics = examine_topics(look, own_run)
        yield from topics
        if topics[0].ok:  # the inbox: all else is measured through it
            yield from _measured(look, starts=all(topic.ok for topic in topics))
    yield from _kept(look, found, clear_stale)


def _measured(look: Look, *, starts: bool) -> Iterator[Finding]:
    chunk = 0
    if starts:  # else it would wait long for what the topics' findings say already
        try:
            with MqttTransport(look.access, run=look.run, node=look.node) as transport:
                chunk = transport.chunk_size
                yield Finding("transport", True, f"starts as node {look.node!r} of run {look.run!r}")
        except TransportError as error:
            yield Finding("transport", False, str(error))
    measurements: dict[str, Callable[[], list[Finding]]] = {
        "packet limit": lambda: [packet_limit(look, chunk)],
        "round trip": lambda: judge_trips(measure_trips(look)),
        "throughput": lambda: [throughput(look, chunk or SHORTER[-1])],
    }
    for name, measure in measurements.items():
        try:
            yield from measure()
        except TransportError as error:
            yield Finding(name, False, str(error))


def _kept(look: Look, found: Retained, clear_stale: bool) -> Iterator[Finding]:
    cleared = clear(look, found.stale(time.time())) if clear_stale else None
    yield judge_retained(found, look, time.time(), cleared)
    clocks = judge_clocks(found)
    if clocks is not None:
        yield clocks
