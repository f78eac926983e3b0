"""A device that is an attacker: what it sends is seen, capped and written down, and the run goes on without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgesplit.checkpoint import latest
from edgesplit.codecs import pack, unpack
from edgesplit.engine import Engine
from edgesplit.errors import ExperimentError, RunError
from edgesplit.node import Outcome, Run, Serve, Work
from edgesplit.observe import audit
from edgesplit.observe.audit import Audit
from edgesplit.offences import Offences, judge, offenders, weight_fits
from edgesplit.options import options
from edgesplit.protocol import Report
from edgesplit.replanning import without
from edgesplit.schedule import Micro, Step
from edgesplit.session import Session
from tests.cases import RULES, Loader, Ran, Steps, apart, by_rounds, equal, one_process, open_session, points_task, tree

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = [32, 32, 16, 24]
DEVICES = ["d1", "d2", "d3", "d4"]
LIMITS: dict[str, Any] = {"quarantine_after": 2, "device_weight": 1.5}
Bend = Callable[[Engine, Work, Outcome], Outcome]


def hostile(monkeypatch: pytest.MonkeyPatch, bend: Bend, name: str = "d2") -> None:
    """Have one device send something else than it should."""
    execute = Engine.execute

    def executed(self: Engine, work: Work) -> Outcome:
        outcome = execute(self, work)
        return bend(self, work, outcome) if self.name == name else outcome

    monkeypatch.setattr(Engine, "execute", executed)


def first(work: Work) -> bool:
    return isinstance(work, Run) and work.action.op == "F" and work.action.stage == 0


def nan_activations(engine: Engine, work: Work, outcome: Outcome) -> Outcome:
    if not first(work):
        return outcome
    return replace(outcome, arrays=pack({n: a * np.nan for n, a in unpack(outcome.arrays).items()}, "raw"))


def shaped(change: Callable[[Any], Any]) -> Bend:
    def bend(engine: Engine, work: Work, outcome: Outcome) -> Outcome:
        arrays = {n: np.ascontiguousarray(change(a)) for n, a in unpack(outcome.arrays).items()}
        return replace(outcome, arrays=pack(arrays, "raw")) if first(work) else outcome

    return bend


def labels(change: Callable[[Any], Any]) -> Bend:
    def bend(engine: Engine, work: Work, outcome: Outcome) -> Outcome:
        if not first(work) or outcome.target is None:
            return outcome
        arrays = {n: np.ascontiguousarray(change(a)) for n, a in unpack(outcome.target).items()}
        return replace(outcome, target=pack(arrays, "raw"))

    return bend


def heavy(weight: float) -> Bend:
    return lambda engine, work, outcome: replace(outcome, weight=weight) if first(work) else outcome


def lies_and_nans(engine: Engine, work: Work, outcome: Outcome) -> Outcome:
    """Its activations are not finite, every second time, and it says that all is well."""
    if first(work) and isinstance(work, Run) and work.action.micro % 2:
        return nan_activations(engine, work, outcome)
    if outcome.report is not None:
        return replace(outcome, report=replace(outcome.report, finite=True, layers={}, culprit=None))
    return outcome


def reports_nonsense(engine: Engine, work: Work, outcome: Outcome) -> Outcome:
    if outcome.report is None:
        return outcome
    return replace(outcome, report=replace(outcome.report, layers={0: (-5.0, 1.0), 3: (1e300, -1.0)}))


BENDS: dict[str, Bend] = {
    "activations that are not finite": nan_activations,
    "the same, and it lies": lies_and_nans,
    "samples that weigh 1e300": heavy(1e300),
    "samples that weigh less than nothing": heavy(-1.0),
    "samples of weight nan": heavy(float("nan")),
    "negative weights in its report": reports_nonsense,
    "ten times the samples": shaped(lambda a: np.concatenate([a] * 10)),
    "activations of another width": shaped(lambda a: a[:, :3]),
    "activations of another type": shaped(lambda a: a.astype(np.int64)),
    "no activations": lambda e, w, o: replace(o, arrays={}) if first(w) else o,
    "ten times the labels": labels(lambda a: np.concatenate([a] * 10)),
    "labels that are no class": labels(lambda a: a + 100),
    "labels of another type": labels(lambda a: a.astype(np.float64) * np.nan),
}


def train(session: Session) -> Ran:
    watch = Steps()
    session.fit(callbacks=[watch])
    return Ran(watch.done, session.weights())


def audited(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("what", list(BENDS))
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_the_run_goes_on_without_the_device_as_if_it_had_never_been(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hostile(monkeypatch, BENDS[what])
    task = points_task(SIZES)
    how = {"every": "step", "micros": 2, "batch_size": 8, "rounds": 2, "steps_per_round": 4, "limits": LIMITS}
    with open_session(tree(task, [1, 4]), task, directory=tmp_path, **how, **RULES["clipped momentum"]) as session:
        ran = train(session)
        assert set(session.training.conductor.coordinator.offences.barred) == {"d2"}
        assert session.training.conductor.coordinator.missed.keys() == {"d2"}
        assert [r.device for r in session.training.plan.routes] == ["d1", "d3", "d4"]
    loader = Loader(task, DEVICES, 8)
    steps = [loader.take(["d1", "d3", "d4"]) for _ in range(8)]
    want = one_process(task, "clipped momentum", steps)
    equal(Ran(ran.steps[-6:], ran.weights), want._replace(losses=want.losses[-6:]))
    lines = [line for line in audited(tmp_path) if line["node"] == "d2"]
    assert "left out for good" in lines[-1]["what"]
    assert len(lines) >= 2


@pytest.mark.parametrize("rule", ["sgd", "momentum"])
def test_who_fails_while_weights_are_given_out_is_left_out_from_the_next_round_on(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others do the round again without it, and must nevertheless all get what it had come to with it."""
    task, loads = points_task(SIZES), count(1)
    plan = tree(task, [1, 4])
    rest = without(plan, ["d2"])
    assert rest is not None
    how = {"micros": 2, "batch_size": 8, "steps_per_round": 4, "rounds": 2, "limits": LIMITS, **RULES[rule]}
    with open_session(plan, task, **how) as session:
        session.fit(1)
        session.replan(rest)
        session.fit(1)
        want = session.weights()

    def fail(engine: Engine, work: Work, outcome: Outcome) -> Outcome:
        if isinstance(work, Serve) and work.message.kind == "load" and next(loads) == 2:
            raise RunError("no memory")
        return outcome

    hostile(monkeypatch, fail)
    with open_session(plan, task, **how) as session:
        session.fit(1)
        assert session.plan.routes == rest.routes
        assert session.training.conductor.coordinator.missed == {}
        session.fit(1)
        assert apart(session.weights(), want) == 0.0


