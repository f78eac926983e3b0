"""Ways to a broker, as values: which broker, over what, in which version of MQTT."""

from __future__ import annotations

import signal
import ssl
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edgesplit.transport.broker import configure
from tests.brokers import Iotcore, Mosquitto, WebBroker, free_port, tls_options
from tests.certificates import Authority
from tests.system.command import kept
from tests.system.relay import Relay


class Broker(Protocol):
    """A broker's process."""

    port: int

    @property
    def pid(self) -> int: ...

    def start(self) -> None: ...

    def stop(self, how: signal.Signals = ...) -> None: ...


@dataclass(frozen=True)
class Entry:
    """A broker that is there, and how clients get in.

    Attributes:
        port: that clients reach it at.
        log: what mosquitto has to say.
        lines: of its configuration, but for limits.
        spy: port of mosquitto's for us, without TLS.
    """

    way: Way
    broker: Broker
    port: int
    authority: Authority | None
    log: Path
    lines: tuple[str, ...] = ()
    spy: int = 0

    def dropped(self) -> int:
        """How many messages mosquitto has dropped, as it said within the last second."""
        topic = "$SYS/broker/publish/messages/dropped"
        return int(kept(self.spy, topic).get(topic, 0))

    def limit(self, limits: Sequence[str]) -> None:
        """Have mosquitto come back with other limits."""
        assert isinstance(self.broker, Mosquitto)
        self.broker.configure([*self.lines, *limits])

    def options(self, name: str, port: int) -> list[str]:
        """Return the options of a command line for a client of that name that comes through ``port``."""
        path = "/mqtt" if self.way.scheme == "wss" else ""
        version = ["--mqtt", self.way.mqtt] if self.way.mqtt else []
        papers = self.authority.options(name) if self.authority else []
        return ["--broker", f"{self.way.scheme}://127.0.0.1:{port}{path}", *version, *papers]


@dataclass(frozen=True)
class Way:
    """A way to a broker.

    Attributes:
        title: for people.
        broker: ``mosquitto``, ``embedded`` or ``web``: that in iotcore behind a web server, which a relay with TLS is.
        scheme: of the url. Over TLS clients need a certificate.
        mqtt: the version; None: what the broker speaks.
    """

    title: str
    broker: str = "mosquitto"
    scheme: str = "mqtt"
    mqtt: str | None = None

    @contextmanager
    def open(self, folder: Path, limits: Sequence[str] = ()) -> Iterator[Entry]:
        """Start the broker; ``limits``: lines of mosquitto's configuration, ``{folder}`` where it is."""
        log = folder / "mosquitto.log"
        authority = Authority(_new(folder / "papers")) if self.scheme != "mqtt" else None
        with ExitStack() as stack:
            if self.broker == "mosquitto":
                spy = free_port()
                lines = [f"log_dest file {log}", "log_type all", "sys_interval 1"]
                lines += [*(tls_options(authority) if authority else []), f"listener {spy} 127.0.0.1"]
                mosquitto = Mosquitto(folder, [*lines, *(line.format(folder=folder) for line in limits)])
                stack.callback(mosquitto.stop)
                yield Entry(self, mosquitto, mosquitto.port, authority, log, tuple(lines), spy)
            elif self.broker == "embedded":
                ports = free_port(), free_port()
                configure(folder / "broker.toml", *ports)
                iotcore = Iotcore(folder / "broker.toml", ports[self.mqtt == "3.1.1"])
                stack.callback(iotcore.stop)
                yield Entry(self, iotcore, iotcore.port, authority, log)
            else:
                assert authority is not None
                web = WebBroker(folder, authority)
                stack.callback(web.close)
                front = Relay(web.process.port, _server(authority))
                stack.callback(front.close)
                yield Entry(self, web.process, front.port, authority, log)


def _server(authority: Authority) -> ssl.SSLContext:
    """Return the context of a web server that demands a certificate of its clients."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.ca)
    context.load_cert_chain(*authority.sign("front", "127.0.0.1", "localhost"))
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


MOSQUITTO = Way("mosquitto, the version that it speaks")
WAYS = {
    "mosquitto-3": Way("mosquitto, MQTT 3.1.1", mqtt="3.1.1"),
    "mosquitto-5": Way("mosquitto, MQTT 5", mqtt="5"),
    "embedded-3": Way("the embedded broker, MQTT 3.1.1", "embedded", mqtt="3.1.1"),
    "embedded-5": Way("the embedded broker, MQTT 5", "embedded", mqtt="5"),
    "mqtts-3": Way("mosquitto, TLS and client certificates, MQTT 3.1.1", scheme="mqtts", mqtt="3.1.1"),
    "mqtts-5": Way("mosquitto, TLS and client certificates, MQTT 5", scheme="mqtts", mqtt="5"),
    "wss-3": Way("WebSocket, TLS and client certificates, MQTT 3.1.1", "web", "wss", "3.1.1"),
}
