"""Data messages that wait for their turn on a node: those that a sheet announces, from those that are to send them.

Whatever a neighbour sends, what is kept has a limit. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from edgesplit.transport.base import Message

Key = tuple[str, int, int, int]
"""Kind, stage, micro-batch, slice."""

MOST_EARLY = 4096
"""Messages that one neighbour may send before the sheets that announce them. One that keeps to the sheets is two steps
ahead at most."""

MOST_BYTES = 1 << 30
"""Bytes of one neighbour's messages that wait for their sheet, and of one device's that wait for their turn."""


def key_of(message: Message) -> Key:
    """Return what a data message is held by."""
    return message.kind, message.stage, message.micro, message.slice


class Mailbox:
    """Holds data messages until they are taken.

    Attributes:
        dropped: messages that nothing waits for, that come from another than they should, or that are too much.
    """

    def __init__(self) -> None:
        self.dropped = 0
        # By micro-batch: who is to send it, and the device whose micro-batch it is.
        self._awaited: dict[int, dict[Key, tuple[str, str]]] = {}
        self._held: dict[Key, Message] = {}
        self._bytes: dict[str, int] = {}  # held, by device
        self._early: dict[str, dict[Key, Message]] = {}  # by sender
        self._early_bytes: dict[str, int] = {}
        self._next_micro = 0  # all before it have been announced

    def __len__(self) -> int:
        return len(self._held) + len(self._awaited) + sum(map(len, self._early.values()))

    def expect(self, awaited: Mapping[Key, tuple[str, str]], next_micro: int) -> None:
        """A sheet has come: these messages are to follow, each from a sender and of a device's micro-batch.

        Args:
            next_micro: micro-batches before this number have been announced, here or to other nodes.
        """
        for key, sender in awaited.items():
            self._awaited.setdefault(key[2], {})[key] = sender
        self._next_micro = max(self._next_micro, next_micro)
        self._retry(lambda message: True)

    def put(self, message: Message) -> None:
        """Hold a message, the first under its key; or drop it."""
        key = key_of(message)
        if key in (awaited := self._awaited.get(message.micro, {})):
            sender, device = awaited[key]
            size = self._bytes.get(device, 0) + message.nbytes
            if sender == message.sender and key not in self._held and size <= MOST_BYTES:
                self._held[key], self._bytes[device] = message, size
                return
        elif message.micro >= self._next_micro:
            early = self._early.setdefault(message.sender, {})
            size = self._early_bytes.get(message.sender, 0) + message.nbytes
            if key not in early and len(early) < MOST_EARLY and size <= MOST_BYTES:
                early[key], self._early_bytes[message.sender] = message, size
                return
        self.dropped += 1

    def get(self, key: Key) -> Message | None:
        """Return a message that is there."""
        return self._held.get(key)

    def take(self, key: Key) -> None:
        """Let go of a message, and wait for it no more."""
        self._let_go(key)
        awaited = self._awaited.get(key[2], {})
        awaited.pop(key, None)
        if not awaited:
            self._awaited.pop(key[2], None)

    def forget(self, micros: Collection[int]) -> None:
        """Let go of all that belongs to these micro-batches."""
        for micro in micros:
            for key in list(self._awaited.get(micro, ())):
                self.take(key)

    def renew(self, term: int) -> None:
        """Let go of what was sent in an earlier term."""
        for key in [key for key, message in self._held.items() if message.term < term]:
            self._let_go(key)
        self._retry(lambda message: message.term >= term)

    def clear(self) -> None:
        """Let go of everything; micro-batches may be numbered anew."""
        for held in (self._awaited, self._held, self._bytes, self._early, self._early_bytes):
            held.clear()
        self._next_micro = 0

    def _let_go(self, key: Key) -> None:
        message = self._held.pop(key, None)
        if message is not None:
            device = self._awaited[key[2]][key][1]
            left = self._bytes.pop(device, 0) - message.nbytes
            if left:
                self._bytes[device] = left

    def _retry(self, wanted: Callable[[Message], bool]) -> None:
        """Take those that came early anew."""
        early = [message for of_one in self._early.values() for message in of_one.values() if wanted(message)]
        self._early.clear()
        self._early_bytes.clear()
        for message in early:
            self.put(message)
