"""The node's state machine, message by message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from edgesplit.errors import EdgesplitError, FrameError
from edgesplit.methods import order_of
from edgesplit.node import Keep, NodeMachine, Outcome, Reckon, Run, Serve, Settle, Work
from edgesplit.plan import Plan, Route, Stage
from edgesplit.protocol import Commit, Report, Send, Sheet
from edgesplit.schedule import Action, Micro, Step
from edgesplit.transport.base import Message
from tests.virtual import MEMORY

LAYERS = ("l0", "l1", "l2")


def plan_of(*routes: str) -> Plan:
    """``"d e:2 c"``: d has layers 0 up to the next node's first, e begins at 2 ..."""
    made = []
    for text in routes:
        words = [word.partition(":") for word in text.split()]
        starts = [int(at or index) for index, (_, _, at) in enumerate(words)]
        stops = [*starts[1:], len(LAYERS)]
        made.append(Route(words[0][0], tuple(Stage(w[0], a, b) for w, a, b in zip(words, starts, stops, strict=True))))
    return Plan(LAYERS, tuple(made))


CHAIN = plan_of("d e c")
TREE = plan_of("d1 e c", "d2 e c")
GRADS = frozenset({"x"})


class Driven:
    """A machine, with outcomes in place of an engine."""

    def __init__(self, name: str, plan: Plan = CHAIN, *, method: str = "1f1b", **options: Any) -> None:
        split = options.pop("split", False)

        def order(steps: Sequence[Step]) -> Sequence[Action]:
            return order_of(method, plan, steps, name, split_backward=split)

        self.machine = NodeMachine(name, plan, order=order, **options)
        self.sent: list[Send] = []
        self.ran: list[str] = []

    def get(self, *messages: Message) -> None:
        for message in messages:
            self.machine.receive(message)

    def run(self, outcome: Outcome | None = None) -> list[str]:
        """Do all that can be done now; return it, as ``2F0``, ``reckon 3``, ``apply 3``, ``back 3``, ``fetch``."""
        before = len(self.ran)
        while (work := self.machine.next()) is not None:
            self.ran.append(told(work))
            self.sent += self.machine.done(work, outcome or outcome_of(work))
        return self.ran[before:]

    @property
    def memory(self) -> dict[str, Any]:
        return {part: held for part in MEMORY if (held := getattr(self.machine, part))}


def told(work: Work) -> str:
    match work:
        case Run(action):
            return str(action)
        case Reckon(step):
            return f"reckon {step.step}"
        case Settle(commit):
            return f"{'apply' if commit.apply else 'back'} {commit.step}"
        case Keep(number):
            return f"keep {number}"
        case Serve(message):
            return message.kind


def outcome_of(work: Work) -> Outcome:
    if isinstance(work, Run) and work.action.op == "F":
        first = work.action.stage == 0 and not work.last
        return Outcome(
            needs=frozenset() if work.last else GRADS, target={} if first else None, weight=2.0, loss_sum=3.0
        )
    return Outcome(report=Report(work.step.step)) if isinstance(work, Reckon) else Outcome()


def step(number: int, micros: Sequence[int], device: str = "d") -> Step:
    return Step(number, tuple(Micro(m, device, 0, 1) for m in micros), {device: (0, number)})


def sheet(*steps: Step, evaluate: bool = False, term: int = 0) -> Message:
    return control("sheet", Sheet(steps, evaluate).meta(), term)


def commit(number: int, apply: bool = True, term: int = 0, **fields: float) -> Message:
    return control("commit", Commit(number, apply, **fields).meta(), term)


def control(kind: str, meta: dict[str, Any], term: int = 0) -> Message:
    return Message(kind=kind, sender="coordinator", term=term, meta=meta)


def data(kind: str, sender: str, stage: int, micro: int, term: int = 0) -> Message:
    meta = {"needs": ["x"]} if kind == "act" else {}
    return Message(kind=kind, sender=sender, stage=stage, micro=micro, term=term, weight=2.0, meta=meta)


# --- the way of a step ----------------------------------------------------------------------------------------------


