"""The matrix of faults: every role, in every phase of a run, over mosquitto; the weights must be the undisturbed run's.

``python -m tests.system.matrix [--cells PATTERN] [--repeats 3] [--jobs 2] [--markdown FILE]``

A cell is ``role/fault/phase``. The phases of one role and fault are hit one after another, each in a round of its own,
where possible in one run. A phase is met on purpose: a node waits there, see ``project/gated.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from tests.system import cells, usual
from tests.system.command import Shell
from tests.system.stage import FAULTS, PHASES, VICTIMS, Stage

KILLS_A_RUN = {"kill": 4, "kill-twice": 2, "kill-two": 4, "kill-again": 4, "with-broker": 4}
"""Phases a run, by fault: a local process may be killed five times a minute."""

NODE = (
    *(
        "kill",
        "kill-twice",
        "kill-two",
        "kill-again",
        "kill-hand",
        "with-broker",
        "hang",
        "pause-3",
        "pause-25",
        "cut-1",
        "cut-10",
        "cut-60",
    ),
    *("reset-10", "disk", "clock", "clock-kill"),
)
ROLES: dict[str, tuple[str, ...]] = {
    "device": NODE,
    "edge": NODE,
    "cloud": NODE,
    "broker": ("kill", "kill-hand", "kill-embedded", "down-45", "pause-3", "pause-25"),
    "coordinator": ("kill", "kill-hand", "pause-3", "pause-25", "cut-1", "cut-10", "cut-60", "reset-10"),
    "all": ("kill", "kill-hand"),
}


class Cell(NamedTuple):
    """One place of the matrix."""

    role: str
    fault: str
    phase: str


CELLS = [
    Cell(role, fault, phase)
    for role, faults in ROLES.items()
    for fault in faults
    for phase in PHASES
    if (fault, phase) != ("kill-again", "join")  # nothing has been kept yet: nobody goes back
]

QUICK = [
    Cell(*name.split("/"))
    for name in (
        "edge/kill/forward",
        "edge/kill/update",
        "edge/kill/fetch",
        "cloud/disk/load",
        "cloud/disk/evaluate",
        "broker/kill-hand/forward",
        "coordinator/kill-hand/commit",
        "all/kill-hand/backward",
        "device/reset-10/join",
        "device/reset-10/forward",
    )
]
"""What the suite runs."""


def _stage(place: Shell, found: Sequence[cells.Cell]) -> Stage:
    role, fault, _ = found[0]
    return Stage(place, role, FAULTS[fault])


def _title(cell: cells.Cell) -> tuple[str, str]:
    role, fault, _ = cell
    return role, FAULTS[fault].title


def _most(cell: cells.Cell) -> int | None:
    role, fault, _ = cell
    return KILLS_A_RUN.get(fault) if role in VICTIMS else None


TABLE = cells.Table(
    "tests.system.matrix",
    __doc__.split("\n")[0],
    "role/fault/phase",
    ("role", "fault"),
    CELLS,
    _stage,
    _title,
    _most,
    below=usual.measure,
)

if __name__ == "__main__":
    sys.exit(TABLE.main())
