from __future__ import annotations

import json
import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgesplit.codecs import Packed
from edgesplit.emulation import Emulator, LinkPacer, check_real, describe
from edgesplit.errors import RunError
from edgesplit.methods import predict
from edgesplit.plan import Plan, Route, Stage
from edgesplit.schedule import Action, Micro, Step
from edgesplit.topology import Link, Node, Topology
from edgesplit.transport.base import Message

PLAN = Plan(
    ("a", "b"),
    tuple(Route(d, (Stage(d, 0, 1), Stage("c", 1, 2))) for d in ("d0", "d1")),
)
HOME = Topology.of(
    [
        Node(name="c", tier="cloud", gflops=100.0),
        Node(name="e", tier="edge", parent="c", up_mbps=8, down_mbps=16, latency_ms=500),
        *(
            Node(name=f"d{i}", tier="device", parent="e", gflops=10.0, up_mbps=4, down_mbps=8, latency_ms=250)
            for i in range(2)
        ),
    ],
    broker_at="e",
)
PROFILE = {
    "gflops": 100.0,
    "target_bytes": 0,
    "layers": [
        {"name": n, "forward_s": 0.1, "input_grad_s": 0.2, "weight_grad_s": 0.3, "cut_bytes": {"x": 1e6}} for n in "ab"
    ],
}


@dataclass
class Work:
    action: Action
    micro: Micro | None


def message(sender, micro=0, nbytes=1_000_000, sent=0.0):
    packed = Packed("raw", "uint8", (nbytes,), bytes(nbytes))
    return Message(kind="act", sender=sender, stage=1, micro=micro, arrays={"x": packed}, sent=sent)


def emulator(node):
    return Emulator(node, json.loads(json.dumps(describe(node, PLAN, PROFILE, HOME))))


def test_a_link_carries_one_message_at_a_time():
    link = Link("a", "b", 8.0, 0.25)
    pacer = LinkPacer()
    assert pacer.leave(link, 10.0, 1e6) == 11.25
    assert pacer.leave(link, 10.5, 1e6) == 12.25  # waits for the first to leave, not to arrive
    assert pacer.leave(link, 20.0, 2e6) == 22.25
    assert LinkPacer().arrive([link, Link("b", "c", 4.0, 0.5)], 0.0, 1e6) == 1.25 + 2.5
    assert LinkPacer().arrive([Link("a", "b", math.inf, 0.0)], 3.0, 1e9) == 3.0
    assert LinkPacer().arrive([], 3.0, 1e9) == 3.0


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 10**6)), max_size=20))
def test_a_link_is_never_faster_than_its_bandwidth_and_keeps_order(sends):
    link, pacer, at, arrived = Link("a", "b", 8.0, 0.1), LinkPacer(), 0.0, []
    for pause, nbytes in sends:
        at += pause
        arrived.append(pacer.leave(link, at, nbytes))
        assert arrived[-1] >= at + link.seconds(nbytes) - 1e-9
    assert arrived == sorted(arrived)


def test_the_sender_stamps_its_first_link_and_the_receiver_goes_on():
    d0, d1, cloud = map(emulator, ("d0", "d1", "c"))
    first = d0.stamp("c", message("d0"), 0.0)
    second = d0.stamp("c", message("d0", 2), 0.0)
    assert (first.sent, second.sent) == (2.25, 4.25)
    assert cloud.due(first) == 2.25 + 1.0 + 0.5
    assert cloud.due(second) == 4.25 + 1.0 + 0.5
    other = d1.stamp("c", message("d1", 1), 2.5)
    assert other.sent == 4.75
    # The broker's link to the cloud is still carrying d0's second message, until 5.25.
    assert cloud.due(other) == 5.25 + 1.0 + 0.5


