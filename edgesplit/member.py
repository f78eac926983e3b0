"""A node's place in a run, as a state machine: whom it greets, whose word it takes, when it leaves. No I/O, no clock.

The shell (``worker.py``) feeds it messages and does what it says; a simulated process does the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgesplit.errors import CoordinatorGone, RunError
from edgesplit.protocol import Send
from edgesplit.task import COORDINATOR
from edgesplit.transport.base import Message


@dataclass(frozen=True, slots=True)
class Begin:
    """Effect: take the part that the message assigns; whatever this node did before is over."""

    message: Message


@dataclass(frozen=True, slots=True)
class Heed:
    """Effect: give the message to the node's machine, once whatever delays it is over."""

    message: Message


@dataclass(frozen=True, slots=True)
class End:
    """Effect: the coordinator has ended the run."""

    message: Message


@dataclass(frozen=True, slots=True)
class Notice:
    """Effect: let people know what the coordinator says."""

    text: str


Effect = Send | Begin | Heed | End | Notice


class Member:
    """What a node's process knows of its run, beside its part in it.

    Args:
        name: the node.
        life: a random number that no other process of this node has told: a new one has an empty memory.
        facts: what its hello says of it.
        coordinator_s: how long, in seconds, it stays when the coordinator is gone.
    """

    def __init__(
        self, name: str, life: str, facts: Mapping[str, Any] | None = None, *, coordinator_s: float = math.inf
    ) -> None:
        self.name, self._life, self._facts = name, life, facts or {}
        self._coordinator_s = coordinator_s
        self._assigned = False
        self._coordinator: str | None = None  # the boot of the one that is there
        self._gone: tuple[float, str] | None = None  # since when it is not, and why

    @property
    def coordinator(self) -> str | None:
        """The boot of the coordinator that was last seen; None: there was none yet."""
        return self._coordinator

    def greet(self) -> Send:
        """Return the hello of this life."""
        return self._send("hello", {**self._facts, "life": self._life})

    def receive(self, message: Message, now: float) -> list[Effect]:
        """Take a message. Raises RunError where there is no way to the coordinator."""
        if message.kind == "status":
            return self._status(message, now) if message.sender == COORDINATOR else []
        if message.kind == "refused":
            self._refused(message)
            return []
        if message.sender == COORDINATOR and message.kind == "assign":
            self._assigned = True
            return [Begin(message)]
        if message.sender == COORDINATOR and message.kind == "stop":
            return [End(message)]
        if message.sender == COORDINATOR and message.kind == "notice":
            return [Notice(str(message.meta.get("text")))]
        return [Heed(message)] if self._assigned else []  # what was sent to an earlier life is of no use

    def deadline(self) -> float:
        """When :meth:`check` is to be called: the coordinator has then been gone for too long."""
        return math.inf if self._gone is None else self._gone[0] + self._coordinator_s

    def check(self, now: float) -> None:
        """Raise CoordinatorGone where the coordinator did not come back in time."""
        if self._gone is not None and now >= self.deadline():
            raise CoordinatorGone(
                f"the coordinator is gone ({self._gone[1]}) and did not come back within {self._coordinator_s:g} s"
            )

    def _status(self, message: Message, now: float) -> list[Effect]:
        if message.meta.get("state") == "offline":
            self._gone = now, str(message.meta.get("reason") or "its connection closed")
            return []
        boot, self._gone = str(message.meta.get("boot")), None
        before, self._coordinator = self._coordinator, boot
        # It may have been started again, and know nobody; so may the first that is seen: another may have died with the
        # hello that it had acknowledged.
        return [self.greet()] if before != boot else []

    def _refused(self, message: Message) -> None:
        """A neighbour that refuses fails the probe, by name."""
        if message.sender == COORDINATOR and not self._assigned:
            raise RunError(f"no way to the coordinator: {message.meta.get('reason')}")

    def _send(self, kind: str, meta: Mapping[str, Any]) -> Send:
        return Send(COORDINATOR, Message(kind=kind, sender=self.name, meta=meta))
