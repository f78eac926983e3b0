"""Sends from a thread of its own, so that a node goes on computing while its last message is encoded and written."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Protocol, Self

from edgesplit.errors import TransportTimeout
from edgesplit.transport.base import Inbox, Message, Transport

DRAIN_S = 60.0
"""How long the traffic may take to be known: what is queued must be encoded first."""


class Probing(Transport, Protocol):
    """A transport that can make sure that its frames arrive."""

    def probe(self, peers: Iterable[str], timeout: float = ...) -> None:
        """Raise where a peer cannot be reached."""
        ...


class Outbox:
    """One node's transport, with sends queued; the order stays.

    The arrays of a message must not change after ``send``. What a send raises comes out of the node's inbox.

    Args:
        transport: that does the sending; closed with this.
        node: whose it is.
    """

    def __init__(self, transport: Probing, node: str) -> None:
        self._transport, self._inbox = transport, transport.mailbox(node)
        self._queue: queue.SimpleQueue[tuple[str, tuple[Message, ...]] | None] = queue.SimpleQueue()
        self._left = 0
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"edgesplit-outbox-{node}", daemon=True)
        self._thread.start()

    def mailbox(self, node: str) -> Inbox:
        """Return the node's inbox."""
        return self._transport.mailbox(node)

    def send(self, node: str, *messages: Message) -> None:
        """Queue ``messages`` for ``node``, to travel together."""
        with self._change:
            self._left += 1
        self._queue.put((node, messages))

    def probe(self, peers: Iterable[str], timeout: float = 10.0) -> None:
        """Make sure that frames reach these nodes, and theirs this one."""
        self._transport.probe(peers, timeout)

    def flush(self, timeout: float) -> None:
        """Wait until everything sent has been acknowledged. Raises TransportTimeout naming who has not."""
        deadline = time.monotonic() + timeout
        self._drain(timeout)
        self._transport.flush(max(deadline - time.monotonic(), 0.0))

    def traffic(self) -> Mapping[str, int]:
        """Bytes sent so far, by receiver, with what is queued."""
        self._drain(DRAIN_S)
        return self._transport.traffic()

    def close(self) -> None:
        """Send what is queued, end the thread, close the transport; may be called twice."""
        self._queue.put(None)
        self._thread.join()
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _drain(self, timeout: float) -> None:
        with self._change:
            if not self._change.wait_for(lambda: not self._left, timeout):
                raise TransportTimeout(f"{self._left} messages are not on their way after {timeout:g} s")

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            node, messages = item
            try:
                self._transport.send(node, *messages)
            except Exception as error:  # noqa: BLE001 - for the node's thread, which takes it from its inbox
                self._inbox.fail(error)
            with self._change:
                self._left -= 1
                self._change.notify_all()
