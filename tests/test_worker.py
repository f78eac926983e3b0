"""The shell around a node, in a thread, with the test as its coordinator and its neighbours."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgesplit.codecs import pack, unpack
from edgesplit.errors import (
    CoordinatorGone,
    EdgesplitError,
    FrameError,
    PlanError,
    RunError,
    ScheduleError,
    TransportError,
    TransportTimeout,
)
from edgesplit.kit import Kit
from edgesplit.plan import Plan, Route, Stage
from edgesplit.protocol import Assignment, Commit, Sheet
from edgesplit.schedule import Micro, Step
from edgesplit.transport.base import Inbox, Message
from edgesplit.transport.memory import MemoryTransport
from edgesplit.worker import Worker
from tests.test_engine import Samples1D, make_assignment, make_kit

PLAN = Plan(("l0", "l1"), (Route("d", (Stage("d", 0, 1), Stage("c", 1, 2))),))
DATA = {"d": Samples1D(8, 1)}
STEP = Step(0, (Micro(0, "d", 0, 2), Micro(1, "d", 2, 4)), {"d": (0, 0)})


class Node:
    """A worker in a thread, and what it sends."""

    def __init__(self, transport: MemoryTransport, name: str, kit: Callable[[Assignment], Kit], **options: Any) -> None:
        self.transport, self.name = transport, name
        self.inboxes: dict[str, Inbox] = {n: transport.mailbox(n) for n in ("coordinator", "d", "c") if n != name}
        self.error: Exception | None = None
        self.steps = 0
        self._worker = Worker(name, transport, kit, facts={"pid": 7}, on_step=self._count, **options)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.took("coordinator", "hello")

    def _count(self) -> None:
        self.steps += 1

    def _run(self) -> None:
        try:
            self._worker.run()
        except Exception as error:  # noqa: BLE001 - for the test to look at
            self.error = error

    def tell(
        self, kind: str, meta: Mapping[str, Any] | None = None, sender: str = "coordinator", **fields: Any
    ) -> None:
        self.transport.send(self.name, Message(kind=kind, sender=sender, meta=meta or {}, **fields))

    def took(self, to: str, kind: str) -> Message:
        message = self.inboxes[to].get(10.0, kind)
        assert message.kind == kind, message
        assert message.sender == self.name
        return message

    def end(self) -> Exception | None:
        self._thread.join(10.0)
        assert not self._thread.is_alive()
        return self.error

    def assign(self, **fields: Any) -> Message:
        self.tell("assign", {**make_assignment(PLAN, self.name, **fields).meta(), "request": 3})
        return self.took("coordinator", "assigned")

    def load(self) -> None:
        layers = PLAN.layers_of(self.name)
        arrays = {f"param/{la}.p": np.array(0.5) for la in layers} | {f"buffer/{la}.n": np.array(0) for la in layers}
        self.tell("load", {"request": 4}, arrays=pack(arrays))
        assert self.took("coordinator", "loaded").meta["request"] == 4


Start = Callable[..., Node]


@pytest.fixture
def start() -> Iterator[Start]:
    nodes = []
    with MemoryTransport() as transport:

        def make(name: str = "d", kit: Callable[[Assignment], Kit] | None = None, **options: Any) -> Node:
            nodes.append(Node(transport, name, kit or (lambda told: make_kit(PLAN, DATA)), **options))
            return nodes[-1]

        yield make
        for node in nodes:
            node.tell("stop")
            node._thread.join(10.0)


def test_a_device_through_a_step(start: Start) -> None:
    d = start()
    told = d.assign()
    assert told.meta == {"request": 3, "sizes": {"train": [4, 4], "test": [4, 4]}, "kept": []}
    d.load()
    d.tell("sheet", Sheet((STEP,)).meta())
    acts = [d.took("c", kind) for kind in ("act", "target", "act", "target")]
    assert [message.micro for message in acts] == [0, 0, 1, 1]
    for micro in (0, 1):
        arrays = pack({"x": np.ones(2)})
        d.tell("grad", sender="c", stage=0, micro=micro, arrays=arrays)
    report = d.took("coordinator", "report")
    assert [row[0] for row in report.meta["events"]] == ["0F0", "0F1", "0B0", "0B1"]
    assert report.meta["traffic"]["c"] > 0
    assert d.steps == 1
    d.tell("commit", Commit(0, True).meta())
    d.tell("fetch", {"request": 9})
    fetched = d.took("coordinator", "fetched")
    assert [row[0] for row in fetched.meta["events"]] == ["0U1"], "each is told once"
    assert fetched.meta["request"] == 9
    assert set(unpack(fetched.arrays)) == {"param/0.p", "buffer/0.n"}
    d.tell("stop")
    stopped = d.took("coordinator", "stopped")
    assert stopped.meta["waiting_for"] is None
    assert d.end() is None


def test_stop_says_what_it_waited_for(start: Start) -> None:
    d = start()
    d.tell("stop")
    assert d.took("coordinator", "stopped").meta["waiting_for"] == "its assignment"
    assert d.end() is None


def test_stop_in_a_step_and_with_an_error(start: Start) -> None:
    c = start("c")
    c.assign()
    c.load()
    c.tell("sheet", Sheet((STEP,)).meta())
    c.tell("stop", {"error": "'d' failed: out of memory"})
    assert c.took("coordinator", "stopped").meta["waiting_for"] == "act of 1F0 from 'd' (step 0)"
    error = c.end()
    assert isinstance(error, RunError)
    assert str(error) == "'d' failed: out of memory"


def failed(node: Node) -> tuple[str, Exception]:
    told = node.took("coordinator", "failed").meta["error"]
    error = node.end()
    assert error is not None
    assert "\n" not in told
    return told, error


def test_another_fingerprint(start: Start) -> None:
    d = start(kit=lambda told: replace(make_kit(PLAN, DATA), fingerprint="other"))
    d.tell("assign", make_assignment(PLAN, "d").meta())
    told, error = failed(d)
    assert isinstance(error, RunError)
    assert told == str(error)
    assert "the task on 'd' is not the coordinator's (fingerprint other, not numpy)" in told


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"window": 0}, FrameError, "a assign message is malformed: window"),
        ({"plan": {}}, PlanError, "plan: 'layers' is missing"),
        ({"method": "no such"}, ScheduleError, "no method is called 'no such'"),
        ({"optimizer": None}, RunError, "'d' was given no optimizer"),
        ({"optimizer": {"rules": 3}}, EdgesplitError, "an optimizer must be an object"),
    ],
)
def test_assignments_that_cannot_be(start: Start, change: dict[str, Any], kind: type, text: str) -> None:
    d = start()
    d.tell("assign", {**make_assignment(PLAN, "d").meta(), **change})
    told, error = failed(d)
    assert isinstance(error, kind)
    assert text in told


def test_an_error_of_the_users_code_names_its_place(start: Start) -> None:
    def broken(shard: Any, test: bool) -> Any:
        raise ValueError("no\n   camera")

    d = start(kit=lambda told: replace(make_kit(PLAN, DATA), data=broken))
    d.tell("assign", make_assignment(PLAN, "d").meta())
    told, error = failed(d)
    assert isinstance(error, ValueError)
    assert told.startswith("ValueError: no camera (")
    assert "test_worker.py:" in told


@pytest.mark.parametrize(
    ("kind", "meta", "text"),
    [
        ("sheet", {"steps": 3}, "malformed"),
        ("commit", {}, "malformed"),
        ("insert", {"request": 1}, "'d' takes no batches"),
    ],
)
def test_messages_that_make_no_sense(start: Start, kind: str, meta: dict[str, Any], text: str) -> None:
    d = start()
    d.assign()
    d.load()
    d.tell(kind, meta)
    told, error = failed(d)
    assert isinstance(error, EdgesplitError)
    assert text in told


def test_the_coordinator_is_gone(start: Start) -> None:
    d = start(coordinator_s=0.1)
    d.assign()
    d.tell("status", {"state": "offline", "reason": "killed"}, sender="c")
    d.tell("status", {"state": "online"})
    d.took("coordinator", "hello")
    d.tell("status", {"state": "offline", "reason": "keep-alive ran out"})
    told, error = failed(d)
    assert isinstance(error, CoordinatorGone)
    assert told == str(error) == "the coordinator is gone (keep-alive ran out) and did not come back within 0.1 s"


def test_each_coordinator_that_is_seen_is_greeted(start: Start) -> None:
    d = start(coordinator_s=5.0)
    d.tell("status", {"state": "online", "boot": "1"})  # another may have died with the hello that it had acknowledged
    d.took("coordinator", "hello")
    d.tell("status", {"state": "offline", "reason": "killed"})
    d.tell("status", {"state": "online", "boot": "1"})  # it was only away
    d.tell("status", {"state": "offline", "reason": "killed"})
    d.tell("status", {"state": "online", "boot": "2"})
    again = d.took("coordinator", "hello")
    assert again.meta["life"]
    d.assign()


def test_others_cannot_assign_or_stop(start: Start) -> None:
    d = start()
    d.tell("assign", make_assignment(PLAN, "d").meta(), sender="c")
    d.tell("stop", sender="c")
    d.assign()


def test_patience(start: Start) -> None:
    c = start("c", patience=0.05)
    c.assign()
    c.load()
    c.tell("sheet", Sheet((STEP,)).meta())
    told, error = failed(c)
    assert isinstance(error, TransportTimeout)
    assert told == "'c' waited 0.05 s for act of 1F0 from 'd' (step 0), which did not come"


def test_what_fails_when_a_message_is_taken_is_no_message_that_did_not_come(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(self: MemoryTransport, peers: Sequence[str], timeout: float) -> None:
        raise TransportTimeout(f"no answer within {timeout:g} s from {', '.join(peers)}")

    d = start()
    d.tell("status", {"state": "online", "boot": "1"})
    d.took("coordinator", "hello")
    time.sleep(0.2)  # until it waits
    monkeypatch.setattr(MemoryTransport, "probe", unreachable)
    d.tell("assign", {**make_assignment(PLAN, "d").meta(), "request": 3})
    assert failed(d)[0] == "no answer within 10 s from c"


def test_an_error_is_not_hidden_by_a_network_that_is_gone(start: Start) -> None:
    d = start()
    d.assign()
    d.transport.close()
    d.transport.mailbox("d").put(Message(kind="sheet", sender="coordinator", meta={"steps": 3}))
    error = d.end()
    assert isinstance(error, FrameError), error
    with pytest.raises(TransportError):
        d.tell("stop")
    d.transport._closed = False  # for the fixture's end
