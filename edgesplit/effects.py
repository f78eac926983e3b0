"""What the coordinator wants done or told, as data: its state machine returns these, the shell acts on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from edgesplit.protocol import Send
from edgesplit.transport.base import Message


@dataclass(frozen=True, slots=True)
class StepDone:
    """Effect: a step has ended. ``loss`` is the weighted mean over the step (nan where it has no weight)."""

    step: int
    loss: float
    weight: float
    samples: int
    applied: bool
    metrics: Mapping[str, Mapping[str, tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Replied:
    """Effect: every node asked has answered a request."""

    request: int
    replies: Mapping[str, Message]


@dataclass(frozen=True, slots=True)
class Offended:
    """Effect: a node did what it may not.

    Attributes:
        node: which.
        what: in words.
        value: what was found, where it is a value.
        out: it is left out from now on.
    """

    node: str
    what: str
    value: Any = None
    out: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """Effect: the run cannot go on."""

    error: Exception


@dataclass(frozen=True, slots=True)
class NodeChanged:
    """Effect: what has become of a node.

    Attributes:
        state: ``lost``; ``back`` with all it had; ``returned`` with an empty memory, and then ``recovered``, when all
            nodes are in one state again; ``left`` out of the round; ``waits`` for the next one; ``forgetful``, if it
            cannot keep its state.
        reason: why it was lost, where the fleet goes on, or what its disk says.
    """

    node: str
    state: Literal["lost", "back", "returned", "recovered", "left", "waits", "forgetful"]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Noted:
    """Effect: something to be written down, for a coordinator that has to go on from here (see ``logbook.py``)."""

    record: Mapping[str, Any]


Effect = Send | StepDone | Replied | NodeChanged | Noted | Offended | Failed
