"""Real brokers for tests: a mosquitto of its own on a free port of the loopback interface, and the embedded one.

Both with and without TLS. Debian's mosquitto has no WebSockets; the broker in iotcore has.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import iotcore
import pytest

from edgesplit.transport.access import Access
from edgesplit.transport.broker import EmbeddedBroker
from tests.certificates import Authority


def find_mosquitto() -> str | None:
    """Return where mosquitto is; Debian keeps it outside an ordinary user's path."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


_BELOW_OUTGOING = range(20_000, 32_000)
"""Ports that the system gives to nobody by itself: one stays free while a broker is down, and until it is up."""


def free_port() -> int:
    """Return a port that is free now, and that another process of tests has hardly chosen too."""
    while True:
        port = secrets.choice(_BELOW_OUTGOING)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Mosquitto:
    """A mosquitto process; ``options`` are further lines of its configuration."""

    def __init__(self, directory: Path, options: Sequence[str] = (), *, anonymous: bool = True) -> None:
        self.port = free_port()
        self._config = directory / "mosquitto.conf"
        # Started as root it would become a user that cannot read the directory.
        user = ["user root"] if os.geteuid() == 0 else []
        self._lines = [f"listener {self.port} 127.0.0.1", "set_tcp_nodelay true", *user]
        self._last = [f"allow_anonymous {str(anonymous).lower()}", ""]
        self._process: subprocess.Popen[bytes] | None = None
        self.configure(options)
        self.start()

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def configure(self, options: Sequence[str]) -> None:
        """Write its configuration, for the next start."""
        self._config.write_text("\n".join([*self._lines, *options, *self._last]))

    def start(self) -> None:
        found = find_mosquitto()
        assert found is not None
        self._process = subprocess.Popen([found, "-c", str(self._config)], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                assert self._process.poll() is None, "mosquitto ended at once: is its configuration right?"
                time.sleep(0.01)
            else:
                return
        raise AssertionError("mosquitto does not listen")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(10)
            self._process = None


@pytest.fixture
def start_mosquitto(tmp_path: Path) -> Iterator[Callable[..., Mosquitto]]:
    """Starts a mosquitto with options of its own: ``start_mosquitto(["max_packet_size 3000"], anonymous=False)``."""
    started: list[Mosquitto] = []

    def start(options: Sequence[str] = (), *, anonymous: bool = True) -> Mosquitto:
        directory = tmp_path / f"mosquitto-{len(started)}"
        directory.mkdir()
        started.append(Mosquitto(directory, options, anonymous=anonymous))
        return started[-1]

    yield start
    for broker in started:
        broker.stop()


@pytest.fixture(scope="session")
def mosquitto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mosquitto]:
    """One mosquitto for all tests that do not stop it; each test uses a run of its own."""
    broker = Mosquitto(tmp_path_factory.mktemp("mosquitto"))
    yield broker
    broker.stop()


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Signs the certificates of the tests."""
    return Authority(tmp_path_factory.mktemp("certificates"))


def tls_options(authority: Authority, name: str = "broker", *hosts: str, **dates: int) -> list[str]:
    """Lines of a mosquitto that shows a certificate for ``hosts`` and demands one of its clients."""
    cert, key = authority.sign(name, *(hosts or ("127.0.0.1", "localhost")), **dates)
    return [f"cafile {authority.ca}", f"certfile {cert}", f"keyfile {key}", "require_certificate true"]


def with_certificate(authority: Authority, url: str, name: str = "client") -> Access:
    """How a client with a certificate gets in over TLS."""
    cert, key = authority.sign(name)
    return Access(url.replace("mqtt://", "mqtts://"), ca=str(authority.ca), cert=cert, cert_key=key)


@pytest.fixture(scope="session")
def mosquitto_tls(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Access]:
    """How to get into a mosquitto that demands a client's certificate."""
    broker = Mosquitto(tmp_path_factory.mktemp("mosquitto-tls"), tls_options(authority))
    yield with_certificate(authority, broker.url)
    broker.stop()


_WEB = """\
id = 0
[router]
id = 0
max_connections = 100
max_outgoing_packet_count = 200
max_segment_size = 104857600
max_segment_count = 10
"""
_WEB_LISTENER = """\
[ws.{number}]
name = "ws-{number}"
listen = "127.0.0.1:{port}"
next_connection_delay_ms = 1
[ws.{number}.connections]
connection_timeout_ms = 60000
max_payload_size = 268435456
max_inflight_count = 100
dynamic_filters = true
"""


class Iotcore:
    """The process of the broker in iotcore, to be ended and started as mosquitto's; nothing else watches it."""

    def __init__(self, config: Path, port: int) -> None:
        self.port, self._broker = port, iotcore.Broker(config_path=str(config))
        self.start()

    @property
    def pid(self) -> int:
        return int(self._broker._process.pid)

    def start(self) -> None:
        self._broker.start()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self._broker.is_running:
            self._broker._process.send_signal(how)
            self._broker._process.wait(10)
        self._broker.stop()


class WebBroker:
    """A broker behind WebSockets, on a port with TLS and one without; MQTT 3.1.1."""

    def __init__(self, folder: Path, authority: Authority, ports: tuple[int, int] | None = None) -> None:
        cert, key = authority.sign("web", "127.0.0.1", "localhost")
        ports = ports or (free_port(), free_port())
        listeners = [_WEB_LISTENER.format(number=number, port=port) for number, port in enumerate(ports, 1)]
        tls = f'[ws.2.tls]\ncertpath = "{cert}"\nkeypath = "{key}"\ncapath = "{authority.ca}"\n'
        (folder / "web.toml").write_text(_WEB + "".join(listeners) + tls)
        self.plain = Access(f"ws://127.0.0.1:{ports[0]}/mqtt")
        self.secure = Access(f"wss://localhost:{ports[1]}/mqtt", ca=str(authority.ca))
        self.process = Iotcore(folder / "web.toml", ports[0])

    def close(self) -> None:
        self.process.stop()


@pytest.fixture(scope="session")
def web_broker(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[WebBroker]:
    broker = WebBroker(tmp_path_factory.mktemp("web"), authority)
    yield broker
    broker.close()


@pytest.fixture(scope="session")
def embedded_broker() -> Iterator[EmbeddedBroker]:
    """One embedded broker for all tests that do not stop it."""
    with EmbeddedBroker() as broker:
        yield broker


def mark_mosquitto(items: list[pytest.Item]) -> None:
    """Mark what needs mosquitto by the fixtures it uses, and skip it where there is none."""
    missing = find_mosquitto() is None
    for item in items:
        if {"mosquitto", "mosquitto_tls", "start_mosquitto"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.mosquitto)
            if missing:
                item.add_marker(pytest.mark.skip(reason="mosquitto is not installed"))
