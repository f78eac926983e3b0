"""An MQTT broker in a child process, for a laptop, a demo, or a home without one."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

from edgesplit.errors import TransportError

if TYPE_CHECKING:
    import iotcore

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


class EmbeddedBroker:
    """A broker on the loopback interface, for MQTT 5 and 3.1.1 on a port each.

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
        for left in reversed(range(1 if port else TRIES)):
            free, self.port_v3 = _free_ports()
            self.port = port or free
            try:
                self._broker = self._start(iotcore.Broker)
                return
            except TransportError:  # a port that was free may be somebody else's by now
                if not left:
                    self._directory.cleanup()
                    raise

    @property
    def url(self) -> str:
        """Where nodes of this machine reach it, with MQTT 5."""
        return f"mqtt://127.0.0.1:{self.port}"

    @property
    def url_v3(self) -> str:
        """The same for clients that speak MQTT 3.1.1."""
        return f"mqtt://127.0.0.1:{self.port_v3}"

    def watch(self) -> None:
        """Start the child process again where it has died, on the same ports; where they are taken, the next time."""
        if not self._broker.is_running:
            with contextlib.suppress(OSError, RuntimeError):
                self._broker.start()

    def close(self) -> None:
        """End the child process and free its ports; may be called twice."""
        self._broker.stop()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _start(self, broker_type: type[iotcore.Broker]) -> iotcore.Broker:
        config = Path(self._directory.name) / "broker.toml"
        listeners = (("v5", self.port), ("v4", self.port_v3))
        config.write_text(
            _CONFIG + "".join(_LISTENER.format(version=version, port=port) for version, port in listeners)
        )
        broker = broker_type(config_path=str(config))
        try:
            return broker.start()
        except (OSError, RuntimeError) as error:
            broker.stop()
            raise TransportError(
                f"the embedded broker cannot use port {self.port} of 127.0.0.1: {error}: free it, or use another"
            ) from None


def _free_ports() -> tuple[int, int]:
    """Return two ports that nobody uses now."""
    with socket.socket() as one, socket.socket() as other:
        for probe in (one, other):
            probe.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1]), int(other.getsockname()[1])
