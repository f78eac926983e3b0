"""The run's key: what a MAC covers, who is believed, and that nothing recorded counts twice."""

from __future__ import annotations

import hashlib
import random
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from edgesplit.codecs import pack
from edgesplit.errors import ExperimentError, TransportError
from edgesplit.rundir import RunDirectory
from edgesplit.transport import frames
from edgesplit.transport.base import Message
from edgesplit.transport.endpoint import Deliver, Effect, Endpoint
from edgesplit.transport.frames import Flag, Proof
from edgesplit.transport.guard import ANOTHER_KEY, DENIED, NO_KEY
from edgesplit.transport.key import MAC_BYTES, Key
from edgesplit.transport.reliable import Publish, Reached

RUN = frames.run_hash("run")
KEY, OTHER = Key(bytes(range(32))), Key(bytes(32))
HEAD = frames.header_size("a")


def order(number: int = 1, size: int = 0) -> Message:
    return Message(kind="commit", sender="a", micro=number, meta={"pad": "." * size})


def act(number: int = 1) -> Message:
    return Message(kind="act", sender="a", micro=number, arrays=pack({"h": np.arange(64.0)}))


# --- a chunk ---


def signed(message: Message, chunk_size: int = 4096, key: Key = KEY) -> list[bytes]:
    chunks = frames.split(
        frames.encode(message), chunk_size, "a", signed=True, whole=message.kind not in ("act", "grad", "target")
    )
    return [
        bytes(frames.seal(chunk, Flag.DATA, RUN, "a", 1, 2, number, key=key)) for number, chunk in enumerate(chunks, 1)
    ]


def repaired(data: bytes | bytearray) -> bytes:
    """With the right checksum, as one who wants to do harm would send it."""
    data = bytearray(data)
    crc = zlib.crc32(data[80:HEAD], zlib.crc32(data[:76], zlib.crc32(data[HEAD:-MAC_BYTES])))
    data[76:80] = struct.pack("!I", crc)
    return bytes(data)


@pytest.mark.parametrize("message", [order(size=600), act()], ids=["control", "bulk"])
def test_a_signed_message_is_the_same_message(message: Message) -> None:
    pieces = [frames.parse(data, RUN, key=KEY) for data in signed(message, 256)]
    assert len(pieces) > 2
    assert {piece.proof for piece in pieces} == {Proof.WHOLE if message.kind == "commit" else Proof.HEAD}
    body = memoryview(b"".join(piece.payload for piece in pieces))
    assert frames.decode(body, "a").meta == message.meta
    assert max(len(data) for data in signed(message, 256)) == 256


def test_who_has_no_key_reads_it_and_who_has_another_sees_that() -> None:
    (data,) = signed(order())
    assert frames.parse(data, RUN).proof == Proof.UNCHECKED
    assert frames.parse(data, RUN, key=OTHER).proof == Proof.WRONG
    (chunk,) = frames.split(frames.encode(order()), 4096, "a")
    plain = bytes(frames.seal(chunk, Flag.DATA, RUN, "a", 1, 2, 1))
    assert frames.parse(plain, RUN, key=KEY).proof == Proof.NONE


@pytest.mark.parametrize("message", [order(size=100), act()], ids=["control", "bulk"])
def test_no_byte_of_a_header_can_be_changed(message: Message) -> None:
    (data,) = signed(message)
    for at in (3, 5, 8, 16, 24, 32, 40, 48, 56, 60, 64, 68, 72, 74, HEAD - 1, len(data) - 1):
        broken = bytearray(data)
        broken[at] ^= 1 if at != 3 else Flag.WHOLE
        try:
            frame = frames.parse(repaired(broken), RUN, key=KEY)
        except frames.FrameError:
            continue  # it is not even a chunk any more
        assert frame.proof == Proof.WRONG, at


def test_the_payload_of_a_command_is_covered_and_that_of_an_activation_is_not() -> None:
    for message, proof in ((order(size=100), Proof.WRONG), (act(), Proof.HEAD)):
        (data,) = signed(message)
        broken = bytearray(data)
        broken[-MAC_BYTES - 1] ^= 1
        assert frames.parse(repaired(broken), RUN, key=KEY).proof == Proof.WRONG  # the header has the checksum
        payload = b"." * (len(data) - HEAD - MAC_BYTES)
        assert frames.parse(same_checksum(data, payload), RUN, key=KEY).proof == proof


def same_checksum(data: bytes, body: bytes) -> bytes:
    """The chunk with another payload and the same checksum: CRC-32 is linear, so the lowest bits of some dots make up.

    What dots become, ``/``, may stand in a text too.
    """
    size = len(data) - HEAD - MAC_BYTES
    wanted, base, first = zlib.crc32(data[HEAD : HEAD + size]), zlib.crc32(body), body.index(b"." * 64)
    rows = [
        (zlib.crc32(body[:at] + b"/" + body[at + 1 :]) ^ base, 1 << (at - first)) for at in range(first, first + 64)
    ]
    need, flips = wanted ^ base, 0
    for bit in range(31, -1, -1):
        pivot = next(row for row in rows if row[0] >> bit & 1)
        rows = [(a ^ pivot[0], b ^ pivot[1]) if a >> bit & 1 else (a, b) for a, b in rows]
        if need >> bit & 1:
            need, flips = need ^ pivot[0], flips ^ pivot[1]
    changed = bytearray(body)
    for at in range(64):
        changed[first + at] ^= flips >> at & 1
    assert len(changed) == size
    assert zlib.crc32(changed) == wanted
    return data[:HEAD] + bytes(changed) + data[HEAD + size :]


