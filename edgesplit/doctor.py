"""What is installed here, and whether a broker does what it must: ``edgesplit doctor``."""

from __future__ import annotations

import importlib
import secrets
import statistics
import sys
import time
from importlib import metadata
from typing import NamedTuple

from edgesplit.errors import TransportError
from edgesplit.transport.access import Access
from edgesplit.transport.base import Message
from edgesplit.transport.broker import EmbeddedBroker
from edgesplit.transport.mqtt import MqttTransport

REQUIRED = ("numpy", "paho-mqtt", "pydantic", "PyYAML", "rich", "safetensors", "typer")
OPTIONAL = {
    "torch": "nodes that compute with torch, and the coordinator: pip install 'edgesplit[torch]'",
    "flwr": "federated averaging of replicated layers: pip install 'edgesplit[flower]'",
    "iotcore": "the embedded broker: pip install 'edgesplit[broker]'",
    "zlib-ng": "faster checksums of what is sent: pip install 'edgesplit[fast]'",
}
MODULES = {"torch": "torch", "flwr": "flwr", "iotcore": "iotcore", "zlib-ng": "zlib_ng"}
ROUND_TRIPS = 50
SLOW_MS = 20.0
"""A round trip over loopback or a LAN that takes longer than this has Nagle's algorithm in it."""


class Finding(NamedTuple):
    """One line of the doctor's."""

    name: str
    ok: bool
    text: str


def examine(broker: str | Access | None = None) -> list[Finding]:
    """Look at this installation, and at a broker: the one named, else the embedded one where it is installed."""
    findings = [Finding("python", sys.version_info >= (3, 11), sys.version.split()[0])]
    findings += [_package(name) for name in REQUIRED]
    findings += [_optional(name) for name in OPTIONAL]
    if broker is not None:
        findings += _broker(broker, "broker")
    elif any(f.name == "iotcore" and f.text[0].isdigit() for f in findings):
        try:
            with EmbeddedBroker() as embedded:
                findings += _broker(embedded.url, "embedded broker")
        except TransportError as error:
            findings.append(Finding("embedded broker", False, str(error)))
    return findings


def _package(name: str) -> Finding:
    try:
        return Finding(name, True, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, False, f"not installed: pip install {name}")


def _optional(name: str) -> Finding:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, True, f"not installed; needed for {OPTIONAL[name]}")
    try:
        importlib.import_module(MODULES[name])
    except Exception as error:  # noqa: BLE001 - whatever it is, the user must see it
        return Finding(name, False, f"{version}, but does not import: {error}")
    return Finding(name, True, version)


def _broker(broker: str | Access, name: str) -> list[Finding]:
    run = f"doctor-{secrets.token_hex(4)}"
    try:
        access = broker if isinstance(broker, Access) else Access(broker)
        with MqttTransport(access, run=run, node="a") as a, MqttTransport(access, run=run, node="b") as b:
            milliseconds = _round_trip_ms(a, b)
            large = _large_mb_per_s(a, b)
    except TransportError as error:
        return [Finding(name, False, str(error))]
    hint = "" if milliseconds < SLOW_MS else "; Nagle's algorithm? mosquitto: set_tcp_nodelay true"
    return [
        Finding(name, True, f"{access.url}: reachable, takes our topics and packets"),
        Finding("round trip", True, f"1 KiB there and back {milliseconds:.2f} ms (median of {ROUND_TRIPS}){hint}"),
        Finding("throughput", True, f"16 MB message at {large:,.0f} MB/s"),
    ]


def _round_trip_ms(a: MqttTransport, b: MqttTransport) -> float:
    from_a, from_b = a.mailbox("a"), b.mailbox("b")
    times = []
    for number in range(ROUND_TRIPS):
        start = time.perf_counter()
        a.send("b", Message(kind="ping", sender="a", meta={"pad": "." * 1000, "number": number}))
        while from_b.get(10.0, "a ping").kind != "ping":
            pass
        b.send("a", Message(kind="pong", sender="b", meta={"pad": "." * 1000, "number": number}))
        while from_a.get(10.0, "a pong").kind != "pong":
            pass
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def _large_mb_per_s(a: MqttTransport, b: MqttTransport) -> float:
    import numpy as np

    from edgesplit.codecs import pack

    inbox, size = b.mailbox("b"), 16_000_000
    start = time.perf_counter()
    a.send("b", Message(kind="bulk", sender="a", arrays=pack({"x": np.zeros(size, np.uint8)}, "raw")))
    while inbox.get(30.0, "a message of 16 MB").kind != "bulk":
        pass
    return size / 1e6 / (time.perf_counter() - start)
