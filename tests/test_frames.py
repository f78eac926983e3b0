"""The wire: round trips, golden vectors, and that nothing but FrameError comes of whatever bytes arrive."""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgesplit.codecs import CODECS, Packed, pack, unpack
from edgesplit.errors import FrameError
from edgesplit.transport import frames
from edgesplit.transport.base import Message
from edgesplit.transport.frames import Flag, Limits, Proof
from edgesplit.transport.key import Key

GOLDEN = pathlib.Path(__file__).parent / "golden"
RUN = frames.run_hash("run-1")
KEY = Key(bytes(range(32)))


def body_of(message: Message) -> memoryview:
    return memoryview(b"".join(frames.encode(message)))


def over_the_wire(message: Message, chunk_size: int) -> Message:
    """Encode, cut, seal, parse, put together, decode."""
    body = b""
    chunks = list(frames.split(frames.encode(message), chunk_size, message.sender))
    for number, chunk in enumerate(chunks, 1):
        data = bytes(frames.seal(chunk, Flag.DATA, RUN, message.sender, 7, 8, number))
        assert len(data) <= chunk_size
        frame = frames.parse(data, RUN)
        assert (frame.part, frame.parts, frame.seq) == (number - 1, len(chunks), number)
        body += frame.payload
        assert frame.total >= len(body)
    return frames.decode(memoryview(body), message.sender)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
ARRAYS = st.dictionaries(
    st.text(min_size=0, max_size=20),
    st.builds(
        lambda shape, dtype, codec: CODECS[codec].encode(np.arange(math.prod(shape)).reshape(shape).astype(dtype)),
        st.lists(st.integers(0, 5), max_size=4),
        st.sampled_from(["float32", "float64", "int64", "bool", "float16", "uint8"]),
        st.sampled_from(list(CODECS)),
    ),
    max_size=4,
)
MESSAGES = st.builds(
    Message,
    kind=st.sampled_from(["act", "grad", "target", "sheet", "commit"]),
    sender=st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True),
    stage=st.integers(-1, 1000),
    micro=st.integers(-1, 1 << 62),
    slice=st.integers(0, 100),
    term=st.integers(0, 1 << 62),
    weight=st.floats(allow_nan=False),
    version=st.integers(-1, 1 << 62),
    loss_scale=st.floats(allow_nan=False),
    sent=st.floats(allow_nan=False),
    meta=st.dictionaries(st.text(max_size=8), JSON, max_size=4),
    arrays=ARRAYS,
)


@given(MESSAGES, st.integers(160, 700))
@settings(deadline=None, max_examples=100)
def test_a_message_comes_out_as_it_went_in(message: Message, chunk_size: int) -> None:
    result = over_the_wire(message, chunk_size)
    for field in ("kind", "sender", "stage", "micro", "slice", "term", "weight", "version", "loss_scale", "sent"):
        assert getattr(result, field) == getattr(message, field)
    assert result.meta == message.meta
    assert list(result.arrays) == list(message.arrays)
    for name, packed in message.arrays.items():
        assert result.arrays[name][:3] == packed[:3]
        assert bytes(result.arrays[name].data) == bytes(packed.data)


def test_not_finite_values_and_tuples_in_meta() -> None:
    message = Message(kind="report", sender="a", meta={"norm": math.inf, "at": (1, 2)})
    assert over_the_wire(message, 400).meta == {"norm": math.inf, "at": [1, 2]}


def test_arrays_are_aligned_views_of_the_body() -> None:
    arrays = pack({"a": np.arange(3, dtype=np.uint8), "b": np.arange(5.0)})
    buffer = np.empty(sum(len(s) for s in frames.encode(Message(kind="act", sender="a", arrays=arrays))), np.uint8)
    buffer[:] = np.frombuffer(body_of(Message(kind="act", sender="a", arrays=arrays)), np.uint8)
    message = frames.decode(buffer.data, "a")
    decoded = unpack(message.arrays)
    assert all(np.shares_memory(decoded[name], buffer) for name in decoded)
    base = buffer.__array_interface__["data"][0]
    assert all((d.__array_interface__["data"][0] - base) % frames.ALIGN == 0 for d in decoded.values())
    np.testing.assert_array_equal(decoded["b"], np.arange(5.0))


