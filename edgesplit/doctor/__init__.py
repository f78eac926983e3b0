"""What is installed here, and whether a broker does what it must: ``edgesplit doctor``."""

from __future__ import annotations

import time

from edgesplit.doctor.broker import examine_broker
from edgesplit.doctor.finding import Finding
from edgesplit.doctor.installation import clock, packages
from edgesplit.errors import TransportError
from edgesplit.transport.access import Access
from edgesplit.transport.broker import EmbeddedBroker

__all__ = ["Finding", "examine"]


def examine(
    broker: str | Access | None = None,
    *,
    run: str | None = None,
    node: str | None = None,
    clear_stale: bool = False,
) -> list[Finding]:
    """Look at this installation, and at a broker: the one named, else the embedded one where it is installed.

    The other arguments are those of :func:`edgesplit.doctor.broker.examine_broker`.
    """
    findings = [*packages(), clock(time.time())]
    if broker is not None:
        return findings + examine_broker(broker, run=run, node=node, clear_stale=clear_stale)
    if any(f.name == "iotcore" and f.text[0].isdigit() for f in findings):
        try:
            with EmbeddedBroker() as embedded:
                findings += examine_broker(embedded.url, "embedded broker")
        except TransportError as error:
            findings.append(Finding("embedded broker", False, str(error)))
    return findings
