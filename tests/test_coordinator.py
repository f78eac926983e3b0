"""The coordinator's state machine, message by message, and the shell around it over memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from edgesplit.codecs import Packed, pack, unpack
from edgesplit.coordinator import Coordinator
from edgesplit.effects import Effect, Failed, NodeChanged, Noted, Replied, StepDone
from edgesplit.errors import EdgesplitError, FrameError, NodeLost, RunError, TransportTimeout
from edgesplit.plan import Plan, Route, Stage
from edgesplit.protocol import Commit, Report, Send, Sheet
from edgesplit.sheets import Cutting, Draft, Share
from edgesplit.transport.base import Message
from edgesplit.verdict import LossScale

CHAIN = Plan(("l0", "l1"), (Route("d", (Stage("d", 0, 1), Stage("c", 1, 2))),))
TREE = Plan(("l0", "l1"), tuple(Route(d, (Stage(d, 0, 1), Stage("c", 1, 2))) for d in ("d1", "d2")))
"""Layer 0 has replicas."""


def make(plan: Plan = CHAIN, **options: Any) -> Coordinator:
    return Coordinator(plan, Cutting(micros=2), **options)


def draft(step: int, *devices: str, samples: int = 4, index: int | None = None) -> Draft:
    return Draft(step, {d: Share(0, step if index is None else index, samples) for d in devices or ("d",)})


def report(sender: str, step: int, term: int = 0, arrays: Mapping[str, Packed] | None = None, **fields: Any) -> Message:
    meta = Report(step, **fields).meta()
    return Message(kind="report", sender=sender, term=term, meta=meta, arrays=arrays or {})


def sends(effects: Sequence[Effect], kind: str) -> dict[str, Message]:
    return {e.to: e.message for e in effects if isinstance(e, Send) and e.message.kind == kind}


def commits(effects: Sequence[Effect]) -> dict[str, Commit]:
    return {to: Commit.of(message.meta) for to, message in sends(effects, "commit").items()}


def done(effects: Sequence[Effect]) -> list[StepDone]:
    return [effect for effect in effects if isinstance(effect, StepDone)]


def failure(effects: Sequence[Effect]) -> EdgesplitError:
    (failed,) = (effect for effect in effects if isinstance(effect, Failed))
    assert isinstance(failed.error, EdgesplitError)
    return failed.error


def feed(coordinator: Coordinator, *messages: Message) -> list[Effect]:
    return [effect for message in messages for effect in coordinator.receive(message, 0.0)]


# --- steps ----------------------------------------------------------------------------------------------------------


def test_a_step() -> None:
    c = make()
    sheet = sends(c.issue([draft(7)], 0.0), "sheet")
    assert set(sheet) == {"d", "c"}
    (step,) = Sheet.of(sheet["d"].meta).steps
    assert [tuple(micro) for micro in step.micros] == [(0, "d", 0, 2, 0), (1, "d", 2, 4, 0)]
    assert feed(c, report("d", 7)) == []
    effects = feed(c, report("c", 7, losses={0: (3.0, 2.0), 1: (5.0, 2.0)}))
    assert commits(effects) == {"d": Commit(7, True), "c": Commit(7, True)}
    assert done(effects) == [StepDone(7, 2.0, 4.0, 4, True, {})]
    assert not c.busy


def test_steps_end_in_order_whatever_the_order_of_reports() -> None:
    c = make()
    c.issue([draft(0), draft(1)], 0.0)
    assert feed(c, report("d", 0), report("d", 1), report("c", 1)) == []
    assert [step.step for step in done(feed(c, report("c", 0)))] == [0, 1]


def test_numbers_are_never_used_again() -> None:
    c = make()
    c.issue([draft(0)], 0.0)
    feed(c, report("d", 0), report("c", 0))
    c.issue([draft(1)], 0.0, evaluate=True)
    feed(c, report("d", 1), report("c", 1))
    (step,) = Sheet.of(sends(c.issue([draft(1)], 0.0), "sheet")["d"].meta).steps
    assert [micro.micro for micro in step.micros] == [4, 5]


def test_the_loss_is_added_up_in_the_order_of_micro_batches() -> None:
    values = [1e16, 1.0, -1e16, 1.0]
    c = Coordinator(CHAIN, Cutting(micros=4))
    c.issue([draft(0)], 0.0)
    losses = {micro: (values[micro], 1.0) for micro in (3, 1, 0, 2)}
    (step,) = done(feed(c, report("c", 0, losses=losses), report("d", 0)))
    assert step.loss == (((1e16 + 1.0) - 1e16) + 1.0) / 4


def test_a_step_without_weight_has_no_loss() -> None:
    c = make()
    c.issue([draft(0)], 0.0)
    (step,) = done(feed(c, report("c", 0, losses={0: (0.0, 0.0)}), report("d", 0)))
    assert math.isnan(step.loss)
    assert step.applied


def test_only_nodes_on_the_way_take_part() -> None:
    c = make(TREE)
    c.issue([draft(0, "d1")], 0.0)
    assert feed(c, report("d2", 0), report("d1", 0)) == []
    assert set(commits(feed(c, report("c", 0)))) == {"d1", "c"}


@pytest.mark.parametrize("options", [{}, {"add_replicas": True}])
def test_a_step_in_which_nobody_has_samples_ends_at_once(options: dict[str, Any]) -> None:
    c = make(TREE, **options)
    (step,) = done(c.issue([Draft(0, {})], 0.0))
    assert (step.step, step.weight, step.samples, step.applied) == (0, 0.0, 0, True)
    assert not c.busy
    c.issue([draft(1, "d1", samples=0), draft(2, "d1")], 0.0)
    assert c.busy


def test_a_device_with_an_empty_batch_is_not_waited_for() -> None:
    c = make(TREE)
    c.issue([Draft(0, {"d1": Share(0, 0, 4), "d2": Share(0, 0, 0)})], 0.0)
    (step,) = done(feed(c, report("d1", 0), report("c", 0)))
    assert step.samples == 4


def test_empty_steps_end_in_their_place() -> None:
    c = make()
    assert done(c.issue([draft(0), Draft(1, {}), draft(2)], 0.0)) == []
    assert [s.step for s in done(feed(c, report("d", 0), report("c", 0)))] == [0, 1]
    effects = feed(c, report("d", 2, finite=False), report("c", 2))
    assert [(s.step, s.applied) for s in done(effects)] == [(2, False)]


def test_empty_steps_after_one_that_is_skipped() -> None:
    c = make()
    c.issue([draft(0), Draft(1, {}), draft(2)], 0.0)
    effects = feed(c, report("d", 0, finite=False), report("c", 0))
    assert [(s.step, s.applied) for s in done(effects)] == [(0, False), (1, True)]


# --- what is not taken ----------------------------------------------------------------------------------------------


def test_strangers_are_ignored() -> None:
    c = make()
    c.issue([draft(0)], 0.0)
    for message in (
        report("stranger", 0),
        Message(kind="failed", sender="stranger", meta={"error": "ha"}),
        Message(kind="status", sender="stranger", meta={"state": "offline"}),
        Message(kind="hello", sender="stranger", meta={"request": []}),
        report("coordinator", 0),
    ):
        assert feed(c, message) == []


def test_reports_of_another_term_of_no_open_step_and_again() -> None:
    c = make()
    c.issue([draft(0)], 0.0)
    assert feed(c, report("d", 0, term=1), report("c", 0, term=1), report("d", 5), report("d", 0), report("d", 0)) == []
    assert len(done(feed(c, report("c", 0)))) == 1
    assert feed(c, report("c", 0)) == []


def test_a_malformed_report_is_refused() -> None:
    c = make(TREE, add_replicas=True)
    c.issue([draft(0, "d1", "d2")], 0.0)
    with pytest.raises(FrameError, match="malformed"):
        feed(c, Message(kind="report", sender="d1", meta={"step": 0}))
    for name in ("1/w", "x/w", "", "-1/w", "9/w"):
        with pytest.raises(FrameError, match="which is of no layer it shares"):
            feed(c, report("d1", 0, arrays=pack({name: np.ones(2)})))


@pytest.mark.parametrize("other", [np.ones(3), np.ones(()), np.ones(2, np.float32)])
def test_sums_that_do_not_go_together_are_refused(other: Any) -> None:
    c = make(TREE, add_replicas=True)
    c.issue([draft(0, "d1", "d2")], 0.0)
    feed(c, report("d1", 0, arrays=pack({"0/w": np.ones(2)})), report("c", 0))
    with pytest.raises(FrameError, match=r"sum of '0/w' of 'd2' has another shape or dtype"):
        feed(c, report("d2", 0, arrays=pack({"0/w": other})))


@pytest.mark.parametrize("number", [None, [], {}, "1", 2.5, 99, -1, True])
def test_answers_to_nothing_are_ignored(number: Any) -> None:
    c = make()
    if number is not True:
        c.request("fetch", {"d": ({}, {})}, 0.0)
    assert feed(c, Message(kind="fetched", sender="d", meta={"request": number})) == []


# --- requests -------------------------------------------------------------------------------------------------------


def test_requests_are_answered_by_all() -> None:
    c = make()
    first, asked = c.request("fetch", {"d": ({"optimizer": True}, {}), "c": ({}, {})}, 0.0)
    second, _ = c.request("load", {"d": ({}, {})}, 0.0)
    assert sends(asked, "fetch")["d"].meta == {"optimizer": True, "request": first}
    assert first != second
    answer = {n: Message(kind="fetched", sender=n, meta={"request": first}) for n in ("d", "c")}
    assert feed(c, answer["d"], answer["d"]) == []
    assert feed(c, Message(kind="loaded", sender="c", meta={"request": second})) == [], "c was not asked"
    (reply,) = feed(c, answer["c"])
    assert isinstance(reply, Replied)
    assert (reply.request, set(reply.replies)) == (first, {"d", "c"})
    assert c.busy
    noted, reply = feed(c, Message(kind="loaded", sender="d", meta={"request": second}))
    assert noted == Noted({"base": [1, -1], "term": 0, "standing": [1.0, 0, 0, 0], "cuts": []})
    assert isinstance(reply, Replied)
    assert not c.busy


# --- skipped steps --------------------------------------------------------------------------------------------------


def test_a_step_that_is_not_finite_is_taken_back_everywhere_and_what_follows_is_issued_again() -> None:
    c = make(TREE)
    c.issue([draft(0, "d1"), draft(1, "d1", "d2"), draft(2, "d2")], 0.0)
    feed(c, report("d1", 1))  # early, of the step that will be issued again
    effects = feed(c, report("d1", 0, finite=False, culprit="l0"), report("c", 0))
    assert commits(effects) == dict.fromkeys(("d1", "d2", "c"), Commit(0, False))
    assert {message.term for message in sends(effects, "commit").values()} == {1}
    assert [(s.step, s.applied) for s in done(effects)] == [(0, False)]
    again = Sheet.of(sends(effects, "sheet")["d2"].meta)
    assert [step.step for step in again.steps] == [1, 2]
    numbers = [micro.micro for step in again.steps for micro in step.micros]
    assert numbers == [8, 9, 10, 11, 12, 13]
    assert again.steps[0].batches == {"d1": (0, 1), "d2": (0, 1)}, "a skipped step uses up its data, others do not"
    assert feed(c, report("d1", 1), report("d2", 1), report("c", 1)) == [], "of the old term"
    effects = feed(c, *(report(n, 1, term=1) for n in ("d1", "d2", "c")))
    assert [s.applied for s in done(effects)] == [True]
    assert c.skipped == 1


def test_three_in_a_row_end_the_run_and_name_node_and_layer() -> None:
    c = make(TREE)
    c.issue([draft(s, "d1", "d2") for s in range(5)], 0.0)
    effects: list[Effect] = []
    for step in range(3):
        assert not [e for e in effects if isinstance(e, Failed)]
        effects = feed(
            c, report("c", step, step), report("d1", step, step), report("d2", step, step, finite=False, culprit="l0")
        )
    error = failure(effects)
    assert isinstance(error, RunError)
    assert str(error).startswith("3 steps in a row were not finite (steps 0 to 2), last in layer 'l0' on 'd2': ")
    assert all(not commit.apply for commit in commits(effects).values())
    assert len(commits(effects)) == 3, "all put it back before the run ends"
    assert not sends(effects, "sheet")


def test_a_good_step_between_begins_the_row_anew() -> None:
    c = make()
    term = 0
    for step, good in enumerate([False, False, True, False, False, True]):
        c.issue([draft(step)], 0.0)
        effects = feed(c, report("d", step, term, finite=good), report("c", step, term))
        assert not [e for e in effects if isinstance(e, Failed)]
        term += not good
    assert (c.skipped, c.term) == (4, 4)


def test_the_name_does_not_depend_on_the_order_of_reports() -> None:
    texts = set()
    for order in (("d1", "d2", "c"), ("c", "d2", "d1"), ("d2", "c", "d1")):
        c = make(TREE, max_skipped=1)
        c.issue([draft(0, "d1", "d2")], 0.0)
        found = {"d1": report("d1", 0)} | {n: report(n, 0, finite=False, culprit=f"layer of {n}") for n in ("d2", "c")}
        texts.add(str(failure(feed(c, *(found[n] for n in order)))))
    assert len(texts) == 1
    assert "layer 'layer of d2' on 'd2'" in texts.pop(), "bad data shows downstream too: the device is named"


def test_an_asynchronous_run_names_the_node_that_left_out_updates() -> None:
    c = make(synchronous=False)
    for step in range(3):
        c.issue([draft(step)], 0.0)
        effects = feed(c, report("d", step, skipped=1), report("c", step))
        assert not commits(effects)
        assert [s.applied for s in done(effects)] == [False]
    assert "last in 'd':" in str(failure(effects))
    assert c.term == 0


def test_infinite_sums_of_replicas_are_seen() -> None:
    """Each is finite by itself; their sum is not."""
    c = make(TREE, add_replicas=True)
    c.issue([draft(0, "d1", "d2")], 0.0)
    big = pack({"0/w": np.full(2, 3e38, np.float32)})
    with np.errstate(over="ignore"):
        effects = feed(c, report("d1", 0, arrays=big), report("d2", 0, arrays=big), report("c", 0))
    assert [s.applied for s in done(effects)] == [False]


# --- what a commit carries ------------------------------------------------------------------------------------------


def test_barrier_where_an_update_needs_the_answer() -> None:
    assert not make().barrier
    assert not make(TREE).barrier
    assert make(clip_norm=1.0).barrier
    assert make(loss_scale=LossScale(8.0)).barrier
    assert make(loss_scale=LossScale(1.0, dynamic=True)).barrier
    assert make(TREE, add_replicas=True).barrier
    assert not make(add_replicas=True).barrier, "no layer has replicas"
    assert not make(clip_norm=1.0, synchronous=False).barrier


def test_the_norm_is_global() -> None:
    c = make(clip_norm=1.0)
    c.issue([draft(0)], 0.0)
    effects = feed(c, report("d", 0, layers={0: (4.0, 9.0)}), report("c", 0, layers={1: (4.0, 16.0)}))
    assert {commit.clip for commit in commits(effects).values()} == {1.0 / (5.0 + 1e-6)}


def test_the_norm_of_replicas_is_the_mean_by_weight() -> None:
    c = make(TREE, clip_norm=1.0)
    c.issue([draft(0, "d1", "d2")], 0.0)
    effects = feed(
        c,
        report("d1", 0, layers={0: (1.0, 4.0)}),
        report("d2", 0, layers={0: (3.0, 8.0)}),
        report("c", 0, layers={1: (4.0, 2.0)}),
    )
    assert commits(effects)["c"].clip == pytest.approx(1.0 / (math.sqrt((4 + 3 * 8) / 4 + 2) + 1e-6))


def test_sums_of_replicas_go_to_those_that_hold_the_layer() -> None:
    c = make(TREE, add_replicas=True, clip_norm=1.0, loss_scale=LossScale(2.0))
    c.issue([draft(0, "d1", "d2")], 0.0)
    effects = feed(
        c,
        report("d2", 0, layers={0: (3.0, 0.0)}, arrays=pack({"0/w": np.array([2.0, 4.0])})),
        report("c", 0, layers={1: (4.0, 0.0)}),
        report("d1", 0, layers={0: (1.0, 0.0)}, arrays=pack({"0/w": np.array([4.0, 4.0])})),
    )
    told = sends(effects, "commit")
    assert told["c"].arrays == {}
    assert told["c"].meta["weights"] == []
    for node in ("d1", "d2"):
        assert unpack(told[node].arrays)["0/w"].tolist() == [6.0, 8.0]
        assert told[node].meta["weights"] == [[0, 4.0]]
    assert commits(effects)["d1"].clip == pytest.approx(1.0 / (math.sqrt((6 / 8) ** 2 + 1) + 1e-6))


def test_a_replica_that_saw_no_samples_takes_part_under_every_step() -> None:
    c = make(TREE, add_replicas=True)
    c.issue([draft(0, "d1")], 0.0)
    assert feed(c, report("d1", 0, layers={0: (4.0, 0.0)}, arrays=pack({"0/w": np.ones(1)})), report("c", 0)) == []
    told = sends(feed(c, report("d2", 0)), "commit")
    assert unpack(told["d2"].arrays)["0/w"].tolist() == [1.0]


# --- the loss scale -------------------------------------------------------------------------------------------------


def test_loss_scale_alone() -> None:
    scale = LossScale(8.0, dynamic=True, growth_interval=3)
    assert [scale.note(True) for _ in range(4)] == [False] * 4
    assert scale.value == 16.0
    assert scale.note(False)
    assert (scale.value, scale.good) == (8.0, 0)
    assert [scale.note(False) for _ in range(4)] == [True, True, True, False], "at 1 it is no search any more"
    assert scale.value == 1.0
    fixed = LossScale(8.0)
    assert not fixed.note(False)
    assert fixed.value == 8.0


def test_searching_for_a_scale_is_not_counted_towards_the_end() -> None:
    c = make(loss_scale=LossScale(4.0, dynamic=True), max_skipped=2)
    scales, failures = [], 0
    for step in range(4):
        c.issue([draft(step)], 0.0)
        effects = feed(c, report("d", step, step, finite=False), report("c", step, step))
        scales.append(commits(effects)["d"].loss_scale)
        failures += sum(isinstance(e, Failed) for e in effects)
    assert scales == [2.0, 1.0, 1.0, 1.0]
    assert failures == 1
    assert c.skipped == 4


def test_a_scale_that_grows_is_told_to_all() -> None:
    c = make(TREE, loss_scale=LossScale(4.0, dynamic=True, growth_interval=2))
    c.issue([draft(0, "d1"), draft(1, "d1")], 0.0)
    first = commits(feed(c, report("d1", 0), report("c", 0)))
    assert {n: commit.loss_scale for n, commit in first.items()} == {"d1": 4.0, "d2": 4.0, "c": 4.0}
    second = commits(feed(c, report("d1", 1), report("c", 1)))
    assert {n: commit.loss_scale for n, commit in second.items()} == {"d1": 8.0, "d2": 8.0, "c": 8.0}


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_the_timeout_names_who_is_missing() -> None:
    c = make(TREE, step_timeout=10.0)
    assert c.tick(1e9) == []
    c.issue([draft(3, "d1", "d2"), draft(4, "d2")], 100.0)
    assert c.tick(109.9) == []
    c.receive(report("c", 3), 105.0)
    assert c.tick(114.9) == []
    error = failure(c.tick(115.0))
    assert isinstance(error, TransportTimeout)
    assert str(error) == "no progress in step 3 for 10 s: nothing from 'd1', 'd2'"


def test_the_timeout_of_a_request_names_who_has_not_answered() -> None:
    c = make(TREE, step_timeout=10.0)
    number, _ = c.request("fetch", {n: ({}, {}) for n in ("d1", "d2", "c")}, 0.0)
    c.receive(Message(kind="fetched", sender="d2", meta={"request": number}), 5.0)
    assert str(failure(c.tick(15.0))) == "no progress between two steps for 10 s: nothing from 'c', 'd1'"


@pytest.mark.parametrize(
    ("reason", "shown"), [("keep-alive ran out", "keep-alive ran out"), ("", "its connection closed")]
)
def test_a_node_that_is_lost(reason: str, shown: str) -> None:
    c = make()
    gone = Message(kind="status", sender="c", meta={"state": "offline", "reason": reason})
    assert feed(c, gone) == [NodeChanged("c", "lost", shown)], "nobody waits for it"
    c.issue([draft(3)], 0.0)
    assert feed(c, Message(kind="status", sender="c", meta={"state": "online"})) == [NodeChanged("c", "back")]
    error = failure(feed(c, gone))
    assert isinstance(error, NodeLost)
    assert str(error) == f"node 'c' was lost in step 3 ({shown})"


def test_a_node_that_says_it_failed() -> None:
    error = failure(feed(make(), Message(kind="failed", sender="c", meta={"error": "out of memory"})))
    assert str(error) == "'c' failed: out of memory"


# --- questions and those who are lost -------------------------------------------------------------------------------


def hello(node: str, life: str = "1") -> Message:
    return Message(kind="hello", sender=node, meta={"life": life})


def answers(effects: Sequence[Effect], kept: Sequence[Sequence[int]] = ()) -> list[Message]:
    """What nodes say to all that they are asked; ``kept`` to those who want to know."""
    asked = [e for e in effects if isinstance(e, Send) and "request" in e.message.meta]
    meta = {"kept": [list(row) for row in kept]}
    return [
        Message(kind=f"{e.message.kind}ed", sender=e.to, meta={"request": e.message.meta["request"], **meta})
        for e in asked
    ]


def loaded(**options: Any) -> Coordinator:
    """A tree whose nodes have joined, were told their part and given weights."""
    c = make(TREE, **options)
    c.reassign = lambda plan: {node: {"nodes": list(plan.nodes())} for node in plan.nodes()}
    feed(c, *map(hello, TREE.nodes()))
    for kind in ("assign", "load"):
        feed(c, *answers(c.request(kind, {n: ({}, {}) for n in TREE.nodes()}, 0.0)[1]))
    assert not c.busy
    return c


def test_no_answer_counts_that_comes_while_the_fleet_goes_back() -> None:
    c = loaded(on_lost="wait")
    d1, *others = answers(c.request("fetch", {n: ({}, {}) for n in TREE.nodes()}, 0.0)[1])
    feed(c, d1)
    halts = feed(c, hello("d1", "2"))
    assert set(sends(halts, "halt")) == {"c", "d2"}
    assert feed(c, *others) == []
    returns = feed(c, *answers(halts, [(1, -1, 0)]))
    fetches = sends(feed(c, *answers(returns)), "fetch")
    assert set(fetches) == set(TREE.nodes()), "all are asked again"
    assert fetches["c"].meta["request"] != others[0].meta["request"]


def test_who_was_to_be_told_a_plan_is_told_the_one_without_those_who_are_left_out() -> None:
    c = loaded(on_lost="continue")
    c.request("assign", {node: (meta, {}) for node, meta in c.take_plan(TREE).items()}, 0.0)
    feed(c, Message(kind="status", sender="d1", meta={"state": "offline"}))
    told = c.tick(1.0)
    assert {node: message.meta["nodes"] for node, message in sends(told, "assign").items()} == {
        node: ["d2", "c"] for node in ("d2", "c")
    }
    returns = feed(c, *answers(told, [(1, -1, 0)]))
    again = sends(feed(c, *answers(returns)), "assign")
    assert {node: message.meta["nodes"] for node, message in again.items()} == {n: ["d2", "c"] for n in ("d2", "c")}


def test_weights_that_are_given_out_are_withdrawn_when_somebody_is_left_out() -> None:
    c = loaded(on_lost="continue")
    number, effects = c.request("load", {n: ({}, {}) for n in TREE.nodes()}, 0.0)
    assert feed(c, *answers(effects)[1:]) == []
    feed(c, Message(kind="status", sender="d1", meta={"state": "offline"}))
    returns = feed(c, *answers(c.tick(1.0), [(1, -1, 0)]))
    effects = feed(c, *answers(returns))
    assert Replied(number, {}) in effects
    assert not sends(effects, "load")
    assert not c.busy
    assert c.line.base.load == 1, "nobody has them"


def test_a_question_that_nobody_is_left_to_answer_is_not_waited_for() -> None:
    c = loaded(on_lost="continue")
    number, _ = c.request("fetch", {"d1": ({}, {})}, 0.0)
    feed(c, Message(kind="status", sender="d1", meta={"state": "offline"}))
    returns = feed(c, *answers(c.tick(1.0), [(1, -1, 0)]))
    assert Replied(number, {}) in feed(c, *answers(returns))
    number, effects = c.request("fetch", {"d1": ({}, {})}, 2.0)
    assert effects == [Replied(number, {})]
    assert not c.busy


def test_who_was_left_out_is_asked_nothing() -> None:
    c = loaded(on_lost="continue")
    feed(c, Message(kind="status", sender="d1", meta={"state": "offline"}))
    c.issue([draft(0, "d2")], 0.0)
    told = c.tick(1.0)
    feed(c, *answers(feed(c, *answers(told, [(1, -1, 0)]))))
    feed(c, report("d2", 0, term=1), report("c", 0, term=1))
    _, effects = c.request("load", {n: ({}, {}) for n in TREE.nodes()}, 2.0)
    assert set(sends(effects, "load")) == {"c", "d2"}


def test_a_successor_s_questions_have_other_numbers() -> None:
    first, second = make(), make(first_request=1 << 20)
    old = answers(first.request("fetch", {n: ({}, {}) for n in ("d", "c")}, 0.0)[1])
    second.request("fetch", {n: ({}, {}) for n in ("d", "c")}, 0.0)
    assert feed(second, *old) == []
