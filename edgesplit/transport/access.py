"""How a broker lets a node in: its url, what TLS needs, and the names that the broker's rules demand."""

from __future__ import annotations

import os
import string
from dataclasses import dataclass

from edgesplit.errors import TransportError, did_you_mean
from edgesplit.transport import frames
from edgesplit.transport.address import Address, parse_url

PREFIX = "edgesplit"
CLIENT_ID = "{prefix}-{run}-{node}-{boot}"
PLACEHOLDERS = ("prefix", "run", "node", "boot")
VERSIONS = ("5", "3.1.1")

ENVIRONMENT = {"ca": "EDGESPLIT_CA", "cert": "EDGESPLIT_CERT", "cert_key": "EDGESPLIT_CERT_KEY"}
"""What of TLS may come from the environment, where nobody said otherwise."""

_OPTIONS = {
    "ca": "--ca", "cert": "--cert", "cert_key": "--cert-key", "prefix": "--topic-prefix", "client_id": "--client-id",
    "mqtt": "--mqtt",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Access:
    """A broker and how to get in; the user is in the url, the password in EDGESPLIT_PASSWORD_FILE.

    Attributes:
        url: ``mqtt://user@host:port``, ``mqtts://``, ``ws://`` or ``wss://host/path``.
        ca: file of the certificates that the broker's must be signed by; None: those that the system trusts.
        cert, cert_key: files of this client's certificate and its private key, where the broker demands one.
        prefix: the first levels of all topics.
        client_id: the pattern of client ids, with ``{prefix}`` (its ``/`` become ``-``), ``{run}``, ``{node}`` and
            ``{boot}``, which no two lives of a node share.
        mqtt: ``"5"`` or ``"3.1.1"``; None: 5 where the broker speaks it.

    Raises:
        TransportError: one of them is wrong, or has no effect.
    """

    url: str
    ca: str | None = None
    cert: str | None = None
    cert_key: str | None = None
    prefix: str = PREFIX
    client_id: str = CLIENT_ID
    mqtt: str | None = None

    def __post_init__(self) -> None:
        address = self.address
        for part in self.prefix.split("/"):
            if not frames.valid_name(part):
                raise TransportError(f"topic prefix {self.prefix!r}: each level must be 1 to 64 of A-Z a-z 0-9 . _ -")
        check_client_id(self.client_id)
        if self.mqtt not in (None, *VERSIONS):
            raise TransportError(f"mqtt version {self.mqtt!r} must be 5 or 3.1.1")
        given = [name for name in ENVIRONMENT if getattr(self, name)]
        if given and not address.tls:
            secure = "wss" if address.websockets else "mqtts"
            raise TransportError(
                f"{given[0].replace('_', '-')} has no effect over {address.scheme}://: use {secure}://, or remove it"
            )

    @property
    def address(self) -> Address:
        """Where the broker is."""
        return parse_url(self.url)

    def topic(self, run: str, node: str, what: str) -> str:
        """Return a node's topic."""
        return f"{self.prefix}/{run}/{node}/{what}"

    def id_of(self, run: str, node: str, boot: int) -> str:
        """Return the client id of one life of a node."""
        return self.client_id.format(prefix=self.prefix.replace("/", "-"), run=run, node=node, boot=f"{boot:x}")

    @property
    def shares_ids(self) -> bool:
        """Whether two lives of a node have one client id, so that the broker throws out the earlier one."""
        return "{boot}" not in self.client_id

    def file(self, name: str) -> tuple[str, str] | None:
        """Return where a file of TLS is and what named it, from here or the environment."""
        if given := getattr(self, name):
            return str(given), _OPTIONS[name]
        found = os.environ.get(ENVIRONMENT[name])
        return (found, ENVIRONMENT[name]) if found else None

    def options(self) -> list[str]:
        """Return the options of ``edgesplit node`` that say all this but the url."""
        default = Access(self.url)
        said = {name: getattr(self, name) for name in _OPTIONS if getattr(self, name) != getattr(default, name)}
        return [word for name, value in said.items() for word in (_OPTIONS[name], str(value))]


def check_client_id(pattern: str) -> None:
    """Refuse a pattern of client ids that says what is not known.

    Raises:
        TransportError: naming it.
    """
    try:
        fields = [(name, spec, how) for _, name, spec, how in string.Formatter().parse(pattern) if name is not None]
    except ValueError as error:
        raise TransportError(f"client id {pattern!r}: {error}") from None
    for name, spec, how in fields:
        if name not in PLACEHOLDERS or spec or how:
            known = ", ".join(f"{{{each}}}" for each in PLACEHOLDERS)
            near = did_you_mean(name, PLACEHOLDERS)
            raise TransportError(f"client id {pattern!r}: {{{name}}} is none of {known}{near}")
    if not fields or not {"node", "boot"} & {name for name, _, _ in fields} or not pattern.isprintable():
        raise TransportError(
            f"client id {pattern!r} is the same for every node, and a broker keeps only one: put {{node}} into it"
        )
