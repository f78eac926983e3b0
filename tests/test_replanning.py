"""Another plan in the middle of a run: without lost nodes, by command, and what moves then."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgesplit.errors import PlanError
from edgesplit.keeping import NEXT_PLAN
from edgesplit.plan import Plan, Route, Stage
from edgesplit.replanning import moved, without
from tests.cases import EXACT, RULES, apart, chain, open_session, points_task, run, tree

LAYERS = tuple(f"l{i}" for i in range(6))


def plan_of(*routes: str, topology: dict[str, object] | None = None) -> Plan:
    """``"d1 e1:2 c:4"``: d1 has layers 0 and 1, e1 begins at 2, c at 4."""
    made = []
    for text in routes:
        words = [word.partition(":") for word in text.split()]
        starts = [int(at or 0) for _, _, at in words]
        stops = [*starts[1:], len(LAYERS)]
        made.append(Route(words[0][0], tuple(Stage(w[0], a, b) for w, a, b in zip(words, starts, stops, strict=True))))
    return Plan(LAYERS, tuple(made), topology)


TREE = ("d1 e1:2 c:4", "d2 e1:2 c:4", "d3 e2:2 c:4")


def routes(plan: Plan | None) -> list[str] | None:
    if plan is None:
        return None
    return [" ".join(stage.node for stage in route.stages) for route in plan.routes]


@pytest.mark.parametrize(
    ("lost", "left"),
    [
        ([], ["d1 e1 c", "d2 e1 c", "d3 e2 c"]),
        (["d2"], ["d1 e1 c", "d3 e2 c"]),
        (["e2"], ["d1 e1 c", "d2 e1 c", "d3 e1 c"]),
        (["e1"], ["d1 e2 c", "d2 e2 c", "d3 e2 c"]),
        (["e1", "d3"], ["d1 e2 c", "d2 e2 c"]),
        (["c"], None),
        (["e1", "e2"], None),
        (["d1", "d2", "d3"], None),
    ],
)
def test_a_plan_without_nodes(lost: list[str], left: list[str] | None) -> None:
    assert routes(without(plan_of(*TREE), lost)) == left


def test_a_sibling_must_run_the_same_layers() -> None:
    assert without(plan_of("d1 e1:2 c:4", "d2 e2:1 c:4"), ["e2"]) is None


def test_a_sibling_has_the_same_tier_and_parent() -> None:
    rows = [
        {"name": "d1", "tier": "device", "parent": "e1"},
        {"name": "d2", "tier": "device", "parent": "e2"},
        {"name": "e1", "tier": "edge", "parent": "c"},
        {"name": "e2", "tier": "edge", "parent": "other"},
        {"name": "c", "tier": "cloud"},
    ]
    plan = plan_of("d1 e1:2 c:4", "d2 e2:2 c:4", topology={"nodes": rows})
    assert without(plan, ["e2"]) is None
    rows[3]["parent"] = "c"
    assert routes(without(plan_of("d1 e1:2 c:4", "d2 e2:2 c:4", topology={"nodes": rows}), ["e2"])) == [
        "d1 e1 c",
        "d2 e1 c",
    ]


def test_the_devices_of_a_lost_node_are_shared_out() -> None:
    plan = plan_of("d1 e1:2 c:4", "d2 e1:2 c:4", "d3 e2:2 c:4", "d4 e3:2 c:4")
    assert routes(without(plan, ["e1"])) == ["d1 e2 c", "d2 e3 c", "d3 e2 c", "d4 e3 c"]


def test_what_moves() -> None:
    before, after = plan_of("d e:2 c:4"), plan_of("d e:1 c:4")
    assert moved(before, after) == {"d": (), "e": (1,), "c": ()}
    assert moved(before, plan_of("d x:2 c:5")) == {"d": (), "x": (2, 3, 4), "c": ()}


# --- in a run -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["clipped AdamW", "momentum"])
def test_a_run_goes_on_under_another_plan_as_if_it_had_begun_with_it(rule: str) -> None:
    task = points_task([45])
    keywords = {"rounds": 4, "batch_size": 20, "micros": 3, **RULES[rule]}
    first = chain(task, [1, 4], ["a", "b", "c"])
    want = run(first, task, **keywords).weights
    plans = chain(task, [3], ["a", "x"]), chain(task, [2, 5], ["a", "c", "a"]), chain(task, [], ["a"])
    with open_session(first, task, **keywords) as session:
        for plan in plans:
            session.fit(1)
            session.replan(plan)
            assert session.plan.routes == plan.routes
        session.fit(1)
        assert apart(session.weights(), want) <= EXACT


def test_only_the_layers_that_change_hands_are_sent() -> None:
    task = points_task([45])
    first, second = chain(task, [1, 4], ["a", "b", "c"]), chain(task, [2, 4], ["a", "b", "c"])
    with open_session(first, task, rounds=2, batch_size=20, **RULES["momentum"]) as session:
        session.fit(1)
        before = session.links()
        session.replan(second)
        after = session.links()
        params, _ = session.training.names.of(moved(first, second)["a"])
        state = 2 * sum(session.training.params[name].nbytes for name in params)  # and the momentum
        given = {node: after[f"coordinator->{node}"] - before[f"coordinator->{node}"] for node in "abc"}
        assert state <= given["a"] - given["c"] <= 1.1 * state + 2000


def test_a_plan_put_into_the_folder_is_taken_up_with_the_next_round(tmp_path: Path) -> None:
    task = points_task([45])
    keywords = {"rounds": 3, "batch_size": 20, "micros": 3, **RULES["momentum"]}
    first, second = chain(task, [1, 4], ["a", "b", "c"]), chain(task, [3], ["a", "x"])
    said: list[str] = []
    with open_session(first, task, directory=tmp_path, say=said.append, **keywords) as session:
        session.fit(1)
        (tmp_path / NEXT_PLAN).write_text("{}")
        session.fit(1)
        assert session.plan.routes == first.routes
        second.save(tmp_path / NEXT_PLAN)
        session.fit(1)
        assert session.plan.routes == second.routes
        weights = session.weights()
    assert "the plan that was put there is not taken" in said[0]
    assert said[1:] == ["round 3 begins with another plan"]
    assert apart(weights, run(first, task, **keywords).weights) <= EXACT


def test_a_plan_of_another_model_is_refused() -> None:
    task = points_task([45])
    with open_session(chain(task, [1], ["a", "b"]), task, rounds=1, batch_size=20, **RULES["sgd"]) as session:
        other = Plan(LAYERS, (Route("a", (Stage("a", 0, 6),)),))
        with pytest.raises(PlanError, match="the plan has layers l0"):
            session.replan(other)


def test_a_tree_takes_in_another_device() -> None:
    task = points_task([45, 30, 20])
    whole = tree(task, [1, 4], ["d1", "d2", "d3"])
    part = without(whole, ["d2"])
    assert part is not None
    with open_session(part, task, rounds=3, batch_size=20, **RULES["sgd"]) as session:
        samples = [session.fit(1)[-1].samples]
        for plan in (whole, part):
            session.replan(plan)
            samples.append(session.fit(1)[-1].samples)
    assert samples[0] == samples[2] < samples[1]
