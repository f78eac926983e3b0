"""Processes that crash and lose nothing: each has numbers to bring to every other, and writes down what came.

In place of training where the transport itself is on trial: lives that end, late words of the dead, statuses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any

from edgesplit.protocol import Send
from edgesplit.transport.base import Message
from tests.virtual.faults import Faults, draw_faults
from tests.virtual.process import Process
from tests.virtual.trial import PATIENCE_S, SETTINGS
from tests.virtual.world import Client, World


class Ledger:
    """Sends ``entry`` 1, 2, ... to each peer, a few at a time, until it has heard ``got`` of all.

    On disk: ``got`` (peer -> the last that it has), ``have`` (peer -> the last that came from it). A transport that has
    acknowledged a message may have crashed before it was read, so each life says from where on it needs them.
    """

    def __init__(self, name: str, peers: Sequence[str], most: int, disk: dict[str, Any], rng: Random) -> None:
        self.name, self.peers, self.most, self.disk = name, peers, most, disk
        self._rng = rng
        disk.setdefault("got", dict.fromkeys(peers, 0))
        disk.setdefault("have", dict.fromkeys(peers, 0))
        self._next = {peer: disk["got"][peer] + 1 for peer in peers}
        self._due = math.inf
        self.online: dict[str, bool] = {}

    @property
    def done(self) -> bool:
        return all(self.disk[side][peer] == self.most for side in ("got", "have") for peer in self.peers)

    def on_start(self, now: float) -> Sequence[Send]:
        self._due = now
        return [self._send(peer, "begin", self.disk["have"][peer]) for peer in self.peers]

    def on_message(self, message: Message, now: float) -> Sequence[Send]:
        peer = message.sender
        if message.kind == "status":
            self.online[peer] = message.meta["state"] == "online"
        elif message.kind in {"got", "begin"}:
            self.disk["got"][peer] = max(self.disk["got"][peer], message.micro)
            if message.kind == "begin":
                self._next[peer], self._due = message.micro + 1, now
                return [self._send(peer, "got", self.disk["have"][peer])]
        elif message.micro == self.disk["have"][peer] + 1:
            self.disk["have"][peer] += 1
            return [self._send(peer, "got", message.micro)]
        return ()

    def next_deadline(self) -> float:
        return self._due

    def on_tick(self, now: float) -> Sequence[Send]:
        sends = []
        for peer in self.peers:
            end = min(self._next[peer] + self._rng.randint(0, 3), self.most + 1)
            sends += [self._send(peer, "entry", number) for number in range(self._next[peer], end)]
            self._next[peer] = end
        more = any(number <= self.most for number in self._next.values())
        self._due = now + 0.1 * self._rng.random() if more else math.inf
        return sends

    def waits_for(self) -> object:
        return self.disk

    def _send(self, to: str, kind: str, number: int) -> Send:
        pad = "." * (number % 5 * 60)
        return Send(to, Message(kind=kind, sender=self.name, micro=number, meta={"pad": pad}))


def ledgers(seed: int, faults: Faults | None = None) -> World:
    """Run two to four of them to the end; then each must know of each other that it is there."""
    rng = Random(seed)
    names = ["a", "b", "c", "d"][: rng.randint(2, 4)]
    drawn = faults or draw_faults(rng, names)
    world = World(rng.getrandbits(64), drawn)
    most, chunk_size, settings = rng.randint(3, 8), rng.choice([160, 224, 4096]), rng.choice(SETTINGS)

    def maker(name: str) -> Any:
        def make(client: Client, disk: dict[str, Any]) -> Process:
            program = Ledger(name, [n for n in names if n != name], most, disk, world.rng)
            return Process(world, name, client, program, chunk_size, settings)

        return make

    for name in names:
        world.add(name, maker(name))

    def quiet() -> bool:
        processes = world.processes.values()
        return all(p.program.done and not p.endpoint.missing() for p in processes)  # type: ignore[attr-defined]

    def all_seen() -> bool:
        programs = [process.program for process in world.processes.values()]
        return all(program.online.get(n) for program in programs for n in program.peers)  # type: ignore[attr-defined]

    until = drawn.calm + PATIENCE_S
    try:
        world.run(quiet, until)
        # A status tells of the last life: what was said before the last fault may still come.
        world.run(lambda: world.now > drawn.calm + 40, until, look=5.0)
        world.run(all_seen, until)
    except BaseException as error:
        error.add_note(f"seed {seed}: python -m tests.virtual ledgers --start {seed} --seeds 1")
        raise
    return world
