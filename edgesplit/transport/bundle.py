"""Several messages to one node as one, such as an activation and its target: a packet costs more than its bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgesplit.codecs import Packed
from edgesplit.errors import FrameError
from edgesplit.transport.base import Message

KIND = "bundle"
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "kind": str,
    "stage": int,
    "micro": int,
    "slice": int,
    "term": int,
    "weight": (int, float),
    "version": int,
    "loss_scale": (int, float),
    "sent": (int, float),
    "meta": dict,
}
"""What each of its rows says of a message, in this order, and of which type it is in JSON."""


def bundle(messages: Sequence[Message]) -> Message:
    """Return one message that holds these, all of one sender; a single one as it is."""
    if len(messages) == 1:
        return messages[0]
    rows = [[dict(m.meta) if name == "meta" else getattr(m, name) for name in _FIELDS] for m in messages]
    arrays = {f"{i}/{name}": packed for i, m in enumerate(messages) for name, packed in m.arrays.items()}
    return Message(kind=KIND, sender=messages[0].sender, meta={"messages": rows}, arrays=arrays)


def unbundle(message: Message) -> list[Message]:
    """Return the messages that :func:`bundle` put together; any other message alone.

    Raises:
        FrameError: it is a bundle, but not of ours.
    """
    if message.kind != KIND:
        return [message]
    rows = message.meta.get("messages")
    if not isinstance(rows, list) or not rows:
        raise FrameError("a bundle holds no messages")
    arrays: list[dict[str, Packed]] = [{} for _ in rows]
    for name, packed in message.arrays.items():
        index, slash, rest = name.partition("/")
        if not slash or not index.isascii() or not index.isdecimal() or len(index) > 9 or int(index) >= len(rows):
            raise FrameError(f"array {name!r} belongs to none of the {len(rows)} messages of its bundle")
        arrays[int(index)][rest] = packed
    return [Message(sender=message.sender, arrays=mine, **_fields(row)) for row, mine in zip(rows, arrays, strict=True)]


def _fields(row: Any) -> Mapping[str, Any]:
    if not isinstance(row, list) or len(row) != len(_FIELDS):
        raise FrameError("a message of a bundle is malformed")
    if not all(type(v) is not bool and isinstance(v, kind) for v, kind in zip(row, _FIELDS.values(), strict=True)):
        raise FrameError("a message of a bundle is malformed")
    found = dict(zip(_FIELDS, row, strict=True))
    if found["kind"] == KIND:
        raise FrameError("a bundle holds a bundle")
    return found
