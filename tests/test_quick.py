"""Publishes that are taken without paho's copies are the same messages as paho's."""

from __future__ import annotations

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
def test_packets_are_pahos(version: str, size: int) -> None:
    client = Quick(CallbackAPIVersion.VERSION2, protocol=VERSIONS[version])
    client.on_socket_register_write = lambda *_: None
    payload, topic = bytearray(b"x" * size), "a/b\N{GREEK SMALL LETTER MU}"
    client.post(topic, payload)
    assert not client._out_packet, "there is no connection"
    with socket.socket() as client._sock:
        client.publish(topic, bytes(payload), qos=0)
        client.post(topic, payload)
        payload[:] = b"y" * size
        theirs, ours = client._out_packet
        client._sock = None
    assert bytes(ours.pop("packet")) == bytes(theirs.pop("packet"))
    for left in (ours, theirs):
        del left["info"], left["mid"]  # which a packet of this quality does not carry
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
    slow: list[Quick] = []
    original = paho.Client._handle_publish
    monkeypatch.setattr(paho.Client, "_handle_publish", lambda self: slow.append(self) or original(self))
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
