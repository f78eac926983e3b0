"""Finds the runs of a broker by their coordinators' retained statuses: for a node that was not told which run."""

from __future__ import annotations

import time
from typing import Any

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

from edgesplit.errors import FrameError, TransportError, TransportTimeout
from edgesplit.task import COORDINATOR
from edgesplit.transport.address import Address, parse_url, unreachable
from edgesplit.transport.frames import valid_name
from edgesplit.transport.mqtt import identify, refusal
from edgesplit.transport.presence import FRESH, Status

SETTLE_S = 1.0
"""How long it may take until all retained statuses have come."""


def find_run(url: str, *, prefix: str = "edgesplit", timeout: float = 300.0) -> str:
    """Wait for a run's coordinator on a broker and return the run's name.

    Raises:
        TransportError: the broker cannot be reached or refuses, or there are several runs: their names.
        TransportTimeout: no coordinator came within ``timeout`` seconds.
    """
    address = parse_url(url)
    runs: dict[str, Status] = {}
    refused: list[str] = []

    def on_connect(client: paho.Client, _u: Any, _f: Any, code: Any, _p: Any) -> None:
        if code.is_failure:
            refused.append(code.getName())
        else:
            client.subscribe(f"{prefix}/+/{COORDINATOR}/status", qos=1)

    def on_message(client: paho.Client, _u: Any, message: paho.MQTTMessage) -> None:
        run = message.topic.removeprefix(f"{prefix}/").split("/")[0]
        try:
            status = Status.of_json(message.payload)
        except FrameError:
            return  # not ours
        if valid_name(run):
            runs[run] = status

    client = paho.Client(CallbackAPIVersion.VERSION2)
    identify(client, address)
    client.on_connect, client.on_message = on_connect, on_message
    try:
        client.connect(address.host, address.port)
        return _wait(client, address, runs, refused, timeout)
    except OSError as error:
        raise unreachable(address, error) from None
    finally:
        client.disconnect()


def _wait(client: paho.Client, address: Address, runs: dict[str, Status], refused: list[str], timeout: float) -> str:
    deadline, settled = time.monotonic() + timeout, time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        lost = client.loop(0.1) != paho.MQTT_ERR_SUCCESS
        if refused:
            raise refusal(address, refused[0])
        if lost:
            raise TransportError(f"the broker at {address} has closed the connection: look at its log")
        now = time.time()
        live = [run for run, s in runs.items() if s.state == "online" and now - s.time < FRESH]
        if len(live) > 1 and time.monotonic() > settled:
            raise TransportError(f"there are several runs at {address}: choose with --run: {', '.join(sorted(live))}")
        if live and time.monotonic() > settled:
            return live[0]
    raise TransportTimeout(f"no run began at {address} within {timeout:g} s: start 'edgesplit run ... --broker URL'")
