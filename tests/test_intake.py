"""Packets come out of a stream of bytes as they went in, whatever pieces it arrives in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgesplit.transport.intake import ALIGN, HEAD, Intake, Packet


def written(command: int, data: bytes) -> bytes:
    length, left = bytearray(), len(data)
    while left > 127:
        length.append(left & 127 | 128)
        left >>= 7
    return bytes([command, *length, left]) + data


def publish(topic: bytes, payload: bytes) -> tuple[int, bytes]:
    return 0x30, len(topic).to_bytes(2, "big") + topic + b"\0" + payload


def fed(intake: Intake, stream: bytes, sizes: list[int]) -> list[Packet]:
    """What comes when the stream arrives in pieces of these sizes, at most, over and over."""
    came, at, turn = [], 0, 0
    while at < len(stream):
        room = intake.room()
        count = min(len(room), sizes[turn % len(sizes)], len(stream) - at)
        room[:count] = stream[at : at + count]
        came += intake.took(count)
        at, turn = at + count, turn + 1
    return came


PACKETS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 255), st.binary(max_size=6)),
        st.builds(publish, st.binary(max_size=40), st.binary(max_size=40)),
        st.builds(lambda n, fill: publish(b"t", bytes([fill]) * n), st.integers(0, 3 * HEAD), st.integers(0, 255)),
    ),
    max_size=12,
)


@given(packets=PACKETS, sizes=st.lists(st.integers(1, 2 * HEAD), min_size=1, max_size=5))
def test_packets_come_whole_and_in_order(packets: list[tuple[int, bytes]], sizes: list[int]) -> None:
    came = fed(Intake(five=True), b"".join(written(*packet) for packet in packets), sizes)
    assert [(command, bytes(data)) for command, data in came] == packets


@pytest.mark.parametrize("topic", [b"t", b"edgesplit/run/node-07/in"])
@pytest.mark.parametrize("size", [HEAD, HEAD + 1, 300_000])
def test_a_long_payload_lies_where_arrays_can_be_used(topic: bytes, size: int) -> None:
    (packet,) = fed(Intake(five=True), written(*publish(topic, b"x" * size)), [1000])
    payload = packet.data[len(packet.data) - size :]
    assert np.frombuffer(payload, np.uint8).ctypes.data % ALIGN == 0


def test_what_has_come_does_not_change() -> None:
    intake = Intake(five=True)
    sent = [publish(b"t", bytes([number]) * 2000) for number in range(9)]
    came = [packet for packet in sent for packet in fed(intake, written(*packet), [700])]
    assert [bytes(packet.data) for packet in came] == [data for _, data in sent]


def test_a_length_of_five_bytes_is_refused() -> None:
    intake = Intake(five=True)
    with pytest.raises(ValueError, match="more than four bytes"):
        fed(intake, b"\x30\xff\xff\xff\xff\x01", [6])


def test_the_longest_length_takes_no_memory_before_it_comes() -> None:
    intake = Intake(five=True)
    assert fed(intake, b"\x30\xff\xff\xff\x7f\x00\x01t", [8]) == []
    assert len(intake.room()) == (1 << 28) - 1 - 3