def test_a_step_on_the_middle_node() -> None:
    e = Driven("e")
    e.get(sheet(step(0, [0, 1])))
    assert e.run() == []
    e.get(data("act", "d", 1, 0), data("act", "d", 1, 1))
    assert e.run() == ["1F0", "1F1"]
    e.get(data("grad", "c", 1, 0), data("grad", "c", 1, 1))
    assert e.run() == ["1B0", "1B1", "reckon 0", "1U1", "keep 0"]
    e.get(commit(0))
    assert e.run() == ["apply 0"]
    assert e.memory == {}
    assert [(s.to, s.message.kind, s.message.stage, s.message.micro, s.message.weight) for s in e.sent] == [
        ("c", "act", 2, 0, 2.0),
        ("c", "act", 2, 1, 2.0),
        ("d", "grad", 0, 0, 2.0),
        ("d", "grad", 0, 1, 2.0),
        ("coordinator", "report", 0, 0, 0.0),
    ]


def test_messages_that_come_before_their_sheet_are_kept() -> None:
    c = Driven("c")
    c.get(data("target", "d", 2, 0), data("act", "e", 2, 0))
    assert c.run() == []
    c.get(sheet(step(0, [0])))
    assert c.run() == ["2F0", "2B0", "reckon 0", "2U0", "keep 0"]
    assert c.sent[-1].message.meta["losses"] == [[0, 3.0, 2.0]]


@pytest.mark.parametrize("first", ["act", "target"])
def test_the_last_stage_needs_activation_and_target(first: str) -> None:
    c = Driven("c")
    messages = {"act": data("act", "e", 2, 0), "target": data("target", "d", 2, 0)}
    c.get(sheet(step(0, [0])), messages.pop(first))
    assert c.run() == []
    c.get(*messages.values())
    assert c.run()[0] == "2F0"


def test_labels_of_a_u_shape_stay_on_the_device() -> None:
    d = Driven("d", plan_of("d e d:2"))
    d.get(sheet(step(0, [0])))
    assert d.run() == ["0F0"]
    assert [(s.to, s.message.kind) for s in d.sent] == [("e", "act")]
    d.get(data("act", "e", 2, 0))
    assert d.run() == ["2F0", "2B0", "2U0"]
    d.get(data("grad", "e", 0, 0))
    assert d.run() == ["0B0", "reckon 0", "0U0", "keep 0"]
    d.get(commit(0))
    assert d.run() == ["apply 0"]
    assert d.memory == {}


def test_a_wholly_frozen_part_sends_and_awaits_nothing() -> None:
    e = Driven("e")
    act = Message(kind="act", sender="d", stage=1, micro=0, weight=2.0, meta={"needs": []})
    e.get(sheet(step(0, [0])), act)
    assert e.run(Outcome(weight=2.0)) == ["1F0", "1B0", "reckon 0", "1U0", "keep 0"]
    assert [s.message.kind for s in e.sent] == ["act", "report"]


def test_halves_of_a_backward() -> None:
    e = Driven("e", split=True)
    e.get(sheet(step(0, [0])), data("act", "d", 1, 0), data("grad", "c", 1, 0))
    assert e.run() == ["1F0", "1I0", "1W0", "reckon 0", "1U0", "keep 0"]
    assert [s.message.kind for s in e.sent] == ["act", "grad", "report"]


def test_window_looks_past_what_is_not_ready() -> None:
    e = Driven("e", TREE, window=2)
    micros = (Micro(0, "d1", 0, 1), Micro(1, "d2", 0, 1))
    e.get(sheet(Step(0, micros, {"d1": (0, 0), "d2": (0, 0)})), data("act", "d2", 1, 1))
    assert e.run() == ["1F1"]
    e.get(data("act", "d1", 1, 0), data("grad", "c", 1, 1))
    assert e.run() == ["1F0", "1B1"]


# --- updates and commits --------------------------------------------------------------------------------------------


def test_at_most_one_version_is_uncommitted() -> None:
    d = Driven("d")
    d.get(sheet(step(0, [0]), step(1, [1]), step(2, [2])), data("grad", "e", 0, 0), data("grad", "e", 0, 1))
    assert d.run() == ["0F0", "0B0", "reckon 0", "0U0", "0F1", "0B1", "keep 0", "reckon 1"]
    assert d.machine.waiting_for() == "the commit of step 0"
    d.get(commit(0))
    assert d.run() == ["apply 0", "0U1", "0F2", "keep 1"]


