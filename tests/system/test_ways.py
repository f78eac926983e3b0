"""Faults of brokers over the ways to them: a part of the matrix of ``ways.py``, and whether its means work."""

from __future__ import annotations

import gc
import socket
import time
from pathlib import Path

import pytest

from edgesplit.errors import TransportError
from edgesplit.transport.access import Access
from edgesplit.transport.mqtt import MqttTransport
from tests.brokers import find_mosquitto, free_port
from tests.system import ways
from tests.system.cells import Row
from tests.system.relay import Relay
from tests.system.stage import Hit
from tests.system.way import WAYS

pytestmark = pytest.mark.system


@pytest.mark.mosquitto
@pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")
def test_the_weights_are_those_of_the_undisturbed_run(tmp_path: Path) -> None:
    (group,) = ways.TABLE.groups(ways.QUICK)
    assert [row.error for row in ways.TABLE.run(group, tmp_path)] == [None] * len(group)


def test_every_fault_is_over_every_way_or_says_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    there = {cell[:3] for cell in ways.CELLS}
    there |= {tuple(name.split("/")) for name in ways.MISSING}
    faults = {(role, fault) for role, found in ways.ROLES.items() for fault in found}
    assert there == {(way, *fault) for way in WAYS for fault in faults}
    assert ways.TABLE.main(["--list", "--cells", "wss-3/edge/refused*"]) == 0
    assert capsys.readouterr().out == "wss-3/edge/refused: none, this broker has no access rules\n"


def test_the_table_has_a_column_for_each_way() -> None:
    cells = [ways.Cell(way, "edge", "refused", phase) for way in ("mqtts-5", "mosquitto-3") for phase in ways.PHASES]
    rows = [Row(cell, Hit(0, 5.0, 0.5), None) for cell in cells[:-1]]
    head, _, line = ways.TABLE.markdown([*rows, Row(cells[-1], None, "other weights")]).splitlines()
    assert head == "| role | fault | mosquitto-3 | mqtts-5 | s to the next new step, most |"
    assert line == "| edge | a rule refuses what is for the edge, for 3 s | 2 of 3 | 3 of 3 | 0.5 |"
    other = Row(ways.Cell("wss-3", "edge", "cut-1", "forward"), Hit(0, 1.0, 0.0), None)
    assert ways.TABLE.markdown([*rows, other]).splitlines()[2].split("|")[3:6] == [" 2 of 2 ", " 3 of 3 ", " - "]


def test_the_web_server_lets_in_only_clients_with_a_certificate(tmp_path: Path) -> None:
    with WAYS["wss-3"].open(tmp_path) as entry:
        assert entry.authority is not None
        url, ca = f"wss://127.0.0.1:{entry.port}/mqtt", str(entry.authority.ca)
        with pytest.raises(TransportError, match="ends the connection"):
            MqttTransport(Access(url, ca=ca), run="r", node="a", connect_timeout=3.0)
        cert, key = entry.authority.sign("a")
        with MqttTransport(Access(url, ca=ca, cert=cert, cert_key=key), run="r", node="a") as transport:
            assert transport.connected


def test_the_relay_slows_down_what_clients_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        relay = Relay(server.getsockname()[1])
        with socket.create_connection(("127.0.0.1", relay.port), timeout=5) as client:
            client.sendall(b"first")  # what was read while it was fast passes at once
            ours, _ = server.accept()
            with ours:
                ours.settimeout(5)
                ours.recv(5)
                relay.slow(100_000)
                began = time.monotonic()
                ours.sendall(b"x" * 60_000)
                left = 60_000
                while left:
                    left -= len(client.recv(left))
                assert time.monotonic() - began > 0.4
        relay.close()


def test_the_relay_hangs_up_while_there_is_no_broker() -> None:
    """And leaves no socket behind, which the suite takes for an error."""
    relay = Relay(free_port())
    with socket.create_connection(("127.0.0.1", relay.port), timeout=5) as client:
        assert client.recv(1) == b""
    relay.close()
    gc.collect()
