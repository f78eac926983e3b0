"""The seam between a node and the network: messages, an inbox, and what every transport must do."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from edgesplit.codecs import Packed
from edgesplit.errors import TransportTimeout

DATA_KINDS = frozenset({"act", "grad", "target"})
"""What travels along a route. Every other kind is control."""

LOCAL_KINDS = frozenset({"status", "refused"})
"""What a transport itself tells; never taken from the network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What one node sends another.

    Attributes:
        kind: ``act``, ``grad``, ``target``, or a control kind (``assign``, ``sheet``, ``commit``, ``report`` ...).
        sender: the node that sends.
        stage: the stage that a data message is for.
        micro: the micro-batch's number.
        slice: the part of the micro-batch (0: the whole).
        term: the coordinator's term under which it was sent.
        weight: the micro-batch's weight (``Task.weight``).
        version: the sender's weight version.
        loss_scale: what gradients were multiplied by.
        sent: the sender's clock when the message left it, in seconds since the epoch.
        meta: small JSON values: all that a control message says, and flags of a data message.
        arrays: encoded arrays by name.
    """

    kind: str
    sender: str
    stage: int = 0
    micro: int = 0
    slice: int = 0
    term: int = 0
    weight: float = 0.0
    version: int = 0
    loss_scale: float = 1.0
    sent: float = 0.0
    meta: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Packed] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the encoded arrays."""
        return sum(len(packed.data) for packed in self.arrays.values())


class Inbox:
    """Messages for one node in the order of arrival; blocking, thread-safe.

    A change in another node's liveness is a message too: ``kind="status"``, ``sender`` the node it is about,
    ``meta["state"]`` ``"online"`` or ``"offline"`` with ``meta["reason"]``. ``kind="refused"`` tells that ``sender``
    and this node do not believe each other, and ``meta["reason"]`` why. A transport that cannot go on
    calls :meth:`fail`; the next :meth:`get` raises that error.
    """

    def __init__(self, node: str) -> None:
        self.node = node
        self._messages: queue.SimpleQueue[Message | BaseException] = queue.SimpleQueue()
        self._failed = threading.Event()

    def put(self, message: Message) -> None:
        """Add a message; never blocks."""
        self._messages.put(message)

    def fail(self, error: BaseException) -> None:
        """Make the next ``get`` raise ``error``; only the first failure counts."""
        if not self._failed.is_set():
            self._failed.set()
            self._messages.put(error)

    @property
    def failed(self) -> bool:
        """Whether the transport has failed."""
        return self._failed.is_set()

    def get(self, timeout: float, waiting_for: str = "a message") -> Message:
        """Take the next message.

        Raises:
            TransportTimeout: none came within ``timeout`` seconds; names the node and ``waiting_for``.
        """
        try:
            item = self._messages.get(timeout=max(timeout, 0.0))
        except queue.Empty:
            raise TransportTimeout(
                f"{self.node!r} waited {timeout:g} s for {waiting_for}, which did not come"
            ) from None
        if isinstance(item, BaseException):
            raise item
        return item

    def poll(self) -> Message | None:
        """Take the next message if there is one."""
        try:
            item = self._messages.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            raise item
        return item


class Transport(Protocol):
    """Moves messages between nodes: each once, in order per sender, however bad the network below."""

    def mailbox(self, node: str) -> Inbox:
        """Return the inbox of ``node`` (a network transport has one node's only), receiving from now on."""
        ...

    def send(self, node: str, *messages: Message) -> None:
        """Queue ``messages`` for ``node``, to travel together; never blocks on the network and never drops."""
        ...

    def probe(self, peers: Iterable[str], timeout: float = 10.0) -> None:
        """Make sure that messages reach these nodes and theirs this one. Raises TransportTimeout naming the others."""
        ...

    def flush(self, timeout: float) -> None:
        """Wait until everything sent has been acknowledged. Raises TransportTimeout naming who has not."""
        ...

    def traffic(self, node: str) -> Mapping[str, int]:
        """Payload bytes that ``node`` (one of this transport's) has sent so far, by receiver."""
        ...

    def close(self) -> None:
        """Stop receiving, release sockets and threads; may be called twice."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...
