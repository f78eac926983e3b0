"""Who has a status under a prefix: living nodes, whose clocks can be compared, and what dead runs have left."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from edgesplit.doctor.finding import Finding
from edgesplit.doctor.look import Look
from edgesplit.errors import FrameError
from edgesplit.transport.caller import Got
from edgesplit.transport.frames import valid_name
from edgesplit.transport.presence import Status

LISTEN_S = 5.0
"""A living node refreshes its status every two seconds."""

SETTLE_S = 0.5
STALE_S = 3600.0
"""Only the statuses of runs of which nothing is younger may be cleared."""

APART_S = 5.0
"""Clocks that are further apart than this delay a start (10 s: a status that is older must be confirmed)."""

MOST = 20_000
SHOWN = 5


@dataclass(slots=True)
class Sighting:
    """A node's status.

    Attributes:
        status: the last; None: what lies on the topic is none.
        live: it came fresh from the node while the doctor listened.
        apart: seconds by which this host's clock is ahead of the node's.
    """

    status: Status | None = None
    live: bool = False
    apart: float = 0.0


@dataclass(slots=True)
class Retained:
    """What a broker keeps under a prefix.

    Attributes:
        nodes: run -> node -> its status.
        foreign: other topics on which something is kept.
        refused: why nothing could be seen; None: it could.
    """

    nodes: dict[str, dict[str, Sighting]] = field(default_factory=dict)
    foreign: set[str] = field(default_factory=set)
    refused: str | None = None

    def take(self, look: Look, got: Got) -> None:
        """Note a message that came on a topic under the prefix."""
        parts = got.topic.removeprefix(f"{look.prefix}/").split("/")
        ours = len(parts) == 3 and parts[2] == "status" and all(map(valid_name, parts[:2]))
        if len(self.foreign) + sum(map(len, self.nodes.values())) >= MOST:
            return
        if not ours:
            if got.retained:
                self.foreign.add(got.topic)
            return
        run, node, _ = parts
        if not got.payload:
            self.nodes.get(run, {}).pop(node, None)
            return
        sighting = self.nodes.setdefault(run, {}).setdefault(node, Sighting())
        try:
            sighting.status = Status.of_json(got.payload)
        except FrameError:
            return
        if not got.retained and sighting.status.state == "online":
            sighting.live, sighting.apart = True, got.at - sighting.status.time

    def unsettled(self) -> bool:
        """Whether a status says online and its node was not heard yet."""
        return any(
            sighting.status is not None and sighting.status.state == "online" and not sighting.live
            for nodes in self.nodes.values()
            for sighting in nodes.values()
        )

    def living(self) -> dict[str, float]:
        """``run/node`` of those heard -> seconds by which this host's clock is ahead of theirs."""
        return {
            f"{run}/{node}": sighting.apart
            for run, nodes in sorted(self.nodes.items())
            for node, sighting in sorted(nodes.items())
            if sighting.live
        }

    def dead(self) -> dict[str, dict[str, Sighting]]:
        """The runs of which no node was heard."""
        return {run: nodes for run, nodes in self.nodes.items() if nodes and not any(s.live for s in nodes.values())}

    def stale(self, now: float) -> dict[str, list[str]]:
        """Run -> nodes whose statuses may be cleared: nobody was heard and, by this host's clock, all are old."""
        return {run: sorted(nodes) for run, nodes in self.dead().items() if min(ages(nodes.values(), now)) >= STALE_S}


def ages(sightings: Iterable[Sighting], now: float) -> list[float]:
    """Seconds since each status was written; one that is none counts as just written, one of the future as well."""
    return [max(now - s.status.time, 0.0) if s.status is not None else 0.0 for s in sightings]