def test_a_resumed_run_still_goes_on_without_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hostile(monkeypatch, heavy(1e300))
    task = points_task(SIZES)
    how = {"micros": 2, "batch_size": 8, "steps_per_round": 2, "limits": LIMITS, **RULES["sgd"]}
    with open_session(tree(task, [1, 4]), task, directory=tmp_path, rounds=2, **how) as session:
        session.fit()
    with open_session(tree(task, [1, 4]), task, directory=tmp_path, rounds=4, **how) as session:
        session.resume(latest(tmp_path / "checkpoints"))
        assert set(session.training.conductor.coordinator.offences.barred) == {"d2"}
        ran = train(session)
        assert [r.device for r in session.training.plan.routes] == ["d1", "d3", "d4"]
    assert len(ran.steps) == 4
    assert all(np.isfinite(array).all() for array in ran.weights.values())


def test_without_limits_nothing_is_looked_at_and_a_bad_device_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile(monkeypatch, nan_activations)
    task = points_task(SIZES)
    with pytest.raises(RunError, match="3 steps in a row were not finite"):
        train(open_session(tree(task, [1, 4]), task, every="step", batch_size=8, **RULES["sgd"]))


def test_where_all_are_not_finite_it_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    task = points_task(SIZES, poisoned={i: range(n) for i, n in enumerate(SIZES)})
    with pytest.raises(RunError, match="3 steps in a row were not finite"):
        train(open_session(tree(task, [1, 4]), task, every="step", batch_size=8, limits=LIMITS, **RULES["sgd"]))


