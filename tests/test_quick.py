"""Publishes that are taken without paho's copies are the same messages as paho's."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from edgesplit.transport.access import Access
from edgesplit.transport.client import PROTOCOLS as VERSIONS
from edgesplit.transport.mqtt import MqttTransport
from edgesplit.transport.quick import Publish, Quick, plain
from tests.brokers import Mosquitto


def written(version: str, topic: str, payload: bytes, **options: Any) -> tuple[int, bytearray]:
    """The first byte, and what follows the length, of the packet that paho writes."""
    client = paho.Client(CallbackAPIVersion.VERSION2, protocol=VERSIONS[version])
    client.on_socket_register_write = lambda *_: None
    client._sock = socket.socket()
    client.publish(topic, payload, **options)
    packet = client._out_packet[0]["packet"]
    client._sock.close()
    client._sock = None
    at = 1
    while packet[at] & 0x80:
        at += 1
    return packet[0], bytearray(packet[at + 1 :])


class Wrapped(socket.socket):
    """One that is not plain, as one of TLS, which cannot write from several places."""


def left_of(packet: Any, start: int) -> bytes:
    """What paho would have written of a packet from there on."""
    left = packet[start:]
    return b"".join(left) if isinstance(left, tuple) else bytes(left)


@pytest.mark.parametrize("version", list(VERSIONS))
@given(
    topic=st.text(st.characters(codec="utf-8", exclude_characters="+#\0"), min_size=1, max_size=50),
    payload=st.binary(max_size=300),
    retain=st.booleans(),
)
def test_a_plain_publish(version: str, topic: str, payload: bytes, retain: bool) -> None:
    command, data = written(version, topic, payload, qos=0, retain=retain)
    found = plain(command, data, five=version == "5")
    assert found == Publish(topic, memoryview(payload), retain)
    assert found.payload.readonly


@pytest.mark.parametrize("version", list(VERSIONS))
@pytest.mark.parametrize("size", [0, 1, 100, 127, 128, 16_383, 16_384, 300_000, 2_097_152])
@pytest.mark.parametrize("kind", [socket.socket, Wrapped])
def test_packets_are_pahos(version: str, size: int, kind: type[socket.socket]) -> None:
    client = Quick(CallbackAPIVersion.VERSION2, protocol=VERSIONS[version])
    client.on_socket_register_write = lambda *_: None
    payload, topic = bytearray(b"x" * size), "a/b\N{GREEK SMALL LETTER MU}"
    client.post(topic, payload)
    assert not client._out_packet, "there is no connection"
    with kind() as client._sock:
        client.publish(topic, bytes(payload), qos=0)
        client.post(topic, payload)
        theirs, ours = client._out_packet
        client._sock = None
    left, whole = ours.pop("packet"), bytes(theirs.pop("packet"))
    assert len(left) == len(whole)
    for start in {0, 1, 5, len(whole) - size - 1, len(whole) - size, len(whole) - size // 2, len(whole) - 1}:
        assert left_of(left, start) == whole[start:]
    for packet in (ours, theirs):
        del packet["info"], packet["mid"]  # which a packet of this quality does not carry
    assert ours == theirs


@pytest.mark.parametrize("version", list(VERSIONS))
@pytest.mark.parametrize("qos", [1, 2])
def test_other_qualities_are_left_to_paho(version: str, qos: int) -> None:
    assert plain(*written(version, "t", b"x", qos=qos), five=version == "5") is None


def test_properties_are_left_to_paho() -> None:
    properties = Properties(PacketTypes.PUBLISH)
    properties.ContentType = "x"
    assert plain(*written("5", "t", b"x", properties=properties), five=True) is None


@given(command=st.integers(0x30, 0x3F), data=st.binary(max_size=20), five=st.booleans())
def test_whatever_comes_it_is_a_message_or_left_to_paho(command: int, data: bytes, five: bool) -> None:
    found = plain(command, bytearray(data), five=five)
    if found is not None:
        topic = found.topic.encode()
        assert data == len(topic).to_bytes(2, "big") + topic + (b"\0" if five else b"") + bytes(found.payload)
        assert not command & 6
        assert topic


@pytest.mark.parametrize("version", list(VERSIONS))
def test_the_installed_paho_goes_this_way(mosquitto: Mosquitto, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Where paho's private parts have changed, everything still arrives, but slowly: then this fails."""
    slow: list[str] = []
    for name in ("_handle_publish", "_packet_read"):
        original = getattr(paho.Client, name)
        monkeypatch.setattr(paho.Client, name, lambda self, n=name, do=original: slow.append(n) or do(self))
    with MqttTransport(Access(mosquitto.url, mqtt=version), run=f"fast-{version}", node="a") as a:
        deadline = time.monotonic() + 5
        while not a.connected and time.monotonic() < deadline:
            time.sleep(0.01)
        assert a.connected, "it has had its own probe and status"
    assert slow == []


