"""Where a broker is and who asks: the URL, and the password that is not in it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from edgesplit.errors import TransportError, Unreachable, did_you_mean

SCHEMES = {"mqtt": 1883, "mqtts": 8883, "ws": 80, "wss": 443}
"""Scheme -> its port."""


@dataclass(frozen=True, slots=True)
class Address:
    """A broker's.

    Attributes:
        scheme: a key of :data:`SCHEMES`.
        user: to log in as; None: without a name.
        path: of a websocket.
    """

    scheme: str
    host: str
    port: int
    user: str | None = None
    path: str = "/mqtt"

    @property
    def tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.scheme in ("mqtts", "wss")

    @property
    def websockets(self) -> bool:
        """Whether MQTT goes through a web server."""
        return self.scheme in ("ws", "wss")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_url(url: str) -> Address:
    """Read ``mqtt://user@host:port`` (or ``mqtts``, ``ws``, ``wss``).

    Raises:
        TransportError: it is no such URL, or has a password in it.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        shown = re.sub(r":[^/@]*@", ":...@", url)  # a password is not repeated
        raise TransportError(f"broker url {shown!r}: {error}") from None
    if parts.password is not None:
        # The url itself is not repeated: messages end up in logs.
        raise TransportError(
            f"broker url for {parts.hostname!r} has a password in it: put it into a file and name that in "
            "EDGESPLIT_PASSWORD_FILE"
        )
    if parts.scheme not in SCHEMES:
        near = did_you_mean(parts.scheme, SCHEMES)
        raise TransportError(f"broker url {url!r} must begin with one of {', '.join(f'{s}://' for s in SCHEMES)}{near}")
    if not parts.hostname or parts.query or parts.fragment:
        raise TransportError(f"broker url {url!r} must look like mqtt://user@host:1883")
    return Address(parts.scheme, parts.hostname, port or SCHEMES[parts.scheme], parts.username, parts.path or "/mqtt")


def password() -> str | None:
    """Return the password of the file that ``EDGESPLIT_PASSWORD_FILE`` names, else ``EDGESPLIT_PASSWORD``, else None.

    Raises:
        TransportError: the file cannot be read.
    """
    path = os.environ.get("EDGESPLIT_PASSWORD_FILE")
    if not path:
        return os.environ.get("EDGESPLIT_PASSWORD")
    try:
        return Path(path).read_text("utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TransportError(f"EDGESPLIT_PASSWORD_FILE: cannot read {path!r}: {error}") from None


def unreachable(address: Address, error: Exception) -> Unreachable:
    """Return the error for a broker to which no connection comes about."""
    why = getattr(error, "strerror", None) or error
    return Unreachable(f"cannot reach the broker at {address}: {why}: is it running there, and is the url right?")
