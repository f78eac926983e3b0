"""What a node keeps: whole or not there, of this run only, and no more than anybody will ask for."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import numpy as np
import pytest

from edgesplit.journal import Journal
from edgesplit.recovery import Kept, Point

BASE = Point(1, -1)


def state(value: float, **more: float) -> dict[str, np.ndarray]:
    return {name: np.array([v, v]) for name, v in {"param/w": value, **more}.items()}


def opened(tmp_path: Path, run: str = "r", layers: str = "f (0, 1)", *, sync: bool = False) -> Journal:
    return Journal(tmp_path / "node", run=run, layers=layers, sync=sync)


def filled(tmp_path: Path, steps: int = 3, *, sync: bool = False) -> Journal:
    journal = opened(tmp_path, sync=sync)
    journal.keep(BASE, 0, state(0.0, frozen=9.0), committed=BASE, full=True)
    for step in range(steps):
        journal.keep(Point(1, step), 0, state(step + 1.0), committed=Point(1, step - 1), full=False)
    return journal


@pytest.mark.parametrize("sync", [False, True], ids=["at once", "by the thread"])
def test_another_life_reads_what_was_kept(tmp_path: Path, sync: bool) -> None:
    filled(tmp_path, sync=sync).flush()
    again = opened(tmp_path)
    assert again.kept() == [Kept(BASE, 0), *(Kept(Point(1, step), 0) for step in range(3))]
    found = again.read(Kept(Point(1, 2), 0))
    assert found is not None
    assert {name: array.tolist() for name, array in found.items()} == {"param/w": [3.0, 3.0], "frozen": [9.0, 9.0]}
    assert again.read(Kept(Point(1, 2), 7)) is None, "made in another term"
    assert again.read(Kept(Point(2, 2), 0)) is None


@pytest.mark.parametrize("sync", [False, True], ids=["at once", "by the thread"])
def test_only_what_may_be_asked_for_stays(tmp_path: Path, sync: bool) -> None:
    journal = filled(tmp_path, 10, sync=sync)
    assert [kept.point.step for kept in journal.kept()] == [-1, 7, 8, 9]
    journal.keep(Point(2, 9), 0, state(0.0), committed=Point(2, 9), full=True)
    assert {kept.point.load for kept in journal.kept()} == {1, 2}, "others may not have the second yet"
    journal.keep(Point(2, 10), 0, state(1.0), committed=Point(2, 10), full=False)
    assert [kept.point for kept in journal.kept()] == [Point(2, 9), Point(2, 10)]


def test_a_file_is_written_over_by_a_longer_and_by_a_shorter_one(tmp_path: Path) -> None:
    journal = filled(tmp_path, 5)
    states = [state(5.0, more=1.0), state(6.0), state(7.0, more=2.0, most=3.0), state(8.0), state(9.0)]
    for step, arrays in enumerate(states, start=5):
        journal.keep(Point(1, step), 0, arrays, committed=Point(1, step - 1), full=False)
        found = opened(tmp_path).read(Kept(Point(1, step), 0))
        assert found is not None
        whole = state(0.0, frozen=9.0) | arrays
        assert {name: array.tolist() for name, array in found.items()} == {n: a.tolist() for n, a in whole.items()}


def test_large_states_and_small_ones_come_in_order(tmp_path: Path) -> None:
    journal = filled(tmp_path, 0)
    large = np.arange(1 << 19, dtype=np.float32)
    for step in range(6):
        arrays = state(step) | ({"large": large + step} if step % 2 else {})
        journal.keep(Point(1, step), 0, arrays, committed=Point(1, step - 1), full=False)
    assert [kept.point.step for kept in journal.kept()] == [-1, 3, 4, 5]
    found = opened(tmp_path).read(Kept(Point(1, 5), 0))
    assert found is not None
    assert np.array_equal(found["large"], large + 5)


def test_what_was_taken_back_is_forgotten(tmp_path: Path) -> None:
    journal = filled(tmp_path)
    journal.forget_after(Point(1, 1))
    left = [Kept(BASE, 0), Kept(Point(1, 0), 0), Kept(Point(1, 1), 0)]
    assert journal.kept() == opened(tmp_path).kept() == left


def test_what_was_free_is_not_found_after_going_back(tmp_path: Path) -> None:
    journal = filled(tmp_path, 10)
    assert journal._free
    journal.forget_after(Point(1, 8))
    assert opened(tmp_path).kept() == journal.kept() == [Kept(BASE, 0), Kept(Point(1, 7), 0), Kept(Point(1, 8), 0)]


@pytest.mark.parametrize(("run", "layers"), [("another", "f (0, 1)"), ("r", "f (0,)")])
def test_another_run_or_other_layers_find_nothing(tmp_path: Path, run: str, layers: str) -> None:
    filled(tmp_path).flush()
    assert opened(tmp_path, run, layers).kept() == []
    assert list((tmp_path / "node").iterdir()) == []


def test_a_damaged_file_is_none(tmp_path: Path) -> None:
    filled(tmp_path).flush()
    last = tmp_path / "node" / "step-2.safetensors"
    data = bytearray(last.read_bytes())
    data[-1] ^= 1  # as after a power cut: its length, but not its contents
    last.write_bytes(data)
    (tmp_path / "node" / "step-9.safetensors").write_bytes(b"short")
    (tmp_path / "node" / ".unfinished").write_bytes(b"unfinished")
    assert [kept.point.step for kept in opened(tmp_path).kept()] == [-1, 0, 1]
    assert len(list((tmp_path / "node").iterdir())) == 3


def test_a_full_disk_is_said_and_not_raised(tmp_path: Path) -> None:
    journal = filled(tmp_path, 1)
    journal.flush()
    assert journal.problem is None
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
        journal.keep(Point(1, 1), 0, state(5.0), committed=Point(1, 0), full=False)
        journal.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert journal.problem is not None
    assert "cannot keep its state in" in journal.problem
    assert [kept.point.step for kept in journal.kept()] == [-1, 0]
    journal.keep(Point(1, 2), 0, state(6.0), committed=Point(1, 1), full=False)
    journal.flush()
    assert journal.problem is None


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "node").write_text("a file")
    journal = opened(tmp_path)
    journal.keep(BASE, 0, state(0.0), committed=BASE, full=True)
    journal.flush()
    assert journal.kept() == []
    assert journal.problem


def test_a_run_that_has_ended_leaves_nothing(tmp_path: Path) -> None:
    journal = filled(tmp_path)
    journal.close(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_the_arrays_of_numbers_keep_shape_and_type(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    arrays = {"count": np.array(3, np.int64), "empty": np.zeros((0, 2), np.float32), "turned": np.ones((2, 3)).T}
    journal.keep(BASE, 0, arrays, committed=BASE, full=True)
    found = journal.read(Kept(BASE, 0))
    assert found is not None
    for name, array in arrays.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
        assert np.array_equal(found[name], array)


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_long_run_needs_a_few_files_which_stay_open_until_the_end(tmp_path: Path) -> None:
    before = _open_files()
    journal = filled(tmp_path, 6)
    files, opened_files = sorted((tmp_path / "node").iterdir()), _open_files()
    assert len(files) == opened_files - before + 1 <= 6
    for step in range(6, 200):
        journal.keep(Point(1, step), 0, state(step), committed=Point(1, step - 1), full=False)
    assert sorted((tmp_path / "node").iterdir()) == files
    assert _open_files() == opened_files
    journal.close()
    assert _open_files() == before


def test_a_crash_within_a_write_leaves_the_points_before(tmp_path: Path) -> None:
    journal = filled(tmp_path, 10)
    free = Path(journal._free[-1])
    whole = free.read_bytes()
    journal.keep(Point(1, 10), 0, state(11.0), committed=Point(1, 9), full=False)
    new = free.read_bytes()
    free.write_bytes(new[: len(new) // 2] + whole[len(new) // 2 :])
    assert [kept.point.step for kept in opened(tmp_path).kept()] == [-1, 7, 8, 9]


def test_a_step_whose_whole_state_is_gone_is_nothing(tmp_path: Path) -> None:
    journal = filled(tmp_path, 10)
    journal.keep(Point(2, 9), 0, state(0.0), committed=Point(2, 9), full=True)
    journal.keep(Point(2, 10), 0, state(1.0), committed=Point(2, 10), full=False)
    assert len(list((tmp_path / "node").glob("step-*"))) > 1, "of the first load, to be written over"
    assert [kept.point for kept in opened(tmp_path).kept()] == [Point(2, 9), Point(2, 10)]
    assert len(list((tmp_path / "node").iterdir())) == 2
