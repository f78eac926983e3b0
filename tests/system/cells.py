"""Cells of a table, each a fault that finds a run somewhere: several in one run, and the weights must be as they were.

The last part of a cell's name is the phase in which the fault finds the run. A table is a command of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import statistics
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.system.command import Shell, shell
from tests.system.stage import Hit, Stage

Cell = tuple[str, ...]


@dataclass
class Row:
    """What became of one cell in one run. ``error``: why it failed; None: as it should."""

    cell: Cell
    hit: Hit | None
    error: str | None


@dataclass(frozen=True)
class Table:
    """What is run, and how it is told.

    Attributes:
        module: its name.
        about: one line for ``--help``.
        names: of the parts of a cell.
        titles: of the columns of the first parts.
        cells: all there are, a run's in the order in which it meets their phases.
        stage: opens the run of some cells.
        title: for people: those first parts of a cell.
        most: so many phases a run.
        missing: name -> why there is no such cell.
        below: makes a line below the table.
    """

    module: str
    about: str
    names: str
    titles: tuple[str, ...]
    cells: Sequence[Cell]
    stage: Callable[[Shell, Sequence[Cell]], Stage]
    title: Callable[[Cell], Sequence[str]]
    most: Callable[[Cell], int | None] = lambda _: None
    missing: dict[str, str] = field(default_factory=dict)
    below: Callable[[Path], object] = lambda _: ""

    def groups(self, cells: Sequence[Cell]) -> list[list[Cell]]:
        """Put cells that differ by the phase together, in the order in which a run meets their phases."""
        by_fault: dict[Cell, list[Cell]] = {}
        for cell in cells:
            by_fault.setdefault(cell[:-1], []).append(cell)
        runs = []
        for found in by_fault.values():
            most = self.most(found[0]) or len(found)
            runs += [found[i : i + most] for i in range(0, len(found), most)]
        return runs

    def run(self, cells: Sequence[Cell], folder: Path) -> list[Row]:
        """Run cells that differ by the phase, in one run."""
        hits: list[Hit] = []
        error: str | None = None
        try:
            with shell(folder) as place, self.stage(place, cells) as stage:
                for index, cell in enumerate(cells):
                    hits.append(stage.strike(index, cell[-1]))
                if stage.fault.ends is None:
                    found, wanted = stage.end()["weights"], undisturbed(stage, folder)
                    if found != wanted:
                        error = f"other weights: {found[:12]}, not {wanted[:12]}"
        except Exception as failure:  # noqa: BLE001 - a row of the table, not the end of it
            error = "".join(traceback.format_exception(failure))
        rows = [Row(cell, hit, error) for cell, hit in zip(cells, hits, strict=False)]
        missed = cells[len(hits) :]
        return [*rows, *(Row(cell, None, error or "not run") for cell in missed[:1])]

    def measure(
        self, cells: Sequence[Cell], repeats: int, jobs: int, folder: Path, kept: Path | None = None
    ) -> list[Row]:
        """Run the cells so many times, some side by side.

        Args:
            kept: a file that gets the rows of each run as it ends; runs that it has already are not done again.
        """
        earlier = _read(kept)
        rows = [row for found in earlier for row in found]
        work = [group for _ in range(repeats) for group in self.groups(cells)]
        for found in earlier:
            with contextlib.suppress(ValueError):  # it is of other cells
                work.remove([row.cell for row in found])
        with ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(self.run, group, folder) for group in work]
            for done, future in enumerate(as_completed(futures), start=1):
                found = future.result()
                rows += found
                _write(kept, found)
                for row in found:
                    told = row.error or (str(row.hit) if row.hit else "")
                    what = f"{'FAILED' if row.error else 'ok'} {'/'.join(row.cell)}"
                    print(f"[{done}/{len(work)}] {what} {told}", file=sys.stderr, flush=True)
        return rows

    def markdown(self, rows: Sequence[Row]) -> str:
        """A line for each fault, of all its phases."""
        heads = ["phases x runs", "equal weights", "steps done again, most", "s to the next new step"]
        heads += ["s of it after the fault was over", "most"]
        found = self.together(rows, lambda cell: cell[:-1])
        return table([*self.titles, *heads], [[*self.title(of[0].cell), *_figures(of)] for of in found])

    def together(self, rows: Sequence[Row], key: Callable[[Cell], Cell]) -> list[list[Row]]:
        """Put rows of one key together, in the order of the cells."""
        order = {cell: number for number, cell in enumerate(self.cells)}
        found: dict[Cell, list[Row]] = {}
        for row in sorted(rows, key=lambda row: order[row.cell]):
            found.setdefault(key(row.cell), []).append(row)
        return list(found.values())

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run the table and print it."""
        parser = argparse.ArgumentParser(prog=f"python -m {self.module}", description=self.about)
        parser.add_argument("--cells", default="*", help=f"patterns of {self.names}, with commas: 'edge/kill*/*'")
        parser.add_argument("--repeats", type=int, default=3)
        parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
        parser.add_argument("--list", action="store_true", help="print the cells and run nothing")
        parser.add_argument("--markdown", type=Path, help="also write the table to this file")
        parser.add_argument(
            "--rows", type=Path, help="a file that keeps the runs done, to go on where this was stopped"
        )
        options = parser.parse_args(arguments)

        def wanted(name: str) -> bool:
            return any(fnmatch.fnmatch(name, pattern) for pattern in options.cells.split(","))

        cells = [cell for cell in self.cells if wanted("/".join(cell))]
        if options.list:
            for cell in cells:
                print("/".join(cell))
            for name, reason in self.missing.items():
                if wanted(name):
                    print(f"{name}: none, {reason}")
            return 0
        if not cells:
            parser.error(f"no cell is {options.cells!r}: see --list")
        with tempfile.TemporaryDirectory(prefix="edgesplit-cells-") as folder:
            rows = self.measure(cells, options.repeats, options.jobs, Path(folder), options.rows)
            found = f"{self.markdown(rows)}\n\n{self.below(Path(folder))}".strip()
        print(found)
        for row in rows:
            if row.error:
                print(f"\n{'/'.join(row.cell)}: {row.error}")
        if options.markdown:
            options.markdown.write_text(found + "\n")
        return int(any(row.error for row in rows))


