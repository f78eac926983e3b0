"""Finds the runs of a broker by their coordinators' retained statuses: for a node that was not told which run."""

from __future__ import annotations

import secrets
import time
from typing import Any

from paho.mqtt import client as paho

from edgesplit.errors import FrameError, TransportError, TransportTimeout
from edgesplit.task import COORDINATOR
from edgesplit.transport.access import VERSIONS, Access
from edgesplit.transport.address import Address
from edgesplit.transport.client import OLD_BROKER, Client, refusal
from edgesplit.transport.frames import valid_name
from edgesplit.transport.presence import FRESH, Status

SETTLE_S = 1.0
"""How long it may take until all retained statuses have come."""


ANSWER_S = 10.0
"""How long a broker may take to answer."""


class _Lobby:
    """What the broker has said."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.runs: dict[str, Status] = {}
        self.answer: Any = None

    def on_connect(self, client: paho.Client, _u: Any, _f: Any, code: Any, _p: Any) -> None:
        self.answer = code
        if not code.is_failure:
            client.subscribe(f"{self.prefix}/+/{COORDINATOR}/status", qos=1)

    def on_message(self, _c: paho.Client, _u: Any, message: paho.MQTTMessage) -> None:
        run = message.topic.removeprefix(f"{self.prefix}/").split("/")[0]
        try:
            status = Status.of_json(message.payload)
        except FrameError:
            return  # not ours
        if valid_name(run):
            self.runs[run] = status


def find_run(broker: str | Access, node: str, *, timeout: float = 300.0) -> str:
    """Wait for a run's coordinator on a broker and return the run's name.

    Args:
        broker: its url, or the url and how to get in.
        node: who asks; the client id is made of it.
        timeout: seconds.

    Raises:
        TransportError: the broker cannot be reached or refuses, or there are several runs: their names.
        TransportTimeout: no coordinator came within ``timeout`` seconds.
    """
    access = broker if isinstance(broker, Access) else Access(broker)
    lobby = _Lobby(access.prefix)
    client = _connect(access, node, lobby)
    try:
        return _wait(client, access.address, lobby, timeout)
    finally:
        client.disconnect()


def _connect(access: Access, node: str, lobby: _Lobby) -> Client:
    """Connect in the first version of MQTT that the broker answers in."""
    versions = [access.mqtt] if access.mqtt else list(VERSIONS)
    for mqtt in versions:
        lobby.answer = None
        name = access.id_of("lobby", node, secrets.randbits(63))
        client = Client(access, name, mqtt=mqtt, timeout=ANSWER_S)
        client.on_connect, client.on_message = lobby.on_connect, lobby.on_message
        client.connect(access.address.host, access.address.port)
        deadline = time.monotonic() + ANSWER_S
        while lobby.answer is None and client.loop(0.1) == paho.MQTT_ERR_SUCCESS and time.monotonic() < deadline:
            pass
        if lobby.answer is not None and not lobby.answer.is_failure:
            return client
        client.disconnect()
        if lobby.answer is None and (trouble := client.trouble(ask=mqtt == versions[-1])) is not None:
            raise trouble
        if lobby.answer is not None and lobby.answer.getName() != OLD_BROKER:
            raise refusal(access.address, lobby.answer.getName())
    raise TransportError(
        f"{access.address} took the connection but says nothing in MQTT {' or '.join(versions)}: "
        "is it a broker's port, and the right one for this url?"
    )


def _wait(client: Client, address: Address, lobby: _Lobby, timeout: float) -> str:
    deadline, settled = time.monotonic() + timeout, time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        if client.loop(0.1) != paho.MQTT_ERR_SUCCESS:
            raise TransportError(f"the broker at {address} has closed the connection: look at its log")
        now = time.time()
        live = [run for run, s in lobby.runs.items() if s.state == "online" and now - s.time < FRESH]
        if len(live) > 1 and time.monotonic() > settled:
            raise TransportError(f"there are several runs at {address}: choose with --run: {', '.join(sorted(live))}")
        if live and time.monotonic() > settled:
            return live[0]
    raise TransportTimeout(f"no run began at {address} within {timeout:g} s: start 'edgesplit run ... --broker URL'")
