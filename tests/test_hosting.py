"""How nodes come to a broker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from edgesplit import hosting
from edgesplit.errors import TransportError, Unreachable
from edgesplit.transport.access import Access
from edgesplit.transport.mqtt import MqttTransport
from tests.brokers import Mosquitto, free_port


def test_a_local_node_calls_a_broker_that_is_down_until_it_is_back(
    start_mosquitto: Callable[..., Mosquitto], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "CALL_S", 0.1)
    broker = start_mosquitto()
    broker.stop()
    back = threading.Timer(1.0, broker.start)
    back.start()
    with hosting._connected(Access(broker.url), "r", "pi", None, give_up=20.0, again=True) as transport:
        assert transport.connected
    back.join()


def test_others_are_told_at_once() -> None:
    with pytest.raises(Unreachable, match=r"cannot reach the broker at 127\.0\.0\.1"):
        hosting.run_nodes(["pi"], broker=f"mqtt://127.0.0.1:{free_port()}", run="r")


def test_a_local_node_gives_up_where_calling_again_is_of_no_use(mosquitto: Mosquitto) -> None:
    began = time.monotonic()
    with MqttTransport(mosquitto.url, run="taken", node="pi"), pytest.raises(TransportError, match="is already in run"):
        hosting._connected(Access(mosquitto.url), "taken", "pi", None, give_up=100.0, again=True)
    assert time.monotonic() - began < 50
