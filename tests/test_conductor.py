"""The shell around the coordinator, over memory, against nodes that do what each test says."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from edgesplit.conductor import Conductor
from edgesplit.coordinator import Coordinator
from edgesplit.errors import NodeLost, RunError, TransportError, TransportTimeout
from edgesplit.observe.recorder import Recorder
from edgesplit.plan import Plan, Route, Stage
from edgesplit.protocol import Report
from edgesplit.sheets import Cutting, Draft, Share
from edgesplit.transport.base import Message
from edgesplit.transport.memory import MemoryTransport

PLAN = Plan(("l0", "l1"), (Route("d", (Stage("d", 0, 1), Stage("c", 1, 2))),))
DRAFTS = [Draft(0, {"d": Share(0, 0, 4)})]
Answer = Callable[[Message], dict[str, Any] | None]


class Clock:
    """Each look at it is a tenth of a second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.1
        return self.now


class Nodes:
    """Answers whatever comes to a node; runs in the thread of the test, whenever the conductor looks around."""

    def __init__(self, transport: MemoryTransport) -> None:
        self.transport = transport
        self.inboxes = {name: transport.mailbox(name) for name in ("d", "c")}
        self.got: list[tuple[str, str]] = []
        self.extra: dict[str, Any] = {}

    def say(self, name: str, kind: str, **meta: Any) -> None:
        self.transport.send("coordinator", Message(kind=kind, sender=name, meta=meta))

    def __call__(self) -> None:
        for name, inbox in self.inboxes.items():
            while (message := inbox.poll()) is not None:
                self.got.append((name, message.kind))
                if message.kind == "sheet":
                    for step in message.meta["steps"]:
                        self.say(name, "report", **Report(step["step"]).meta(), **self.extra)
                elif "request" in message.meta:
                    self.say(name, f"{message.kind}ed", request=message.meta["request"], **self.extra)
                elif message.kind == "stop":
                    self.say(name, "stopped", waiting_for=f"what {name} wanted")


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Conductor, Nodes]]:
    monkeypatch.setattr("edgesplit.conductor.TURN_S", 0.002)
    with MemoryTransport() as transport:
        nodes = Nodes(transport)
        conductor = Conductor(
            Coordinator(PLAN, Cutting(1), step_timeout=5.0), transport, Recorder(), watch=nodes, clock=Clock()
        )
        yield conductor, nodes


def test_join_ask_steps_stop(fleet: tuple[Conductor, Nodes]) -> None:
    conductor, nodes = fleet
    nodes.say("c", "hello", pid=1)
    nodes.say("d", "hello", pid=2)
    conductor.join(["d", "c"], 10.0)
    assert {name: facts["pid"] for name, facts in conductor.hellos.items()} == {"c": 1, "d": 2}
    assert set(conductor.ask("fetch", {"d": ({}, {}), "c": ({}, {})})) == {"d", "c"}
    assert [done.step for done in conductor.steps(DRAFTS)] == [0]
    assert list(conductor.steps([])) == []
    threading.Timer(0.05, nodes).start()
    assert conductor.stop(["d", "c"], 5.0) == {"d": "what d wanted", "c": "what c wanted"}


def test_nodes_that_do_not_come_are_named(fleet: tuple[Conductor, Nodes]) -> None:
    conductor, nodes = fleet
    nodes.say("c", "hello")
    with pytest.raises(TransportTimeout, match=r"no word from 'd' within 1 s: start 'edgesplit node NAME"):
        conductor.join(["d", "c"], 1.0)


def test_a_node_that_leaves_before_the_others_have_come_must_come_again(fleet: tuple[Conductor, Nodes]) -> None:
    conductor, nodes = fleet
    nodes.say("d", "hello")
    nodes.say("d", "status", state="offline", reason="killed")
    nodes.say("c", "hello")
    with pytest.raises(TransportTimeout, match=r"no word from 'd' within"):
        conductor.join(["d", "c"], 1.0)
    nodes.say("d", "hello")
    conductor.join(["d", "c"], 1.0)


def test_a_node_that_fails_while_others_join(fleet: tuple[Conductor, Nodes]) -> None:
    conductor, nodes = fleet
    nodes.say("d", "failed", error="no such file")
    with pytest.raises(RunError, match=r"'d' failed: no such file"):
        conductor.join(["d", "c"], 10.0)


def test_a_node_that_is_lost_in_a_step(fleet: tuple[Conductor, Nodes]) -> None:
    conductor, nodes = fleet
    nodes.say("c", "status", state="offline", reason="killed")
    with pytest.raises(NodeLost, match=r"node 'c' was lost in step 0 \(killed\)"):
        list(conductor.steps(DRAFTS))


def test_no_progress(fleet: tuple[Conductor, Nodes]) -> None:
    conductor, nodes = fleet
    nodes.inboxes.pop("c")
    with pytest.raises(TransportTimeout, match=r"no progress in step 0 for 5 s: nothing from 'c'"):
        list(conductor.steps(DRAFTS))


def test_what_the_watch_raises_ends_the_run(fleet: tuple[Conductor, Nodes]) -> None:
    conductor, _ = fleet

    def watch() -> None:
        raise RunError("the process of c ended")

    conductor._watch = watch
    with pytest.raises(RunError, match="the process of c ended"):
        list(conductor.steps(DRAFTS))


