"""At whose topics, at which broker, in which version: what all questions to a broker share."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from edgesplit.transport.access import Access
from edgesplit.transport.caller import Caller, Got

WAIT_S = 3.0
"""How long something that was published may take to come back."""


_OWN = re.compile("doctor-(run|a|b)-[0-9a-f]{8}")


def _fresh(what: str) -> Callable[[], str]:
    return lambda: f"doctor-{what}-{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One examination of a broker.

    Attributes:
        access: the broker, and how to get in.
        run: whose topics are used; one of the doctor's own by default.
        node, other: the nodes that the doctor is; names of its own by default.
        version: of MQTT.
    """

    access: Access
    version: str = "5"
    run: str = field(default_factory=_fresh("run"))
    node: str = field(default_factory=_fresh("a"))
    other: str = field(default_factory=_fresh("b"))

    @property
    def prefix(self) -> str:
        """First levels of the topics."""
        return self.access.prefix

    def topic(self, node: str, what: str = "in") -> str:
        """Return a topic of the run; ``what`` is ``in`` or ``status``."""
        return self.access.topic(self.run, node, what)

    def rule(self, topic: str) -> str:
        """Return the topic with ``+`` for the doctor's own names: what an access rule would say."""
        return "/".join("+" if _OWN.fullmatch(part) else part for part in topic.split("/"))

    def call(
        self, node: str | None = None, answer: Callable[[Caller, Got], None] | None = None, **options: Any
    ) -> Caller:
        """Connect under a client id like that of ``node``, the doctor's first by default; options are a caller's.

        Raises:
            TransportError: no connection comes about.
        """
        name = self.access.id_of(self.run, node or self.node, secrets.randbits(32))
        if self.access.shares_ids:  # the doctor is several clients at once, and must not throw out a living node
            name += f"-{secrets.token_hex(2)}"
        return Caller(self.access, self.version, name, answer=answer, **options)
