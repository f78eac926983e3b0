"""One end of the transport's benchmark, in a process of its own: the same application over our transport or raw paho.

``python -m edgesplit.bench.ends SIDE NODE PEER URL RUN CHUNK`` says on stdout when it is ready. Node ``a`` then reads a
line of JSON on stdin for each block, ``["stream", bytes, messages]`` or ``["trips", bytes, times]``, and answers with
one: the seconds that it took. Node ``b`` answers ``a``. Both end with their stdin.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from edgesplit.bench.application import KINDS, Array, End, answer, stream, trips
from edgesplit.bench.raw import Raw
from edgesplit.codecs import pack, unpack
from edgesplit.transport.base import Message
from edgesplit.transport.mqtt import MqttTransport

RECEIVER = "b"


class Ours:
    """The transport of a run."""

    def __init__(self, node: str, peer: str, url: str, run: str) -> None:
        self._transport = MqttTransport(url, run=run, node=node)
        self._inbox = self._transport.mailbox(node)
        self._node, self._peer = node, peer
        self.chunk = self._transport.chunk_size

    def send(self, kind: str, data: Array) -> None:
        """Send an array."""
        self._transport.send(self._peer, Message(kind=kind, sender=self._node, arrays=pack({"x": data}, "raw")))

    def receive(self, timeout: float) -> tuple[str, Array]:
        """Return the next array."""
        while True:
            message = self._inbox.get(timeout, "the other end")
            if message.kind in KINDS:
                return message.kind, unpack(message.arrays)["x"]


def _end_with_stdin(line: Callable[[str], None]) -> None:
    for text in sys.stdin:
        line(text)
    os._exit(0)


def _say(answered: Any) -> None:
    sys.stdout.write(json.dumps(answered) + "\n")
    sys.stdout.flush()


def connect(side: str, node: str, peer: str, url: str, run: str, chunk: int) -> End:
    """Open an end; ``chunk`` is for raw paho only, which has nothing that finds it out."""
    if side == "ours":
        return Ours(node, peer, url, run)
    return Raw(node, peer, url, run, chunk=chunk, quick_ack=side == "raw-quick-ack")


def main(side: str, node: str, peer: str, url: str, run: str, chunk: str) -> None:
    """Run an end until stdin ends."""
    end = connect(side, node, peer, url, run, int(chunk))
    _say({"chunk": end.chunk})
    if node == RECEIVER:
        threading.Thread(target=_end_with_stdin, args=(lambda text: None,), daemon=True).start()
        answer(end)
    blocks = {"stream": stream, "trips": trips}

    def block(text: str) -> None:
        what, size, count = json.loads(text)
        _say(blocks[what](end, size, count))

    _end_with_stdin(block)


if __name__ == "__main__":
    main(*sys.argv[1:])
