"""The faults of brokers and networks over every way to a broker; the weights must be the undisturbed run's.

``python -m tests.system.ways [--cells PATTERN] [--repeats 3] [--jobs 2] [--markdown FILE] [--list]``

A cell is ``way/role/fault/phase``, as in ``matrix.py``; ``--list`` also says which there cannot be, and why.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from tests.system import cells
from tests.system.broker_faults import BROKER_FAULTS, UNTOLD
from tests.system.command import Shell
from tests.system.stage import Stage
from tests.system.way import WAYS

PHASES = ("forward", "backward", "update")

ROLES: dict[str, tuple[str, ...]] = {
    "broker": ("kill", "kill-embedded", "over-long", "over-long-told", "shrunk", "shrunk-told", "300MB", "300MB-told"),
    "device": ("cut-1", "reset-1", "slow", "full-queue"),
    "edge": ("cut-1", "reset-1", "slow", "full-queue", "refused"),
    "coordinator": ("cut-1", "reset-1"),
}
ONCE = {"shrunk": "forward", "shrunk-told": "forward", "300MB": "fetch", "300MB-told": "fetch"}
"""Faults for which one phase is enough."""


class Cell(NamedTuple):
    """One place of the matrix."""

    way: str
    role: str
    fault: str
    phase: str


def _missing(way: str, fault: str) -> str | None:
    """Why there is no such fault over a way; None: there is."""
    if fault == "kill-embedded":
        return None if WAYS[way].broker == "embedded" else "this is of the embedded broker"
    if WAYS[way].broker == "mosquitto" and fault.startswith("300MB"):
        told = WAYS[way].mqtt == "5"
        other = "tells clients the limit" if told else "cannot tell clients the limit"
        return None if told == (fault == "300MB-told") else f"MQTT {WAYS[way].mqtt} {other}"
    if WAYS[way].broker == "mosquitto":
        return None
    if fault == "full-queue":
        return "this broker has a log of 1 GB in place of queues, and the transport has 32 MB in flight to an inbox"
    if fault == "refused":
        return "this broker has no access rules"
    if BROKER_FAULTS[fault].limits or fault.startswith("shrunk"):
        return "the packet limit of this broker is edgesplit's own, 256 MB"
    return None


_EVERY = [
    Cell(way, role, fault, phase)
    for way in WAYS
    for role, faults in ROLES.items()
    for fault in faults
    for phase in ((ONCE[fault],) if fault in ONCE else PHASES)
]
CELLS = [cell for cell in _EVERY if _missing(cell.way, cell.fault) is None]
MISSING = {
    f"{cell.way}/{cell.role}/{cell.fault}": reason for cell in _EVERY if (reason := _missing(cell.way, cell.fault))
}

QUICK = [Cell("mqtts-5", "edge", "reset-1", "forward")]
"""What the suite runs."""


def _stage(place: Shell, found: Sequence[cells.Cell]) -> Stage:
    way, role, fault, _ = found[0]
    wanted = BROKER_FAULTS[fault]
    if wanted.ends is not None and WAYS[way].mqtt != "5":
        wanted = replace(wanted, ends=UNTOLD)
    return Stage(place, role, wanted, WAYS[way], rounds=len(found) + 1)


def _title(cell: cells.Cell) -> tuple[str, str]:
    _, role, fault, _ = cell
    return role, BROKER_FAULTS[fault].title


class _Ways(cells.Table):
    def markdown(self, rows: Sequence[cells.Row]) -> str:
        """A line for each fault, a column for each way."""
        shown = [way for way in WAYS if any(row.cell[0] == way for row in rows)]
        lines = []
        for found in self.together(rows, lambda cell: cell[1:3]):
            by_way = [[row for row in found if row.cell[0] == way] for way in shown]
            counts = [cells.good(mine) if mine else "-" for mine in by_way]
            lines.append([*self.title(found[0].cell), *counts, cells.longest(found)])
        return cells.table([*self.titles, *shown, "s to the next new step, most"], lines)


TABLE = _Ways(
    "tests.system.ways",
    __doc__.split("\n")[0],
    "way/role/fault/phase",
    ("role", "fault"),
    CELLS,
    _stage,
    _title,
    missing=MISSING,
)

if __name__ == "__main__":
    sys.exit(TABLE.main())
