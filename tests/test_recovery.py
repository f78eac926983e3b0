"""Nodes that crash: whatever is lost, the weights are those of the undisturbed run."""

from __future__ import annotations

from random import Random

import pytest

from edgesplit.errors import FrameError
from edgesplit.recovery import Ended, Kept, Line, Point, Standing, kept_of, point_of
from edgesplit.sheets import Agenda, Draft, evaluation
from tests.crashing import CrashingFleet
from tests.test_simulation import (
    SYNCHRONOUS,
    AnyWay,
    aggregate,
    compare,
    drafts_of,
    draw_case,
    draw_shared_case,
    draw_sizes,
    in_pieces,
    noted,
)
from tests.virtual import Oracle


def simulate(seed: int, *, share: bool = False) -> CrashingFleet:
    rng = Random(seed)
    case = draw_shared_case(rng) if share else draw_case(rng, SYNCHRONOUS)
    fleet, oracle = CrashingFleet(case, rng, rate=10 ** rng.uniform(-3, -1)), Oracle(case)
    if share and rng.random() < 0.8:
        fleet.coordinator.steps.router = AnyWay(rng)  # type: ignore[assignment]
    devices = [r.device for r in case.plan.routes]
    agenda = Agenda(draw_sizes(rng, case), lambda step: 1 + step % 3)
    test_sizes = draw_sizes(rng, case)
    for _ in range(2):
        drafts = drafts_of(rng, agenda, devices)
        compare(fleet, oracle, drafts, fleet.train(*in_pieces(rng, drafts)))
        if rng.random() < 0.4:
            tests = list(evaluation(test_sizes, agenda.step))
            found = fleet.train(tests, evaluate=True)
            assert [{d: v["m"] for d, v in step.metrics.items()} for step in found] == [
                oracle.evaluate(draft) for draft in tests
            ]
        aggregate(fleet, oracle)
    aggregate(fleet, oracle)
    fleet.left = 0
    fleet.settle()
    return fleet


def test_nodes_that_crash() -> None:
    crashes = 0
    for seed in range(200):
        with noted(seed):
            crashes += simulate(seed).crashes
    assert crashes > 100


def test_nodes_that_share_and_crash() -> None:
    crashes = 0
    for seed in range(100):
        with noted(seed):
            crashes += simulate(seed, share=True).crashes
    assert crashes > 50


# --- which points count ---------------------------------------------------------------------------------------------

NONE = Standing(1.0, 0, 0, 0)


def a_line(*steps: tuple[int, str, bool], cuts: tuple[tuple[int, Point], ...] = ()) -> Line:
    ended = [Ended(Draft(step, {}), tuple(nodes.split()), applied, NONE) for step, nodes, applied in steps]
    return Line(Point(1, -1), NONE, ended, list(cuts))


def kept(*steps: int, term: int = 0, load: int = 1) -> list[Kept]:
    return [Kept(Point(load, step), term) for step in steps]


STEPS = (0, "a b", True), (1, "a b", True), (2, "a b", True)


@pytest.mark.parametrize(
    ("a", "b", "count"),
    [
        (kept(-1, 1, 2), kept(-1, 1, 2), 3),
        (kept(-1, 1, 2), kept(-1, 1), 2),
        (kept(-1, 1, 2), kept(-1, 0), 0),
        (kept(-1, 1, 2), [], None),
        (kept(-1, 1, 2), kept(2), 3),
        (kept(-1), kept(-1, 2), 0),
        (kept(-1, 2, load=2), kept(-1, 2), None),
    ],
)
def test_the_newest_point_that_all_have(a: list[Kept], b: list[Kept], count: int | None) -> None:
    assert a_line(*STEPS).common({"a": a, "b": b}) == count


def test_a_node_that_a_step_passed_by_has_its_end_too() -> None:
    line = a_line((0, "a b", True), (1, "a", True), (2, "a b", False), (3, "a", True))
    assert line.common({"a": kept(-1, 0, 1, 3), "b": kept(-1, 0)}) == 4
    assert line.newest(kept(-1, 0)) == Kept(Point(1, 0), 0)


def test_what_was_kept_of_a_step_that_was_taken_back_does_not_count() -> None:
    line = a_line(*STEPS, cuts=((3, Point(1, 0)),))
    assert line.common({"a": kept(-1, 0) + kept(1, 2, term=3), "b": kept(-1, 0, 1, 2)}) == 1
    assert line.newest(kept(-1, 0, 1, 2)) == Kept(Point(1, 0), 0)
    assert line.newest(kept(-1, 0, 1) + kept(2, term=3)) == Kept(Point(1, 2), 3)
    assert line.newest(kept(5, term=9)) is None


def test_going_back_returns_the_steps_to_be_done_again() -> None:
    line = a_line(*STEPS)
    assert [entry.draft.step for entry in line.rewind(4, 1)] == [1, 2]
    assert line.point() == Point(1, 0)
    assert line.cuts == [(4, Point(1, 0))]


@pytest.mark.parametrize("rows", [None, 3, [[1, 2]], [[1, 2, "3"]], [[True, 1, 1]], {"a": 1}])
def test_malformed_points(rows: object) -> None:
    with pytest.raises(FrameError):
        kept_of({"kept": rows})
    with pytest.raises(FrameError):
        point_of(rows)