# --- what does not belong on the wire ---


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"kind": ""}, "kind"),
        ({"kind": "x" * 33}, "kind"),
        ({"meta": {"a": object()}}, "JSON"),
        ({"meta": {"a": np.float32(1)}}, "JSON"),
        ({"micro": 1 << 63}, "does not fit"),
        ({"stage": "two"}, "does not fit"),
        ({"arrays": {"a": Packed("raw", "float32", (2,), b"1234")}}, "'a'"),
        ({"arrays": {"a": Packed("zip", "float32", (1,), b"1234")}}, "'zip'"),
        ({"arrays": {"n" * 513: Packed("raw", "int8", (1,), b"1")}}, "nnn"),
    ],
)
def test_what_the_format_cannot_say_is_refused_at_the_sender(change: dict[str, Any], match: str) -> None:
    with pytest.raises(FrameError, match=match):
        frames.encode(Message(**{"kind": "act", "sender": "a", **change}))


def test_limits_hold_at_the_sender() -> None:
    arrays = pack({"a": np.zeros(100), "b": np.zeros(1)})
    message = Message(kind="act", sender="a", meta={"m": "x" * 50}, arrays=arrays)
    for limits in (Limits(message=500), Limits(meta=40), Limits(arrays=1)):
        with pytest.raises(FrameError):
            frames.encode(message, limits)
    with pytest.raises(FrameError, match="no room"):
        frames.split([b"x"], frames.header_size("a"), "a")


def sealed(payload: bytes = b"p" * 20, sender: str = "a", **header: Any) -> bytearray:
    chunk = next(frames.split([payload], 1000, sender))._replace(**header)
    return frames.seal(chunk, Flag.DATA, RUN, sender, 1, 2, 3)


def resealed(data: bytearray) -> bytes:
    """Give a changed chunk a right checksum, as one who wants to do harm would."""
    head = -(-(80 + data[4]) // 16) * 16
    crc = zlib.crc32(data[80:head], zlib.crc32(data[:76], zlib.crc32(data[head:])))
    data[76:80] = struct.pack("!I", crc)
    return bytes(data)


@pytest.mark.parametrize(
    ("at", "value", "match"),
    [
        (0, b"xx", "begins"),
        (2, b"\x02", "version 2"),
        (3, b"\x80", "covered by no MAC"),
        (3, b"\x41", "damaged"),  # the last 16 bytes are its payload, not a MAC
        (4, b"\xff", "header"),
        (4, b"\x00", "name"),
        (8, b"12345678", "another run"),
        (32, bytes(8), "cannot be"),  # number 0
        (48, b"\xff" * 8, "beyond the limit"),
        (64, b"\xff" * 4, "cannot be"),
        (68, b"\xff" * 4, "cannot be"),
        (80, b"/", "name"),
        (80, b"\xff", "name"),
    ],
)
def test_each_wrong_field_of_a_chunk_is_named(at: int, value: bytes, match: str) -> None:
    data = sealed()
    data[at : at + len(value)] = value
    with pytest.raises(FrameError, match=match):
        frames.parse(resealed(data), RUN)


def test_damage_is_noticed_wherever_it_is() -> None:
    data = bytes(sealed())
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 0x10
        with pytest.raises(FrameError):
            frames.parse(broken, RUN)


def test_a_chunk_beyond_the_limit_is_refused() -> None:
    with pytest.raises(FrameError, match="packet of"):
        frames.parse(bytes(sealed(b"p" * 200)), RUN, Limits(chunk=250))


def only_frame_errors(action: Callable[[], object]) -> None:
    with contextlib.suppress(FrameError):
        action()


@given(st.binary(max_size=400))
@settings(deadline=None, max_examples=300)
def test_random_bytes(data: bytes) -> None:
    only_frame_errors(lambda: frames.parse(data, RUN))
    only_frame_errors(lambda: frames.parse(b"es\x01\x01" + data, RUN))
    only_frame_errors(lambda: frames.decode(memoryview(data), "a"))


@given(st.data())
@settings(deadline=None, max_examples=400)
def test_changed_bytes(data: st.DataObject) -> None:
    """Valid messages with a few bytes replaced, cut off or added: both layers, the outer one with a right checksum."""
    arrays = pack({"h": np.arange(6.0).reshape(2, 3), "m": np.ones(2, bool)})
    good = bytes(body_of(Message(kind="act", sender="a", meta={"k": [1, {"z": None}]}, arrays=arrays)))
    changed = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=8))
    only_frame_errors(lambda: unpack(frames.decode(memoryview(bytes(changed)), "a").arrays))
    chunk = sealed(good)
    at = data.draw(st.integers(0, 95))
    chunk[at : at + 4] = data.draw(st.binary(min_size=4, max_size=4))
    only_frame_errors(lambda: frames.parse(resealed(chunk), RUN))
    only_frame_errors(lambda: frames.parse(resealed(chunk), RUN, key=KEY))


