"""The reliability machine on a virtual clock: seeded schedules of loss, repeats, reordering and outages."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from edgesplit.transport import frames
from edgesplit.transport.base import Message
from edgesplit.transport.inbound import Bodies, Inbound
from edgesplit.transport.outbound import Outbound, Patience
from edgesplit.transport.reliable import Deliver, Effect, Publish, Reached, Rejected, Reliable, Settings

RUN = "run"
CHUNK = 160
SMALL = Settings(window_bytes=1600, window_frames=8, inbox_bytes=3000, inbox_frames=16)


def chunks_of(sender: str, number: int, size: int = 0) -> list[frames.Chunk]:
    message = Message(kind="x", sender=sender, micro=number, meta={"pad": "." * size})
    return list(frames.split(frames.encode(message), CHUNK, sender))


@dataclass
class Faults:
    """Chances of each thing that a network does to a packet, and how many outages it has."""

    loss: float = 0.0
    repeat: float = 0.0
    reorder: float = 0.0
    delay: float = 0.01
    outages: int = 0


class Stuck(AssertionError):
    """A simulation that does not end."""


class World:
    """Nodes with one machine each, a faulty network between them, and a clock that jumps to the next event."""

    def __init__(
        self, seed: int, faults: Faults, machine: type[Reliable] = Reliable, settings: Settings = SMALL
    ) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.machine_type = machine
        self.settings = settings
        self.now = 0.0
        self.order = itertools.count()
        self.events: list[tuple[float, int, str, bytes | None]] = []
        self.machines: dict[str, Reliable] = {}
        self.delivered: dict[tuple[str, str], list[int]] = {}
        self.published = 0
        self.last: dict[str, float] = {}
        self.down_until = 0.0
        self.boots = itertools.count(1)
        self.rejected: list[Rejected] = []
        self.reached: list[tuple[str, str]] = []
        self.lent: list[tuple[bytearray, bytes]] = []  # a shell writes it when it can: it must not change until then

    def start(self, node: str) -> None:
        self.machines[node] = self.machine_type(RUN, node, next(self.boots), self.settings)

    def send(self, sender: str, receiver: str, number: int, size: int = 0) -> None:
        self.perform(sender, self.machines[sender].send(receiver, chunks_of(sender, number, size), self.now))

    def perform(self, node: str, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Publish(peer, data):
                    self.published += 1
                    self.lent.append((data, bytes(data)))
                    self.transmit(peer, bytes(data))
                case Deliver(sender, body):
                    number = frames.decode(body, sender).micro
                    self.delivered.setdefault((sender, node), []).append(number)
                case Rejected():
                    self.rejected.append(effect)
                case Reached(peer):
                    self.reached.append((node, peer))

    def transmit(self, node: str, data: bytes) -> None:
        faults, chance = self.faults, self.random.random
        for _ in range(2 if chance() < faults.repeat else 1):
            if chance() < faults.loss or self.now < self.down_until:
                continue
            at = self.now + faults.delay * (0.5 + chance())
            if chance() < faults.reorder:
                at += 20 * faults.delay * chance()
            else:
                at = self.last[node] = max(at, self.last.get(node, 0.0))
            heapq.heappush(self.events, (at, next(self.order), node, data))

    def outage(self, length: float) -> None:
        """Everything on the way is lost, and what is sent for a while; then each node connects again in its time."""
        self.events = [event for event in self.events if event[3] is None]
        heapq.heapify(self.events)
        self.down_until = self.now + length
        for node in self.machines:
            at = self.down_until + self.random.random() * 0.2
            heapq.heappush(self.events, (at, next(self.order), node, None))

    def run(self, until: float = 2000.0) -> None:
        """Run until nothing is waited for; fails when that does not come."""
        while True:
            deadlines = {node: machine.next_deadline() for node, machine in self.machines.items()}
            first = min(deadlines, key=deadlines.__getitem__)
            if self.events and self.events[0][0] <= deadlines[first]:
                self.now, _, node, data = heapq.heappop(self.events)
                if node in self.machines:
                    self.arrive(node, data)
            elif deadlines[first] < float("inf"):
                self.now = max(self.now, deadlines[first])
                self.perform(first, self.machines[first].tick(self.now))
            else:
                return
            if self.now > until or self.published > 200_000:
                raise Stuck(f"at {self.now}: {[m.unacknowledged() for m in self.machines.values()]}")

    def arrive(self, node: str, data: bytes | None) -> None:
        machine = self.machines[node]
        if data is None:
            self.perform(node, machine.reconnected(self.now))
        else:
            self.perform(node, machine.received(frames.parse(data, frames.run_hash(RUN)), self.now))


def schedule(seed: int, machine: type[Reliable] = Reliable) -> World:
    """One random case: up to four nodes, messages of up to a dozen chunks both ways, and faults."""
    dice = random.Random(seed)
    faults = Faults(
        loss=dice.choice([0.0, 0.05, 0.2]),
        repeat=dice.choice([0.0, 0.1]),
        reorder=dice.choice([0.0, 0.1]),
        delay=dice.choice([0.001, 0.02, 0.4]),
        outages=dice.choice([0, 0, 1, 2]),
    )
    world = World(seed, faults, machine)
    nodes = ["a", "b", "c", "d"][: dice.choice([2, 2, 2, 4])]
    for node in nodes:
        world.start(node)
    pairs = [(s, r) for s in nodes for r in nodes if s != r]
    counts = dict.fromkeys(pairs, 0)
    for _ in range(faults.outages + 1):
        for _ in range(dice.randrange(1, 7)):
            pair = dice.choice(pairs)
            counts[pair] += 1
            world.send(*pair, counts[pair], size=dice.choice([0, 0, 100, 800]))
        if faults.outages:
            world.outage(dice.choice([0.1, 5.0]))
    world.run()
    expected = {pair: list(range(1, count + 1)) for pair, count in counts.items() if count}
    assert world.delivered == expected
    assert not world.rejected
    assert all(data == packet for data, packet in world.lent)
    assert all(not machine.unacknowledged() for machine in world.machines.values())
    return world


@pytest.mark.parametrize("part", range(4))
def test_every_message_arrives_once_in_order_and_the_work_ends(part: int) -> None:
    for seed in range(part * 400, (part + 1) * 400):
        schedule(seed)


class NoDedupe(Inbound):
    """An end that does not look for repeats."""

    def repeated(self, frame: frames.Frame) -> bool:
        if frame.seq <= self.mark:
            self.mark = frame.seq - 1
        return False


class NoAcks(Outbound):
    """An end that does not hear acknowledgements."""

    def acknowledged(self, mark: int, gap: int, now: float) -> Iterator[int]:
        return iter(())


class NoResend(Outbound):
    """An end that sends everything once."""

    def timed_out(self, now: float) -> Iterator[int]:
        self.due = now + 1
        return iter(())

    def again(self, now: float) -> Iterator[int]:
        return iter(())

    def acknowledged(self, mark: int, gap: int, now: float) -> Iterator[int]:
        return super().acknowledged(mark, 0, now)


class NoCopy(Outbound):
    """An end that writes a new header where the one before may wait to be sent."""

    def chunk(self, number: int, now: float) -> frames.Chunk:
        self._kept[number].lent = False
        return super().chunk(number, now)


@pytest.mark.parametrize(
    ("part", "broken"),
    [("Inbound", NoDedupe), ("Outbound", NoAcks), ("Outbound", NoResend), ("Outbound", NoCopy)],
)
def test_the_simulation_notices_what_is_missing(monkeypatch: pytest.MonkeyPatch, part: str, broken: type) -> None:
    monkeypatch.setattr(f"edgesplit.transport.reliable.{part}", broken)
    failures = 0
    for seed in range(16):
        try:
            schedule(seed)
        except AssertionError:
            failures += 1
    assert failures >= 4


def pair(faults: Faults | None = None, settings: Settings = SMALL, seed: int = 0) -> World:
    world = World(seed, faults or Faults(), settings=settings)
    world.start("a")
    world.start("b")
    return world


def test_without_faults_nothing_is_sent_twice() -> None:
    world = pair(settings=Settings())
    for number in range(200):
        world.send("a", "b", number)
    world.run()
    chunks = sum(len(chunks_of("a", number)) for number in range(200))
    assert world.delivered["a", "b"] == list(range(200))
    assert world.published <= chunks + 20  # acknowledgements are cumulative


def test_acknowledgements_ride_on_data_going_back() -> None:
    world = pair(Faults(delay=0.0001), Settings())
    world.send("a", "b", 0)
    world.send("b", "a", 0)
    world.run()
    before = world.published
    for number in range(1, 50):  # a question and an answer each
        world.send("a", "b", number)
        while len(world.delivered["a", "b"]) <= number:
            world.now, _, node, data = heapq.heappop(world.events)
            world.arrive(node, data)
        world.send("b", "a", number)
        while len(world.delivered["b", "a"]) <= number:
            world.now, _, node, data = heapq.heappop(world.events)
            world.arrive(node, data)
    per_message = len(chunks_of("a", 1))
    assert world.published - before == 2 * 49 * per_message


def test_a_receiver_that_is_away_costs_hellos_only_and_gets_everything_when_it_comes() -> None:
    world = World(0, Faults(), settings=SMALL)
    world.start("a")
    for number in range(50):
        world.send("a", "b", number)
    with pytest.raises(Stuck):
        world.run(until=100.0)
    assert world.published < 60
    world.start("b")
    world.perform("a", world.machines["a"].online("b", 2, world.now))
    world.run()
    assert world.delivered["a", "b"] == list(range(50))


def test_a_slow_peer_does_not_cause_a_storm() -> None:
    world = pair(
        Faults(delay=20.0), settings=Settings(window_bytes=1600, window_frames=8, patience=Patience(most=60.0))
    )
    for number in range(20):
        world.send("a", "b", number)
    world.run(until=100_000)
    chunks = sum(len(chunks_of("a", number)) for number in range(20))
    assert world.delivered["a", "b"] == list(range(20))
    assert world.published < 3 * chunks + 20


@pytest.mark.parametrize("senders", [1, 3, 10])
def test_what_is_in_flight_to_one_inbox_is_bounded_over_all_its_senders(senders: int) -> None:
    settings = Settings(window_bytes=1600, window_frames=8, inbox_bytes=4000, inbox_frames=20)
    world = World(1, Faults(delay=0.01), settings=settings)
    world.start("hub")
    names = [f"n{i}" for i in range(senders)]
    for name in names:
        world.start(name)
    for name in names:  # once through, so that the hub has counted its senders and each knows its share
        world.send(name, "hub", 0)
        world.run()
    for number in range(1, 20):
        for name in names:
            world.send(name, "hub", number, size=500)
    flying = sum(machine._outs["hub"].flying for machine in world.machines.values() if "hub" in machine._outs)
    assert flying <= max(settings.inbox_bytes, senders * CHUNK) + senders * CHUNK
    world.run()
    assert all(world.delivered[name, "hub"] == list(range(20)) for name in names)


def test_a_small_window_slows_down_but_does_not_stop() -> None:
    world = pair(settings=Settings(window_bytes=1, window_frames=1, inbox_bytes=1, inbox_frames=1))
    for number in range(10):
        world.send("a", "b", number, size=300)
    world.run()
    assert world.delivered["a", "b"] == list(range(10))


def restart_schedule(seed: int) -> None:
    """Nodes that die and start anew: each life of a receiver sees each life of a sender in order, without repeats."""
    dice = random.Random(seed)
    world = World(seed, Faults(loss=dice.choice([0, 0.1]), repeat=0.1, reorder=0.1, delay=dice.choice([0.001, 0.1])))
    world.start("a")
    world.start("b")
    number = 0
    finished: list[tuple[tuple[str, str], list[int]]] = []
    sent_in_this_life: dict[tuple[str, str], list[int]] = {("a", "b"): [], ("b", "a"): []}
    for _ in range(dice.randrange(2, 6)):
        for _ in range(dice.randrange(1, 8)):
            number += 1
            route = dice.choice([("a", "b"), ("b", "a")])
            world.send(*route, number, size=dice.choice([0, 600]))
            sent_in_this_life[route].append(number)
        for _ in range(dice.randrange(60)):  # some of it arrives
            if world.events:
                world.now, _, node, data = heapq.heappop(world.events)
                world.arrive(node, data)
        victim, other = dice.choice([("a", "b"), ("b", "a")])
        finished += [(route, world.delivered.pop(route, [])) for route in [("a", "b"), ("b", "a")]]
        unacknowledged = world.machines[other].unacknowledged().get(victim, 0)
        world.start(victim)
        sent_in_this_life[victim, other] = []
        if not unacknowledged:
            sent_in_this_life[other, victim] = []
    number += 1
    for route in [("a", "b"), ("b", "a")]:
        world.send(*route, number)
        sent_in_this_life[route].append(number)
    world.run()
    for route, numbers in [*finished, *world.delivered.items()]:
        assert numbers == sorted(set(numbers)), (seed, route)
    for route, numbers in world.delivered.items():
        # The last life of the receiver got the end of what the last life of the sender sent, without a hole.
        assert numbers[-1] == number
        known = sent_in_this_life[route]
        assert [n for n in numbers if n in known] == known[len(known) - len([n for n in numbers if n in known]) :]
    assert all(not machine.unacknowledged() for machine in world.machines.values())


@pytest.mark.parametrize("part", range(4))
def test_a_node_that_starts_anew_is_not_taken_for_a_repeat(part: int) -> None:
    for seed in range(part * 100, (part + 1) * 100):
        restart_schedule(seed)


def test_unacknowledged_names_peers_until_they_are_forgotten() -> None:
    world = World(0, Faults())
    world.start("a")
    world.send("a", "b", 1)
    world.send("a", "c", 2, size=500)
    assert list(world.machines["a"].unacknowledged()) == ["b", "c"]
    world.machines["a"].forget("b")
    world.machines["a"].forget("c")
    assert world.machines["a"].unacknowledged() == {}
    assert world.machines["a"].next_deadline() == float("inf")


def test_a_hello_is_answered_by_the_machine_itself() -> None:
    world = pair(Faults(loss=0.5), seed=3)
    world.perform("a", world.machines["a"].hello("b", 0.0))
    world.run()
    assert ("a", "b") in world.reached


def test_memory_of_a_message_is_used_again_when_nobody_looks_at_it() -> None:
    bodies = Bodies(most=10_000)
    first = bodies.take(1000)
    second = bodies.take(1000)
    for view, value in ((first, 1), (second, 2)):
        view[:] = bytes([value]) * 1000
    held = np.frombuffer(first[100:200].toreadonly(), np.uint8)
    address = np.frombuffer(second, np.uint8).__array_interface__["data"][0]
    del first, second, view
    third = bodies.take(900)
    assert np.frombuffer(third, np.uint8).__array_interface__["data"][0] == address
    third[:] = bytes(900)
    assert held.tolist() == [1] * 100
    assert len(bodies.take(20_000)) == 20_000


@pytest.mark.parametrize(("shifted", "same"), [(0, True), (8, True), (1, False), (4, False)])
def test_a_large_message_of_one_chunk_is_copied_where_it_lies_badly_only(shifted: int, same: bool) -> None:
    head = frames.header_size("a")
    message = Message(kind="x", sender="a", meta={"pad": "." * 10_000})
    (chunk,) = frames.split(frames.encode(message), 20_000, "a")
    packet = bytes(frames.seal(chunk, frames.Flag.DATA, frames.run_hash(RUN), "a", 1, 2, 1))
    memory = np.empty(len(packet) + 8, np.uint8)
    view = memory.data[shifted : shifted + len(packet)]
    view[:] = packet
    (whole,) = Inbound(1, (1 << 20, 100), Bodies()).take(frames.parse(view, frames.run_hash(RUN)))
    body = np.frombuffer(whole.body, np.uint8)
    assert np.shares_memory(body, memory) is same
    assert body.ctypes.data % 8 == 0
    assert bytes(whole.body) == packet[head:]
    assert frames.decode(whole.body, "a").meta == message.meta
