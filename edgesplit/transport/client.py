"""A paho client whose connection is ours: TCP, TLS and WebSocket, with errors that say what to do."""

from __future__ import annotations

import socket
import ssl
from typing import Any

from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from edgesplit.errors import TransportError
from edgesplit.transport import tls
from edgesplit.transport.access import Access
from edgesplit.transport.address import Address, password, unreachable
from edgesplit.transport.quick import Quick
from edgesplit.transport.websocket import WebSocket, WebSocketError

PROTOCOLS = {"5": MQTTProtocolVersion.MQTTv5, "3.1.1": MQTTProtocolVersion.MQTTv311}

OLD_BROKER = "Unsupported protocol version"


class Client(Quick):
    """A client of the broker that ``access`` tells of.

    Args:
        client_id: its name at the broker.
        mqtt: a key of :data:`PROTOCOLS`.
        timeout: seconds for each step of connecting.

    Raises:
        TransportError: a file that TLS or the password needs cannot be used.
    """

    def __init__(self, access: Access, client_id: str, *, mqtt: str, timeout: float) -> None:
        super().__init__(
            CallbackAPIVersion.VERSION2,
            client_id=client_id,
            clean_session=None if mqtt == "5" else True,
            protocol=PROTOCOLS[mqtt],
            reconnect_on_failure=False,
        )
        self.connect_timeout = timeout
        self.raw: socket.socket | None = None
        self._access, self._address = access, access.address
        self._tls = tls.context(access) if self._address.tls else None
        if self._address.user is not None:
            self.username_pw_set(self._address.user, password())

    def trouble(self, *, ask: bool = False) -> TransportError | None:
        """Return why the broker ended the connection, where TLS told; ``ask``: call again for it, up to a second."""
        found = self.raw.trouble if isinstance(self.raw, tls.Watched) else None
        if found is None and ask and self._tls is not None:
            found = tls.alert(self._address, self._tls)
        return tls.trouble(self._address, self._access, found) if found is not None else None

    def quick_ack(self) -> None:
        """Have what comes next acknowledged at once: a broker with Nagle on waits for that, and Linux delays it."""
        if self.raw is not None and hasattr(socket, "TCP_QUICKACK"):
            self.raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def _create_socket_connection(self) -> Any:
        """Called by paho for a new connection; raises TransportError, which paho lets through."""
        address = self._address
        try:
            self.raw = socket.create_connection((address.host, address.port), timeout=self.connect_timeout)
        except OSError as error:
            raise unreachable(address, error) from None
        try:
            self.raw.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
            )  # small frames must not wait for a full packet
            if self._tls is not None:
                self.raw = self._tls.wrap_socket(self.raw, server_hostname=address.host)
            return WebSocket(self.raw, address) if address.websockets else self.raw
        except OSError as error:
            self.raw.close()
            raise self._explained(address, error) from None

    def _explained(self, address: Address, error: OSError) -> TransportError:
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            return tls.trouble(address, self._access, error)
        if isinstance(error, WebSocketError):
            return TransportError(
                f"the web server at {address} takes no MQTT over WebSocket: {error}: is the path of the url right?"
            )
        silent = isinstance(error, TimeoutError)
        what = f"does not answer within {self.connect_timeout:g} s" if silent else "hangs up"
        how = "TLS" if address.tls else "a WebSocket"
        return TransportError(
            f"{address} took the connection but {what} when asked for {how}: is it the right port for this url?"
        )


def refusal(address: Address, reason: str) -> TransportError:
    """Return the error for a broker that does not let a client in."""
    who = f"user {address.user!r}" if address.user else "a node without a user name"
    hint = ": look at the user in the url and at EDGESPLIT_PASSWORD_FILE" if reason in _REFUSED else ""
    return TransportError(f"the broker at {address} refuses {who} ({reason}){hint}")


_REFUSED = {"Bad user name or password", "Not authorized", "Banned", "Bad authentication method"}
