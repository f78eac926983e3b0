"""Faults that a run survives: each finds it in a phase of its own, and the weights are the undisturbed run's.

A part of the matrix of ``matrix.py``, which runs all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.brokers import find_mosquitto
from tests.system import matrix
from tests.system.cells import Row
from tests.system.matrix import Cell
from tests.system.relay import Relay
from tests.system.stage import STEPS, Hit

MISSING = pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")
pytestmark = [pytest.mark.system, pytest.mark.mosquitto, MISSING]

AT_ONCE = 3
RUNS = {"/".join(group[0][:2]): group for group in matrix.TABLE.groups(matrix.QUICK)}


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[list[Row]]]]:
    """The runs that were chosen, on their way."""
    folder: Path = tmp_path_factory.mktemp("recovery")
    wanted = [
        item.callspec.params["run"]
        for item in request.session.items
        if hasattr(item, "callspec") and item.module is request.module
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {name: pool.submit(matrix.TABLE.run, RUNS[name], folder) for name in wanted}


@pytest.mark.parametrize("run", list(RUNS))
def test_the_weights_are_those_of_the_undisturbed_run(run: str, running: dict[str, Future[list[Row]]]) -> None:
    rows = running[run].result()
    assert [row.error for row in rows] == [None] * len(RUNS[run])
    for row in rows:
        most = STEPS if row.cell[1] == "disk" else 2  # whoever could keep nothing begins the round again
        assert row.hit is not None
        assert row.hit.again <= most


def test_every_cell_is_in_one_run() -> None:
    runs = matrix.TABLE.groups(matrix.CELLS)
    assert sorted(cell for run in runs for cell in run) == sorted(matrix.CELLS)
    assert all(len({cell[:2] for cell in run}) == 1 for run in runs)


def test_the_table_says_what_failed() -> None:
    cells = [Cell("edge", "kill", "forward"), Cell("edge", "kill", "fetch")]
    rows = [Row(cells[0], Hit(1, 5.0, 0.5), None), Row(cells[1], Hit(0, 4.0, 0.3), "other weights")]
    line = matrix.TABLE.markdown(rows).splitlines()[-1]
    assert line == "| edge | `kill -9` (local processes) | 2 x 1 | 1 of 2 | 1 | 4.5 | 0.4 | 0.5 |"
    assert matrix.TABLE.main(["--list", "--cells", "edge/kill/f*"]) == 0


def test_the_relay_holds_back_and_refuses() -> None:
    """What the matrix takes for a cut network is one."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        relay = Relay(server.getsockname()[1])
        with socket.create_connection(("127.0.0.1", relay.port), timeout=5) as client:
            ours, _ = server.accept()
            with ours:
                ours.settimeout(0.3)
                client.sendall(b"one")
                assert ours.recv(3) == b"one"
                relay.cut()
                client.sendall(b"two")
                with pytest.raises(TimeoutError):
                    ours.recv(3)
                relay.mend()
                ours.settimeout(5)
                assert ours.recv(3) == b"two"
                relay.reset()
                assert ours.recv(3) == b""
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", relay.port), timeout=5)
        relay.close()