@pytest.mark.parametrize(("name", "whole"), [("act-raw-signed.0", False), ("commit-signed.0", True)])
def test_the_mac_is_what_the_specification_says(name: str, whole: bool) -> None:
    data = (Path(__file__).parent / "golden" / f"{name}.bin").read_bytes()
    head = -(-(80 + data[4]) // 16) * 16
    covered = data[:head] + (hashlib.sha256(data[head:-16]).digest() if whole else b"")
    mac = hashlib.blake2b(covered, key=bytes(range(32)), digest_size=16, person=b"edgesplit chunk").digest()
    assert data[-16:] == mac


# --- who is believed ---


class Wire:
    """Endpoints, the packets between them, and what they deliver."""

    def __init__(self, **ends: Endpoint) -> None:
        self.ends = ends
        self.now = 0.0
        self.got: dict[str, list[Message]] = {name: [] for name in ends}
        self.reached: set[tuple[str, str]] = set()
        self.tape: list[tuple[str, bytes]] = []

    def carry(self, at: str, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Publish):
                self.tape.append((effect.peer, bytes(effect.data)))
                self.bring(*self.tape[-1])
            elif isinstance(effect, Deliver):
                self.got[at].append(effect.message)
            elif isinstance(effect, Reached):
                self.reached.add((at, effect.peer))

    def bring(self, to: str, data: bytes) -> None:
        if to in self.ends:
            end = self.ends[to]
            self.carry(to, end.received(end.parse(data), self.now))

    def send(self, sender: str, to: str, message: Message) -> None:
        end = self.ends[sender]
        for chunk in end.cut(to, end.pack(to, [message]), 512):
            self.carry(sender, end.send(to, chunk, self.now))

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds * 10)):
            self.now += 0.1
            for name, end in self.ends.items():
                self.carry(name, end.tick(self.now, 0.0))

    def micros(self, at: str) -> list[int]:
        return [message.micro for message in self.got[at] if message.kind != "refused"]

    def refusals(self, at: str) -> list[tuple[str, str]]:
        return [(m.sender, m.meta["reason"]) for m in self.got[at] if m.kind == "refused"]


def end(name: str, boot: int = 1, key: Key | None = None, *, required: bool = True) -> Endpoint:
    return Endpoint("run", name, boot, key=key, key_required=required)


def test_holders_of_the_key_understand_each_other() -> None:
    wire = Wire(a=end("a", 1, KEY), b=end("b", 2, KEY))
    wire.send("a", "b", order(1, 2000))
    wire.send("a", "b", act(2))
    wire.wait(1.0)
    assert wire.micros("b") == [1, 2]
    assert wire.refusals("a") == wire.refusals("b") == []
    assert wire.ends["a"].missing() == {}


def test_without_the_key_no_way_in_where_it_is_required_and_both_are_told() -> None:
    wire = Wire(a=end("a", 1), b=end("b", 2, KEY))
    wire.send("a", "b", order(1))
    wire.wait(8.0)
    assert wire.micros("b") == []
    assert wire.refusals("a") == [("b", DENIED)]
    assert wire.refusals("b") == [("a", NO_KEY)]


def test_with_another_key_no_way_in_and_both_are_told() -> None:
    wire = Wire(a=end("a", 1, OTHER), b=end("b", 2, KEY, required=False))
    wire.send("a", "b", order(1))
    wire.wait(8.0)
    assert wire.micros("b") == []
    assert wire.refusals("a") == [("b", ANOTHER_KEY)]
    assert wire.refusals("b") == [("a", ANOTHER_KEY)]


def test_where_it_is_optional_a_node_without_it_may_join_but_not_take_anothers_place() -> None:
    wire = Wire(a=end("a", 1), b=end("b", 2, KEY, required=False))
    wire.send("a", "b", order(1))
    wire.wait(1.0)
    wire.ends["b"].pack("a", [Message(kind="x", sender="b")])
    wire.send("b", "a", Message(kind="x", sender="b", micro=5))
    wire.wait(1.0)
    assert wire.micros("b") == [1]
    assert wire.micros("a") == [5]  # signed, and it cannot check that
    wire.ends["a"] = end("a", 3, KEY)
    wire.send("a", "b", order(2))
    wire.wait(1.0)
    assert wire.micros("b") == [1, 2]
    wire.ends["a"] = end("a", 4)  # it has shown that it holds the key, and is held to it
    wire.send("a", "b", order(3))
    wire.wait(8.0)
    assert wire.micros("b") == [1, 2]
    assert wire.refusals("a") == [("b", DENIED)]