def listen(look: Look) -> Retained:
    """See what is kept under the prefix, and listen whether the nodes that claim to be online are.

    Raises:
        TransportError: the broker cannot be reached any more.
    """
    found = Retained()
    with look.call() as caller:
        # All that is kept comes at once; what is sent meanwhile to the nodes of a run is not wanted.
        everything = f"{look.prefix}/#"
        if caller.subscribe(everything) is None:
            caller.unsubscribe(everything)
        found.refused = caller.subscribe(f"{look.prefix}/+/+/status")
        settled = time.monotonic() + SETTLE_S
        while (left := settled - time.monotonic()) > 0 and (got := caller.take(left)) is not None:
            found.take(look, got)
        deadline = time.monotonic() + LISTEN_S
        while found.unsettled() and (got := caller.take(deadline - time.monotonic())) is not None:
            found.take(look, got)
    return found


def clear(look: Look, stale: Mapping[str, Iterable[str]]) -> int:
    """Clear retained statuses; returns how many.

    Raises:
        TransportError: the broker cannot be reached any more, or does not acknowledge.
    """
    cleared = 0
    with look.call() as caller:
        for run, nodes in stale.items():
            for node in nodes:
                cleared += caller.ask(f"{look.prefix}/{run}/{node}/status", b"", retain=True) is None
    return cleared


def judge_retained(found: Retained, look: Look, now: float, cleared: int | None = None) -> Finding:
    """Say what the broker keeps; ``cleared`` statuses have just been cleared, None: that was not asked for."""
    if found.refused is not None:
        text = f"{look.prefix}/+/+/status cannot be seen ({found.refused})"
        return Finding("retained", True, text)
    dead = found.dead()
    values = {
        "living": sorted(found.living()),
        "left": {run: {node: _state(s) for node, s in sorted(nodes.items())} for run, nodes in sorted(dead.items())},
        "stale": found.stale(now),
        "foreign": sorted(found.foreign),
        "cleared": cleared or 0,
    }
    parts, hint = [], ""
    if found.foreign:
        parts.append(f"{len(found.foreign)} messages that are no statuses of ours: {_some(sorted(found.foreign))}")
        hint = "every node that subscribes there gets these again: clear them, or use another --topic-prefix"
    if dead:
        parts.append(_left(dead, now))
        hint = hint or _clearing(dead, look)
    if cleared is not None:
        parts.append(f"{cleared} statuses cleared")
    return Finding("retained", True, "; ".join(parts) or f"nothing of dead runs under {look.prefix}", hint, values)


def _left(dead: Mapping[str, Mapping[str, Sighting]], now: float) -> str:
    old = {run: max(ages(nodes.values(), now)) for run, nodes in dead.items()}
    runs = [f"{run} ({len(dead[run])}, {words(old[run])})" for run in sorted(old, key=lambda run: -old[run])]
    count = sum(map(len, dead.values()))
    return f"{count} statuses of runs without a living node, up to {words(max(old.values()))} old: {_some(runs)}"


def _clearing(dead: Mapping[str, Mapping[str, Sighting]], look: Look) -> str:
    run = min(dead)
    return (
        "no node believes them, but the broker keeps them: --clear-stale clears those of runs of which nothing is "
        f"younger than {words(STALE_S)}; one by hand: "
        f"mosquitto_pub -r -n -t {look.prefix}/{run}/{min(dead[run])}/status"
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def judge_clocks(found: Retained) -> Finding | None:
    """Compare this host's clock with those of the nodes that were heard; None: nobody was."""
    living = found.living()
    if not living:
        return None
    worst = max(living, key=lambda name: abs(living[name]))
    side = "ahead of" if living[worst] > 0 else "behind"
    text = f"living nodes: {len(living)}; this host's clock is {abs(living[worst]):.1f} s {side} that of {worst}"
    far = sorted(name for name, seconds in living.items() if abs(seconds) > APART_S)
    hint = ""
    if 2 * len(far) > len(living):
        hint = "this host's clock is far from theirs: set it, for example with 'timedatectl set-ntp true'"
    elif far:
        hint = f"set the clocks of {_some(far)}"
    return Finding("clocks", True, text, hint, {"ahead_s": living})


def words(seconds: float) -> str:
    """Seconds in words: ``3 days``."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _state(sighting: Sighting) -> dict[str, object]:
    status = sighting.status
    return {"state": status.state, "time": status.time} if status is not None else {"state": "no status of ours"}
