"""What an attacker may make of real frames; all from one seed."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from edgesplit.transport import frames
from edgesplit.transport.base import Message

STRANGERS = ("x", "mallory", "d5", "coordinator2", "a" * 64)
NUMBERS = (0, 1, 2, 7, 255, 65_535, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
VALUES: Sequence[Any] = (
    None, True, -1, 0, 1, 10**30, 10**400, 1e300, -1e300, float("nan"), float("inf"), "", "x", "\ud800", "d1", [], {},
    [[]], [None] * 50, {"a": {"b": []}}, [[0, 0, 0, 0]], "x" * 3000, [1] * 300,
)  # fmt: skip
FIELDS = {  # name -> offset and bytes of the header's fields, from docs/wire-format.md
    "flags": (3, 1), "name length": (4, 1), "run": (8, 8), "boot": (16, 8), "to boot": (24, 8), "seq": (32, 8),
    "ack": (40, 8), "total": (48, 8), "window bytes": (56, 4), "gap": (60, 4), "part": (64, 4), "parts": (68, 4),
    "window chunks": (72, 2),
}  # fmt: skip


def sealed(data: bytearray) -> bytes:
    """The frame with the checksum that its bytes need: an attacker can reckon it too."""
    if len(data) < 81:
        return bytes(data)
    head = -(-(80 + data[4]) // 16) * 16
    end = len(data) - (16 if data[3] & 64 else 0)
    if head > end:
        return bytes(data)
    crc = zlib.crc32(data[80:head], zlib.crc32(data[:76], zlib.crc32(data[head:end])))
    struct.pack_into("!I", data, 76, crc)
    return bytes(data)


def noise(rng: Random, data: bytes) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 79, 80, 81, 96, 200, 2000)))


def flipped(rng: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def flipped_and_sealed(rng: Random, data: bytes) -> bytes:
    return sealed(bytearray(flipped(rng, data)))


def cut_or_longer(rng: Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return sealed(bytearray(data[:at] if rng.random() < 0.5 else data + rng.randbytes(rng.choice((1, 16, 300)))))


def header_changed(rng: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        offset, size = FIELDS[rng.choice(list(FIELDS))]
        value = rng.choice((*NUMBERS, rng.getrandbits(64))) % (1 << 8 * size)
        changed[offset : offset + size] = value.to_bytes(size, "big")
    return sealed(changed)


def renamed(rng: Random, data: bytes, name: str) -> bytes:
    """The same chunk in another node's name."""
    if len(data) < 80:
        return data
    head = -(-(80 + data[4]) // 16) * 16
    start = bytearray(data[:80])
    start[4] = len(name)
    padded = name.encode().ljust(-(-(80 + len(name)) // 16) * 16 - 80, b"\0")
    return sealed(start + padded + data[head:])


def replayed(rng: Random, data: bytes) -> bytes:
    return data


def spliced(rng: Random, data: bytes) -> bytes:
    """The header of one, and its payload twice or in part."""
    head = -(-(80 + data[4]) // 16) * 16
    payload = data[head:]
    at = rng.randrange(len(payload) + 1)
    return sealed(bytearray(data[:head] + payload[at:] + payload[:at] * rng.choice((0, 1, 2))))


CHANGES: Sequence[Callable[[Random, bytes], bytes]] = (
    noise, flipped, flipped_and_sealed, cut_or_longer, header_changed, header_changed, spliced, replayed,
)  # fmt: skip


def packets(rng: Random, corpus: Sequence[tuple[str, bytes]], names: Sequence[str] = ()) -> Iterator[tuple[str, bytes]]:
    """Yield packets without end, each with whom it goes to; in one of ``names`` where there are any."""
    while True:
        to, data = corpus[rng.randrange(len(corpus))]
        changed = rng.choice(CHANGES)(rng, data)
        yield to, renamed(rng, changed, rng.choice(names)) if names else changed


# --- messages ------------------------------------------------------------------------------------------------------


def value_changed(rng: Random, value: Any) -> Any:
    """A JSON value with one part of it replaced, dropped, or there twice."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        changed = dict(value)
        match rng.randrange(8):
            case 0:
                del changed[key]
            case 1:
                changed[rng.choice(("", "x", "step", "request", key + "x"))] = rng.choice(VALUES)
            case _:
                changed[key] = value_changed(rng, value[key])
        return changed
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        match rng.randrange(8):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value + value[at:]
            case _:
                return [*value[:at], value_changed(rng, value[at]), *value[at + 1 :]]
    if type(value) in (int, float) and rng.random() < 0.5:
        return rng.choice((value + 1, value - 1, -value, value * 2, float(value) if abs(value) < 1e300 else 0.0))
    return rng.choice(VALUES)


def message_changed(rng: Random, message: Message) -> Message:
    """A message with one of its fields, or what it says, or its arrays, changed."""
    fields = {name: getattr(message, name) for name in message.__slots__}
    number = rng.choice((0, 1, -1, 5, 10**6, (1 << 31) - 1, -(1 << 31)))
    match rng.randrange(6):
        case 0:
            fields[rng.choice(("stage", "slice"))] = number
        case 1:
            fields[rng.choice(("micro", "term", "version"))] = number * rng.choice((1, 1, 1 << 31))
        case 2:
            fields["weight" if rng.random() < 0.7 else "loss_scale"] = rng.choice((-1.0, 0.0, 1e300, float("nan")))
        case 3:
            fields["kind"] = rng.choice(("act", "grad", "target", "report", "sheet", "commit", "bundle", "status", "x"))
        case _:
            meta = value_changed(rng, dict(message.meta))
            fields["meta"] = meta if isinstance(meta, dict) else {}
    if fields["arrays"] and rng.random() < 0.3:
        arrays = dict(message.arrays)
        name = rng.choice(list(arrays))
        if rng.random() < 0.5:
            arrays[rng.choice(("", "0/x", "y", "param/", "9/a.weight"))] = arrays[name]
        del arrays[name]
        fields["arrays"] = arrays
    return Message(**fields)


def valid(message: Message) -> bool:
    """Whether it can travel at all."""
    try:
        frames.encode(message)
    except (frames.FrameError, UnicodeEncodeError):
        return False
    return True
