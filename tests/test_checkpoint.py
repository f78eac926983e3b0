from __future__ import annotations

import hashlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgesplit import checkpoint
from edgesplit.checkpoint import Checkpoint, Position, latest, load, save, save_model, weights_hash
from edgesplit.errors import RunError


def make(number: int, size: int = 5) -> Checkpoint:
    """A checkpoint whose contents all follow from the round's number."""
    return Checkpoint(
        position=Position(
            round=number,
            step=number * 10,
            micro=number * 80,
            term=2,
            seed=7,
            participation={"pi-1": number},
            positions={"pi-1": [number, 3]},
            loss_scale={"scale": 1024.0, "good": 3},
            best={"name": "accuracy", "value": 0.1 + 0.2, "round": 1},
            experiment={"rounds": 10, "optimizer": {"lr": 0.05}},
            plan={"layers": ["a", "b"]},
            extra={"note": "é"},
        ),
        model={"w": np.full(size, number, np.float32), "b": np.array(number, np.int64)},
        nodes={
            "pi-1": {"params/w": np.full(size, number + 0.5), "optimizer/w/count": np.array(number)},
            "../../up": {"params/b": np.zeros((0, 3), bool)},
        },
        strategy={"0.m_t|dict|w": np.arange(4.0)},
    )


def assert_same(a: Checkpoint, b: Checkpoint) -> None:
    assert a.position == b.position
    assert list(a.nodes) == list(b.nodes)
    pairs = [(a.model, b.model), (a.strategy, b.strategy), *((a.nodes[n], b.nodes[n]) for n in a.nodes)]
    for left, right in pairs:
        assert set(left) == set(right)
        for name in left:
            assert (left[name].dtype, left[name].shape) == (right[name].dtype, right[name].shape)
            assert left[name].tobytes() == right[name].tobytes()


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", make(7))
    assert path.name == "round-0007"
    assert latest(tmp_path / "checkpoints") == path
    assert_same(load(path), make(7))


def test_a_node_name_is_never_a_path(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", make(1))
    inside = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert all(name.startswith("checkpoints/round-0001/") for name in inside)
    assert len(list((path / "nodes").iterdir())) == 2


def test_arrays_in_any_memory_order_are_written_by_value(tmp_path: Path) -> None:
    arrays = {"t": np.arange(6.0).reshape(2, 3).T, "big": np.arange(3, dtype=">f4"), "half": np.ones(2, np.float16)}
    back = load(save(tmp_path, replace(make(1), model=arrays))).model
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)


def test_keep_removes_the_oldest(tmp_path: Path) -> None:
    for number in range(1, 6):
        save(tmp_path, make(number), keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["round-0004", "round-0005"]
    save(tmp_path, make(12345), keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["round-0005", "round-12345"]
    with pytest.raises(RunError, match="keep at least 1"):
        save(tmp_path, make(6), keep=0)


def test_keep_counts_whole_checkpoints_only(tmp_path: Path) -> None:
    for number in range(1, 4):
        save(tmp_path, make(number))
    (tmp_path / "round-0003" / "model.safetensors").write_bytes(b"short")
    save(tmp_path, make(4), keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["round-0002", "round-0003", "round-0004"]


def test_the_same_round_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, make(3))
    other = replace(make(3), model={"w": np.ones(2)})
    save(tmp_path, other)
    assert_same(load(tmp_path / "round-0003"), other)
    assert [p.name for p in tmp_path.iterdir()] == ["round-0003"]


def test_one_that_stepped_aside_serves_until_its_successor_is_there(tmp_path: Path) -> None:
    save(tmp_path, make(2))
    save(tmp_path, make(3)).rename(tmp_path / "round-0003.old")
    assert latest(tmp_path) == tmp_path / "round-0003.old"
    save(tmp_path, make(3))
    assert latest(tmp_path) == tmp_path / "round-0003"


def test_latest_passes_over_what_is_not_whole(tmp_path: Path) -> None:
    assert latest(tmp_path / "none") is None
    save(tmp_path, make(1))
    for number, damage in enumerate(["model.safetensors", "nodes/pi-1.safetensors", "state.json"], start=2):
        (save(tmp_path, make(number)) / damage).unlink()
    (save(tmp_path, make(5)) / "state.json").write_text('{"format": 1')
    with (save(tmp_path, make(6)) / "model.safetensors").open("ab") as file:
        file.write(b"x")
    (tmp_path / "round-9999").mkdir()
    (tmp_path / "round-x").mkdir()
    assert latest(tmp_path) == tmp_path / "round-0001"


@pytest.mark.parametrize("name", ["model.safetensors", "nodes/pi-1.safetensors", "strategy.safetensors"])
def test_a_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    file = save(tmp_path, make(1)) / name
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(RunError, match=re.escape(repr(name))):
        load(file.parents[name.count("/")])


def test_a_changed_state_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, make(1))
    state = json.loads((path / "state.json").read_text())
    state["position"]["step"] += 1
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(RunError, match="damaged"):
        load(path)


def test_another_format_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, make(1))
    (path / "state.json").write_text(json.dumps({"format": 99}))
    assert latest(tmp_path) == path  # not silently passed over for an older one
    with pytest.raises(RunError, match="format 99, and this edgesplit reads 1"):
        load(path)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such file"):
        load(tmp_path / "round-0001")
    (tmp_path / "state.json").write_text("[]")
    with pytest.raises(RunError, match="format None"):
        load(tmp_path)


@pytest.mark.parametrize("extra", [{"x": float("nan")}, {"x": object()}])
def test_values_that_are_not_json_leave_the_last_checkpoint(tmp_path: Path, extra: dict[str, object]) -> None:
    save(tmp_path, make(1))
    bad = make(2)
    with pytest.raises(RunError, match="cannot write checkpoint"):
        save(tmp_path, replace(bad, position=replace(bad.position, extra=extra)))
    assert [p.name for p in tmp_path.iterdir()] == ["round-0001"]


