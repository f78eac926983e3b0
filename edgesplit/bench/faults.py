"""``edgesplit bench faults``: what sharing and surviving give and cost."""

from __future__ import annotations

import sys
from typing import Any

from edgesplit.bench.broker import own_broker
from edgesplit.bench.figures import machine, report
from edgesplit.bench.moving import plan_change
from edgesplit.bench.overhead import PAIRS, STARTS, overhead
from edgesplit.bench.shared import killed, share

PARTS = {
    "share": share,
    "killed": killed,
    "plan_change": plan_change,
    "overhead": overhead,
}
"""Name -> a function ``(broker's url, say) -> (figures, details)``, in the order in which they run."""


def measure() -> dict[str, Any]:
    """Measure all figures, in about six minutes on two cores that have nothing else to do.

    No process is left behind, however it ends.

    Returns:
        What ``edgesplit bench`` prints.
    """
    where = machine()
    figures, details = [], {}
    with own_broker() as (broker, url):
        for name, part in PARTS.items():
            found, details[name] = part(url, _say)
            figures += found
    return report(figures, {"broker": broker, **details}, where, STARTS * PAIRS)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