def test_a_single_device_cannot_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile(monkeypatch, shaped(lambda a: a[:, :3]))
    task = points_task([32, 32])
    with pytest.raises(RunError, match=r"'d2': 1F\d+ fails on 'e1': .*the others cannot go on without it"):
        train(open_session(tree(task, [1, 4], ["d2"]), task, batch_size=8, limits=LIMITS, **RULES["sgd"]))


# --- replicas -------------------------------------------------------------------------------------------------------


def fetched(change: Callable[[Any], Any] = lambda a: a, weight: float | None = None) -> Bend:
    """What a device sends of its layers at a round's end."""

    def bend(engine: Engine, work: Work, outcome: Outcome) -> Outcome:
        if not isinstance(work, Serve) or work.message.kind != "fetch":
            return outcome
        arrays = {n: change(a) if n.startswith("param/") else a for n, a in unpack(outcome.arrays).items()}
        rows = [[la, w if weight is None else weight] for la, w in outcome.meta["weights"]]
        return replace(outcome, arrays=pack(arrays, "raw"), meta={"weights": rows})

    return bend


@pytest.mark.parametrize(
    "bend",
    [fetched(lambda a: a * np.nan), fetched(weight=float("inf")), fetched(weight=-1.0), fetched(weight=1e300)],
    ids=["not finite", "weight inf", "weight negative", "weight 1e300"],
)
def test_a_replica_that_cannot_count_is_left_out_of_the_mean_and_then_the_device_of_the_run(
    bend: Bend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hostile(monkeypatch, bend)
    task = points_task(SIZES)
    plan = tree(task, [1, 4])
    how = {"batch_size": 8, "rounds": 4, "steps_per_round": 2, "limits": {"quarantine_after": 2, "device_weight": 1}}
    with open_session(plan, task, directory=tmp_path, **how, **RULES["sgd"]) as session:
        ran = train(session)
        assert set(session.training.conductor.coordinator.offences.barred) == {"d2"}
    assert all(np.isfinite(array).all() for array in ran.weights.values())
    assert sum("left out for good" in line["what"] for line in audited(tmp_path)) == 1


def test_a_replica_that_must_be_as_the_others_and_is_not_does_not_become_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hostile(monkeypatch, fetched(lambda a: a + 1), name="d1")
    task = points_task(SIZES)
    how: dict[str, Any] = {"every": "step", "batch_size": 8, "rounds": 2, "steps_per_round": 2, **RULES["sgd"]}
    with open_session(tree(task, [1, 4]), task, limits={"quarantine_after": 3}, **how) as session:
        ran = train(session)
        assert session.training.conductor.coordinator.offences.counts == {"d1": 2}
    equal(ran, one_process(task, "sgd", Loader(task, DEVICES, 8).steps(4)))


def test_a_replica_that_has_gone_far_is_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    task = points_task(SIZES)
    plan = tree(task, [1, 4])
    how: dict[str, Any] = {"batch_size": 8, "rounds": 1, "steps_per_round": 2, **RULES["sgd"]}
    loader = Loader(task, DEVICES, 8)
    want = by_rounds(task, plan, [loader.steps(2)], "sgd")
    with open_session(plan, task, limits={"device_norm": 1000}, **how) as session:
        equal(train(session), want)
    hostile(monkeypatch, fetched(lambda a: a + 1e6))
    distances = {}
    for norm in (None, 1.0, 3.0):
        with open_session(plan, task, **({"limits": {"device_norm": norm}} if norm else {}), **how) as session:
            got = train(session)
        distances[norm] = max(
            float(np.abs(got.weights[n] - want.weights[-1][n].numpy()).max()) for n in ("a.weight", "a.bias")
        )
    assert distances[1.0] < distances[3.0] < 1.0
    assert distances[None] is not None
    assert distances[None] > 1e4


# --- the parts ------------------------------------------------------------------------------------------------------

STEP = Step(3, (Micro(0, "a", 0, 2), Micro(1, "b", 0, 2), Micro(2, "c", 0, 2)), dict.fromkeys("abc", (0, 0)))


def test_whose_fault_a_step_is() -> None:
    fine = Report(3, layers={0: (2.0, 1.0)})
    bad = replace(fine, finite=False)
    loss = Report(3, False, losses={0: (1.0, 2.0), 1: (np.nan, 2.0)})

    def who(**reports: Report) -> tuple[set[str], set[str]]:
        guilty, broken = offenders(STEP, reports, ["a", "b", "c"])
        return set(guilty), broken

    assert who(a=fine, b=fine, c=fine, cloud=bad) == (set(), set())
    assert who(a=fine, b=bad, c=fine, cloud=bad) == ({"b"}, set())
    assert who(a=fine, b=fine, c=fine, cloud=loss) == ({"b"}, set())
    assert who(a=bad, b=bad, c=bad, cloud=bad) == (set(), set())
    accused = replace(fine, offences={"c": "its act is not finite", "z": "it is not there"})
    assert who(a=fine, b=fine, c=fine, edge=accused) == ({"c"}, {"c"})
    assert who(a=accused, b=fine, c=fine) == (set(), set()), "devices do not judge each other"
    assert who(a=replace(fine, layers={0: (-1.0, 1.0)}), b=fine, c=fine) == ({"a"}, {"a"})


def test_offences_are_counted() -> None:
    counted = Offences(3)
    assert [counted.note("a") for _ in range(3)] == [False, False, True]
    assert counted.note("b", grave=True)
    counted.barred["a"] = "so"
    assert counted.note("a"), "one that was left out before is not given another chance"
    assert not any(Offences(None).note("a", grave=True) for _ in range(9))


@pytest.mark.parametrize(
    ("weight", "fits"), [(0, True), (12.0, True), (12.1, False), (-1e-9, False), (np.nan, False), (np.inf, False)]
)
def test_weights_of_micro_batches(weight: float, fits: bool) -> None:
    assert weight_fits(weight, 8, 1.5) == fits


def replica(change: float, weight: float = 1.0) -> tuple[dict[str, Any], float]:
    return {"w": np.full(4, 1 + change), "n": np.arange(3)}, weight


def test_a_group_of_replicas_is_judged() -> None:
    before = {"w": np.ones(4), "n": np.arange(3)}
    replicas = {"a": replica(0.1), "b": replica(-0.2), "c": replica(50.0), "d": replica(np.nan), "e": replica(0.1, 9)}
    found = judge(replicas, before, norm=2.0, most={"e": 5.0})
    assert {node: one.weight for node, one in found.items()} == {"a": 1, "b": 1, "c": 1, "d": 0, "e": 5}
    assert {node for node, one in found.items() if one.what} == {"c", "d", "e"}
    np.testing.assert_allclose(found["c"].arrays["w"], 1.2)
    assert found["a"].arrays is replicas["a"][0]
    np.testing.assert_array_equal(found["c"].arrays["n"], np.arange(3))
    assert all(one.what is None for one in judge({"a": replica(0), "b": replica(0)}, before, norm=1, most={}).values())


@pytest.mark.parametrize(
    ("limits", "how", "match"),
    [
        ({"device_weight": 2}, {}, "device_weight has no effect without"),
        ({"device_norm": 2}, {"every": "step"}, "device_norm has no effect with every: step"),
        ({"quarantine_after": 2}, {"method": "pipedream"}, "needs a common step"),
        ({"quarantine_after": 4}, {"max_skipped": 3}, "max_skipped must not be less"),
    ],
)
def test_limits_that_would_do_nothing_are_refused(limits: dict[str, Any], how: dict[str, Any], match: str) -> None:
    with pytest.raises(ExperimentError, match=match):
        options(limits=limits, **how)


def test_the_audit_says_each_thing_and_not_too_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    log = Audit(tmp_path / "audit.jsonl", lambda: now[0])
    for number in range(1000):
        log.note("d1", "it floods", number)
    log.note("d2", "something else", float("nan"))
    now[0] += 61
    log.note("d1", "it floods", 7)
    lines = audited(tmp_path)
    assert len(lines) == 12
    assert lines[0] == {"time": 100.0, "node": "d1", "what": "it floods", "value": 0}
    assert lines[-2]["value"] == "nan"
    assert lines[-1] == {"time": 161.0, "node": "d1", "what": "it floods", "value": 7, "also": 990}
    monkeypatch.setattr(audit, "MOST_KINDS", 3)
    for number in range(10):
        log.note(f"s{number}", "x")
    assert len(audited(tmp_path)) == 13
    with pytest.raises(RunError, match="cannot write"):
        Audit(tmp_path).note("a", "b")
