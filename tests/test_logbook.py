"""What a coordinator writes down, and what its successor reads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from edgesplit.logbook import Logbook
from edgesplit.recovery import Point


def base(load: int, step: int, term: int) -> dict[str, Any]:
    return {"base": [load, step], "term": term, "standing": [1.0, 0, 0, 0], "cuts": [[1, load, step]]}


def ended(step: int, term: int, micro: int, loss: float | None = 0.5) -> dict[str, Any]:
    told = {"step": step, "term": term, "micro": micro, "participants": ["d"], "applied": True, "counts": True}
    return {**told, "standing": [2.0, 1, 0, 0], "loss": loss, "weight": 4.0, "samples": 4}


@pytest.fixture
def logbook(tmp_path: Path) -> Logbook:
    return Logbook(tmp_path / "state")


def test_what_was_written_is_read(logbook: Logbook) -> None:
    for record in (base(1, -1, 0), ended(0, 0, 2), ended(1, 0, 4, None), {"cut": [1, 0], "term": 3}):
        logbook.note(record)
    progress = logbook.read(1)
    assert progress is not None
    assert (progress.base, progress.term, progress.micro) == (Point(1, -1), 3, 4)
    assert [done.step for done in progress.done] == [0], "what was taken back has not ended"
    assert progress.cuts == [(1, Point(1, -1)), (3, Point(1, 0))]


def test_a_loss_that_is_none_is_not_a_number(logbook: Logbook) -> None:
    logbook.note(base(1, -1, 0))
    logbook.note(ended(0, 0, 2, None))
    progress = logbook.read(1)
    assert progress is not None
    assert math.isnan(progress.done[0].loss)


def test_a_line_that_was_cut_short_is_not_read_and_makes_none_with_the_next(tmp_path: Path) -> None:
    logbook = Logbook(tmp_path)
    logbook.note(base(1, -1, 0))
    with (tmp_path / "progress-1.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 0, "ter')
    progress = logbook.read(1)
    assert progress is not None
    assert progress.done == []
    successor = Logbook(tmp_path)
    successor.note({"again": [1, -1], "term": 1})
    successor.note(ended(0, 1, 2))
    progress = successor.read(1)
    assert progress is not None
    assert [done.step for done in progress.done] == [0]


def test_a_successor_that_begins_before_the_last_file_knows_its_terms(logbook: Logbook) -> None:
    assert logbook.last() == (0, 0)
    for record in (base(1, -1, 0), ended(0, 0, 2), base(2, 0, 0), {"cut": [2, 0], "term": 7}, ended(1, 7, 9)):
        logbook.note(record)
    progress = logbook.read(1)
    assert progress is not None
    assert progress.term == 0
    assert logbook.last() == (7, 9)


def test_the_last_two_files_are_kept(tmp_path: Path) -> None:
    logbook = Logbook(tmp_path)
    for load in (1, 2, 3):
        logbook.note(base(load, load, 0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["progress-2.jsonl", "progress-3.jsonl"]
    logbook.note({"again": [2, 2], "term": 4})
    assert [path.name for path in tmp_path.iterdir()] == ["progress-2.jsonl"], "what came after is done again"


def test_without_a_directory_nothing_is_kept() -> None:
    logbook = Logbook(None)
    logbook.note(base(1, -1, 0))
    assert logbook.read(1) is None
    assert logbook.last() == (0, 0)
