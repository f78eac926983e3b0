"""An MQTT broker in a child process, for a laptop, a demo, or a home without one."""

from __future__ import annotations

import logging
import socket
import struct
import tempfile
import threading
import time
from pathlib import Path
from typing import Self

from edgesplit.errors import TransportError

# Without a file the largest payload is 20 KB. The log (segments x size) bounds what a slow subscriber may be behind
# before it loses messages silently: far above what the transport allows in flight to one inbox.
_CONFIG = """\
id = 0
[router]
id = 0
max_connections = 10010
max_outgoing_packet_count = 200
max_segment_size = 104857600
max_segment_count = 10
"""
_LISTENER = """\
[{version}.1]
name = "{version}"
listen = "127.0.0.1:{port}"
next_connection_delay_ms = 1
[{version}.1.connections]
connection_timeout_ms = 60000
max_payload_size = 268435456
max_inflight_count = 100
dynamic_filters = true
"""

TRIES = 3
"""Pairs of free ports that are tried."""

WATCH_S = 0.25
"""Seconds between two looks whether the child process lives."""

CALL_S = 2.0
"""Seconds between two calls of each port, to see whether it still takes clients."""

ANSWER_S = 1.0
"""Seconds that a call waits for the broker's answer."""

HANG_UPS = 3
"""Calls in a row that a port hangs up on before the broker is started again."""

log = logging.getLogger("edgesplit.transport.broker")


class EmbeddedBroker:
    """A broker on the loopback interface, for MQTT 5 and 3.1.1 on a port each.

    A thread watches it: where the child process has died, or a port hangs up on every client, it is started again on
    the same ports. (``rumqttd`` 0.20 keeps an entry for a client that was gone before its CONNACK; the next connect
    under the same id panics on it with a lock held, and no client can connect to that port any more.)

    The child process ends when this one closes it or dies: it reads a pipe that this process holds open.

    Args:
        port: for MQTT 5; 0: any that is free.

    Raises:
        TransportError: ``iotcore`` is not installed, or the port is in use.
    """

    def __init__(self, port: int = 0) -> None:
        try:
            import iotcore
        except ImportError:
            raise TransportError(
                "the embedded broker needs iotcore: pip install 'edgesplit[broker]', or name a broker's url"
            ) from None
        self._directory = tempfile.TemporaryDirectory(prefix="edgesplit-broker-")
        config = Path(self._directory.name) / "broker.toml"
        for left in reversed(range(1 if port else TRIES)):
            free, self.port_v3 = _free_ports()
            self.port = port or free
            configure(config, self.port, self.port_v3)
            self._broker = iotcore.Broker(config_path=str(config))
            try:
                self._broker.start()
                break
            except (OSError, RuntimeError) as error:  # a port that was free may be somebody else's by now
                self._broker.stop()
                if not left:
                    self._directory.cleanup()
                    where = f"port {self.port} of 127.0.0.1"
                    raise TransportError(
                        f"the embedded broker cannot use {where}: {error}: free it, or use another"
                    ) from None
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="edgesplit-broker", daemon=True)
        self._watcher.start()

    @property
    def url(self) -> str:
        """Where nodes of this machine reach it, with MQTT 5."""
        return f"mqtt://127.0.0.1:{self.port}"

    @property
    def url_v3(self) -> str:
        """The same for clients that speak MQTT 3.1.1."""
        return f"mqtt://127.0.0.1:{self.port_v3}"

    def close(self) -> None:
        """End the child process and free its ports; may be called twice."""
        self._closing.set()
        self._watcher.join()
        self._broker.stop()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _watch(self) -> None:
        """Start the broker again where it has to be, until it is closed."""
        ports = [_Port(self.port, 5), _Port(self.port_v3, 4)]
        call_at = time.monotonic() + CALL_S
        while not self._closing.wait(WATCH_S):
            if not self._broker.is_running:
                self._restart("has died")
            elif time.monotonic() >= call_at:
                if any(port.refuses() for port in ports) and self._broker.is_running:
                    self._restart("hangs up on its clients")
                call_at = time.monotonic() + CALL_S

    def _restart(self, why: str) -> None:
        """Start the child process again on the same ports; where they are taken, the next time."""
        self._broker.stop()
        try:
            self._broker.start()
        except (OSError, RuntimeError) as error:
            log.warning("the embedded broker %s and cannot be started again yet: %s", why, error)
            self._closing.wait(1.0)
        else:
            log.warning("the embedded broker %s: it was started again", why)


class _Port:
    """One port of the broker, called as a client does.

    The client id changes where a call was not answered: the broker keeps something for each id, and an entry of a
    client that was gone too early is what makes it panic.
    """

    def __init__(self, port: int, level: int) -> None:
        self._port, self._level, self._unanswered = port, level, 0

    def refuses(self) -> bool:
        """Whether it hangs up :data:`HANG_UPS` times in a row. One that is only silent may have no time."""
        return all(self._hangs_up() for _ in range(HANG_UPS))

    def _hangs_up(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), ANSWER_S) as call:
                call.sendall(connect_packet(f"edgesplit-watch-{self._unanswered}", self._level))
                if call.recv(1):
                    call.sendall(_DISCONNECT)
                    return False
        except TimeoutError:
            self._unanswered += 1
            return False
        except OSError:  # reset, or refused where the listener is gone
            pass
        self._unanswered += 1
        return True


_DISCONNECT = b"\xe0\x00"


def connect_packet(client_id: str, level: int) -> bytes:
    """Return MQTT's CONNECT of a new session, with a keep-alive of 10 s; ``level``: 4 (3.1.1) or 5."""
    properties = b"\x00" if level == 5 else b""
    name = client_id.encode()
    body = b"\x00\x04MQTT" + struct.pack("!BBH", level, 0x02, 10) + properties + struct.pack("!H", len(name)) + name
    return b"\x10" + bytes([len(body)]) + body


def configure(path: Path, port: int, port_v3: int) -> None:
    """Write the broker's configuration; ``port`` is MQTT 5's, ``port_v3`` that of MQTT 3.1.1."""
    listeners = (("v5", port), ("v4", port_v3))
    path.write_text(_CONFIG + "".join(_LISTENER.format(version=version, port=port) for version, port in listeners))


def _free_ports() -> tuple[int, int]:
    """Return two ports that nobody uses now."""
    with socket.socket() as one, socket.socket() as other:
        for probe in (one, other):
            probe.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1]), int(other.getsockname()[1])
