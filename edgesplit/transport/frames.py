"""The wire, version 1: a message as bytes, and those bytes as chunks that fit the broker's packets.

``docs/wire-format.md`` is the specification; ``tests/golden`` pins it. Whatever bytes come in, :func:`parse` and
:func:`decode` return something checked or raise :class:`FrameError`, and allocate nothing that limits do not allow.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

from edgesplit.codecs import MAX_DIMS, Packed, encoded_size
from edgesplit.errors import CodecError, FrameError
from edgesplit.transport.base import Message
from edgesplit.transport.key import MAC_BYTES, Key, digest_of

try:
    from zlib_ng.zlib_ng import crc32  # a tenth of the time, and every byte passes it twice
except ImportError:
    from zlib import crc32

MAGIC = b"es"
VERSION = 1
ALIGN = 64
"""Arrays begin at multiples of this in a body, so that they can be used where they lie."""

KNOWN_TABLE = 4096
"""Bytes of the longest table of arrays that is remembered."""

Bytes = bytes | bytearray | memoryview

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
_HEADER = struct.Struct("!2sBBB3x8sQQQQQIIIIHxxI")
_CRC_AT = _HEADER.size - 4
_BODY = struct.Struct("!BxHiiqqqdddII")
_ENTRY = struct.Struct("!HBBB")
_JSON = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)


class Flag:
    """Bits that say what a chunk is for."""

    DATA = 1
    """Carries a numbered piece of a message."""
    ACK = 2
    """``ack`` and ``gap`` are valid, for the stream from this chunk's receiver back to its sender."""
    HELLO = 4
    """Asks who is there; ``seq`` is a number to be echoed."""
    WELCOME = 8
    """Answers a hello; ``ack`` echoes its number."""
    RESYNC = 16
    """The sender was away: whatever was in flight to it may be lost."""
    PROBE = 32
    """A node's test of its own topic."""
    MAC = 64
    """The last 16 bytes authenticate the header."""
    WHOLE = 128
    """They authenticate the payload too."""


class Proof(IntEnum):
    """What is known of who sent a chunk."""

    NONE = 0
    """It carries no MAC."""
    UNCHECKED = 1
    """It carries one, and this node has no key."""
    WRONG = 2
    """Its MAC is not made with this node's key."""
    HEAD = 3
    """Its header is as a holder of the key has sent it."""
    WHOLE = 4
    """All of it is."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What is accepted from the network.

    Attributes:
        chunk: bytes of one packet.
        message: bytes of one reassembled message.
        meta: bytes of a message's JSON.
        arrays: arrays in a message.
        name: bytes of an array's name.
    """

    chunk: int = 64 << 20
    message: int = 4 << 30
    meta: int = 64 << 20
    arrays: int = 65_535
    name: int = 512


LIMITS = Limits()


class Frame(NamedTuple):
    """A chunk that was received and checked.

    Attributes:
        flags: see :class:`Flag`.
        sender: the node that sent it.
        boot: identifies this life of the sender.
        to_boot: the life of the receiver that is meant; 0: whoever is there.
        seq: the number of a data chunk in its stream, from 1.
        ack: the stream back has arrived without a hole up to here.
        window_bytes, window_frames: what the receiver of this chunk may have in flight to its sender.
        gap: how many chunks after ``ack`` are missing although later ones came; 0: no hole is known.
        part, parts: this is piece ``part`` of ``parts`` of a message of ``total`` bytes.
        payload: that piece.
        proof: whether it comes from a holder of the run's key.
    """

    flags: int
    sender: str
    boot: int
    to_boot: int
    seq: int
    ack: int
    window_bytes: int
    window_frames: int
    gap: int
    part: int
    parts: int
    total: int
    payload: memoryview
    proof: Proof


class Chunk(NamedTuple):
    """A piece of a message to be sent: room for the header, then the payload, whose checksum is ``crc``.

    ``digest`` is None without a MAC; else there is room for one at the end, and it covers the header and what has this
    digest: nothing, or the payload.
    """

    data: bytearray
    crc: int
    part: int
    parts: int
    total: int
    digest: bytes | None = None


def valid_name(name: str) -> bool:
    """Whether ``name`` can be a node's or a run's: 1 to 64 of ``A-Z a-z 0-9 . _ -``, since it becomes a topic."""
    return _NAME.match(name) is not None


def run_hash(run: str) -> bytes:
    """Return the 8 bytes that stand for a run in every chunk."""
    return hashlib.blake2s(run.encode(), digest_size=8).digest()


