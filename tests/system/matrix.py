"""The matrix of faults: every role, in every phase of a run, over mosquitto; the weights must be the undisturbed run's.

``python -m tests.system.matrix [--cells PATTERN] [--repeats 3] [--jobs 2] [--markdown FILE]``

A cell is ``role/fault/phase``. The phases of one role and fault are hit one after another, each in a round of its own,
where possible in one run. A phase is met on purpose: a node waits there, see ``project/gated.py``.
"""

from __future__ import annotations

import argparse
import fnmatch
import statistics
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.system.command import shell
from tests.system.stage import FAULTS, OPTIONS, PHASES, VICTIMS, Hit, Stage

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

    def __str__(self) -> str:
        return "/".join(self)


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


@dataclass
class Row:
    """What became of one cell in one run. ``error``: why it failed; None: as it should."""

    cell: Cell
    hit: Hit | None
    error: str | None


_reference: list[str] = []
_reference_lock = threading.Lock()


def reference(folder: Path) -> str:
    """The weights of the undisturbed run."""
    with _reference_lock:
        if not _reference:
            with shell(folder) as place:
                ended = place.run("run", "experiment.yaml", *OPTIONS, "local.processes=1", "--json")
                _reference.append(ended.json["weights"])
        return _reference[0]


def run_cells(cells: Sequence[Cell], folder: Path) -> list[Row]:
    """Run cells of one role and fault, in one run."""
    wanted = reference(folder)
    hits: list[Hit] = []
    error: str | None = None
    try:
        with shell(folder) as place, Stage(place, cells[0].role, cells[0].fault) as stage:
            for index, cell in enumerate(cells):
                hits.append(stage.strike(index, cell.phase))
            found = stage.end()
            if found["weights"] != wanted:
                error = f"other weights: {found['weights'][:12]}, not {wanted[:12]}"
    except Exception as failure:  # noqa: BLE001 - a row of the table, not the end of it
        error = "".join(traceback.format_exception(failure))
    rows = [Row(cell, hit, error) for cell, hit in zip(cells, hits, strict=False)]
    missed = cells[len(hits) :]
    return [*rows, *(Row(cell, None, error or "not run") for cell in missed[:1])]


def groups(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Put cells of one role and fault together, in the order in which a run meets their phases."""
    by_fault: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        by_fault.setdefault((cell.role, cell.fault), []).append(cell)
    runs = []
    for (role, fault), found in by_fault.items():
        most = KILLS_A_RUN.get(fault, len(found)) if role in VICTIMS else len(found)
        runs += [found[i : i + most] for i in range(0, len(found), most)]
    return runs


def measure(cells: Sequence[Cell], repeats: int, jobs: int, folder: Path) -> list[Row]:
    """Run the cells so many times, some side by side."""
    rows: list[Row] = []
    work = [group for _ in range(repeats) for group in groups(cells)]
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run_cells, group, folder) for group in work]
        for done, future in enumerate(as_completed(futures), start=1):
            found = future.result()
            rows += found
            for row in found:
                told = row.error or (str(row.hit) if row.hit else "")
                print(
                    f"[{done}/{len(work)}] {'FAILED' if row.error else 'ok'} {row.cell} {told}",
                    file=sys.stderr,
                    flush=True,
                )
    return rows


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f}" if values else ""


def table(rows: Sequence[Row]) -> str:
    """A markdown table, a line for each role and fault."""
    lines = [
        "| role | fault | phases x runs | equal weights | steps done again, most | s to the next new step | most |",
        "|---|---|---|---|---|---|---|",
    ]
    order = {cell: number for number, cell in enumerate(CELLS)}
    rows = sorted(rows, key=lambda row: order[row.cell])
    keys = dict.fromkeys((row.cell.role, row.cell.fault) for row in rows)
    for role, fault in keys:
        mine = [row for row in rows if (row.cell.role, row.cell.fault) == (role, fault)]
        hits = [row.hit for row in mine if row.hit]
        good = sum(row.error is None for row in mine)
        phases = len({row.cell.phase for row in mine})
        lost = [hit.lost for hit in hits]
        again = max((hit.again for hit in hits), default=0)
        most = f"{max(lost, default=0.0):.1f}"
        count = f"{phases} x {len(mine) // phases}"
        lines.append(
            f"| {role} | {FAULTS[fault].title} | {count} | {good} of {len(mine)} | {again} | {_median(lost)} | {most} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the matrix and print it."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.matrix", description=__doc__.split("\n")[0])
    parser.add_argument("--cells", default="*", help="pattern of role/fault/phase, such as 'edge/kill*/*'")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--list", action="store_true", help="print the cells and run nothing")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    options = parser.parse_args(arguments)
    cells = [cell for cell in CELLS if any(fnmatch.fnmatch(str(cell), p) for p in options.cells.split(","))]
    if options.list:
        print("\n".join(map(str, cells)))
        return 0
    if not cells:
        parser.error(f"no cell is {options.cells!r}: see --list")
    with tempfile.TemporaryDirectory(prefix="edgesplit-matrix-") as folder:
        rows = measure(cells, options.repeats, options.jobs, Path(folder))
    found = table(rows)
    print(found)
    for row in rows:
        if row.error:
            print(f"\n{row.cell}: {row.error}")
    if options.markdown:
        options.markdown.write_text(found + "\n")
    return int(any(row.error for row in rows))


if __name__ == "__main__":
    sys.exit(main())
