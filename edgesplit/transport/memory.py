"""Nodes that are threads of one process: their messages go from hand to hand."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Self

from edgesplit.errors import TransportError
from edgesplit.transport import frames
from edgesplit.transport.base import Inbox, Message


class MemoryTransport:
    """One transport for all nodes of a process.

    A message is what it would be after a network: a copy made when it was sent, its meta plain JSON.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inboxes: dict[str, Inbox] = {}
        self._waiting: defaultdict[str, list[Message]] = defaultdict(list)
        self._traffic: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._closed = False

    def mailbox(self, node: str) -> Inbox:
        """Return the inbox of ``node``; what was sent to it before is in it."""
        with self._lock:
            if node not in self._inboxes:
                inbox = self._inboxes[node] = Inbox(node)
                for message in self._waiting.pop(node, []):
                    inbox.put(message)
            return self._inboxes[node]

    def send(self, node: str, *messages: Message) -> None:
        """Put a copy of each message into the inbox of ``node``, or keep it until that is opened.

        Raises:
            FrameError: a message could not travel (see :func:`frames.encode`).
            TransportError: the transport is closed, or a name is none.
        """
        for message in messages:
            self._send(node, message)

    def _send(self, node: str, message: Message) -> None:
        for name in (node, message.sender):
            if not frames.valid_name(name):
                raise TransportError(f"node name {name!r} must be 1 to 64 of A-Z a-z 0-9 . _ -")
        body = b"".join(frames.encode(message))
        copy = frames.decode(memoryview(body), message.sender)
        with self._lock:
            if self._closed:
                raise TransportError(f"{message.kind!r} message to {node!r} after the transport was closed")
            self._traffic[message.sender, node] += len(body)
            if node in self._inboxes:
                self._inboxes[node].put(copy)
            else:
                self._waiting[node].append(copy)

    def offline(self, node: str, reason: str = "closed") -> None:
        """Tell all other nodes that ``node`` is gone."""
        status = Message(kind="status", sender=node, meta={"state": "offline", "reason": reason})
        with self._lock:
            for name, inbox in self._inboxes.items():
                if name != node:
                    inbox.put(status)

    def probe(self, peers: Iterable[str], timeout: float = 10.0) -> None:
        """Return at once: nothing can be in between."""

    def flush(self, timeout: float) -> None:
        """Return at once: what was sent has arrived."""

    def traffic(self, node: str) -> Mapping[str, int]:
        """Bytes that ``node`` has sent so far, by receiver."""
        with self._lock:
            return {to: count for (sender, to), count in self._traffic.items() if sender == node}

    def close(self) -> None:
        """Take no more messages; what is in the inboxes stays there."""
        with self._lock:
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
