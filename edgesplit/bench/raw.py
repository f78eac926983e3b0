"""The peer of the transport's benchmark: paho as its documentation shows it, and no more than the comparison needs.

It sends packets of the same sizes with the same number of bytes in flight and puts arrays together again, in the same
kind of memory. It does not make sure of anything: no checksum, no repeating, no order, no look at who sent it.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from edgesplit.bench.application import KINDS, Array
from edgesplit.codecs import pack
from edgesplit.errors import TransportTimeout
from edgesplit.transport import frames
from edgesplit.transport.address import parse_url
from edgesplit.transport.base import Message
from edgesplit.transport.inbound import Bodies
from edgesplit.transport.reliable import Settings

_HEAD = struct.Struct("!BHIIQQ")
"""Kind, bytes of the body before the array, part, parts, bytes of the body; of an acknowledgement: packets taken."""

_ACK = len(KINDS)
_CONNECT_S = 10.0


class Raw:
    """One end.

    Args:
        chunk: bytes of a packet's payload, at most.
        quick_ack: re-arm TCP_QUICKACK with every message, as the transport does; a broker with Nagle on needs it.
    """

    def __init__(self, node: str, peer: str, url: str, run: str, *, chunk: int, quick_ack: bool = False) -> None:
        self.chunk = chunk
        self._node, self._quick_ack = node, quick_ack
        self._own, self._to = (f"edgesplit/{run}/{name}/in" for name in (node, peer))
        self._arrays: queue.SimpleQueue[tuple[str, Array]] = queue.SimpleQueue()
        self._receiving = Reassembly(node)
        self._flying = Flying(Settings())
        address = parse_url(url)
        self._ready = threading.Event()
        self._client = paho.Client(
            CallbackAPIVersion.VERSION2, client_id=f"{run}-{node}", protocol=MQTTProtocolVersion.MQTTv5
        )
        self._client.on_connect = lambda client, *_: client.subscribe(self._own)
        self._client.on_subscribe = lambda *_: self._ready.set()
        self._client.on_message = self._on_message
        self._client.on_socket_open = _no_delay
        self._client.connect(address.host, address.port)
        self._client.loop_start()
        if not self._ready.wait(_CONNECT_S):
            raise TransportTimeout(f"{node!r} is not subscribed to {self._own} after {_CONNECT_S:g} s")

    def send(self, kind: str, data: Array) -> None:
        """Send an array; waits where the window is full."""
        for packet in packets(kind, data, self.chunk, self._node):
            self._flying.add(len(packet))
            self._client.publish(self._to, packet)

    def receive(self, timeout: float) -> tuple[str, Array]:
        """Return the next array."""
        try:
            return self._arrays.get(timeout=timeout)
        except queue.Empty:
            raise TransportTimeout(f"{self._node!r} waited {timeout:g} s for the other end") from None

    def _on_message(self, client: paho.Client, _u: Any, message: paho.MQTTMessage) -> None:
        if self._quick_ack:
            sock = client.socket()
            if isinstance(sock, socket.socket) and hasattr(socket, "TCP_QUICKACK"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        payload = message.payload
        if payload[0] == _ACK:
            self._flying.acknowledged(_HEAD.unpack_from(payload)[-1])
            return
        whole = self._receiving.take(payload)
        if self._receiving.owes(len(payload)):
            client.publish(self._to, acknowledgement(self._receiving.taken, self._node))
        if whole is not None:
            self._arrays.put(whole)


class Flying:
    """What is on its way: as much as the transport's window allows, acknowledged every quarter of it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._changed = threading.Condition()
        self._sizes: deque[int] = deque()
        self._bytes = self._first = 0

    def add(self, size: int) -> None:
        """Count a packet, as soon as there is room for it."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._room(size), 60.0):
                raise TransportTimeout(f"no acknowledgement of {len(self._sizes)} packets within 60 s")
            self._sizes.append(size)
            self._bytes += size

    def acknowledged(self, taken: int) -> None:
        """The other end has taken so many packets in all."""
        with self._changed:
            while self._first < taken and self._sizes:
                self._bytes -= self._sizes.popleft()
                self._first += 1
            self._changed.notify_all()

    def _room(self, size: int) -> bool:
        settings = self._settings
        return not self._sizes or (
            self._bytes + size <= settings.window_bytes and len(self._sizes) < settings.window_frames
        )


class Reassembly:
    """Puts arrays together."""

    def __init__(self, node: str) -> None:
        self.taken = 0
        self._head = frames.header_size(node)  # both names are a letter
        self._bodies, self._settings = Bodies(), Settings()
        self._body: memoryview | None = None
        self._filled = self._fresh_bytes = self._fresh = 0

    def take(self, payload: bytes | bytearray) -> tuple[str, Array] | None:
        """Take a packet; return the array that it completes."""
        kind, before, part, parts, total, _ = _HEAD.unpack_from(payload)
        if parts == 1:
            return KINDS[kind], np.frombuffer(payload, np.uint8, offset=self._head + before)
        if part == 0:
            self._body, self._filled = self._bodies.take(total), 0
        piece = memoryview(payload)[self._head :]
        if self._body is None:
            return None
        self._body[self._filled : self._filled + len(piece)] = piece
        self._filled += len(piece)
        if part < parts - 1:
            return None
        body, self._body = self._body, None
        return KINDS[kind], np.frombuffer(body, np.uint8, offset=before)

    def owes(self, size: int) -> bool:
        """Count a packet; whether it is time to acknowledge."""
        self.taken += 1
        self._fresh += 1
        self._fresh_bytes += size
        settings = self._settings
        if 4 * self._fresh_bytes < settings.window_bytes and 4 * self._fresh < settings.window_frames:
            return False
        self._fresh = self._fresh_bytes = 0
        return True


def packets(kind: str, data: Array, chunk: int, node: str) -> Iterator[bytes]:
    """Cut an array into packets, each as long as the transport's for the same message."""
    head, before = frames.header_size(node), prefix(kind, len(data), node)
    room, view = chunk - head, data.data
    total = len(before) + len(view)
    parts = -(-total // room)
    start = 0
    for part in range(parts):
        fields = _HEAD.pack(KINDS.index(kind), len(before), part, parts, total, 0).ljust(head, b"\0")
        end = min(start + room - (len(before) if part == 0 else 0), len(view))
        yield b"".join((fields, before if part == 0 else b"", view[start:end]))
        start = end


def acknowledgement(taken: int, node: str) -> bytes:
    """Return a packet as long as the transport's acknowledgements."""
    return _HEAD.pack(_ACK, 0, 0, 1, 0, taken).ljust(frames.header_size(node), b"\0")


@cache
def prefix(kind: str, size: int, node: str) -> bytes:
    """Return what stands before the array in the transport's body of such a message."""
    message = Message(kind=kind, sender=node, arrays=pack({"x": np.zeros(size, np.uint8)}, "raw"))
    return b"".join(frames.encode(message)[:-1])


def _no_delay(_client: paho.Client, _userdata: Any, sock: Any) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
