"""Nodes that crash: whatever is lost, the weights are those of the undisturbed run."""

from __future__ import annotations

from random import Random

from edgesplit.sheets import Agenda, evaluation
from tests.crashing import CrashingFleet
from tests.test_simulation import (
    SYNCHRONOUS,
    AnyWay,
    Oracle,
    aggregate,
    compare,
    drafts_of,
    draw_case,
    draw_shared_case,
    draw_sizes,
    in_pieces,
    noted,
)


def simulate(seed: int, *, share: bool = False) -> CrashingFleet:
    rng = Random(seed)
    case = draw_shared_case(rng) if share else draw_case(rng, SYNCHRONOUS)
    fleet, oracle = CrashingFleet(case, rng, rate=10 ** rng.uniform(-3, -1)), Oracle(case)
    if share and rng.random() < 0.8:
        fleet.coordinator.router = AnyWay(rng)  # type: ignore[assignment]
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
