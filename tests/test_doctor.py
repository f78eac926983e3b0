"""What the doctor finds: packages, and a broker that is there, is not there, or is no broker."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest

from edgesplit import doctor
from edgesplit.doctor import OPTIONAL, REQUIRED, Finding, examine
from edgesplit.transport.broker import EmbeddedBroker
from tests.brokers import Mosquitto, free_port


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    assert len({finding.name for finding in findings}) == len(findings)
    return {finding.name: finding for finding in findings}


@pytest.fixture
def no_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_broker", lambda url, name: [Finding(name, True, url)])


@pytest.mark.usefixtures("no_broker")
def test_packages() -> None:
    found = by_name(examine("mqtt://nowhere"))
    assert {"python", "broker", *REQUIRED, *OPTIONAL} == set(found)
    assert all(finding.ok for finding in found.values())
    assert found["numpy"].text == metadata.version("numpy")


@pytest.mark.usefixtures("no_broker")
def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name in {"paho-mqtt", "torch", "iotcore"}:
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    found = by_name(examine())
    assert found["paho-mqtt"] == Finding("paho-mqtt", False, "not installed: pip install paho-mqtt")
    assert found["torch"].ok, "a device may do without"
    assert "pip install 'edgesplit[torch]'" in found["torch"].text
    assert "embedded broker" not in found, "it is not installed, so there is none to look at"


@pytest.mark.usefixtures("no_broker")
def test_what_is_installed_and_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise RuntimeError("built for another interpreter")

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    found = by_name(examine("mqtt://nowhere"))
    assert not found["flwr"].ok
    assert found["flwr"].text.endswith("but does not import: built for another interpreter")


# --- brokers --------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ROUND_TRIPS", 3)


def broker_part(found: dict[str, Finding]) -> dict[str, Finding]:
    return {name: f for name, f in found.items() if name not in {"python", *REQUIRED, *OPTIONAL}}


@pytest.mark.usefixtures("quick")
def test_a_broker(mosquitto: Mosquitto) -> None:
    found = broker_part(by_name(examine(mosquitto.url)))
    assert set(found) == {"broker", "round trip", "throughput"}
    assert all(finding.ok for finding in found.values())
    assert mosquitto.url in found["broker"].text
    assert "ms (median of 3)" in found["round trip"].text


@pytest.mark.usefixtures("quick")
def test_the_embedded_broker(monkeypatch: pytest.MonkeyPatch, embedded_broker: EmbeddedBroker) -> None:
    class Given:
        def __enter__(self) -> EmbeddedBroker:
            return embedded_broker

        def __exit__(self, *exc_info: object) -> None: ...

    monkeypatch.setattr(doctor, "EmbeddedBroker", Given)
    found = broker_part(by_name(examine()))
    assert set(found) == {"embedded broker", "round trip", "throughput"}
    assert all(finding.ok for finding in found.values())


@pytest.fixture
def deaf() -> Iterator[int]:
    """Something that listens and is no broker: it answers everything with a web page."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client:
                    client.recv(100)
                    client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def test_no_broker_there() -> None:
    port = free_port()
    found = broker_part(by_name(examine(f"mqtt://127.0.0.1:{port}")))
    assert set(found) == {"broker"}
    assert not found["broker"].ok
    assert f"127.0.0.1:{port}" in found["broker"].text


def test_what_listens_there_is_no_broker(deaf: int) -> None:
    found = broker_part(by_name(examine(f"mqtt://127.0.0.1:{deaf}")))
    assert set(found) == {"broker"}
    assert not found["broker"].ok
    assert f"127.0.0.1:{deaf}" in found["broker"].text


@pytest.mark.parametrize(
    "url", ["", "nonsense", "http://127.0.0.1", "mqtt://", "mqtt://127.0.0.1:port", "mqtt://127.0.0.1:99999"]
)
def test_addresses_that_are_none(url: str) -> None:
    found = broker_part(by_name(examine(url)))
    assert [finding.ok for finding in found.values()] == [False]
    assert "\n" not in found["broker"].text