def test_a_node_on_the_brokers_host_has_one_hop():
    plan = Plan(("a", "b"), (Route("d0", (Stage("d0", 0, 1), Stage("e", 1, 2))),))
    parts = {node: describe(node, plan, PROFILE, HOME) for node in ("d0", "e")}
    stamped = Emulator("d0", parts["d0"]).stamp("e", message("d0"), 0.0)
    assert Emulator("e", parts["e"]).due(stamped) == stamped.sent == 2.25


def test_emulated_messages_arrive_when_the_simulator_says():
    steps = [Step(0, tuple(Micro(i, f"d{i % 2}", i, i + 1) for i in range(4)), {})]

    class Costs:
        def seconds(self, node, action):
            return 0.0

        def nbytes(self, kind, stage, micro):
            return 1e6 if kind == "act" else 0.0

        def hops(self, src, dst):
            return HOME.hops(src, dst)

    timeline = predict("gpipe", PLAN, steps, Costs())
    senders, cloud = {d: emulator(d) for d in ("d0", "d1")}, emulator("c")
    due = {}
    for micro in range(4):
        device = f"d{micro % 2}"
        due[micro] = cloud.due(senders[device].stamp("c", message(device, micro), 0.0))
    arrived = {t.micro: t.end + 0.5 for t in timeline.transfers if t.kind == "act" and t.dst == "c"}
    assert due == pytest.approx(arrived)


def test_targets_follow_samples_layers_and_speed():
    device, cloud = emulator("d0"), emulator("c")
    micro = Micro(0, "d0", 4, 7)
    assert device.target(Work(Action("F", 0, 0), micro)) == pytest.approx(3 * 0.1 * 10)
    assert device.target(Work(Action("B", 0, 0), micro)) == pytest.approx(3 * 0.3 * 10)
    assert cloud.target(Work(Action("B", 1, 0), micro)) == pytest.approx(3 * 0.5)
    assert cloud.target(Work(Action("I", 1, 0), micro)) == pytest.approx(3 * 0.2)
    assert cloud.target(Work(Action("U", 1, 0), None)) == 0.0


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_an_action_takes_its_target():
    device, clock = emulator("d0"), Clock()
    work = Work(Action("F", 0, 0), Micro(0, "d0", 0, 1))
    for real in (0.9, 0.9, 0.4, 0.6, 0.6, 0.6, 0.6):  # neither a cold start nor a moment's other work is an error
        start = clock.now
        clock.now += real
        device.pace(work, start, clock, clock.sleep)
        assert clock.now == pytest.approx(start + 1.0)
    start = clock.now
    clock.now += 0.6
    with pytest.raises(RunError, match=r"'d0' cannot be emulated here: 0F0 really took 0\.6 s"):
        device.pace(work, start, clock, clock.sleep)


def test_oversleeping_does_not_add_up():
    device, cloud, clock = emulator("d0"), emulator("c"), Clock()
    work = Work(Action("F", 0, 0), Micro(0, "d0", 0, 1))

    def oversleep(seconds):
        clock.now += seconds + 0.125

    for turn in range(1, 4):
        device.pace(work, clock.now, clock, oversleep)
        assert clock.now == pytest.approx(100.0 + turn + 0.125)
    message_left = device.stamp("c", message("d0"), clock.now).sent
    assert message_left == pytest.approx(103.0 + 2.25)
    clock.now += 0.25  # of other work, which counts
    device.pace(work, clock.now, clock, clock.sleep)
    assert clock.now == pytest.approx(104.25)
    clock.now += 2.0
    cloud.pace(Work(Action("F", 1, 0), Micro(0, "d0", 0, 1)), clock.now - 2.0, clock, oversleep)
    assert cloud.late == 0.0, "what was busy all the time has not slept"


def test_an_update_is_not_paced():
    clock = Clock()
    emulator("d0").pace(Work(Action("U", 0, 0), None), 0.0, clock, clock.sleep)
    assert clock.now == 100.0


def test_half_of_the_target_is_the_limit():
    check_real(0.5, 1.0, "n", "0F0")
    with pytest.raises(RunError, match="more than half"):
        check_real(0.51, 1.0, "n", "0F0")
