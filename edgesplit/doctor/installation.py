"""What is installed here, and what this host's clock says."""

from __future__ import annotations

import importlib
import sys
from datetime import UTC, datetime
from importlib import metadata

from edgesplit.doctor.finding import Finding

REQUIRED = ("numpy", "paho-mqtt", "pydantic", "PyYAML", "rich", "safetensors", "typer")
OPTIONAL = {
    "torch": "nodes that compute with torch, and the coordinator: pip install 'edgesplit[torch]'",
    "flwr": "federated averaging of replicated layers: pip install 'edgesplit[flower]'",
    "iotcore": "the embedded broker: pip install 'edgesplit[broker]'",
    "zlib-ng": "faster checksums of what is sent: pip install 'edgesplit[fast]'",
}
MODULES = {"torch": "torch", "flwr": "flwr", "iotcore": "iotcore", "zlib-ng": "zlib_ng"}
EARLIEST = datetime(2024, 1, 1, tzinfo=UTC)
"""No clock of a machine that runs this can be right and say less."""


def packages() -> list[Finding]:
    """Look at Python and the packages."""
    findings = [Finding("python", sys.version_info >= (3, 11), sys.version.split()[0])]
    findings += [_package(name) for name in REQUIRED]
    return findings + [_optional(name) for name in OPTIONAL]


def clock(now: float) -> Finding:
    """Judge this host's clock by itself; ``now`` in seconds since the epoch."""
    shown = datetime.fromtimestamp(now, UTC)
    text, values = f"{shown:%Y-%m-%d %H:%M:%S} UTC", {"epoch_s": now}
    if shown >= EARLIEST:
        return Finding("clock", True, text, values=values)
    hint = (
        "certificates, statuses and logs need the time: set it, for example with 'timedatectl set-ntp true'; "
        "a board without a battery for its clock must ask a time server at every start"
    )
    return Finding("clock", False, f"{text}: that is wrong", hint, values)


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
