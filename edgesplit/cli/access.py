"""The options of commands that connect to a broker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from edgesplit.transport.access import Access

URL = "mqtt[s]://[user@]host[:port] or ws[s]://[user@]host[:port]/path; password: EDGESPLIT_PASSWORD_FILE"

Ca = Annotated[
    str | None,
    typer.Option("--ca", metavar="FILE", help="Certificates that the broker's must be signed by (or EDGESPLIT_CA)."),
]
Cert = Annotated[
    str | None,
    typer.Option("--cert", metavar="FILE", help="This client's certificate, for the broker (or EDGESPLIT_CERT)."),
]
CertKey = Annotated[
    str | None, typer.Option("--cert-key", metavar="FILE", help="Its private key (or EDGESPLIT_CERT_KEY).")
]
TopicPrefix = Annotated[
    str | None, typer.Option("--topic-prefix", metavar="PREFIX", help="First levels of all topics: site/a.")
]
ClientId = Annotated[
    str | None,
    typer.Option("--client-id", metavar="PATTERN", help="Client ids, made of {prefix} {run} {node} {boot}."),
]
Mqtt = Annotated[str | None, typer.Option("--mqtt", metavar="VERSION", help="5 or 3.1.1; default: what it speaks.")]


def access(
    url: str,
    ca: str | None,
    cert: str | None,
    cert_key: str | None,
    topic_prefix: str | None,
    client_id: str | None,
    mqtt: str | None,
) -> Access:
    """Return how to reach a broker, as the options say."""
    from edgesplit.transport.access import Access

    given = {"prefix": topic_prefix, "client_id": client_id}
    names = {name: value for name, value in given.items() if value is not None}
    return Access(url, ca=ca, cert=cert, cert_key=cert_key, mqtt=mqtt, **names)


def said(
    url: str | None,
    ca: str | None,
    cert: str | None,
    cert_key: str | None,
    topic_prefix: str | None,
    client_id: str | None,
    mqtt: str | None,
) -> list[str]:
    """Return the same as overrides of an experiment, in whose file they may stand too."""
    files = {name: str(Path(file).absolute()) for name, file in (("ca", ca), ("cert", cert), ("key", cert_key)) if file}
    given = {"url": url, **files, "topic_prefix": topic_prefix, "client_id": client_id, "mqtt": mqtt}
    return [f"broker.{name}={json.dumps(value)}" for name, value in given.items() if value is not None]
