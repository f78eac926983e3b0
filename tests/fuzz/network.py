"""A broker in memory between real endpoints: whole runs over it, with whatever else is published to their topics."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Self

from edgesplit.errors import FrameError
from edgesplit.transport.base import Inbox, Message
from edgesplit.transport.endpoint import Announce, Deliver, Effect, Endpoint
from edgesplit.transport.key import Key
from edgesplit.transport.reliable import Publish

CHUNK = 700
TICK_S = 0.02


class Network:
    """The endpoints of one run.

    Args:
        key: the run's; all sign with it and believe nothing else. None: nobody signs.
        first_boot: of the first node that connects; the others' follow.
        seen: called with each frame that is published: to whom, and its bytes.
    """

    def __init__(
        self, key: Key | None = None, seen: Callable[[str, bytes], None] = lambda to, data: None, first_boot: int = 1
    ) -> None:
        self.key, self._seen, self._first_boot = key, seen, first_boot
        self.ends: dict[str, Endpoint] = {}
        self.inboxes: dict[str, Inbox] = {}
        self.wrong: list[BaseException] = []
        self._lock = threading.RLock()
        self._queue: deque[tuple[str, bytes]] = deque()
        self._carrying = False
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)
        self._ticker.start()

    def connect(self, node: str) -> Wire:
        with self._lock:
            self.ends[node] = Endpoint("run", node, self._first_boot + len(self.ends), key=self.key)
            self.inboxes[node] = Inbox(node)
        return Wire(self, node)

    def send(self, sender: str, to: str, messages: Iterable[Message]) -> None:
        with self._lock:
            end = self.ends[sender]
            outgoing = end.pack(to, list(messages))
            for chunk in end.cut(to, outgoing, CHUNK):
                self._perform(sender, end.send(to, chunk, time.monotonic()))
            self._carry()

    def publish(self, to: str, data: bytes) -> None:
        """Have somebody publish a packet to a node's topic."""
        with self._lock:
            self._queue.append((to, data))
            self._carry()

    def _perform(self, node: str, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Publish):
                data = bytes(effect.data)
                self._seen(effect.peer, data)
                self._queue.append((effect.peer, data))
            elif isinstance(effect, Deliver):
                self.inboxes[node].put(effect.message)
            else:
                assert isinstance(effect, Announce) or effect.peer

    def _carry(self) -> None:
        if self._carrying:
            return
        self._carrying = True
        try:
            while self._queue:
                to, data = self._queue.popleft()
                if to in self.ends:
                    self._arrived(to, data)
        finally:
            self._carrying = False

    def _arrived(self, to: str, data: bytes) -> None:
        end = self.ends[to]
        try:
            self._perform(to, end.received(end.parse(data), time.monotonic()))
        except FrameError:
            pass
        except Exception as error:  # noqa: BLE001 - what a test is to find
            self.wrong.append(error)

    def _tick(self) -> None:
        while not self._ended.wait(TICK_S):
            with self._lock:
                for node, end in list(self.ends.items()):
                    self._perform(node, end.tick(time.monotonic(), time.time()))
                self._carry()

    def close(self) -> None:
        self._ended.set()
        self._ticker.join()


class Wire:
    """One node's transport."""

    def __init__(self, network: Network, node: str) -> None:
        self._network, self.node = network, node

    def mailbox(self, node: str) -> Inbox:
        return self._network.inboxes[node]

    def send(self, node: str, *messages: Message) -> None:
        self._network.send(self.node, node, messages)

    def probe(self, peers: Iterable[str], timeout: float = 10.0) -> None:
        return

    def flush(self, timeout: float) -> None:
        with contextlib.suppress(KeyError):
            deadline = time.monotonic() + timeout
            while self._network.ends[self.node].missing() and time.monotonic() < deadline:
                time.sleep(TICK_S)

    def traffic(self, node: str) -> Mapping[str, int]:
        return self._network.ends[self.node].traffic()

    def close(self) -> None:
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
