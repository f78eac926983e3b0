"""What is written while a run goes on does not grow without end, and readers find what was turned over."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edgesplit import fleet as fleet_module
from edgesplit.errors import ExperimentError
from edgesplit.fleet import Processes
from edgesplit.observe import recorder as recorder_module
from edgesplit.observe.recorder import Recorder, earlier, read_events
from edgesplit.rundir import RunDirectory
from edgesplit.schedule import Action, Event


def event(number: int) -> Event:
    return Event("n", Action("F", 0, number), float(number), number + 0.5, number, 0)


def record(path: Path, first: int, last: int) -> list[Event]:
    with Recorder(path) as recorder:
        for number in range(first, last):
            recorder.add(event(number))
        return recorder.events


def numbers(path: Path) -> list[int]:
    return [found.step for found in read_events(path)]


def test_files_of_events_are_turned_over_and_read_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MOST_BYTES", 2000)
    path = tmp_path / "events.jsonl"
    record(path, 0, 60)
    files = [*earlier(path), path]
    assert len(files) > 2
    assert all(file.stat().st_size < 2200 for file in files)
    assert numbers(path) == list(range(60))
    record(path, 60, 65)  # a resumed run goes on
    assert numbers(path) == list(range(65))
    record(path, 65, 500)
    assert len(earlier(path)) == recorder_module.MOST_FILES
    assert [file.name for file in earlier(path)] == [f"events.jsonl.{n}" for n in (4, 3, 2, 1)]
    found = numbers(path)
    assert found == list(range(found[0], 500))
    assert found[0] > 300


@pytest.mark.parametrize(("name", "most"), [(None, 10), ("events.jsonl", 3)])
def test_memory_keeps_the_last(name: str | None, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MOST_EVENTS", 10)
    monkeypatch.setattr(recorder_module, "MOST_BESIDE_FILE", 3)
    with Recorder(tmp_path / name if name else None) as recorder:
        for number in range(100):
            recorder.add(event(number))
        assert [found.step for found in recorder.events] == list(range(100 - most, 100))


def test_other_files_are_none_of_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    record(path, 0, 3)
    for name in ("events.jsonl.old", "events.jsonl.0", "events.jsonl.1x", "events.jsonl.-1"):
        (tmp_path / name).write_text("nonsense\n")
    assert numbers(path) == [0, 1, 2]


def test_a_folder_whose_events_were_just_turned_over_holds_a_run(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("")
    (tmp_path / "events.jsonl.1").write_text("{}\n")
    with pytest.raises(ExperimentError, match="holds a run already"):
        RunDirectory.open(name=None, out=tmp_path, stem="x", resume=False)


def test_a_log_that_grows_too_long_is_turned_over_while_its_process_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "MOST_LOG", 1000)
    monkeypatch.setattr(fleet_module, "LOGS_S", 0.0)
    script = "import sys\nfor i in range(40): print('line', i, '.' * 50, flush=True)\nsys.stdin.read()\nprint('last')"
    processes = Processes([sys.executable, "-c", script], tmp_path)
    processes.start(["n"])
    log = tmp_path / "n.log"
    while "line 39" not in log.read_text():
        processes.watch() if log.stat().st_size > 1500 else None
        if (tmp_path / "n.log.1").exists() and "line 39" in (tmp_path / "n.log.1").read_text():
            break
    processes.watch()
    processes.stop(10.0)
    assert (tmp_path / "n.log.1").exists()
    assert log.read_text().endswith("last\n")
    assert "\0" not in log.read_text(), "the process goes on at the new end"
    assert log.stat().st_size < 4000
