"""paho's client without the copies that it makes of every packet: most of what a transport's time went into.

For each message paho copies its packet three or four times on either side, parses properties that are not there, and
looks for a callback by topic. A publish of QoS 0 without properties, which is all that nodes send each other, needs
none of that. This is the one place that touches paho's private parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from paho.mqtt import client as paho
from paho.mqtt.enums import MQTTErrorCode, MQTTProtocolVersion

from edgesplit.transport.frames import Bytes

_QOS = 0b0110
_RETAIN = 0b0001
_PUBLISH = 0x30


class _Nobody:
    """Does not want to know when its message has been written."""

    def _set_as_published(self) -> None:
        pass


_NOBODY = _Nobody()


class Publish(NamedTuple):
    """What a callback ``on_message`` gets: of paho's message the fields that are used here."""

    topic: str
    payload: memoryview
    retain: bool


class Quick(paho.Client):
    """Like paho's, but ``on_message`` gets a :class:`Publish` for most messages."""

    def post(self, topic: str, payload: Bytes) -> None:
        """Publish with QoS 0, without retaining; the payload is copied once, here, and dropped where paho would."""
        if self._sock is not None:
            packet = packet_of(topic, payload, five=self._protocol == MQTTProtocolVersion.MQTTv5)
            # paho takes slices of what is left to be written: of a view they are no copies.
            self._packet_queue(_PUBLISH, cast("bytes", memoryview(packet)), 0, 0, cast("paho.MQTTMessageInfo", _NOBODY))

    def _handle_publish(self) -> MQTTErrorCode:
        packet: Any = self._in_packet
        publish = plain(packet["command"], packet["packet"], five=self._protocol == MQTTProtocolVersion.MQTTv5)
        if publish is None:
            return super()._handle_publish()
        if self.on_message is not None:
            self.on_message(self, self._userdata, cast("paho.MQTTMessage", publish))
        return MQTTErrorCode.MQTT_ERR_SUCCESS


def packet_of(topic: str, payload: Bytes, *, five: bool) -> bytes:
    """Return a PUBLISH packet of QoS 0 without properties."""
    name = topic.encode()
    left = 2 + len(name) + five + len(payload)
    length = bytearray()
    while left > 127:
        length.append(left & 127 | 128)
        left >>= 7
    length.append(left)
    properties = b"\0" if five else b""
    return b"".join((b"\x30", length, len(name).to_bytes(2, "big"), name, properties, payload))


def plain(command: int, data: bytearray, *, five: bool) -> Publish | None:
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
