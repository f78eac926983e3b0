"""paho's client without the copies that it makes of every packet: most of what a transport's time went into.

For each message paho copies its packet three or four times on either side, reads it in five pieces, parses properties
that are not there, and looks for a callback by topic. A publish of QoS 0 without properties, which is all that nodes
send each other, needs none of that. This is the one place that touches paho's private parts.
"""

from __future__ import annotations

import socket
import time
from functools import lru_cache
from typing import Any, NamedTuple, cast

from paho.mqtt import client as paho
from paho.mqtt.enums import MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.properties import MalformedPacket  # type: ignore[attr-defined]  # where 2.0 defines it

from edgesplit.transport.frames import Bytes
from edgesplit.transport.intake import Intake

_QOS = 0b0110
_RETAIN = 0b0001
_PUBLISH = 0x30

SMALL = 4096
"""Bytes of a payload that are copied in less time than it takes to write from two places."""

READS = 16
"""Reads of the socket in a row; then others have a turn."""


class _Nobody:
    """Does not want to know when its message has been written."""

    def _set_as_published(self) -> None:
        pass


_NOBODY = _Nobody()


class Publish(NamedTuple):
    """What a callback ``on_message`` gets: of paho's message the fields that are used here.

    The payload's memory is the receiver's.
    """

    topic: str
    payload: memoryview
    retain: bool


class _Parts:
    """A packet whose payload lies somewhere else; paho takes slices of what is left to be written."""

    __slots__ = ("_head", "_payload")

    def __init__(self, head: bytes, payload: Bytes) -> None:
        self._head, self._payload = head, memoryview(payload)

    def __len__(self) -> int:
        return len(self._head) + len(self._payload)

    def __getitem__(self, left: slice) -> tuple[Bytes, ...]:
        start, head = left.start, len(self._head)
        if start < head:
            return self._head[start:] if start else self._head, self._payload
        return (self._payload[start - head :],)


class Quick(paho.Client):
    """Like paho's, but ``on_message`` gets a :class:`Publish` for most messages."""

    _intake: tuple[socket.socket, Intake] | None = None

    def post(self, topic: str, payload: Bytes) -> None:
        """Publish with QoS 0, without retaining; dropped where paho would.

        Where the connection is a plain socket a payload that is not small is not copied: it must not change until it
        has been written.
        """
        sock = self._sock
        if sock is None:
            return
        head = head_of(topic, len(payload), five=self._protocol == MQTTProtocolVersion.MQTTv5)
        # TLS and WebSocket write one piece of memory. paho takes slices of it: of a view they are no copies.
        apart = len(payload) > SMALL and _plain(sock)
        packet: Any = _Parts(head, payload) if apart else memoryview(head + payload)
        self._packet_queue(_PUBLISH, packet, 0, 0, cast("paho.MQTTMessageInfo", _NOBODY))

    def _sock_send(self, buf: Any) -> int:
        if type(buf) is not tuple:
            return super()._sock_send(buf)
        if self._sock is None:
            raise ConnectionError("self._sock is None")
        try:
            return cast("socket.socket", self._sock).sendmsg(buf)
        except BlockingIOError:
            self._call_socket_register_write()
            raise

    def _packet_read(self) -> MQTTErrorCode:
        sock: Any = self._sock
        if not _plain(sock):
            return super()._packet_read()
        if self._intake is None or self._intake[0] is not sock:
            self._intake = sock, Intake(five=self._protocol == MQTTProtocolVersion.MQTTv5)
        intake = self._intake[1]
        for _ in range(READS):
            room = intake.room()
            try:
                count = sock.recv_into(room)
            except BlockingIOError:
                return MQTTErrorCode.MQTT_ERR_AGAIN
            except OSError:
                return MQTTErrorCode.MQTT_ERR_CONN_LOST
            if not count:
                return MQTTErrorCode.MQTT_ERR_CONN_LOST
            self._last_bytes_received = time.monotonic()
            try:
                packets = intake.took(count)
            except (ValueError, MemoryError):  # no MQTT, or a length that nobody who means well sends
                return MQTTErrorCode.MQTT_ERR_PROTOCOL
            for command, data in packets:
                code = self._take(command, data)
                if code or self._sock is not sock:
                    return code
            if count < len(room):
                break  # there was no more
        return MQTTErrorCode.MQTT_ERR_SUCCESS

    def _take(self, command: int, data: memoryview) -> MQTTErrorCode:
        if command & 0xF0 == _PUBLISH:
            publish = plain(command, data, five=self._protocol == MQTTProtocolVersion.MQTTv5)
            if publish is not None:
                return self._publish_came(publish)
        self._in_packet = {
            "command": command,
            "have_remaining": 1,
            "remaining_count": [],
            "remaining_mult": 1,
            "remaining_length": len(data),
            "packet": bytearray(data),
            "to_process": 0,
            "pos": 0,
        }
        try:
            return self._packet_handle()
        except MalformedPacket:
            return MQTTErrorCode.MQTT_ERR_PROTOCOL

    def _handle_publish(self) -> MQTTErrorCode:
        packet: Any = self._in_packet
        publish = plain(packet["command"], packet["packet"], five=self._protocol == MQTTProtocolVersion.MQTTv5)
        return super()._handle_publish() if publish is None else self._publish_came(publish)

    def _publish_came(self, publish: Publish) -> MQTTErrorCode:
        if self.on_message is not None:
            self.on_message(self, self._userdata, cast("paho.MQTTMessage", publish))
        return MQTTErrorCode.MQTT_ERR_SUCCESS


def _plain(sock: Any) -> bool:
    return type(sock) is socket.socket and hasattr(sock, "sendmsg")


def head_of(topic: str, size: int, *, five: bool) -> bytes:
    """Return what stands before the payload in a PUBLISH packet of QoS 0 without properties."""
    name = _name_of(topic, five=five)
    left = len(name) + size
    length = bytearray(b"\x30")
    while left > 127:
        length.append(left & 127 | 128)
        left >>= 7
    length.append(left)
    return bytes(length) + name


@lru_cache(maxsize=1024)
def _name_of(topic: str, *, five: bool) -> bytes:
    name = topic.encode()
    return len(name).to_bytes(2, "big") + name + (b"\0" if five else b"")


def plain(command: int, data: bytearray | memoryview, *, five: bool) -> Publish | None:
    """Return the message of a PUBLISH packet whose memory nobody else uses; None: it is not of the plain kind.

    Args:
        command: the packet's first byte.
        data: what follows its length.
        five: it is a packet of MQTT 5, which may have properties.
    """
    topic_end = 2 + int.from_bytes(data[:2], "big")
    start = topic_end + five
    if command & _QOS or start > len(data) or (five and data[topic_end]) or topic_end == 2:
        return None
    try:
        topic = str(data[2:topic_end], "utf-8")
    except UnicodeDecodeError:
        return None
    return Publish(topic, memoryview(data)[start:].toreadonly(), bool(command & _RETAIN))
