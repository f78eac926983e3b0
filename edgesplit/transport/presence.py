"""Who is there: what the retained statuses of a run's nodes mean. No I/O, no clock.

A node keeps a retained status with its boot, refreshed every few seconds; the broker replaces it by the node's last
will. A broker that lost its power can show a dead node's "online", and a will can come late, so neither is believed
without a look at the boot and the time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from edgesplit.errors import FrameError
from edgesplit.transport.base import Message

CLOSED = "closed"
"""The reason of a node that left by itself."""

FRESH = 10.0
"""Seconds: a retained status older than this (by the clocks of two hosts) must be confirmed by a live one."""

MOST = 16_384
"""Nodes beyond this number are not watched."""


class Status(NamedTuple):
    """What a node says of itself, or its last will of it; ``time`` in seconds since the epoch."""

    state: str
    boot: int
    time: float
    reason: str = ""

    def to_json(self) -> bytes:
        """Return the payload of the status topic."""
        entry = {"state": self.state, "boot": f"{self.boot:016x}", "time": round(self.time, 3)}
        return json.dumps(entry | ({"reason": self.reason} if self.reason else {})).encode()

    @classmethod
    def of_json(cls, data: bytes | bytearray | memoryview) -> Status:
        """Read a payload.

        Raises:
            FrameError: it is none.
        """
        try:
            entry: Any = json.loads(bytes(data)) if len(data) <= 4096 else None
            status = cls(entry["state"], int(entry["boot"], 16), float(entry["time"]), str(entry.get("reason", "")))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise FrameError(f"status {bytes(data[:64])!r} is not one: {error}") from None
        if status.state not in ("online", "offline") or not 0 < status.boot < 1 << 64:
            raise FrameError(f"status {bytes(data[:64])!r} is not one")
        return status


@dataclass(slots=True)
class _Node:
    boot: int
    online: bool = True
    reason: str = ""
    seen: float = -math.inf
    gone_at: float = math.inf


class Presence:
    """What is known of the other nodes; methods return the status messages for the inbox.

    Args:
        grace: a node whose connection broke is reported after this many seconds if it has not come back.
        silence: a node from which nothing was heard for this many seconds is reported.
    """

    def __init__(self, grace: float, silence: float) -> None:
        self._grace, self._silence = grace, silence
        self._nodes: dict[str, _Node] = {}

    def heard(self, name: str, status: Status, retained: bool, now: float, wall: float) -> Iterator[Message]:
        """A status came; ``retained`` if it lay at the broker. ``now`` is monotonic, ``wall`` since the epoch."""
        node = self._nodes.get(name)
        if status.state == "offline":
            if node is not None and node.online and node.boot == status.boot:
                node.reason = status.reason or "its connection broke"
                node.gone_at = now if status.reason == CLOSED else now + self._grace
                yield from self.tick(now)
        elif not retained or abs(wall - status.time) <= FRESH:
            yield from self._online(name, node, status.boot, now)

    def seen(self, name: str, now: float) -> None:
        """Something else came from a node."""
        if (node := self._nodes.get(name)) is not None:
            node.seen = now

    def tick(self, now: float) -> Iterator[Message]:
        """Report nodes that did not come back in time."""
        for name, node in self._nodes.items():
            if node.online and now - node.seen >= self._silence and node.gone_at == math.inf:
                node.reason, node.gone_at = f"nothing was heard of it for {self._silence:g} s", now
            if node.online and node.gone_at <= now:
                node.online, node.gone_at = False, math.inf
                yield _message(name, "offline", node.boot, node.reason)

    def reconnected(self, now: float) -> None:
        """This node was away itself: the silence of the others begins anew."""
        for node in self._nodes.values():
            node.seen = now

    def last_seen(self, name: str) -> float | None:
        """When something was last heard of a node, in monotonic seconds; None: never."""
        node = self._nodes.get(name)
        return node.seen if node is not None else None

    def left(self, name: str) -> bool:
        """Whether a node has left by itself."""
        node = self._nodes.get(name)
        return node is not None and not node.online and node.reason == CLOSED

    def away(self, name: str) -> bool:
        """Whether a node was there and is not now."""
        node = self._nodes.get(name)
        return node is not None and not node.online

    def _online(self, name: str, node: _Node | None, boot: int, now: float) -> Iterator[Message]:
        if node is not None and node.online and node.boot == boot:
            node.seen, node.gone_at = now, math.inf
            return
        if node is None and len(self._nodes) >= MOST:
            return
        if node is not None and node.online:
            yield _message(name, "offline", node.boot, "it was started again")
        self._nodes[name] = _Node(boot, seen=now)
        yield _message(name, "online", boot, "")


def _message(node: str, state: str, boot: int, reason: str) -> Message:
    return Message(kind="status", sender=node, meta={"state": state, "boot": f"{boot:016x}", "reason": reason})
