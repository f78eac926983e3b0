"""The coordinator's notes: read back, they say where the run was."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from edgesplit.errors import RunError
from edgesplit.logbook import Logbook
from edgesplit.recovery import Point, Standing
from edgesplit.sheets import Draft, Share

BASE = {"base": [2, 7], "term": 3, "standing": [4.0, 1, 0, 0], "cuts": [[3, 1, 5]]}


def ended(step: int, **more: Any) -> dict[str, Any]:
    record = {
        "step": step, "term": 3, "micro": 4 * step, "participants": ["a", "b"], "applied": True, "counts": True,
        "standing": [4.0, step, 0, 0], "loss": 0.5, "weight": 8.0, "samples": 8,
    }  # fmt: skip
    return {**record, **more}


def test_what_was_noted_is_read(tmp_path: Path) -> None:
    book = Logbook(tmp_path)
    for record in (BASE, ended(8), ended(9, loss=None, applied=False), ended(10)):
        book.note(record)
    found = Logbook(tmp_path).read(2)
    assert found is not None
    assert (found.base, found.origin, found.term, found.micro) == (Point(2, 7), Standing(4.0, 1, 0, 0), 3, 40)
    assert [(done.step, done.applied) for done in found.done] == [(8, True), (9, False), (10, True)]
    assert math.isnan(found.done[1].loss)
    line = found.line({step: Draft(step, {"a": Share(0, step, 8)}) for step in range(8, 12)})
    assert line.point() == Point(2, 10)
    assert line.standing() == Standing(4.0, 10, 0, 0)
    assert line.cuts == [(3, Point(1, 5))]
    with pytest.raises(RunError, match="step 8 of the interrupted round"):
        found.line({})


def test_steps_that_were_taken_back_are_done_again(tmp_path: Path) -> None:
    book = Logbook(tmp_path)
    for record in (BASE, ended(8), ended(9), {"cut": [2, 8], "term": 4}, ended(9, loss=0.25)):
        book.note(record)
    found = book.read(2)
    assert found is not None
    assert [(done.step, done.loss) for done in found.done] == [(8, 0.5), (9, 0.25)]
    assert found.cuts == [(3, Point(1, 5)), (4, Point(2, 8))]
    assert found.term == 4


def test_a_line_that_was_cut_short_is_left_out_and_not_written_on(tmp_path: Path) -> None:
    book = Logbook(tmp_path)
    for record in (BASE, ended(8)):
        book.note(record)
    path = tmp_path / "progress-2.jsonl"
    with path.open("a") as file:
        file.write('{"step": 9, "te')
    again = Logbook(tmp_path)
    again.note({"again": [2, 7], "term": 9})
    again.note(ended(9))
    found = again.read(2)
    assert found is not None
    assert [done.step for done in found.done] == [8, 9]
    assert found.term == 9


def test_two_files_are_kept(tmp_path: Path) -> None:
    book = Logbook(tmp_path)
    for load in range(1, 5):
        book.note({**BASE, "base": [load, 7]})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["progress-3.jsonl", "progress-4.jsonl"]
    assert book.read(1) is None


def test_without_a_folder_nothing_is_noted() -> None:
    book = Logbook(None)
    book.note(BASE)
    assert book.read(2) is None


def test_a_disk_that_takes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        Logbook(tmp_path / "file").note(BASE)


def test_a_successor_that_begins_before_the_last_file_knows_its_terms(tmp_path: Path) -> None:
    book = Logbook(tmp_path)
    assert book.last() == (0, 0)
    for record in (BASE, ended(8), {**BASE, "base": [3, 8]}, {"cut": [3, 8], "term": 7}, ended(9, term=7)):
        book.note(record)
    found = book.read(2)
    assert found is not None
    assert found.term == 3
    assert book.last() == (7, 36)
    book.note({"again": [2, 7], "term": 8})
    assert [path.name for path in tmp_path.iterdir()] == ["progress-2.jsonl"], "what came after is done again"
