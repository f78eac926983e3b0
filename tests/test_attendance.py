"""Devices with hours and budgets: who takes part in which round, by an injected clock."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from edgesplit.attendance import Attendance, Rule, hours_of
from edgesplit.errors import TopologyError
from edgesplit.logbook import progress_of
from edgesplit.topology import Node, Topology
from tests.cases import RULES, Loader, Ran, Steps, by_rounds, equal, open_session, points_task, tree

pytestmark = pytest.mark.usefixtures("one_thread")


def at(hour: int, minute: int = 0) -> float:
    """Seconds since the epoch at a time of the day here."""
    return time.mktime((2026, 3, 4, hour, minute, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [("01:00-05:00", [(1, 0), (4, 59)], [(0, 59), (5, 0), (13, 0)]),
     ("22:30-06:00", [(22, 30), (0, 0), (5, 59)], [(6, 0), (22, 29)])],
)  # fmt: skip
def test_hours(hours: str, inside: list[tuple[int, int]], outside: list[tuple[int, int]]) -> None:
    for times, found in ((inside, {}), (outside, {"d": f"outside its hours {hours}"})):
        for when in times:
            assert Attendance({"d": Rule(hours)}, lambda when=when: at(*when)).out(["d", "e"]) == found


@pytest.mark.parametrize(
    "text", ["", "1:00-5:00", "01:00-24:00", "01:00", "05:00-05:00", "01:60-02:00", "01:00-05:00 "]
)
def test_hours_that_are_none(text: str) -> None:
    with pytest.raises(TopologyError, match="must be like '01:00-05:00'"):
        hours_of(text)


def test_a_budget_is_a_mean() -> None:
    found = Attendance({"d": Rule(mb=2.0)})
    assert found.out(["d"]) == {}
    found.spent({"d": 5.5e6})
    assert found.out(["d"]) == {"d": "3.5 MB beyond its 2 MB a round"}
    found.spent({"d": 5.6e6})
    assert found.out(["d"]) == {"d": "1.6 MB beyond its 2 MB a round"}
    found.spent({"d": 5.6e6})
    assert found.out(["d"]) == {}
    found.spent({"d": 0.5e6})  # its process was started again, and counts anew
    assert found.out(["d"]) == {}
    assert not Attendance({"d": Rule(), "e": Rule()})


def test_the_news_is_told_once() -> None:
    found = Attendance({"d": Rule("01:00-05:00")})
    assert found.news(3, {"d": "outside its hours"}) == ["d takes no part from round 3 on: outside its hours"]
    assert found.news(4, {"d": "outside its hours"}) == []
    assert found.news(9, {}) == ["d takes part again from round 9 on"]
    assert found.news(10, {}) == []


def test_rules_are_for_devices() -> None:
    node = Node(name="d", tier="device", hours="01:00-05:00", max_mb_per_round=3.0)
    fleet = Topology.of([node])
    assert Topology.from_dict(fleet.to_dict()) == fleet
    assert "hours" not in Topology.of([Node(name="d", tier="device")]).to_dict()["nodes"][0]
    with pytest.raises(TopologyError, match="'e' is no device"):
        Node(name="e", tier="edge", hours="01:00-05:00")
    with pytest.raises(TopologyError, match="must be like"):
        Node(name="d", tier="device", hours="at night")


SIZES = [24, 16, 16, 24]
HOW: dict[str, Any] = {"batch_size": 8, "rounds": 4, "steps_per_round": 2, **RULES["sgd"]}


def test_a_run_in_which_devices_come_and_go(tmp_path: Path) -> None:
    task = points_task(SIZES)
    plan = tree(task, [1, 4])
    hour, said, watch = 2, [], Steps()
    with open_session(plan, task, directory=tmp_path, say=said.append, **HOW) as session:
        rules = {"d2": Rule("01:00-05:00"), "d3": Rule(mb=0.5)}
        session.training.attendance = Attendance(rules, lambda: at(hour))
        session.fit(1, callbacks=[watch])
        hour = 6
        session.training.attendance._debt["d3"] = 0.6e6
        session.fit(1, callbacks=[watch])
        session.training.attendance._debt.clear()
        session.fit(1, callbacks=[watch])
        hour = 1
        session.fit(1, callbacks=[watch])
        weights = session.weights()
        took_part = session.training.participation
    loader = Loader(task, ["d1", "d2", "d3", "d4"], 8)
    taking = [["d1", "d2", "d3", "d4"], ["d1", "d4"], ["d1", "d3", "d4"], ["d1", "d2", "d3", "d4"]]
    rounds = [[loader.take(devices) for _ in range(2)] for devices in taking]
    equal(Ran(watch.done, weights), by_rounds(task, plan, rounds, "sgd"))
    assert took_part == {"d1": 4, "d2": 2, "d3": 3, "d4": 4}
    assert said == [
        "d2 takes no part from round 2 on: outside its hours 01:00-05:00",
        "d3 takes no part from round 2 on: 0.6 MB beyond its 0.5 MB a round",
        "d3 takes part again from round 3 on",
        "d2 takes part again from round 4 on",
    ]


def test_a_run_waits_where_all_are_outside_their_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgesplit.training.HOURS_S", 0.05)
    task = points_task(SIZES)
    hours, said = [at(7)] * 3 + [at(2)] * 100, []
    with open_session(tree(task, [1, 4]), task, say=said.append, **HOW) as session:
        rules = {device: Rule("01:00-05:00") for device in ("d1", "d2", "d3", "d4")}
        session.training.attendance = Attendance(rules, lambda: hours.pop(0))
        session.fit(1)
    assert said == ["round 1 waits: all devices are outside their hours"]


def test_traffic_counts_both_ways_and_a_resumed_round_is_the_one_that_was_begun() -> None:
    task = points_task(SIZES)
    with open_session(tree(task, [1, 4]), task, **HOW) as session:
        session.fit(1)
        spent = session.training.conductor.spent()
    assert spent["d1"] > sum(session.training.conductor.traffic["d1"].values()) > 0
    lines = ['{"base": [1, -1], "standing": [1.0, 0, 0, 0], "cuts": [], "term": 0}', '{"out": ["d2"], "term": 0}']
    progress = progress_of(lines)
    assert progress is not None
    assert progress.out == ["d2"]
