"""A network of one's own between clients and a broker, which can be cut or slowed down."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Coroutine
from typing import Any

from tests.brokers import free_port

PIECE, SLOW_PIECE = 1 << 16, 1 << 12
SEGMENT = 1400


class Relay:
    """Forwards connections to a port of this machine until it is cut.

    Args:
        port: of the broker.
        tls: clients speak TLS to here, and nobody does from here on, as at a web server in front of a broker.
    """

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.port, self._target, self._tls = free_port(), port, tls
        self._rate: float | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._writers: set[asyncio.StreamWriter] = set()
        self._call(self._begin())

    def cut(self) -> None:
        """From now on nothing passes, and nobody is told: what was sent waits."""
        self._call(self._cut())

    def slow(self, rate: float) -> None:
        """From now on the clients get so many bytes a second of what the broker sends them."""
        self._rate = rate

    def reset(self) -> None:
        """End all connections, and take no new ones."""
        self._call(self._reset())

    def mend(self) -> None:
        """Let all pass again."""
        self._call(self._mend())

    def close(self) -> None:
        self._call(self._reset())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, what: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(10)

    async def _begin(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        await self._listen()

    async def _cut(self) -> None:
        self._open.clear()

    async def _reset(self) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _mend(self) -> None:
        self._rate = None
        self._open.set()
        if not self._server.is_serving():
            await self._listen()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self._tls)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """What a client sent that gave up meanwhile does not arrive: its connection was never there."""
        self._writers.add(writer)
        try:
            first = b""
            while not self._open.is_set():
                with contextlib.suppress(TimeoutError):
                    data = await asyncio.wait_for(reader.read(PIECE), 0.05)
                    if not data:
                        return
                    first += data
            up_reader, up = await asyncio.open_connection(sock=await self._narrow())
            self._writers.add(up)
            try:
                up.write(first)
                await asyncio.gather(self._pump(reader, up), self._pump(up_reader, writer, down=True))
            finally:
                self._writers.discard(up)
                up.transport.abort()
        except OSError:
            return
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _narrow(self) -> socket.socket:
        """Connect to the broker; what this end does not read is soon the broker's affair, not the system's."""
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
        # With the long segments of the loopback interface the system would keep megabytes on the broker's side too.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._target))
        except BaseException:
            sock.close()
            raise
        return sock

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, down: bool = False) -> None:
        while data := await reader.read(SLOW_PIECE if down and self._rate else PIECE):
            await self._open.wait()
            if down and self._rate:  # before it passes: what was being waited for may be a long piece
                await asyncio.sleep(len(data) / self._rate)
            writer.write(data)
            await writer.drain()
        await self._open.wait()
        writer.close()