def test_events_and_traffic_are_recorded(fleet: tuple[Conductor, Nodes]) -> None:
    conductor, nodes = fleet
    nodes.extra = {"events": [["0F0", 1.0, 2.0, 0, 3]], "traffic": {"c": 10}}
    list(conductor.steps(DRAFTS))
    events = {(event.node, str(event.action), event.end, event.version) for event in conductor.recorder.events}
    assert events == {("d", "0F0", 2.0, 3), ("c", "0F0", 2.0, 3)}
    assert conductor.traffic == {"d": {"c": 10}, "c": {"c": 10}}


ROWS = [[], ["0F0"], ["0F0", "1", 2.0, 0, 0], {}, "0F0", [0, 1.0, 2.0, 0, 0], 7, ["nonsense", 1.0, 2.0, 0, 0]]


@pytest.mark.parametrize("row", [*ROWS, ["0F0", math.nan, 2.0, 0, 0], ["0F0", 1.0, 10**400, 0, 0]], ids=str)
def test_a_message_that_is_none_is_dropped_and_named_when_it_is_waited_for_in_vain(
    fleet: tuple[Conductor, Nodes], row: Any
) -> None:
    conductor, nodes = fleet
    nodes.extra = {"events": [row]}
    with pytest.raises(TransportTimeout, match=r"nothing from 'd', 'c'; 'd' .*tells of an event .*, which is none"):
        list(conductor.steps(DRAFTS))
    assert conductor.recorder.events == []


def test_a_message_that_is_none_does_not_end_a_run_whose_nodes_do_their_part(fleet: tuple[Conductor, Nodes]) -> None:
    conductor, nodes = fleet
    for meta in ({"step": -1}, {}, {"events": 3}, {"events": [[]]}, {"losses": "x"}, {"traffic": {"d": []}}):
        nodes.say("d", "report", **meta)
    assert [done.step for done in conductor.steps(DRAFTS)] == [0]


def test_what_a_node_says_of_itself_is_kept_only_as_far_as_it_is_short(fleet: tuple[Conductor, Nodes]) -> None:
    conductor, nodes = fleet
    nodes.say("c", "hello", pid=1, text="x" * 10_000, deep=[[1] * 1000])
    nodes.say("d", "hello", **{f"fact {i}": i for i in range(1000)})
    for stranger in range(300):
        nodes.say(f"stranger-{stranger}", "hello")
    conductor.join(["d", "c"], 10.0)
    assert conductor.hellos["c"] == {"pid": 1, "text": "x" * 256}
    assert len(conductor.hellos["d"]) == 64
    told = [name for name in conductor.transport._waiting if name.startswith("stranger-")]  # type: ignore[attr-defined]
    assert len(told) <= 256


def test_strangers_leave_no_events(fleet: tuple[Conductor, Nodes]) -> None:
    conductor, nodes = fleet
    nodes.say("stranger", "report", events=[["0F0", 1.0, 2.0, 0, 0]], traffic={"d": 1}, **Report(0).meta())
    list(conductor.steps(DRAFTS))
    assert conductor.recorder.events == []
    assert conductor.traffic == {}


def test_stop_does_not_wait_for_who_has_left_or_failed(fleet: tuple[Conductor, Nodes]) -> None:
    conductor, nodes = fleet
    nodes.say("d", "status", state="offline")
    nodes.say("c", "failed", error="x", waiting_for="act of 1F0 from 'd' (step 0)")
    assert conductor.stop(["d", "c"], 1e6) == {"c": "act of 1F0 from 'd' (step 0)"}


def test_stop_gives_up_in_time_and_without_a_network(fleet: tuple[Conductor, Nodes]) -> None:
    conductor, nodes = fleet
    assert conductor.stop(["d", "c"], 0.2) == {}
    conductor._inbox.fail(TransportError("no broker"))
    assert conductor.stop(["d", "c"], 1e6) == {}
    nodes.transport.close()
    assert conductor.stop(["d", "c"], 1e6) == {}


def test_a_transport_that_fails_ends_the_run(fleet: tuple[Conductor, Nodes]) -> None:
    conductor, _ = fleet
    conductor._inbox.fail(TransportError("no broker"))
    with pytest.raises(TransportError, match="no broker"):
        list(conductor.steps(DRAFTS))


def test_a_node_whose_connection_breaks_while_others_are_waited_for_has_joined(
    fleet: tuple[Conductor, Nodes],
) -> None:
    conductor, nodes = fleet
    nodes.say("d", "hello", life="1")
    nodes.say("d", "status", state="offline", reason="its connection broke")
    nodes.say("d", "status", state="online", boot="1")
    nodes.say("c", "hello", life="1")
    conductor.join(["d", "c"], 10.0)
    assert set(conductor.hellos) == {"d", "c"}


def test_a_node_that_is_not_there_any_more_has_not_joined(fleet: tuple[Conductor, Nodes]) -> None:
    conductor, nodes = fleet
    nodes.say("d", "hello", life="1")
    nodes.say("d", "status", state="offline", reason="killed")
    nodes.say("c", "hello", life="1")
    with pytest.raises(TransportTimeout, match="no word from 'd'"):
        conductor.join(["d", "c"], 3.0)
