"""What may come of hostile frames and messages: nothing. A trial is made of one seed and raises where it is not so."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import islice
from random import Random

import numpy as np

from edgesplit.conductor import Conductor
from edgesplit.coordinator import Coordinator
from edgesplit.errors import EdgesplitError, FrameError
from edgesplit.mailbox import MOST_EARLY
from edgesplit.methods import order_of
from edgesplit.node import NodeMachine, Outcome, Reckon, Run, Work
from edgesplit.observe.recorder import Recorder
from edgesplit.protocol import Report
from edgesplit.sheets import Agenda, Cutting
from edgesplit.task import COORDINATOR
from edgesplit.transport.base import DATA_KINDS, Message
from edgesplit.transport.endpoint import Deliver, Endpoint
from edgesplit.transport.memory import MemoryTransport
from tests.cases import identical
from tests.fuzz.corpus import KEY, NODES, case, recorded, run_over
from tests.fuzz.mutants import STRANGERS, header_changed, message_changed, packets, renamed, valid
from tests.fuzz.network import Network

BOOTS = {COORDINATOR: 1} | {node: boot for boot, node in enumerate(case()[0].nodes(), 2)}
"""The lives in which the nodes of a recorded run were."""

MOST_OVERHEAD, MOST_FOLD = 100_000, 50
"""Bytes that taking a packet may need at most: so many, and so many times its own length."""

Delivered = dict[str, list[Message]]
"""What was delivered, by sender."""


def receiver(node: str, *, signed: bool) -> Endpoint:
    return Endpoint("run", node, BOOTS[node], key=KEY if signed else None)


def take(end: Endpoint, data: bytes, now: float, delivered: Delivered) -> None:
    """Have an endpoint take a packet, as its shell does."""
    with contextlib.suppress(FrameError):
        for effect in end.received(end.parse(data), now):
            if isinstance(effect, Deliver) and effect.message.kind not in ("status", "refused"):
                delivered[effect.message.sender].append(effect.message)


def to_node(node: str, *, signed: bool) -> list[bytes]:
    return [data for to, data in recorded(signed=signed).frames if to == node]


@cache
def messages_to(node: str, *, signed: bool = False) -> tuple[Message, ...]:
    """What the node got in the recorded run, in its order."""
    end, found = receiver(node, signed=signed), list[Message]()
    for data in to_node(node, signed=signed):
        delivered: Delivered = defaultdict(list)
        take(end, data, 0.0, delivered)
        found += [message for of_one in delivered.values() for message in of_one]
    return tuple(found)


def plain(message: Message) -> str:
    """All of a message as text."""
    arrays = [(name, packed[:3], bytes(packed.data)) for name, packed in message.arrays.items()]
    return repr([getattr(message, name) for name in message.__slots__ if name != "arrays"]) + repr(arrays)


def same(a: Sequence[Message], b: Sequence[Message]) -> bool:
    return [plain(message) for message in a] == [plain(message) for message in b]


def endpoint(seed: int, count: int, *, signed: bool) -> int:
    """Publish packets between the real ones of a run: what is delivered is what it would be without.

    Signed ones are changed in all ways, and replayed; where nobody signs, all come in strangers' names.
    """
    rng = Random(seed)
    node = rng.choice(NODES)
    real, end, delivered = to_node(node, signed=signed), receiver(node, signed=signed), defaultdict(list)
    hostile = packets(rng, recorded(signed=signed).frames, () if signed else STRANGERS)
    for number, data in enumerate(real):
        for _, packet in islice(hostile, count * (number + 1) // len(real) - count * number // len(real)):
            take(end, packet, number / 10, delivered)
        take(end, data, number / 10, delivered)
    want = defaultdict(list)
    for message in messages_to(node, signed=signed):
        want[message.sender].append(message)
    for sender in NODES:
        if not same(delivered[sender], want[sender]):
            raise AssertionError(f"{node} was delivered {len(delivered[sender])} of {len(want[sender])} of {sender}")
    check_size(end)
    return count


def neighbour(seed: int, count: int) -> int:
    """Packets in members' names, which nobody can tell from theirs: they may do harm, but not to the node itself."""
    rng = Random(seed)
    node = rng.choice(NODES)
    end, delivered = receiver(node, signed=False), defaultdict(list)
    real = to_node(node, signed=False)
    for number, (_, packet) in enumerate(islice(packets(rng, recorded(signed=False).frames), count)):
        take(end, packet, number / 100, delivered)
        take(end, real[number % len(real)], number / 100, delivered)
        end.tick(number / 100, number / 100)
    check_size(end)
    return count