def raw_body(
    meta: bytes = b"{}", table: bytes = b"", arrays: int = 0, data: bytes = b"", kind: bytes = b"act"
) -> bytes:
    head = struct.pack("!BxHiiqqqdddII", len(kind), arrays, 0, 0, 0, 0, 0, 0, 1, 0, len(meta), len(table))
    body = head + kind + meta + table
    return body + (bytes(-len(body) % 64) + data if arrays else data)


def entry(name: bytes, codec: bytes, dtype: bytes, shape: tuple[int, ...], size: int, dims: int | None = None) -> bytes:
    head = struct.pack("!HBBB", len(name), len(codec), len(dtype), len(shape) if dims is None else dims)
    return head + name + codec + dtype + struct.pack(f"!{len(shape) + 1}Q", *shape, size)


def test_the_body_written_by_hand_from_the_specification() -> None:
    table = entry(b"h", b"raw", b"float32", (2,), 8)
    message = frames.decode(memoryview(raw_body(b'{"a":1}', table, 1, struct.pack("<2f", 1.5, -2.0))), "pi-1")
    assert (message.kind, message.sender, message.meta) == ("act", "pi-1", {"a": 1})
    np.testing.assert_array_equal(unpack(message.arrays)["h"], np.array([1.5, -2.0], np.float32))


@pytest.mark.parametrize(
    "body",
    [
        raw_body(b"[1]"),
        raw_body(b"{"),
        raw_body(b"\xff\xfe"),
        raw_body(b"[" * 200_000),
        raw_body(b'{"a":' * 100_000),
        raw_body(b'{"a":' + b"9" * 5000 + b"}"),
        raw_body(kind=b"\xff"),
        raw_body() + b"x",
        raw_body(arrays=1),
        raw_body(arrays=60000),
        raw_body(table=b"\0" * 5),
        raw_body(table=entry(b"h", b"raw", b"int8", (1 << 63, 1 << 63), 1), arrays=1, data=b"1"),
        raw_body(table=entry(b"h", b"raw", b"int8", (1 << 50,), 1 << 50), arrays=1, data=b"1"),
        raw_body(table=entry(b"h", b"raw", b"int8", (1,), 2), arrays=1, data=b"12"),
        raw_body(table=entry(b"h", b"raw", b"object", (1,), 8), arrays=1, data=b"12345678"),
        raw_body(table=entry(b"h", b"gzip", b"int8", (1,), 1), arrays=1, data=b"1"),
        raw_body(table=entry(b"h", b"int8", b"int8", (1,), 5), arrays=1, data=b"12345"),
        raw_body(table=entry(b"\xff", b"raw", b"int8", (1,), 1), arrays=1, data=b"1"),
        raw_body(table=entry(b"h" * 600, b"raw", b"int8", (1,), 1), arrays=1, data=b"1"),
        raw_body(table=entry(b"h", b"raw", b"int8", (1,) * 40, 1), arrays=1, data=b"1"),
        raw_body(table=entry(b"h", b"raw", b"int8", (1,), 1, dims=255), arrays=1, data=b"1"),
        raw_body(table=2 * entry(b"h", b"raw", b"int8", (64,), 64), arrays=2, data=b"1" * 128),
    ],
)
def test_each_wrong_body_is_a_frame_error(body: bytes) -> None:
    with pytest.raises(FrameError):
        frames.decode(memoryview(body), "a")


# --- golden vectors: the bytes of version 1, for ever ---


