"""A run's folder: made, refused, or found again; files in it are whole."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from edgesplit.errors import ExperimentError, RunError
from edgesplit.rundir import RunDirectory
from edgesplit.transport.frames import valid_name


def open_(**options: Any) -> RunDirectory:
    return RunDirectory.open(**{"name": None, "out": None, "stem": "experiment", "resume": False, **options})


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_without_a_name_gets_one_of_its_own() -> None:
    first, second = open_(), open_()
    assert first.name != second.name
    assert first.path == Path("runs") / first.name
    assert first.name.startswith("experiment-")
    assert (first.path / "key").read_text() != (second.path / "key").read_text()


def test_a_name_and_a_folder_of_the_users() -> None:
    assert open_(name="mine").path == Path("runs/mine")
    run = open_(out=Path("a/b"))
    assert run.path == Path("a/b")
    assert run.name.startswith("b-")
    both = open_(out=Path("c"), name="mine")
    assert (both.path, both.name) == (Path("c"), "mine")


@pytest.mark.parametrize("stem", ["my experiment", "größe", "a/b", "x" * 200, "", "🙂"])
def test_whatever_the_files_name_the_runs_name_can_be_a_topic(stem: str) -> None:
    assert valid_name(open_(stem=stem).name)
    if "/" not in stem and stem:
        assert valid_name(open_(out=Path(f"out of {stem}")).name)


@pytest.mark.parametrize("name", ["a b", "a/b", "../x", "..", ".", "", "#", "a+b", "x" * 65, "a\nb", "größe"])
def test_names_that_are_none_are_refused_before_anything_is_made(name: str) -> None:
    with pytest.raises(ExperimentError, match=r"run name .* must be 1 to 64 of A-Z a-z 0-9"):
        open_(name=name)
    assert not Path("runs").exists()


def test_the_key_is_for_its_owner_only() -> None:
    before = os.umask(0)
    try:
        run = open_()
    finally:
        os.umask(before)
    assert stat.S_IMODE((run.path / "key").stat().st_mode) == 0o600
    assert len((run.path / "key").read_text().strip()) == 64


def test_a_folder_with_a_run_is_not_written_over() -> None:
    run = open_(name="mine")
    (run.path / "events.jsonl").write_text("{}\n")
    key = (run.path / "key").read_text()
    with pytest.raises(ExperimentError, match=r"runs/mine holds a run already: resume it with --resume"):
        open_(name="mine")
    assert (run.path / "key").read_text() == key


def test_a_run_that_did_nothing_is_tried_again_with_its_key() -> None:
    """Its nodes may have outlived the coordinator, and believe nobody else."""
    run = open_(name="mine")
    key = (run.path / "key").read_text()
    assert open_(name="mine").key_file.read_text() == key
    assert open_(name="mine", resume=True).key_file.read_text() == key


def test_resume() -> None:
    with pytest.raises(ExperimentError, match=r"--resume needs the run"):
        open_(resume=True)
    with pytest.raises(ExperimentError, match=r"runs/mine has no checkpoints to resume from"):
        open_(resume=True, name="mine")
    assert not Path("runs").exists()
    run = open_(name="mine")
    (run.path / "events.jsonl").write_text("{}\n")
    (run.path / "checkpoints").mkdir()
    again = open_(resume=True, name="mine")
    assert (again.path, again.name) == (run.path, "mine")
    assert (run.path / "events.jsonl").read_text() == "{}\n"


def test_a_folder_that_cannot_be_made() -> None:
    Path("file").write_text("")
    with pytest.raises(RunError, match=r"cannot write file/run: (Not a directory|File exists)"):
        open_(out=Path("file/run"))


# --- files ----------------------------------------------------------------------------------------------------------


def strict(path: Path) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_json_files_are_json() -> None:
    run = open_()
    values = {"loss": math.nan, "deep": [{"norm": math.inf, "ok": 1.5}, (1, -math.inf)], "path": Path("x"), 3: None}
    run.write_json("metrics.json", values)
    assert strict(run.path / "metrics.json") == {
        "loss": None, "deep": [{"norm": None, "ok": 1.5}, [1, None]], "path": "x", "3": None,
    }  # fmt: skip


def test_a_file_is_replaced_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_()
    run.write_json("metrics.json", {"a": 1})

    def full(self: Path, text: str, **options: Any) -> int:
        with self.open("w") as file:
            file.write(text[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RunError, match=r"cannot write .*metrics.json: No space left on device"):
        run.write_json("metrics.json", {"a": 2})
    assert strict(run.path / "metrics.json") == {"a": 1}