def test_a_barrier_updates_with_the_answer_only() -> None:
    d = Driven("d", barrier=True)
    d.get(sheet(step(0, [0]), step(1, [1])), data("grad", "e", 0, 0))
    assert d.run() == ["0F0", "0B0", "reckon 0"]
    assert d.machine.waiting_for() == "the commit of step 0"
    d.get(commit(0, clip=0.5, loss_scale=4.0))
    work = d.machine.next()
    assert isinstance(work, Run)
    assert work.commit is not None
    assert Commit.of(work.commit.meta).clip == 0.5
    assert d.run() == ["0U0", "apply 0", "0F1", "keep 0"]
    assert d.machine.loss_scale == 4.0
    assert d.sent[-1].message.loss_scale == 4.0


def test_a_commit_before_the_last_update() -> None:
    d = Driven("d")
    d.get(sheet(step(0, [0])), data("grad", "e", 0, 0))
    done = []
    while not done or done[-1] != "reckon 0":
        work = d.machine.next()
        assert work is not None
        done.append(told(work))
        d.machine.done(work, outcome_of(work))
    d.get(commit(0))
    assert d.run() == ["0U0", "apply 0", "keep 0"]
    assert d.memory == {}


def test_forwards_of_a_step_are_not_held_up_by_its_own_updates() -> None:
    """``c`` is stage 1 for one device and stage 2 for another: the one's layers are done before the other's."""
    plan = plan_of("d1 c", "d2 e c")
    c = Driven("c", plan, barrier=True)
    micros = tuple(Micro(m, ("d1", "d2")[m % 2], m, m + 1) for m in range(4))
    acts = [data("act", ("d1", "e")[m % 2], 1 + m % 2, m) for m in range(4)]
    targets = [data("target", ("d1", "d2")[m % 2], 1 + m % 2, m) for m in range(4)]
    c.get(sheet(Step(0, micros, {"d1": (0, 0), "d2": (0, 0)})), *acts, *targets)
    assert c.run()[-1] == "reckon 0", c.ran
    assert "1U3" not in c.ran
    c.get(commit(0))
    assert c.run() == ["1U3", "2U3", "apply 0", "keep 0"]


# --- steps that are taken back --------------------------------------------------------------------------------------


def test_a_step_that_passes_the_node_by_is_waited_for_where_its_commit_concerns_all() -> None:
    d = Driven("d1", TREE)
    others = Sheet((step(0, [0], "d2"), step(1, [1], "d1")), everyone=True)
    d.get(control("sheet", others.meta()))
    assert d.run() == []
    assert d.machine.waiting_for() == "the commit of step 0"
    d.get(commit(0, loss_scale=2.0))
    assert d.run() == ["apply 0", "0F1"]
    assert d.machine.loss_scale == 2.0


def test_a_halt_drops_all_that_is_planned_and_under_way() -> None:
    d = Driven("d")
    d.get(sheet(step(0, [0, 1]), step(1, [2])), commit(0), control("fetch", {"request": 1}))
    assert d.run()[0] == "0F0"
    d.get(data("grad", "e", 0, 0), control("halt", {"request": 2}, term=3))
    assert d.machine.term == 3
    assert d.run() == ["halt"]
    assert d.memory == {}
    d.get(sheet(step(0, [3, 4]), term=2), data("grad", "e", 0, 3, term=2))
    assert d.memory == {}, "of an older term"
    d.get(sheet(step(0, [5]), term=3))
    assert d.run() == ["0F5"]


def test_rollback_drops_later_steps_and_their_messages() -> None:
    e = Driven("e")
    e.get(sheet(step(0, [0]), step(1, [1])), *(data("act", "d", 1, m) for m in (0, 1)), data("grad", "c", 1, 0))
    assert e.run() == ["1F0", "1B0", "reckon 0", "1U0", "1F1", "keep 0"]
    e.get(data("act", "d", 1, 7), commit(0, apply=False, term=1))
    assert e.run() == ["back 0"]
    assert e.memory == {}
    e.get(data("grad", "c", 1, 1))  # on its way from before
    assert e.memory == {}
    e.get(sheet(step(1, [2]), term=1), data("act", "d", 1, 2, term=1), data("grad", "c", 1, 2, term=1))
    assert e.run() == ["1F2", "1B2", "reckon 1", "1U2", "keep 1"]
    assert {s.message.term for s in e.sent[-3:]} == {1}