def check_size(end: Endpoint) -> None:
    """Whatever has come: what is kept of it has its limits."""
    link = end._link
    settings = link._settings
    assert len(link._ranks) <= settings.peers
    assert link._bodies.ahead <= settings.ahead_bytes
    assert link._bodies.unfinished <= settings.unfinished_bytes
    assert link._bodies.ahead == sum(stream._ahead_bytes for stream in link._ins.values())
    assert link._bodies.unfinished == sum(stream._filled for stream in link._ins.values() if stream._body is not None)


def allocations(seed: int, count: int) -> int:
    """No packet makes a node allocate much more than it is long, beside address space for the message it claims."""
    rng = Random(seed)
    end, delivered = receiver("e1", signed=False), defaultdict(list)
    real = recorded(signed=False).frames
    mixed = packets(rng, real), packets(rng, real, STRANGERS)
    numpys = np.lib.tracemalloc_domain
    tracemalloc.start()
    try:
        for number in range(count):
            _, packet = next(mixed[number % 2])
            if number % 4 == 3:
                packet = renamed(rng, header_changed(rng, packet), f"n{number}") if len(packet) > 80 else packet
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            take(end, packet, number / 100, delivered)
            delivered.clear()
            _, peak = tracemalloc.get_traced_memory()
            if peak - before > MOST_OVERHEAD + MOST_FOLD * len(packet):
                found = tracemalloc.take_snapshot().filter_traces([tracemalloc.DomainFilter(False, numpys)])
                top = found.statistics("lineno")[:3]
                total = sum(trace.size for trace in found.traces)
                # numpy tells of address space as if it were memory.
                assert total - before < MOST_OVERHEAD + MOST_FOLD * len(packet), f"{peak - before} bytes: {top}"
    finally:
        tracemalloc.stop()
    return count


# --- the machines behind it ----------------------------------------------------------------------------------------


def outcome_of(work: Work) -> Outcome:
    if isinstance(work, Run) and work.action.op == "F":
        return Outcome(needs=frozenset({"x"}), target={}, weight=1.0, loss_sum=1.0)
    return Outcome(report=Report(work.step.step)) if isinstance(work, Reckon) else Outcome()


def machine_of(node: str) -> NodeMachine:
    plan, _ = case()
    return NodeMachine(node, plan, order=lambda steps: order_of("1f1b", plan, steps, node), barrier=True)


def play(machine: NodeMachine, most: int = 10_000) -> list[str]:
    """Do what there is to do; return what is sent for it."""
    sent = []
    for _ in range(most):
        if (work := machine.next()) is None:
            return sent
        sent += [repr(send) for send in machine.done(work, outcome_of(work))]
    raise AssertionError(f"{machine.name} does not come to rest")


def changed(rng: Random, of: Sequence[Message], senders: Sequence[str] = ()) -> Iterator[Message]:
    """Yield messages that were made of these, without end; in one of the names, where there are any."""
    while True:
        message = rng.choice(of)
        for _ in range(rng.choice((1, 1, 2, 3))):
            message = message_changed(rng, message)
        if senders:
            message = Message(**{n: getattr(message, n) for n in message.__slots__} | {"sender": rng.choice(senders)})
        if valid(message):
            yield message


