"""The seam between a node and the network: messages, an inbox, and what every transport must do."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping
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


MOST_WAITING = 64 << 20
"""Bytes of one sender's messages in an inbox; until half of them have been read, its transport takes no more of it."""

OVERHEAD = 512
"""Bytes that a message takes beside its arrays, at least."""


class Inbox:
    """Messages for one node in the order of arrival; blocking, thread-safe.

    A network transport asks :meth:`full` before it takes more from a sender, and is told by ``on_room`` when there is
    room again: what is not taken is not acknowledged, so it waits at the sender, and nothing grows here.

    A change in another node's liveness is a message too: ``kind="status"``, ``sender`` the node it is about,
    ``meta["state"]`` ``"online"`` or ``"offline"`` with ``meta["reason"]``. ``kind="refused"`` tells that ``sender``
    and this node do not believe each other, and ``meta["reason"]`` why. A transport that cannot go on
    calls :meth:`fail`; the next :meth:`get` raises that error.
    """

    def __init__(self, node: str) -> None:
        self.node = node
        self.on_room: Callable[[str], None] = lambda sender: None
        self._messages: queue.SimpleQueue[tuple[Message | BaseException, int]] = queue.SimpleQueue()
        self._failed = threading.Event()
        self._lock = threading.Lock()
        self._waiting: dict[str, int] = {}
        self._held_up: set[str] = set()

    def put(self, message: Message, size: int = 0) -> None:
        """Add a message that takes about ``size`` bytes; never blocks."""
        size = max(size, message.nbytes) + OVERHEAD
        with self._lock:
            self._waiting[message.sender] = self._waiting.get(message.sender, 0) + size
        self._messages.put((message, size))

    def full(self, sender: str) -> bool:
        """Whether no more is to be taken from ``sender`` for now; ``on_room`` is called when that changes."""
        with self._lock:
            if self._waiting.get(sender, 0) < MOST_WAITING:
                return False
            self._held_up.add(sender)
            return True

    def waiting(self) -> dict[str, int]:
        """Bytes that wait to be read, by sender."""
        with self._lock:
            return dict(self._waiting)

    def _read(self, message: Message, size: int) -> None:
        sender = message.sender
        with self._lock:
            left = self._waiting.pop(sender, 0) - size
            if left > 0:
                self._waiting[sender] = left
            room = sender in self._held_up and left < MOST_WAITING // 2
            if room:
                self._held_up.discard(sender)
        if room:
            self.on_room(sender)

    def fail(self, error: BaseException) -> None:
        """Make the next ``get`` raise ``error``; only the first failure counts."""
        if not self._failed.is_set():
            self._failed.set()
            self._messages.put((error, 0))

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
            item, size = self._messages.get(timeout=max(timeout, 0.0))
        except queue.Empty:
            raise TransportTimeout(
                f"{self.node!r} waited {timeout:g} s for {waiting_for}, which did not come"
            ) from None
        if isinstance(item, BaseException):
            raise item
        self._read(item, size)
        return item

    def poll(self) -> Message | None:
        """Take the next message if there is one."""
        try:
            item, size = self._messages.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            raise item
        self._read(item, size)
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
