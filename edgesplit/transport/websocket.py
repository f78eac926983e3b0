"""MQTT through a web server: the client's end of a WebSocket (RFC 6455), as paho uses a socket.

paho's own loses a packet that the system does not take at once, and masks byte by byte.
"""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import struct
from collections import deque

import numpy as np

from edgesplit.transport.address import Address

BINARY, CLOSE, PING, PONG = 2, 8, 9, 10
LONGEST_ANSWER = 16 << 10
LONGEST_CONTROL = 125
READ = 256 << 10
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class WebSocketError(OSError):
    """The web server does not do what a WebSocket's must."""


class WebSocket:
    """A stream of bytes over binary messages.

    Args:
        sock: connected, through TLS or not, with a timeout for the handshake.

    Raises:
        WebSocketError: the server does not agree to it.
        OSError: the connection broke.
    """

    def __init__(self, sock: socket.socket, address: Address) -> None:
        self.sock = sock
        self._raw = bytearray()  # what was read and is not taken apart yet: the beginning of a head
        self._ready: deque[memoryview] = deque()
        self._opcode = BINARY
        self._left = 0  # bytes of the message in work that are still to come
        self._control = bytearray()
        self._out = memoryview(b"")
        self._taken = 0  # bytes of the caller's in _out
        self._answers = bytearray()
        self._shake_hands(address)

    # What paho calls

    def recv(self, most: int) -> bytes:
        """Return up to ``most`` bytes; b"" at the end. Raises as a socket does where none are there yet."""
        while not self._ready:
            data = self.sock.recv(READ)
            if not data or not self._take_apart(memoryview(data)):
                return b""
        first = self._ready[0]
        if len(first) > most:
            self._ready[0] = first[most:]
        else:
            self._ready.popleft()
        return bytes(first[:most])

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """Send all of ``data`` as one message and return its length.

        Raises:
            BlockingIOError: a part is on its way: call again with the same data when the socket can be written.
        """
        if not self._out:
            self._taken = len(data)
            self._out = memoryview(bytes(self._answers) + _frame(BINARY, data))
            self._answers.clear()
        self._out = self._out[self.sock.send(self._out) :]
        if self._out:
            raise BlockingIOError
        return self._taken

    def pending(self) -> int:
        """Return how many bytes have been read that ``select`` does not know of."""
        hidden = self.sock.pending() if hasattr(self.sock, "pending") else 0
        return sum(len(part) for part in self._ready) + hidden

    def fileno(self) -> int:
        """For ``select``."""
        return self.sock.fileno()

    def setblocking(self, flag: bool) -> None:
        """As of any socket."""
        self.sock.setblocking(flag)

    def close(self) -> None:
        """Release the socket."""
        self.sock.close()

    # Reading

    def _take_apart(self, data: memoryview) -> bool:
        """Sort what came; return whether the connection goes on."""
        if self._raw:
            data = memoryview(bytes(self._raw) + data)
            self._raw.clear()
        while data:
            if not self._left:
                head = _head(data)
                if head is None:
                    self._raw += data
                    return True
                size, self._opcode, self._left = head
                if self._left < 0 or (self._opcode >= CLOSE and self._left > LONGEST_CONTROL):
                    return False
                data = data[size:]
                self._control.clear()
            part, data = data[: self._left], data[self._left :]
            self._left -= len(part)
            if self._opcode < CLOSE:
                if len(part):
                    self._ready.append(part)
            else:
                self._control += part
                if not self._left and not self._controlled():
                    return False
        return True

    def _controlled(self) -> bool:
        if self._opcode == PING and len(self._answers) < LONGEST_ANSWER:
            self._answers += _frame(PONG, self._control)  # goes before the next message
        return self._opcode != CLOSE

    # Beginning

    def _shake_hands(self, address: Address) -> None:
        key = base64.b64encode(os.urandom(16))
        self.sock.sendall(
            b"GET %b HTTP/1.1\r\nHost: %b\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: %b\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: mqtt\r\n\r\n"
            % (address.path.encode(), str(address).encode(), key)
        )
        answer = bytearray()
        while b"\r\n\r\n" not in answer:
            data = self.sock.recv(4096)
            if not data or len(answer) > LONGEST_ANSWER:
                raise WebSocketError(f"it ends the connection at path {address.path}")
            answer += data
        head, _, rest = bytes(answer).partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if first.split(" ")[1:2] != ["101"]:
            raise WebSocketError(f"it answers {first[:80]!r} to path {address.path}")
        wanted = base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest()).decode()
        if fields.get("sec-websocket-accept") != wanted:
            raise WebSocketError(f"it does not agree to a WebSocket at path {address.path}")
        self._take_apart(memoryview(rest))


def _head(data: memoryview) -> tuple[int, int, int] | None:
    """Return the size of a message's head, its opcode and its length (-1: none that a server may send)."""
    if len(data) < 2:
        return None
    opcode, short = data[0] & 15, data[1]
    size = 2 + {126: 2, 127: 8}.get(short, 0)
    if len(data) < size:
        return None
    length = short if size == 2 else int.from_bytes(data[2:size])
    known = opcode in (0, BINARY, CLOSE, PING, PONG) and not data[0] & 0x70 and short < 128
    return size, opcode, length if known else -1


def _frame(opcode: int, data: bytes | bytearray | memoryview) -> bytes:
    """Return a whole message, masked as a client must."""
    length = len(data)
    if length < 126:
        head = struct.pack("!BB", 0x80 | opcode, 0x80 | length)
    elif length < 1 << 16:
        head = struct.pack("!BBH", 0x80 | opcode, 0xFE, length)
    else:
        head = struct.pack("!BBQ", 0x80 | opcode, 0xFF, length)
    mask = os.urandom(4)
    masked = np.zeros(-(-length // 4) * 4, np.uint8)
    masked[:length] = np.frombuffer(data, np.uint8)
    words = masked.view(np.uint32)
    words ^= np.frombuffer(mask, np.uint32)
    return head + mask + masked[:length].tobytes()