def _read(kept: Path | None) -> list[list[Row]]:
    """The rows of each run that was kept and went as it should."""
    if kept is None or not kept.exists():
        return []
    runs = [json.loads(line) for line in kept.read_text().splitlines()]
    found = [[Row(tuple(cell), Hit(*hit) if hit else None, error) for cell, hit, error in run] for run in runs]
    return [rows for rows in found if not any(row.error for row in rows)]


def _write(kept: Path | None, rows: Sequence[Row]) -> None:
    if kept is not None:
        with kept.open("a") as file:
            file.write(json.dumps([(row.cell, row.hit, row.error) for row in rows]) + "\n")


_undisturbed: dict[tuple[str, ...], str] = {}
_lock = threading.Lock()


def undisturbed(stage: Stage, folder: Path) -> str:
    """Return the weights of a run of the same options that nothing happens to."""
    options = tuple(stage.options)
    with _lock:
        if options not in _undisturbed:
            with shell(folder) as place:
                command = place.start("run", "experiment.yaml", *options, "local.processes=1", "--json")
                _undisturbed[options] = str(command.end(stage.fault.longest_s).json["weights"])
        return _undisturbed[options]


def good(rows: Sequence[Row]) -> str:
    """How many are as they should be."""
    return f"{sum(row.error is None for row in rows)} of {len(rows)}"


def longest(rows: Sequence[Row]) -> str:
    """Seconds to the next new step, at most."""
    return f"{max((row.hit.lost for row in rows if row.hit), default=0.0):.1f}"


def table(heads: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """Return a table in markdown."""
    rule = "|---" * len(heads) + "|"
    texts = [f"| {' | '.join(map(str, texts))} |" for texts in (heads, *lines)]
    return "\n".join([texts[0], rule, *texts[1:]])


def _median(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.1f}" if seconds else ""


def _figures(rows: Sequence[Row]) -> list[Any]:
    hits = [row.hit for row in rows if row.hit]
    phases = len({row.cell[-1] for row in rows})
    return [
        f"{phases} x {len(rows) // phases}",
        good(rows),
        max((hit.again for hit in hits), default=0),
        _median([hit.down for hit in hits]),
        _median([hit.lost for hit in hits]),
        longest(rows),
    ]
