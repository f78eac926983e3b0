"""``edgesplit bench pipeline``: measured against simulated, and against torch.distributed.pipelining."""

from __future__ import annotations

import sys
from typing import Any

from edgesplit.bench.broker import own_broker
from edgesplit.bench.emulated import emulate
from edgesplit.bench.figures import machine, report
from edgesplit.bench.versus import PAIRS, versus


def measure() -> dict[str, Any]:
    """Measure all figures, in about two minutes on two cores that have nothing else to do.

    What happens is said on stderr, each prediction before its run. No process is left behind, however it ends.

    Returns:
        What ``edgesplit bench`` prints.
    """
    where = machine()
    with own_broker() as (broker, url):
        predicted, emulated = emulate(url, _say)
        compared, blocks = versus(url, _say)
    details = {"broker": broker, "emulated": emulated, "torch_pipelining": blocks}
    return report([*predicted, *compared], details, where, PAIRS)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