def test_state_names_experiment_and_weights_by_hash(tmp_path: Path) -> None:
    state = json.loads((save(tmp_path, make(1)) / "state.json").read_text())
    assert state["weights_hash"] == weights_hash(make(1).model)
    assert state["experiment_hash"] == checkpoint.experiment_hash({"optimizer": {"lr": 0.05}, "rounds": 10})


WRITER = """
import sys
sys.path.insert(0, {tests!r})
from test_checkpoint import make, save
number = int(sys.argv[2])
while True:
    number += 1
    save(sys.argv[1], make(number, size=300_000), keep=3)
    print(number, flush=True)
"""


def test_killed_at_random_moments_the_last_checkpoint_is_whole(tmp_path: Path) -> None:
    script = textwrap.dedent(WRITER).format(tests=str(Path(__file__).parent))
    draw, last = random.Random(5), 0
    for _ in range(6):
        writer = subprocess.Popen([sys.executable, "-c", script, str(tmp_path), str(last)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()  # it runs
        time.sleep(draw.uniform(0, 0.15))
        os.kill(writer.pid, signal.SIGKILL)
        reported = [last + 1, *(int(line) for line in writer.stdout.read().split())]
        writer.stdout.close()
        assert writer.wait() == -signal.SIGKILL
        path = latest(tmp_path)
        assert path is not None
        found = load(path)
        last = found.position.round
        assert reported[-1] <= last <= reported[-1] + 1
        assert_same(found, make(last, size=300_000))
    save(tmp_path, make(last + 1), keep=3)
    assert not list(tmp_path.glob(".unfinished-*"))


FULL = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_checkpoint import assert_same, latest, load, make, save, save_model, limit_files
from edgesplit.errors import RunError
root = Path(sys.argv[1])
save(root, make(1))
save_model(root / "model.safetensors", make(1).model)
if sys.argv[2] == "limit":
    limit_files(100_000)
before = {{p: p.read_bytes() for p in root.rglob("*") if p.is_file()}}
for write in (
    lambda: save(root, make(2, size=500_000), keep=1),
    lambda: save(root, make(1, size=500_000), keep=1),
    lambda: save_model(root / "model.safetensors", make(2, size=500_000).model),
):
    try:
        write()
    except RunError as error:
        print(error)
assert {{p: p.read_bytes() for p in root.rglob("*") if p.is_file()}} == before
assert_same(load(latest(root)), make(1))
"""


def limit_files(size: int) -> None:
    """Let this process write no file beyond so many bytes: a full disk for those who may not mount one."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def fill(root: Path, how: str) -> list[str]:
    script = textwrap.dedent(FULL).format(tests=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", script, str(root), how], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_files_that_may_not_grow_leave_the_last_checkpoint(tmp_path: Path) -> None:
    lines = fill(tmp_path, "limit")
    assert len(lines) == 3
    assert re.fullmatch(r"cannot write checkpoint '.*round-0002': file too large", lines[0])


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        lines = fill(tmp_path, "disk" if mounted else "limit")
    finally:
        if mounted:
            subprocess.run(["umount", str(tmp_path)], check=True)
    what = "no space left on the device; free some, or lower checkpoint.keep" if mounted else "file too large"
    assert len(lines) == 3
    for line, start in zip(lines, ["checkpoint", "checkpoint", "model"], strict=True):
        assert re.fullmatch(f"cannot write {start} '.*': {what}", line)


def test_a_model_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "out" / "model.safetensors"
    save_model(path, {"w": np.zeros(3)}, {"task": "mnist"})
    save_model(path, {"w": np.ones(3)}, {"task": "mnist"})
    np.testing.assert_array_equal(checkpoint.load_file(path)["w"], np.ones(3))
    assert [p.name for p in path.parent.iterdir()] == ["model.safetensors"]
    with pytest.raises(RunError, match="cannot write model"):
        save_model(path / "below", {"w": np.ones(3)})


ARRAYS = st.dictionaries(
    st.text(max_size=4),
    st.tuples(st.sampled_from(["f4", "f8", "i4", "u1"]), st.lists(st.integers(0, 3), max_size=2), st.integers(0, 2)),
    max_size=3,
)


@settings(max_examples=200, deadline=None)
@given(ARRAYS, ARRAYS)
def test_weights_hash_is_equal_for_equal_weights_only(a: dict, b: dict) -> None:
    def build(spec: dict) -> dict[str, np.ndarray]:
        return {name: np.full(shape, value, dtype) for name, (dtype, shape, value) in spec.items()}

    def plain(arrays: dict[str, np.ndarray]) -> dict[str, tuple]:
        return {name: (x.dtype.str, x.shape, x.tobytes()) for name, x in arrays.items()}

    left, right = build(a), build(b)
    assert (weights_hash(left) == weights_hash(right)) == (plain(left) == plain(right))
    assert weights_hash(left) == weights_hash(dict(reversed(left.items())))


def test_weights_hash_does_not_see_memory_order() -> None:
    array = np.arange(6, dtype="<i4").reshape(2, 3)
    assert weights_hash({"w": array}) == weights_hash({"w": np.asfortranarray(array)})
    assert weights_hash({"w": array}) == weights_hash({"w": array.astype(">i4")})
    # spelled out: a hash in a report stays comparable between versions
    text = b'["a", "<f8", []]\n' + np.float64(2).tobytes() + b'["w", "<i4", [2, 3]]\n' + array.tobytes()
    assert weights_hash({"w": array, "a": np.array(2.0)}) == hashlib.sha256(text).hexdigest()
