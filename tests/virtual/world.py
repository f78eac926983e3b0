"""A virtual clock, and on it a broker, the links to it, and what befalls them. One seed makes all of it.

Only what clients can see of a broker is modelled: it forwards what is published to who has subscribed and is connected
now, keeps retained statuses, publishes last wills, drops a client that is silent for long, and may forget it all. A
packet's way from one client through the broker to another is one event, for speed: it is lost if the receiver or the
broker has not been the same connection throughout. In order between two clients, unless a fault says otherwise.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from edgesplit.task import COORDINATOR
from edgesplit.transport.base import Message
from tests.virtual.faults import Faults
from tests.virtual.fleet import Stuck

if TYPE_CHECKING:
    from tests.virtual.process import Process

RUN = "run"
WALL = 1_764_536_400.0
"""The time of day at which every run begins."""

BROKER_PATIENCE, CLIENT_PATIENCE = 15.0, 20.0
"""Seconds of silence after which a broker drops a client (1.5 keepalives), and a client its broker (two pings)."""


class Client:
    """One process's connection to the broker, as both ends see it.

    Attributes:
        conn: number of the connection; 0: the client has none. It may not know yet that the broker has dropped it.
        cut_until: nothing passes either way before this time.
        latency: seconds to the broker, about.
        watch: nodes whose status it subscribes to; None: all.
    """

    __slots__ = ("conn", "cut_until", "dead", "last", "latency", "process", "reset", "skew", "watch")

    def __init__(self, process: Process, latency: float, skew: float, watch: frozenset[str] | None) -> None:
        self.process, self.latency, self.skew, self.watch = process, latency, skew, watch
        self.conn = 0
        self.cut_until = -math.inf
        self.dead = False
        self.reset = False  # some of what it has sent is lost
        self.last: dict[str, float] = {}


class World:
    """The clock, the broker, the links."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.rng = Random(seed)
        self.faults = faults
        self.now = 0.0
        self.packets = 0
        self.events = 0
        self.met: Counter[str] = Counter()  # faults by their names
        self.processes: dict[str, Process] = {}
        self.lives: dict[str, int] = {}
        self.disks: dict[str, dict[str, Any]] = {}
        self.broker_up = True
        self.aims = dict(faults.aims)
        self._kinds: Counter[str] = Counter()  # messages that were about to be sent
        self._makers: dict[str, Callable[[Client, dict[str, Any]], Process]] = {}
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._conns = 0
        self._retained: dict[str, bytes] = {}
        self._sessions: dict[Client, int] = {}  # as the broker sees them
        self._random = self.rng.random
        self._chance = faults.any
        self._due = sorted({*faults.strikes, *faults.crashes}, reverse=True)
        self._next_strike = self._due.pop() if self._due else math.inf
        self.at(faults.calm, self._calm)

    # The clock

    def at(self, when: float, action: Callable[..., None], *args: Any) -> None:
        """Do something later."""
        self._count = count = self._count + 1
        heapq.heappush(self._heap, (when, count, action, args))

    def run(self, done: Callable[[], bool], until: float, look: float = 0.1) -> None:
        """Run until something is true, at which is looked every ``look`` seconds. Raises Stuck where it never is."""
        heap, pop = self._heap, heapq.heappop
        while not done():
            if self.now >= until:
                held = {name: process.waits_for() for name, process in self.processes.items()}
                raise Stuck(f"after {self.now:.1f} s and {self.packets} packets: {held}")
            pause = self.now + look
            while heap and heap[0][0] <= pause:
                self.now, _, action, args = pop(heap)
                self.events += 1
                action(*args)
            self.now = pause

    # Processes

    def add(
        self, name: str, make: Callable[[Client, dict[str, Any]], Process], watch: frozenset[str] | None = None
    ) -> None:
        """Put a process into the world and start it. ``make`` is called again after each crash, with the same disk."""
        self._makers[name], self.disks[name], self.lives[name] = make, {}, 0
        self._start(name, 10 ** self.rng.uniform(-3.5, -1.3), self.rng.choice([0.0, 0.0, 3.0, -100.0]), watch)

    def _start(self, name: str, latency: float, skew: float, watch: frozenset[str] | None) -> None:
        self.lives[name] += 1
        client = Client(None, latency, skew, watch)  # type: ignore[arg-type]
        client.process = self.processes[name] = self._makers[name](client, self.disks[name])
        self.at(self.now + 0.05 * self._random(), self._connect, client, 0.05)

    def crash(self, name: str, down: float, *, power: bool = False, wipe: bool = False) -> None:
        """End a process without a word and start it again after ``down`` seconds, with an empty memory.

        A power cut takes its socket along, so that the broker notices nothing before it misses the keepalives.
        ``wipe``: it comes back without its disk.
        """
        client = self.processes[name].client
        if client.dead:
            return
        conn, client.conn, client.dead = client.conn, 0, True
        if wipe:
            self.disks[name] = {}
        if conn:
            self.at(self.now + (BROKER_PATIENCE if power else client.latency), self._drop, client, conn)
        self.at(self.now + down, self._start, name, client.latency, client.skew, client.watch)

    # What clients do

    def publish(self, client: Client, to: str, data: bytearray) -> None:
        """Take a packet for another process's topic."""
        self.packets = number = self.packets + 1
        if number >= self._next_strike:
            self._strike()
        if client.conn:
            self._pass(client, client.conn, to, bytes(data))

    def _pass(self, client: Client, conn: int, to: str, data: bytes) -> None:
        now, sessions = self.now, self._sessions
        if client.cut_until > now:
            self.at(client.cut_until, self._pass, client, conn, to, data)
            return
        if sessions.get(client) != conn:
            return  # the connection broke while the packet waited for the link, or is dead without the client's knowing
        process = self.processes.get(to)
        target = process.client if process is not None else None
        if target is None or target not in sessions:
            return  # nobody subscribes to that
        chance = self._random()
        due = now + (client.latency + target.latency) * (0.5 + chance)
        if chance < self._chance:
            self._fault(client, target, due, data)
            return
        last = client.last
        if due < last.get(to, 0.0):
            due = last[to]
        last[to] = due
        self._count = count = self._count + 1
        heapq.heappush(self._heap, (due, count, self._arrive, (client, conn, target, target.conn, data)))

    def _arrive(self, client: Client, conn: int, target: Client, target_conn: int, data: bytes) -> None:
        if target.conn != target_conn or self._sessions.get(target) != target_conn:
            return
        if client.reset and client.conn != conn and self._random() < 0.5:
            return  # it had not left the sender's host
        if target.cut_until > self.now:
            self.at(target.cut_until, self._arrive, client, conn, target, target_conn, data)
        else:
            target.process.packet(data)

    def announce(self, client: Client, data: bytes, retain: bool) -> None:
        """Take a status."""
        if client.conn and self._random() >= self.faults.loss:
            self.at(
                max(self.now, client.cut_until) + client.latency, self._announced, client, client.conn, data, retain
            )

    def _announced(self, client: Client, conn: int, data: bytes, retain: bool) -> None:
        if self._sessions.get(client) == conn:
            self._status(client.process.name, data, retain)

    # The broker

    def _status(self, name: str, data: bytes, retain: bool) -> None:
        if retain and data:
            self._retained[name] = data
        elif retain:
            self._retained.pop(name, None)
        if data:
            for client, conn in self._sessions.items():
                self._tell(client, conn, name, data, False)

    def _tell(self, client: Client, conn: int, name: str, data: bytes, retained: bool) -> None:
        if client.process.name != name and (client.watch is None or name in client.watch):
            self.at(self.now + client.latency, self._told, client, conn, name, data, retained)

    def _told(self, client: Client, conn: int, name: str, data: bytes, retained: bool) -> None:
        if client.conn != conn or self._sessions.get(client) != conn:
            return
        if client.cut_until > self.now:
            self.at(client.cut_until, self._told, client, conn, name, data, retained)
        else:
            client.process.status(name, data, retained)

    def _drop(self, client: Client, conn: int) -> None:
        """The broker gives a client up and publishes its will."""
        if self._sessions.get(client) == conn:
            del self._sessions[client]
            self._status(client.process.name, client.process.will, True)

    def crash_broker(self, down: float, *, forget: bool, power: bool) -> None:
        """All sessions end, and all that is under way is lost. ``power``: no client is told."""
        if not self.broker_up:
            return
        self.broker_up = False
        up_at = min(self.now + down, max(self.now, self.faults.calm))
        for client in self._sessions:
            at = min(up_at + 2 * self._random(), self.now + CLIENT_PATIENCE) if power else self.now + client.latency
            self.at(max(at, client.cut_until), self._lost, client, client.conn)
        self._sessions.clear()
        if forget:
            self._retained.clear()
        self.at(up_at, self._restart_broker)

    def _restart_broker(self) -> None:
        self.broker_up = True

    # Connections

    def _connect(self, client: Client, pause: float) -> None:
        if client.dead:
            return
        if not self.broker_up or client.cut_until > self.now:
            self.at(self.now + pause, self._connect, client, min(2 * pause, 1.0))
            return
        self._conns += 1
        client.conn = conn = self._conns
        self.at(self.now + 2 * client.latency, self._subscribed, client, conn)

    def _subscribed(self, client: Client, conn: int) -> None:
        if client.dead or client.conn != conn:
            return
        if not self.broker_up or client.cut_until > self.now:
            self._lost(client, conn)
            return
        if client in self._sessions:  # the same client id: the broker throws its old connection out
            self._drop(client, self._sessions[client])
        self._sessions[client] = conn
        for name, data in self._retained.items():
            self._tell(client, conn, name, data, True)
        self.at(self.now + client.latency, self._ready, client, conn)

    def _ready(self, client: Client, conn: int) -> None:
        if client.conn == conn:
            client.process.up()

    def _lost(self, client: Client, conn: int) -> None:
        if client.conn == conn and not client.dead:
            client.conn = 0
            client.process.down()
            self.at(self.now + 0.05, self._connect, client, 0.1)

    # Faults

    def _fault(self, client: Client, target: Client, due: float, data: bytes) -> None:
        faults, dice = self.faults, self._random() * self._chance
        args = client, client.conn, target, target.conn
        if dice < faults.loss:
            self.met["loss"] += 1
            return
        dice -= faults.loss
        if dice < faults.repeat:
            self.met["repeat"] += 1
            self.at(due, self._arrive, *args, data)
            self.at(due + faults.far * self._random(), self._arrive, *args, data)
        elif dice < faults.repeat + faults.garble:
            self.met["garble"] += 1
            self.at(due, self._arrive, *args, self._garbled(data))
        elif dice < faults.repeat + faults.garble + faults.spike:
            self.met["spike"] += 1  # all that follows waits too
            due += faults.far * self._random()
            client.last[target.process.name] = max(due, client.last.get(target.process.name, 0.0))
            self.at(due, self._arrive, *args, data)
        else:
            self.met["reorder"] += 1
            self.at(due + 10 * (client.latency + target.latency) * self._random(), self._arrive, *args, data)

    def _garbled(self, data: bytes) -> bytes:
        at = self.rng.randrange(len(data))
        match self.rng.randrange(3):
            case 0:
                return data[:at]
            case 1:
                return data + data[:at]
            case _:
                return data[:at] + bytes([data[at] ^ (1 << self.rng.randrange(8))]) + data[at + 1 :]

    def _strike(self) -> None:
        number = int(self._next_strike)
        self._next_strike = self._due.pop() if self._due else math.inf
        if self.now >= self.faults.calm:
            return
        rng = self.rng
        if (name := self.faults.crashes.get(number)) is not None:
            self._fell(name, power=rng.random() < 0.3)  # perhaps the one that publishes: nothing more leaves it
        if (what := self.faults.strikes.get(number)) is None:
            return
        self.met[what] += 1
        client = rng.choice(list(self.processes.values())).client
        if what == "reset":
            self.at(self.now, self._reset, client)
        elif what == "cut":
            self._cut(client, rng.uniform(0.05, 5.0))
        elif what == "long cut":
            self._cut(client, rng.uniform(12.0, 30.0))
        elif what == "power cut":
            self.at(self.now, self._break_broker, 10 ** rng.uniform(-2, 1), True, True)
            for name in rng.sample(sorted(self.processes), rng.randint(1, len(self.processes))):
                self._fell(name, power=True)
        else:
            power = what == "broker power"
            self.at(self.now, self._break_broker, 10 ** rng.uniform(-2, 1), rng.random() < 0.7, power)

    def _fell(self, name: str, *, power: bool) -> None:
        """A process crashes, and is back when all is well at the latest."""
        if self.processes[name].client.dead:
            return
        rng = self.rng
        self.met["crash of the coordinator" if name == COORDINATOR else "crash"] += 1
        wipe = name != COORDINATOR and self.faults.wipe > 0 and rng.random() < self.faults.wipe
        if wipe:
            self.met["wipe"] += 1
        down = min(10 ** rng.uniform(*self.faults.down), max(self.faults.calm - self.now, 0.05))
        self.crash(name, down, power=power, wipe=wipe)

    def about_to_send(self, sender: str, messages: Sequence[Message]) -> None:
        """Crash who is to crash before one of these messages is sent."""
        for message in messages:
            self._kinds[message.kind] = number = self._kinds[message.kind] + 1
            if (message.kind, number) in self.aims and self.now < self.faults.calm:
                self.met["aimed"] += 1
                self._fell(self.aims.pop((message.kind, number)) or sender, power=False)

    def _break_broker(self, down: float, forget: bool, power: bool) -> None:
        self.crash_broker(down, forget=forget, power=power)

    def _reset(self, client: Client) -> None:
        """A client's connection is cut off; both ends learn of it."""
        if conn := client.conn:
            client.reset = True
            self.at(self.now + client.latency, self._drop, client, conn)
            self._lost(client, conn)

    def _cut(self, client: Client, length: float) -> None:
        """Nothing passes for a while, and TCP sends it later, unless one end loses patience before."""
        until = min(self.now + length, self.faults.calm)
        client.cut_until = max(client.cut_until, until)
        if until - self.now >= BROKER_PATIENCE and client.conn:
            self.at(self.now + BROKER_PATIENCE, self._drop, client, client.conn)
            self.at(min(until, self.now + CLIENT_PATIENCE), self._lost, client, client.conn)

    def _calm(self) -> None:
        self._chance = 0.0
        self.faults.loss = 0.0  # of statuses
