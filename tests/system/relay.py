"""A network of one's own between one client and a broker, which can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any

from tests.brokers import free_port


class Relay:
    """Forwards connections to a port of this machine until it is cut.

    Args:
        port: of the broker.
    """

    def __init__(self, port: int) -> None:
        self.port, self._target = free_port(), port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._writers: set[asyncio.StreamWriter] = set()
        self._call(self._begin())

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """From now on nothing passes, and nobody is told: what was sent waits."""
        self._call(self._cut())

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
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def _cut(self) -> None:
        self._open.clear()

    async def _reset(self) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _mend(self) -> None:
        self._open.set()
        if not self._server.is_serving():
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """What a client sent that gave up meanwhile does not arrive: its connection was never there."""
        self._writers.add(writer)
        try:
            first = b""
            while not self._open.is_set():
                with contextlib.suppress(TimeoutError):
                    data = await asyncio.wait_for(reader.read(1 << 16), 0.05)
                    if not data:
                        return
                    first += data
            up_reader, up = await asyncio.open_connection("127.0.0.1", self._target)
            self._writers.add(up)
            try:
                up.write(first)
                await asyncio.gather(self._pump(reader, up), self._pump(up_reader, writer))
            finally:
                self._writers.discard(up)
                up.transport.abort()
        except OSError:
            return
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self._open.wait()
            writer.write(data)
            await writer.drain()
        await self._open.wait()
        writer.close()
