"""Where nodes live: threads, and processes that end with the one that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgesplit.errors import RunError
from edgesplit.fleet import Elsewhere, Processes, Threads, node_command
from edgesplit.transport.base import Message
from edgesplit.transport.memory import MemoryTransport

WAITS = "import sys; print('here', *sys.argv[1:], flush=True); sys.stdin.read(); print('bye', flush=True)"
STUBBORN = "import sys, time, signal; print('here', flush=True); time.sleep(600)"


def waiting(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


Make = Callable[..., Processes]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    fleets = []

    def start(code: str, *nodes: str, **options: Any) -> Processes:
        fleets.append(Processes([sys.executable, "-c", code], tmp_path / "logs", **options))
        fleets[-1].start(nodes)
        return fleets[-1]

    yield start
    for fleet in fleets:
        fleet.stop(0.0)


def error_of(fleet: Processes) -> str:
    def ended() -> bool:
        try:
            fleet.watch()
        except RunError:
            return True
        return False

    waiting(ended)
    with pytest.raises(RunError) as caught:
        fleet.watch()
    return str(caught.value)


def test_a_process_a_node(make: Make, tmp_path: Path) -> None:
    fleet = make(WAITS, "a", "b", "c")
    assert list(fleet.pids) == ["a", "b", "c"]
    assert len(set(fleet.pids.values())) == 3
    fleet.watch()
    waiting(lambda: all("here" in (tmp_path / "logs" / f"{n}.log").read_text() for n in "abc"))
    fleet.stop(20.0)
    assert (tmp_path / "logs" / "a.log").read_text() == "here a\nbye\n", "they end by themselves when stdin closes"
    assert all(map(gone, fleet.pids.values()))
    fleet.stop(20.0)


@pytest.mark.parametrize(("count", "groups"), [(1, 1), (2, 2), (5, 3), (None, 3)])
def test_nodes_that_share_processes(make: Make, tmp_path: Path, count: int | None, groups: int) -> None:
    fleet = make(WAITS, "a", "b", "c", count=count)
    assert sorted(fleet.pids) == ["a", "b", "c"]
    assert len(set(fleet.pids.values())) == groups
    if count == 2:
        assert fleet.pids["a"] == fleet.pids["c"]
        waiting(lambda: "here a c" in (tmp_path / "logs" / "a.log").read_text())


def test_a_process_that_ends_is_noticed_with_its_last_line(make: Make) -> None:
    fleet = make("print('lots of talk'); print('error: no broker at x:1883\\n'); raise SystemExit(2)", "a")
    assert error_of(fleet) == "the process of a ended with exit status 2: no broker at x:1883"


def test_a_process_that_is_killed(make: Make, tmp_path: Path) -> None:
    fleet = make(STUBBORN, "a", "b", count=1)
    waiting(lambda: "here" in (tmp_path / "logs" / "a.log").read_text())
    os.kill(fleet.pids["a"], signal.SIGKILL)
    assert error_of(fleet) == "the process of a,b was killed by signal 9: here"


def again(fleet: Processes, node: str, before: int) -> int:
    """Return the process id of a node's next process."""

    def started() -> bool:
        fleet.watch()
        return fleet.pids[node] != before

    waiting(started)
    return fleet.pids[node]


def test_a_process_that_is_killed_is_started_again_so_many_times(make: Make) -> None:
    fleet = make(STUBBORN, "a", restarts=2)
    for _ in range(2):
        pid = fleet.pids["a"]
        os.kill(pid, signal.SIGKILL)
        again(fleet, "a", pid)
    os.kill(fleet.pids["a"], signal.SIGKILL)
    assert error_of(fleet).startswith("the process of a was killed by signal 9, as 2 times before within 60 s")


def test_a_process_that_hangs_is_killed_and_started_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgesplit.fleet.HANG_S", 0.1)
    fleet = make(STUBBORN, "a", "b", count=1, restarts=5)
    first = fleet.pids["a"]
    fleet.changed("a", "lost")
    fleet.changed("a", "back")
    time.sleep(0.2)
    fleet.watch()
    assert fleet.pids["a"] == first
    fleet.changed("a", "lost")
    fleet.changed("a", "left")
    second = again(fleet, "a", first)
    assert gone(first)
    fleet.changed("a", "lost")  # the first, as the network tells late
    time.sleep(0.2)
    fleet.watch()
    time.sleep(0.1)
    fleet.watch()
    assert fleet.pids["b"] == second, "whoever starts slowly does not hang"
    fleet.changed("a", "returned")
    fleet.changed("b", "lost")
    again(fleet, "b", second)


def test_a_process_that_ends_without_a_word(make: Make, tmp_path: Path) -> None:
    fleet = make("", "a")
    assert error_of(fleet) == f"the process of a ended with exit status 0 (log: {tmp_path / 'logs' / 'a.log'})"
    (tmp_path / "logs" / "a.log").unlink()
    assert "(log: " in error_of(fleet)


def test_what_does_not_end_is_killed(make: Make, tmp_path: Path) -> None:
    fleet = make(STUBBORN, "a", "b")
    waiting(lambda: "here" in (tmp_path / "logs" / "b.log").read_text())
    fleet.stop(0.05)
    assert all(map(gone, fleet.pids.values()))


def test_no_process_outlives_the_one_that_started_them(tmp_path: Path) -> None:
    code = f"""
import os, sys
from pathlib import Path
from edgesplit.fleet import Processes
fleet = Processes([sys.executable, "-c", {WAITS!r}], Path({str(tmp_path)!r}))
fleet.start(["a"])
print(fleet.pids["a"], flush=True)
os._exit(9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 9
    waiting(lambda: gone(int(done.stdout)))


def test_the_environment(make: Make, tmp_path: Path) -> None:
    make("import os, sys; print(os.environ['EXTRA'], 'PATH' in os.environ); sys.stdin.read()", "a", env={"EXTRA": "7"})
    waiting(lambda: (tmp_path / "logs" / "a.log").read_text() == "7 True\n")


def test_the_command_of_nodes() -> None:
    command = node_command("mqtt://127.0.0.1:1883", "run-1", "/x/task.py:make", state=Path("s"))
    assert command[:4] == [sys.executable, "-m", "edgesplit", "node"]
    assert command[4:] == [
        "--broker",
        "mqtt://127.0.0.1:1883",
        "--run",
        "run-1",
        "--local",
        "--state",
        "s",
        "--task",
        "/x/task.py:make",
    ]
    nothing = node_command("mqtt://127.0.0.1:1883", "run-1", state=None)
    assert "--no-state" in nothing
    assert "--state" not in nothing
    assert "--task" not in node_command("mqtt://127.0.0.1:1883", "run-1", state=Path("s"))


def test_threads() -> None:
    with MemoryTransport() as transport:
        fleet = Threads(lambda node: transport, lambda assignment: None)  # type: ignore[arg-type,return-value]
        inbox = transport.mailbox("coordinator")
        fleet.start(["a", "b"])
        assert {inbox.get(10.0).sender for _ in range(2)} == {"a", "b"}
        fleet.watch()
        transport.send("a", Message(kind="assign", sender="coordinator"))
        assert inbox.get(10.0).kind == "failed"
        transport.send("b", Message(kind="stop", sender="coordinator"))
        assert inbox.get(10.0).kind == "stopped"
        fleet.stop(10.0)
        assert not any(thread.is_alive() for thread in fleet._threads)


def test_elsewhere_has_nothing_to_do() -> None:
    fleet = Elsewhere()
    fleet.start(["a"])
    fleet.watch()
    fleet.stop(1.0)