def test_a_command_in_an_activations_clothes_is_dropped() -> None:
    wire = Wire(a=end("a", 1, KEY), b=end("b", 2, KEY))
    wire.send("a", "b", Message(kind="act", sender="a", arrays=pack({"h": np.arange(20.0)})))
    (data,) = (data for to, data in wire.tape if to == "b" and frames.parse(data, RUN).flags & Flag.DATA)
    stop = b"".join(frames.encode(Message(kind="stop", sender="a", meta={"error": ""})))
    dots = "." * (len(frames.parse(data, RUN).payload) - len(stop))
    forged = same_checksum(data, b"".join(frames.encode(Message(kind="stop", sender="a", meta={"error": dots}))))
    assert frames.parse(forged, RUN, key=KEY).proof == Proof.HEAD
    fresh = Wire(a=end("a", 1, KEY), b=end("b", 2, KEY))
    fresh.carry("a", fresh.ends["a"].hello("b", 0.0))
    fresh.bring("b", forged)
    assert fresh.got["b"] == []
    assert fresh.ends["b"].rejected == 1
    believing = Wire(a=end("a", 1, KEY), b=end("b", 2))
    believing.carry("a", believing.ends["a"].hello("b", 0.0))
    believing.bring("b", forged)
    assert [message.kind for message in believing.got["b"]] == ["stop"]  # without the key nothing protects it


def test_a_message_of_the_transports_own_kinds_is_not_taken_from_the_network() -> None:
    wire = Wire(a=end("a", 1), b=end("b", 2))
    for kind in ("status", "refused"):
        wire.send("a", "b", Message(kind=kind, sender="a", meta={"state": "offline", "reason": "x"}))
    assert wire.got["b"] == []
    assert wire.ends["b"].rejected == 2


# --- what was recorded ---


def test_what_was_recorded_counts_never_again() -> None:
    """All that passed in three lives of the sender, brought again in any order, also to a new life of the receiver."""
    for seed in range(40):
        dice = random.Random(seed)
        wire = Wire(a=end("a", 1, KEY), b=end("b", 100, KEY))
        for life in range(1, 4):
            wire.ends["a"] = end("a", life, KEY)
            for number in range(3):
                wire.send("a", "b", order(10 * life + number, dice.choice([0, 900])))
            wire.wait(0.5)
        tape = list(wire.tape)
        expected = wire.micros("b")
        assert expected == [10 * life + number for life in range(1, 4) for number in range(3)]
        for _ in range(200):
            wire.bring(*dice.choice(tape))
        wire.send("a", "b", order(99))
        wire.wait(3.0)
        assert wire.micros("b") == [*expected, 99]
        wire.ends["b"], wire.got["b"] = end("b", 101, KEY), []
        for _ in range(200):
            wire.bring(*dice.choice(tape))
        wire.send("a", "b", order(100))
        wire.wait(5.0)
        assert wire.micros("b") == [100]


def test_a_dead_life_stays_dead_however_many_hellos_were_recorded() -> None:
    wire = Wire(a=end("a", 1, KEY), b=end("b", 100, KEY))
    for life in range(1, 14):  # more than are ranked
        wire.ends["a"] = end("a", life, KEY)
        wire.send("a", "b", order(life))
        wire.wait(0.3)
    tape, expected = list(wire.tape), wire.micros("b")
    assert expected == list(range(1, 14))
    for _ in range(2):
        for to, data in tape:
            if to == "b":
                wire.bring(to, data)
    wire.send("a", "b", order(99))
    wire.wait(5.0)
    assert wire.micros("b") == [*expected, 99]


# --- the file ---


def test_the_runs_key_is_its_owners_and_stays_when_the_run_is_resumed(tmp_path: Path) -> None:
    folder = RunDirectory.open(name="r", out=tmp_path / "r", stem="x", resume=False)
    text = folder.key_file.read_text()
    assert folder.key_file.stat().st_mode & 0o777 == 0o600
    assert Key.read(folder.key_file).mac(b"x") != KEY.mac(b"x")
    (folder.path / "checkpoints").mkdir()
    assert RunDirectory.open(name="r", out=tmp_path / "r", stem="x", resume=True).key_file.read_text() == text
    again = RunDirectory.open(name="r", out=tmp_path / "r", stem="x", resume=False)
    assert again.key_file.read_text() == text, "it has not begun"
    with pytest.raises(ExperimentError):
        RunDirectory.open(name="r", out=tmp_path / "gone", stem="x", resume=True)


def test_files_that_hold_no_key(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(TransportError, match=r"cannot read the key file .*: No such file"):
        Key.read(path)
    for content in (b"", b"ab" * 31, b"\xff" * 64, b"xy" * 32):
        path.write_bytes(content)
        with pytest.raises(TransportError, match="is no key file: copy the file 'key' of the run's folder") as error:
            Key.read(path)
        assert "abab" not in str(error.value)
    path.write_text("00" * 32)
    assert Key.read(path).mac(b"x") == OTHER.mac(b"x")
    with pytest.raises(TransportError, match="of 3 bytes"):
        Key(b"abc")