def node(seed: int, count: int, *, coordinator: bool) -> int:
    """Messages that were made of real ones, to a node in the middle of its work.

    From strangers nothing follows from them; from members (and the coordinator) no error but FrameError.
    """
    rng = Random(seed)
    name = rng.choice([name for name in NODES if name != COORDINATOR])
    real = [m for m in messages_to(name) if m.kind in DATA_KINDS or m.kind not in ("assign", "stop")]
    machine, twin = machine_of(name), machine_of(name)
    names = () if coordinator else (*STRANGERS, name)
    hostile = changed(rng, real, names)
    for number, message in enumerate(real):
        for bad in islice(hostile, count * (number + 1) // len(real) - count * number // len(real)):
            with contextlib.suppress(FrameError):
                machine.receive(bad)
            if coordinator:
                play(machine)
        if coordinator:
            with contextlib.suppress(FrameError):
                machine.receive(message)
            play(machine)
        else:
            machine.receive(message)
            twin.receive(message)
            assert play(machine) == play(twin), f"{name}: another answer to message {number}"
    box = machine._held
    assert all(key in box._awaited.get(key[2], ()) for key in box._held), "it holds what it does not wait for"
    assert all(len(early) <= MOST_EARLY for early in box._early.values())
    return count


def conductor(seed: int, count: int) -> int:
    """Messages that were made of real ones, in nodes' names, to a coordinator with steps and a question open."""
    rng = Random(seed)
    plan, _ = case()
    coordinator = Coordinator(plan, Cutting(2), step_timeout=math.inf, clip_norm=1.0, on_lost="wait")
    with MemoryTransport() as transport:
        conductor = Conductor(coordinator, transport, Recorder())
        real = messages_to(COORDINATOR)
        for node in plan.nodes():
            conductor._take(Message(kind="hello", sender=node, meta={"life": "1"}))
        _, effects = coordinator.request("fetch", {node: ({}, {}) for node in plan.nodes()}, 0.0)
        agenda = Agenda({device: [8] for device in ("d1", "d2", "d3", "d4")})
        effects += coordinator.issue(agenda.round(["d1", "d2", "d3", "d4"], steps=20), 0.0)
        for bad in islice(changed(rng, real), count):
            if bad.kind == "failed":
                continue
            with contextlib.suppress(EdgesplitError):  # of a Failed: the run ends in one line
                conductor._raise_failed(conductor._take(bad))
            coordinator.tick(1.0)
        assert len(conductor.hellos) <= len(plan.nodes())
        assert set(conductor._online) <= set(plan.nodes())
    return count


# --- whole runs -----------------------------------------------------------------------------------------------------


def whole_run(seed: int, count: int) -> int:
    """Publish packets to all nodes' topics while a run goes on: its weights are those of the run without."""
    rng = Random(seed)
    # Of runs before, one of them with another key; and of this one, as far as it has come.
    corpus = [*recorded(signed=True).frames, *recorded(signed=False).frames]
    network = Network(KEY, lambda to, data: corpus.append((to, data)), first_boot=1000)
    hostile = packets(rng, corpus)
    published = 0

    def publish() -> None:
        nonlocal published
        for to, packet in islice(hostile, count):
            network.publish(to, packet)
            published += 1
            if published % 10 == 0:
                time.sleep(0.001)  # over all of the run

    attacker = threading.Thread(target=publish)
    weights = run_over(network, attacker.start)
    attacker.join()
    if network.wrong:
        raise network.wrong[0]
    assert published == count
    assert identical(weights, recorded(signed=True).weights), "the weights are others"
    return count


TRIALS: dict[str, Callable[[int, int], int]] = {
    "endpoint, signed": lambda seed, count: endpoint(seed, count, signed=True),
    "endpoint, strangers": lambda seed, count: endpoint(seed, count, signed=False),
    "endpoint, neighbours": neighbour,
    "allocations": allocations,
    "node, strangers": lambda seed, count: node(seed, count, coordinator=False),
    "node, members": lambda seed, count: node(seed, count, coordinator=True),
    "coordinator": conductor,
    "a run": whole_run,
}
"""By name: seed and number of frames -> how many it were."""