def golden_messages() -> dict[str, Message]:
    values = np.array([[1.0, -2.5, 0.0], [-0.75, 3e-5, -0.1]], np.float32)
    plain = {
        "act-raw": {"h": CODECS["raw"].encode(values), "mask": CODECS["raw"].encode(np.array([True, False]))},
        "act-fp16": {"h": CODECS["fp16"].encode(values)},
        "act-bf16": {"h": CODECS["bf16"].encode(values)},
        "act-int8": {"h": CODECS["int8"].encode(values), "ids": CODECS["raw"].encode(np.array([7, -7]))},
    }
    messages = {
        name: Message(
            kind="act", sender="pi-1", stage=1, micro=5, term=2, weight=12.0, version=3, loss_scale=1024.0,
            sent=1764536400.25, meta={"last": True}, arrays=arrays,
        )
        for name, arrays in plain.items()
    }  # fmt: skip
    messages["commit"] = Message(kind="commit", sender="coordinator", meta={"apply": True, "clip": 0.5, "step": 41})
    return messages


def golden_chunks() -> dict[str, bytes]:
    chunks = {}
    for name, message in golden_messages().items():
        pieces = frames.split(frames.encode(message), 256, message.sender)
        for number, chunk in enumerate(pieces, 9):
            flags = Flag.DATA | Flag.ACK
            data = frames.seal(chunk, flags, RUN, message.sender, 0x1122334455667788, 99, number, 4, (4 << 20, 256), 1)
            chunks[f"{name}.{chunk.part}"] = bytes(data)
    hello = frames.empty_chunk("pi-1")
    chunks["hello"] = bytes(frames.seal(hello, Flag.HELLO, RUN, "pi-1", 0x1122334455667788, 0, 1))
    chunks["welcome"] = bytes(frames.seal(hello, Flag.WELCOME, RUN, "pi-1", 5, 6, 0, 1, (1 << 20, 64)))
    chunks["ack"] = bytes(frames.seal(hello, Flag.ACK | Flag.RESYNC, RUN, "pi-1", 5, 6, 0, 17, (1 << 20, 64), 2))
    for name in ("act-raw", "commit"):
        message, whole = golden_messages()[name], name == "commit"
        for number, chunk in enumerate(
            frames.split(frames.encode(message), 256, message.sender, signed=True, whole=whole), 9
        ):
            data = frames.seal(chunk, Flag.DATA, RUN, message.sender, 5, 99, number, key=KEY)
            chunks[f"{name}-signed.{chunk.part}"] = bytes(data)
    bare = frames.empty_chunk("pi-1", signed=True)
    chunks["hello-signed"] = bytes(frames.seal(bare, Flag.HELLO, RUN, "pi-1", 5, 0, 1, key=KEY))
    chunks["denied-signed"] = bytes(frames.seal(bare, Flag.WELCOME, RUN, "pi-1", 5, 6, 0, 1, (0, 0), key=KEY))
    return chunks


def test_the_golden_vectors_are_complete() -> None:
    assert {path.stem for path in GOLDEN.glob("*.bin")} == set(golden_chunks())


@pytest.mark.parametrize("name", list(golden_chunks()))
def test_version_1_writes_and_reads_the_golden_vectors(name: str) -> None:
    data = (GOLDEN / f"{name}.bin").read_bytes()
    assert golden_chunks()[name] == data
    frame = frames.parse(data, RUN, key=KEY)
    assert frame.sender in ("pi-1", "coordinator")
    signed = Proof.WHOLE if name.startswith("commit") else Proof.HEAD
    assert frame.proof == (signed if "signed" in name else Proof.NONE)


@pytest.mark.parametrize("name", list(golden_messages()))
def test_golden_messages_decode(name: str) -> None:
    pieces = [
        frames.parse((GOLDEN / f"{name}.{i}.bin").read_bytes(), RUN)
        for i in range(10)
        if (GOLDEN / f"{name}.{i}.bin").exists()
    ]
    expected = golden_messages()[name]
    message = frames.decode(memoryview(b"".join(piece.payload for piece in pieces)), pieces[0].sender)
    assert json.dumps(message.meta) == json.dumps(expected.meta)
    assert message.arrays == expected.arrays
    if name.startswith("act"):
        values = np.array([[1.0, -2.5, 0.0], [-0.75, 3e-5, -0.1]], np.float32)
        np.testing.assert_allclose(unpack(message.arrays)["h"], values, rtol=0.01, atol=0.02)