def header_size(sender: str) -> int:
    """Return the bytes of a chunk's header: the fixed part and the sender's name, padded to a multiple of 16."""
    return -(-(_HEADER.size + len(sender)) // 16) * 16


def split(
    segments: Sequence[Bytes],
    chunk_size: int,
    sender: str,
    *,
    signed: bool = False,
    whole: bool = False,
) -> Iterator[Chunk]:
    """Cut a body into chunks of at most ``chunk_size`` bytes, headers included. This is the one copy of the data.

    Args:
        signed: leave room for a MAC.
        whole: it is to cover the payload too.

    Raises:
        FrameError: the limit leaves no room for a payload.
    """
    head, tail = header_size(sender), MAC_BYTES if signed else 0
    room = chunk_size - head - tail
    if room < 1:
        raise FrameError(f"chunks of {chunk_size} bytes have no room beside the header's {head}: allow larger packets")
    return _chunks(segments, head, room, tail, whole=whole)


def _chunks(segments: Sequence[Bytes], head: int, room: int, tail: int, *, whole: bool) -> Iterator[Chunk]:
    total = sum(map(len, segments))
    parts = max(-(-total // room), 1)
    for part, pieces in enumerate([segments] if parts == 1 else _cut(segments, room)):
        data = bytearray().join((bytes(head), *pieces, bytes(tail)))
        payload = memoryview(data)[head : len(data) - tail]
        digest = (digest_of(payload) if whole else b"") if tail else None
        yield Chunk(data, crc32(payload), part, parts, total, digest)


def empty_chunk(sender: str, *, signed: bool = False) -> Chunk:
    """Return a chunk without a payload, for hellos and acknowledgements."""
    data = bytearray(header_size(sender) + (MAC_BYTES if signed else 0))
    return Chunk(data, 0, 0, 1, 0, b"" if signed else None)


def seal(
    chunk: Chunk,
    flags: int,
    run: bytes,
    sender: str,
    boot: int,
    to_boot: int,
    seq: int = 0,
    ack: int = 0,
    window: tuple[int, int] = (0, 0),
    gap: int = 0,
    key: Key | None = None,
) -> bytearray:
    """Write the header into the chunk's room and return its bytes; repeated when the chunk is sent again.

    Args:
        key: signs a chunk that has room for a MAC.
    """
    data, name, head = chunk.data, sender.encode("ascii"), header_size(sender)
    if chunk.digest is not None:
        flags |= Flag.MAC | Flag.WHOLE if chunk.digest else Flag.MAC
    _HEADER.pack_into(
        data, 0, MAGIC, VERSION, flags, len(name), run, boot, to_boot, seq, ack, chunk.total,
        window[0], gap, chunk.part, chunk.parts, window[1], 0,
    )  # fmt: skip
    data[_HEADER.size : head] = name.ljust(head - _HEADER.size, b"\0")
    struct.pack_into("!I", data, _CRC_AT, _checksum(data, head, chunk.crc))
    if chunk.digest is not None and key is not None:
        data[-MAC_BYTES:] = key.mac(memoryview(data)[:head], chunk.digest)
    return data


def parse(data: Bytes, run: bytes, limits: Limits = LIMITS, key: Key | None = None) -> Frame:
    """Check a chunk's header and checksum, and its MAC with ``key``; the payload is a view of ``data``.

    Raises:
        FrameError: it is not a chunk of this version and run, or it is damaged or beyond the limits.
    """
    if not _HEADER.size < len(data) <= limits.chunk:
        raise FrameError(f"packet of {len(data)} bytes is not a chunk: from {_HEADER.size + 1} to {limits.chunk} fit")
    (
        magic, version, flags, name_length, of_run, boot, to_boot, seq, ack, total,
        window_bytes, gap, part, parts, window_frames, crc,
    ) = _HEADER.unpack_from(data)  # fmt: skip
    if magic != MAGIC or version != VERSION:
        raise FrameError(f"packet begins {magic!r} version {version}: expected {MAGIC!r} version {VERSION}")
    if of_run != run:
        raise FrameError("chunk belongs to another run")
    if flags & Flag.WHOLE and not flags & Flag.MAC:
        raise FrameError(f"chunk has flags {flags:#x}: a payload is covered by no MAC")
    head = -(-(_HEADER.size + name_length) // 16) * 16
    end = len(data) - (MAC_BYTES if flags & Flag.MAC else 0)
    if head > end:
        raise FrameError(f"chunk of {len(data)} bytes is shorter than its header of {head}")
    view = memoryview(data)
    payload = view[head:end]
    if crc != _checksum(view, head, crc32(payload)):
        raise FrameError("chunk is damaged: its checksum differs")
    sender = _sender(bytes(view[_HEADER.size : _HEADER.size + name_length]))
    if flags & Flag.DATA:
        _check_piece(seq, part, parts, total, end - head, limits)
    return Frame(
        flags, sender, boot, to_boot, seq, ack, window_bytes, window_frames, gap, part, parts, total,
        payload.toreadonly(), _proof(view, flags, head, end, key),
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _sender(data: bytes) -> str:
    """The same nodes send all the time; only good names are remembered."""
    name = data.decode("ascii", "replace")
    if not valid_name(name):
        raise FrameError(f"chunk's sender {name!r} is not a node's name")
    return name


def _proof(view: memoryview, flags: int, head: int, end: int, key: Key | None) -> Proof:
    if not flags & Flag.MAC:
        return Proof.NONE
    if key is None:
        return Proof.UNCHECKED
    whole = flags & Flag.WHOLE
    if not key.fits(view[end:], view[:head], digest_of(view[head:end]) if whole else b""):
        return Proof.WRONG
    return Proof.WHOLE if whole else Proof.HEAD


def encode(message: Message, limits: Limits = LIMITS) -> list[Bytes]:
    """Return a message's body as segments to be laid end to end; arrays are not copied.

    Raises:
        FrameError: the message says what the format cannot (a meta that is not JSON, a number out of range, a size
            beyond the limits, an array whose bytes do not match its shape).
    """
    meta = _meta_to_json(message, limits)
    kind = message.kind.encode()
    table = bytearray()
    for name, packed in message.arrays.items():
        table += _entry(name, packed, limits)
    try:
        head = _BODY.pack(
            len(kind), len(message.arrays), message.stage, message.slice, message.micro, message.term,
            message.version, message.weight, message.loss_scale, message.sent, len(meta), len(table),
        )  # fmt: skip
    except (struct.error, OverflowError, TypeError) as error:
        raise FrameError(f"{message.kind!r} message has a value that does not fit its field: {error}") from None
    segments: list[Bytes] = [b"".join((head, kind, meta, table))]
    size = len(segments[0])
    for packed in message.arrays.values():
        segments += [bytes(-size % ALIGN), packed.data]
        size += -size % ALIGN + len(packed.data)
    if size > limits.message or len(message.arrays) > limits.arrays:
        raise FrameError(
            f"{message.kind!r} message of {size} bytes and {len(message.arrays)} arrays is beyond the limits of "
            f"{limits.message} and {limits.arrays}: send it in parts"
        )
    return segments


def decode(body: memoryview, sender: str, limits: Limits = LIMITS) -> Message:
    """Return the message of a reassembled body; its arrays are views of ``body``.

    Raises:
        FrameError: it is not one.
    """
    if not _BODY.size <= len(body) <= limits.message:
        raise FrameError(f"message of {len(body)} bytes: from {_BODY.size} to {limits.message} fit")
    (
        kind_length, arrays, stage, slice_, micro, term, version, weight, loss_scale, sent, meta_length, table_length,
    ) = _BODY.unpack_from(body)  # fmt: skip
    if meta_length > limits.meta or arrays > limits.arrays:
        raise FrameError(f"message with {meta_length} bytes of meta and {arrays} arrays is beyond the limits")
    kind_end = _BODY.size + kind_length
    table_start = kind_end + meta_length
    table_end = table_start + table_length
    if table_end > len(body):
        raise FrameError(f"message of {len(body)} bytes is shorter than its head of {table_end}")
    return Message(
        kind=_text(body[_BODY.size : kind_end]),
        sender=sender,
        stage=stage,
        micro=micro,
        slice=slice_,
        term=term,
        weight=weight,
        version=version,
        loss_scale=loss_scale,
        sent=sent,
        meta=_meta_from_json(body[kind_end:table_start]),
        arrays=_arrays(body, body[table_start:table_end], arrays, table_end, limits),
    )


def _checksum(data: Bytes, head: int, payload_crc: int) -> int:
    """Over the payload first, so that sending a chunk again costs the header only; then all but the checksum."""
    view = memoryview(data)
    return crc32(view[_HEADER.size : head], crc32(view[:_CRC_AT], payload_crc))


def _cut(segments: Sequence[Bytes], room: int) -> Iterator[Sequence[Bytes]]:
    pieces: list[memoryview] = []
    free = room
    for segment in segments:
        view = memoryview(segment)
        while len(view) > free:
            yield [*pieces, view[:free]]
            pieces, view, free = [], view[free:], room
        if len(view):
            pieces.append(view)
            free -= len(view)
    if pieces or not sum(map(len, segments)):
        yield pieces


def _check_piece(seq: int, part: int, parts: int, total: int, size: int, limits: Limits) -> None:
    if total > limits.message:
        raise FrameError(f"message of {total} bytes is beyond the limit of {limits.message}")
    if not (seq >= 1 and part < parts <= max(total, 1) and size <= total and (parts > 1 or size == total)):
        raise FrameError(f"piece {part} of {parts} with {size} of {total} bytes, number {seq}, cannot be")


def _meta_to_json(message: Message, limits: Limits) -> bytes:
    if not 1 <= len(message.kind) <= 32 or not message.kind.isascii():
        raise FrameError(f"kind {message.kind!r} is not 1 to 32 ascii characters")
    try:
        meta = _JSON.encode(dict(message.meta)).encode() if message.meta else b"{}"
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"meta of {message.kind!r} message is not JSON: {error}") from None
    if len(meta) > limits.meta:
        raise FrameError(f"meta of {message.kind!r} message takes {len(meta)} bytes, more than {limits.meta}")
    return meta


def _meta_from_json(data: memoryview) -> Mapping[str, Any]:
    text = bytes(data)
    if text == b"{}":  # as in most messages of a step
        return {}
    try:
        meta = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"meta is not JSON: {error}") from None
    if not isinstance(meta, dict):
        raise FrameError(f"meta is a {type(meta).__name__}, not an object")
    return meta


def _entry(name: str, packed: Packed, limits: Limits) -> bytes:
    entry, size = _entry_of(name, packed.codec, packed.dtype, packed.shape)
    if len(packed.data) != size or len(name.encode()) > limits.name:
        raise FrameError(f"array {name!r} has {len(packed.data)} bytes of data, its shape needs {size}")
    return entry


@lru_cache(maxsize=1024)
def _entry_of(name: str, codec: str, dtype: str, shape: tuple[int, ...]) -> tuple[bytes, int]:
    """The same arrays travel in every step."""
    try:
        size = encoded_size(codec, dtype, shape)
    except CodecError as error:
        raise FrameError(f"array {name!r}: {error}") from None
    words = [word.encode() for word in (name, codec, dtype)]
    entry = _ENTRY.pack(*map(len, words), len(shape))
    return b"".join((entry, *words, struct.pack(f"!{len(shape) + 1}Q", *shape, size))), size


def _arrays(body: memoryview, table: memoryview, count: int, position: int, limits: Limits) -> dict[str, Packed]:
    arrays: dict[str, Packed] = {}
    rows = _known_rows if len(table) <= KNOWN_TABLE else _rows
    for name, codec, dtype, shape, size in rows(bytes(table), count, limits):
        position += -position % ALIGN
        if position + size > len(body):
            raise FrameError(f"array {name!r} of {size} bytes at {position} does not fit")
        arrays[name] = Packed(codec, dtype, shape, body[position : position + size])
        position += size
    if position != len(body):
        raise FrameError(f"message has {len(body) - position} bytes too many")
    return arrays


Row = tuple[str, str, str, tuple[int, ...], int]
"""Of an array: its name, codec, dtype and shape, and the bytes that these make."""


def _rows(table: bytes, count: int, limits: Limits) -> tuple[Row, ...]:
    rows: dict[str, Row] = {}
    view, at = memoryview(table), 0
    for _ in range(count):
        name, codec, dtype, shape, size, at = _read_entry(view, at, limits)
        try:
            expected = encoded_size(codec, dtype, shape)
        except CodecError as error:
            raise FrameError(f"array {name!r}: {error}") from None
        if size != expected or name in rows:
            raise FrameError(f"array {name!r} of {size} bytes does not fit its shape, or is there twice")
        rows[name] = (name, codec, dtype, shape, size)
    if at != len(table):
        raise FrameError(f"table of arrays has {len(table) - at} bytes too many")
    return tuple(rows.values())


_known_rows = lru_cache(maxsize=256)(_rows)
"""The same tables come in every step; only good ones are remembered, and only short ones."""


def _read_entry(table: memoryview, at: int, limits: Limits) -> tuple[str, str, str, tuple[int, ...], int, int]:
    if at + _ENTRY.size > len(table):
        raise FrameError("table of arrays ends early")
    name, codec, dtype, dims = _ENTRY.unpack_from(table, at)
    at += _ENTRY.size
    numbers = at + name + codec + dtype
    end = numbers + 8 * (dims + 1)
    if end > len(table) or name > limits.name or dims > MAX_DIMS:
        raise FrameError(f"table of arrays ends early, or has a name of {name} bytes or {dims} dimensions")
    *shape, size = struct.unpack_from(f"!{dims + 1}Q", table, numbers)
    return (
        _text(table[at : at + name]),
        _text(table[at + name : at + name + codec]),
        _text(table[at + name + codec : numbers]),
        tuple(shape),
        size,
        end,
    )


def _text(data: memoryview) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        raise FrameError(f"name {bytes(data[:32])!r} is not utf-8") from None
