"""Reads and writes the socket of a paho client, in place of the client's own loop.

In that loop every publish wakes the network thread, which then contends with the publisher for the interpreter, just
when the publisher has its next micro-batch to compute. Here whoever publishes writes at once what the socket takes.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paho.mqtt.client import Client

CARE_S = 0.25
"""Between two looks at the connection's keep-alive, which is counted in seconds."""


class Pump:
    """Drives one client, by the calls that paho offers to other event loops.

    Args:
        client: with a callback ``on_socket_register_write``, else it writes by itself.
        direct: publishers may write. Not over TLS: two threads may not use one such socket.

    Attributes:
        writing: held by whoever writes, and to be held while the client's socket is replaced.
    """

    def __init__(self, client: Client, *, direct: bool) -> None:
        self.writing = threading.Lock()
        self._client, self._direct = client, direct
        self._care_at = 0.0
        self._watched = False
        self._bell, self._ear = socket.socketpair()
        for end in (self._bell, self._ear):
            end.setblocking(False)

    def turn(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for something to do and do it; return whether the client is connected still.

        For the network thread only.
        """
        client = self._client
        sock = client.socket()
        if sock is None:
            return False
        pending = hasattr(sock, "pending") and sock.pending() > 0
        self._watched = False  # before the look: what is queued after that rings
        writers = (sock,) if client.want_write() else ()
        self._watched = bool(writers)
        try:
            readable, _, _ = select.select((sock, self._ear), writers, (), 0.0 if pending else timeout)
        except (OSError, ValueError):
            return False  # a publisher found the connection lost and closed the socket
        if self._ear in readable:
            with contextlib.suppress(OSError):
                self._ear.recv(4096)
        if (pending or sock in readable) and client.loop_read():
            return False
        if client.want_write():
            with self.writing:
                if client.loop_write():
                    return False
        if (now := time.monotonic()) >= self._care_at:
            self._care_at = now + CARE_S
            return not client.loop_misc()
        return client.socket() is not None

    def published(self) -> None:
        """Write what has been published; the network thread goes on where the socket takes no more.

        For any thread but the network thread, with no lock held that the client's callbacks take.
        """
        if not self._client.want_write():
            return
        if self._direct and self.writing.acquire(blocking=False):
            try:
                self._client.loop_write()
            finally:
                self.writing.release()
            if not self._client.want_write() and self._client.socket() is not None:
                return
        # Who watches the socket wakes when it takes more; nobody does when it has been closed here.
        if not self._watched or self._client.socket() is None:
            self.ring()

    def ring(self) -> None:
        """Wake the network thread."""
        with contextlib.suppress(OSError):  # full: it will wake anyway; or closed
            self._bell.send(b"\0")

    def close(self) -> None:
        """Release the bell."""
        self._bell.close()
        self._ear.close()