def test_a_callback_may_be_missing() -> None:
    client = Quick(CallbackAPIVersion.VERSION2)
    command, data = written("3.1.1", "t", b"x", qos=0)
    client._in_packet["command"], client._in_packet["packet"] = command, data
    assert client._handle_publish() == paho.MQTT_ERR_SUCCESS


class Connected:
    """A client that is connected to a socket of this test."""

    def __init__(self, version: str = "5") -> None:
        ours, self.there = socket.socketpair()
        ours.setblocking(False)
        self.client = Quick(CallbackAPIVersion.VERSION2, protocol=VERSIONS[version])
        self.client.on_socket_register_write = lambda *_: None
        self.client._sock = ours
        self.came: list[tuple[str, bytes]] = []
        self.client.on_message = lambda _c, _u, m: self.came.append((m.topic, bytes(m.payload)))

    def close(self) -> None:
        self.there.close()
        self.client._sock_close()


@pytest.mark.parametrize("version", list(VERSIONS))
def test_whatever_pieces_come_the_messages_are_whole(version: str) -> None:
    there, here = Connected(version), Connected(version)
    sent = [(f"t/{size}", bytes([size % 251]) * size) for size in (0, 5, 3000, 4096, 70_000, 1, 1_000_000)]
    for topic, payload in sent:
        there.client.post(topic, payload)
        there.client.publish(topic, payload, qos=1)
    there.there.setblocking(False)
    while there.client.want_write() or len(here.came) < 2 * len(sent):
        assert there.client.loop_write() == paho.MQTT_ERR_SUCCESS
        with contextlib.suppress(BlockingIOError):
            here.there.sendall(there.there.recv(10_007))
        assert here.client.loop_read() == paho.MQTT_ERR_SUCCESS
    assert here.came == [message for message in sent for _ in range(2)]
    there.close()
    here.close()


@pytest.mark.parametrize(
    ("data", "code"),
    [(b"", paho.MQTT_ERR_CONN_LOST), (b"\x30\xff\xff\xff\xff\x01", paho.MQTT_ERR_PROTOCOL)],
)
def test_a_connection_ends(data: bytes, code: int) -> None:
    """With what the broker ends it, or with what is not MQTT."""
    here = Connected()
    ended: list[object] = []
    here.client.on_disconnect = lambda *_: ended.append(1)
    here.there.sendall(data)
    if not data:
        here.there.close()
    assert here.client.loop_read() == code
    assert here.client.socket() is None
    assert ended == [1]
    here.close()


def test_a_new_connection_begins_anew() -> None:
    """What an old connection broke off in the middle of does not go before what comes on the new one."""
    here = Connected()
    here.there.sendall(b"\x30\x0a\x00\x01t\x00half")
    assert here.client.loop_read() == paho.MQTT_ERR_SUCCESS
    old, (here.client._sock, here.there) = (here.client._sock, here.there), socket.socketpair()
    here.client._sock.setblocking(False)
    here.there.sendall(b"\x30\x05\x00\x01t\x00x")
    assert here.client.loop_read() == paho.MQTT_ERR_SUCCESS
    assert here.came == [("t", b"x")]
    for each in old:
        each.close()
    here.close()