def test_a_message_of_the_new_term_before_the_commit_that_raises_it() -> None:
    e = Driven("e")
    e.get(sheet(step(0, [0]), step(1, [1])), data("act", "d", 1, 0), data("grad", "c", 1, 0))
    e.run()
    e.get(data("act", "d", 1, 2, term=1))  # d heard of it earlier
    assert e.run() == []
    e.get(commit(0, apply=False, term=1), sheet(step(1, [2]), term=1))
    assert e.run() == ["back 0", "1F2"]


def test_control_messages_of_an_older_term_are_dropped() -> None:
    e = Driven("e")
    e.get(commit(0, apply=False, term=3))
    assert e.run() == ["back 0"]
    e.get(sheet(step(1, [1]), term=2), commit(1, term=2), control("fetch", {"request": 1}, term=2))
    assert e.run() == []
    assert e.memory == {}
    assert e.machine.term == 3


def test_rollback_of_a_step_that_passed_the_node_by() -> None:
    """``d1`` takes no part in step 1; its step 0 is not committed and step 2 has begun when step 1 is taken back."""
    d = Driven("d1", TREE)
    d.get(sheet(step(0, [0], "d1"), step(1, [1], "d2"), step(2, [2], "d1")), data("grad", "e", 0, 0))
    assert d.run() == ["0F0", "0B0", "reckon 0", "0U0", "0F2", "keep 0"]
    d.get(commit(0), commit(1, apply=False, term=1), sheet(step(2, [3], "d1"), term=1))
    assert d.run() == ["apply 0", "back 1", "0F3"]
    d.get(data("grad", "e", 0, 2), data("grad", "e", 0, 3, term=1))
    assert d.run() == ["0B3", "reckon 2", "0U3", "keep 2"]
    d.get(commit(2, term=1))
    assert d.run() == ["apply 2"]
    assert d.memory == {}


def test_a_rollback_waits_for_the_update_of_the_step_before() -> None:
    d = Driven("d1", TREE, barrier=True)
    d.get(sheet(step(0, [0], "d1"), step(1, [1], "d2"), step(2, [2], "d1")), data("grad", "e", 0, 0))
    assert d.run() == ["0F0", "0B0", "reckon 0"]
    d.get(commit(0), commit(1, apply=False, term=1))
    assert d.run() == ["0U0", "apply 0", "back 1", "keep 0"]
    assert d.memory == {}


def test_two_steps_taken_back_one_after_the_other() -> None:
    d = Driven("d")
    d.get(sheet(step(0, [0]), step(1, [1])), data("grad", "e", 0, 0))
    d.run()
    d.get(commit(0, apply=False, term=1), sheet(step(1, [2]), term=1), commit(1, apply=False, term=2))
    assert d.run() == ["back 0", "back 1"]
    assert d.machine.term == 2
    assert d.memory == {}


def test_the_loss_scale_reaches_a_node_that_sat_the_step_out() -> None:
    d = Driven("d1", TREE, barrier=True)
    d.get(sheet(step(0, [0], "d2"), step(1, [1], "d1")), commit(0, loss_scale=16.0))
    assert d.run() == ["apply 0", "0F1"]
    assert d.sent[0].message.loss_scale == 16.0


def test_steps_that_pass_a_node_by_leave_nothing_behind() -> None:
    d = Driven("d1", TREE)
    d.get(sheet(*(step(n, [n], "d2") for n in range(50))))
    assert d.run() == []
    assert d.memory == {}


# --- requests, evaluation, strangers --------------------------------------------------------------------------------


def test_a_fetch_waits_until_the_open_steps_are_settled() -> None:
    d = Driven("d")
    d.get(sheet(step(0, [0])), control("fetch", {"request": 5}), data("grad", "e", 0, 0))
    assert d.run() == ["0F0", "0B0", "reckon 0", "0U0", "keep 0"]
    d.get(commit(0))
    assert d.run(Outcome(meta={"weights": []})) == ["apply 0", "fetch"]
    assert d.sent[-1].message.kind == "fetched"
    assert d.sent[-1].message.meta == {"request": 5, "weights": []}


def test_evaluation_runs_forwards_only_and_reports() -> None:
    e = Driven("e")
    e.get(sheet(step(4, [0, 1]), step(5, [2]), evaluate=True), *(data("act", "d", 1, m) for m in range(3)))
    work = e.machine.next()
    assert isinstance(work, Run)
    assert work.evaluate
    assert e.run() == ["1F0", "1F1", "reckon 4", "1F2", "reckon 5"]
    assert [s.message.meta["step"] for s in e.sent if s.message.kind == "report"] == [4, 5]
    assert e.memory == {}


