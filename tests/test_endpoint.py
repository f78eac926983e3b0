"""A node's end of the network without a network: what goes out, what comes in, and what is dropped."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from edgesplit.errors import FrameError, TransportError
from edgesplit.transport import frames
from edgesplit.transport.base import Message
from edgesplit.transport.endpoint import Announce, Deliver, Effect, Endpoint
from edgesplit.transport.frames import Flag
from edgesplit.transport.presence import CLOSED
from edgesplit.transport.reliable import Publish, Reached

CHUNK = 256


def ends(*names: str) -> dict[str, Endpoint]:
    return {name: Endpoint("run", name, boot) for boot, name in enumerate(names, 1)}


def send(end: Endpoint, to: str, *messages: Message) -> list[Effect]:
    effects: list[Effect] = []
    outgoing = end.pack(to, messages)
    for chunk in end.cut(to, outgoing, CHUNK):
        effects += [Publish(e.peer, bytearray(e.data)) for e in end.send(to, chunk, 0.0) if isinstance(e, Publish)]
    return effects


def play(nodes: dict[str, Endpoint], effects: Iterable[Effect]) -> list[Effect]:
    """Carry packets to and fro until none is left; returns the other effects."""
    packets, others = [e for e in effects if isinstance(e, Publish)], []
    while packets:
        to, data = packets.pop(0)
        end = nodes[to]
        for effect in end.received(end.parse(bytes(data)), 0.0):
            if isinstance(effect, Publish):
                packets.append(Publish(effect.peer, bytearray(effect.data)))
            else:
                others.append(effect)
    return others


def message(number: int, sender: str = "a", size: int = 0) -> Message:
    return Message(kind="x", sender=sender, micro=number, meta={"pad": "." * size})


def micros(effects: Iterable[Effect]) -> list[int]:
    return [e.message.micro for e in effects if isinstance(e, Deliver)]


def test_messages_arrive_whole_in_order_and_out_of_their_bundle() -> None:
    nodes = ends("a", "b")
    effects = play(
        nodes, [*send(nodes["a"], "b", message(1, size=900)), *send(nodes["a"], "b", message(2), message(3))]
    )
    assert micros(effects) == [1, 2, 3]
    assert Reached("b") in effects
    assert nodes["a"].missing()["b"] > 5  # acknowledgements wait for data to ride on
    play(nodes, nodes["b"].tick(1.0, 0.0))
    assert nodes["a"].missing() == {}
    assert nodes["a"].traffic()["b"] > 900


def test_a_message_to_oneself_is_a_copy_and_needs_no_network() -> None:
    (end,) = ends("a").values()
    (effect,) = end.to_self(end.pack("a", [message(7)]))
    assert isinstance(effect, Deliver)
    assert effect.message == message(7)


def test_what_cannot_travel_is_refused() -> None:
    (end,) = ends("a").values()
    with pytest.raises(TransportError, match="cannot send a message of 'b'"):
        end.pack("c", [message(1, "b")])
    with pytest.raises(TransportError, match="must be 1 to 64"):
        end.pack("a/b", [message(1)])
    with pytest.raises(FrameError, match="not JSON"):
        end.pack("b", [Message(kind="x", sender="a", meta={"x": object()})])


def test_a_body_that_is_no_message_is_counted_and_those_that_came_with_it_arrive() -> None:
    nodes = ends("a", "b")
    a, b = nodes["a"], nodes["b"]
    play(nodes, a.hello("b", 0.0))
    bodies = [frames.encode(message(1)), [bytes(200)], frames.encode(message(2))]
    packets = [
        b.parse(bytes(frames.seal(chunk, Flag.DATA, a.run_hash, "a", a.boot, b.boot, seq)))
        for seq, body in enumerate(bodies, 1)
        for chunk in frames.split(body, 512, "a")
    ]
    effects = [effect for frame in [*packets[1:], packets[0]] for effect in b.received(frame, 0.0)]
    assert micros(effects) == [1, 2]
    assert b.rejected == 1


@pytest.mark.parametrize("data", [b"", b"x" * 100, bytes(frames.header_size("a"))])
def test_packets_that_are_none_are_counted(data: bytes) -> None:
    (end,) = ends("a").values()
    with pytest.raises(FrameError):
        end.parse(data)
    with pytest.raises(FrameError):
        end.read(data)
    assert end.rejected == 2


def test_nobody_else_speaks_in_this_nodes_name() -> None:
    (end,) = ends("a").values()
    frame = end.parse(bytes(frames.seal(frames.empty_chunk("a"), Flag.HELLO, end.run_hash, "a", 99, 0, 1)))
    assert end.received(frame, 0.0) == []


def test_a_status_is_news_and_makes_what_waits_go_at_once() -> None:
    nodes = ends("a", "b")
    a, b = nodes["a"], nodes["b"]
    send(a, "b", message(1))  # its hello is lost
    (announced,) = (e for e in b.tick(0.1, 50.0) if isinstance(e, Announce))
    assert announced.retain
    hello, news = a.heard("b", a.read(announced.data), False, 0.2, 50.0)
    assert isinstance(news, Deliver)
    assert news.message.meta["state"] == "online"
    assert micros(play(nodes, [hello])) == [1]


def test_the_status_is_refreshed_and_silence_is_reported_when_it_is_due() -> None:
    a = Endpoint("run", "a", 1, heartbeat=2.0, silence=5.0)
    a.heard("b", a.read(Endpoint("run", "b", 2).status("online", 0.0)), False, 0.0, 0.0)
    now, beats, lost = 0.0, [], []
    while now < 7.0:
        for effect in a.tick(now, 0.0):
            if isinstance(effect, Announce):
                beats.append(now)
            elif isinstance(effect, Deliver):
                lost.append((now, effect.message.meta["state"]))
        assert a.next_deadline() > now
        now = a.next_deadline()
    assert beats == [0.0, 2.0, 4.0, 6.0]
    assert [state for _, state in lost] == ["offline"]
    assert 5.0 <= lost[0][0] <= 5.5


def test_goodbye_is_told_and_then_cleared() -> None:
    nodes = ends("a", "b")
    play(nodes, send(nodes["b"], "a", message(1, "b")))
    *acks, said, cleared = nodes["a"].closing(3.0)
    assert [type(e) for e in acks] == [Publish]
    assert isinstance(said, Announce)
    assert json.loads(said.data)["reason"] == CLOSED
    assert not said.retain
    assert cleared == Announce(b"", retain=True)