def test_evaluation_adds_up_metrics_by_device() -> None:
    c = Driven("c", TREE)
    micros = (Micro(0, "d1", 0, 1), Micro(1, "d2", 0, 1), Micro(2, "d1", 1, 2))
    c.get(sheet(Step(0, micros, {"d1": (-1, 0), "d2": (-1, 0)}), evaluate=True))
    c.get(
        *(data("act", "e", 2, m) for m in range(3)), *(data("target", micro.device, 2, micro.micro) for micro in micros)
    )
    c.run(Outcome(weight=1.0, metrics={"right": (1.0, 2.0)}))
    assert c.sent[-1].message.meta["metrics"] == {"d1": {"right": [2.0, 4.0]}, "d2": {"right": [1.0, 2.0]}}


@pytest.mark.parametrize("kind", ["sheet", "commit", "fetch", "load"])
def test_control_messages_of_others_are_ignored(kind: str) -> None:
    d = Driven("d")
    for sender in ("e", "stranger"):
        d.get(Message(kind=kind, sender=sender, term=9, meta=sheet(step(0, [0])).meta))
    assert d.run() == []
    assert d.memory == {}
    assert d.machine.term == 0


def test_data_of_strangers_is_not_kept() -> None:
    e = Driven("e")
    e.get(data("act", "stranger", 1, 0))
    assert e.memory == {}


@pytest.mark.parametrize(
    "bad",
    [
        control("sheet", {}),
        control("sheet", {"steps": [{}]}),
        control("commit", {"step": 1}),
        sheet(step(0, [0], "stranger")),
        sheet(step(0, [0], "stranger"), evaluate=True),
    ],
)
def test_malformed_control_messages_are_refused_and_change_nothing(bad: Message) -> None:
    d = Driven("d")
    with pytest.raises(FrameError, match="malformed"):
        d.get(bad)
    assert d.run() == []
    assert d.memory == {}


def test_a_sheet_that_the_method_cannot_carry_is_refused() -> None:
    ring = Plan(("a", "b", "c", "d"), (Route("x", tuple(Stage("xy"[i % 2], i, i + 1) for i in range(4))),))
    x = Driven("x", ring, method="interleaved")
    with pytest.raises(EdgesplitError, match="multiple of 2"):
        x.get(sheet(step(0, [0, 1, 2], "x")))


# --- asynchronous ---------------------------------------------------------------------------------------------------


def test_an_asynchronous_node_updates_at_once_and_reports_afterwards() -> None:
    d = Driven("d", method="pipedream", synchronous=False, window=2)
    d.get(sheet(step(0, [0]), step(1, [1])))
    assert d.run() == ["0F0", "0F1"]
    d.get(data("grad", "e", 0, 0))
    assert d.run() == ["0B0", "0U0", "reckon 0"]
    d.get(data("grad", "e", 0, 1))
    assert d.run() == ["0B1", "0U1", "reckon 1"]
    assert d.memory == {}


# --- what it waits for ----------------------------------------------------------------------------------------------


def test_waiting_for() -> None:
    e, c, d = Driven("e"), Driven("c"), Driven("d")
    assert e.machine.waiting_for() is None
    for node in (e, c, d):
        node.get(sheet(step(4, [9])))
    assert d.machine.waiting_for() == "its turn to run 0F9"
    d.run()
    assert e.machine.waiting_for() == "act of 1F9 from 'd' (step 4)"
    assert c.machine.waiting_for() == "act of 2F9 from 'e' (step 4)"
    c.get(data("act", "e", 2, 9))
    assert c.machine.waiting_for() == "target of 2F9 from 'd' (step 4)"
    assert d.machine.waiting_for() == "grad of 0B9 from 'e' (step 4)"
    e.get(data("act", "d", 1, 9))
    e.run()
    assert e.machine.waiting_for() == "grad of 1B9 from 'c' (step 4)"
    c.get(data("target", "d", 2, 9))
    c.run()
    assert c.machine.waiting_for() == "the commit of step 4"
    c.get(commit(4))
    c.run()
    assert c.machine.waiting_for() is None
