"""What the coordinator writes down while it works, so that its successor can go on in the middle of a round.

A file for each time that the weights were given out, ``progress-N.jsonl``, of the last two: a line when it begins, one
for each step that has ended, one for each that was taken back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgesplit.effects import StepDone
from edgesplit.errors import RunError
from edgesplit.recovery import Ended, Line, Point, Standing
from edgesplit.sheets import Draft

KEPT = 2
"""Files kept: the checkpoint of a round is written a while after the weights of the next were given out."""

_NAME = re.compile(r"progress-(\d+)\.jsonl")


@dataclass
class Progress:
    """How far a run had come since its weights were last given out.

    Attributes:
        base, origin: the point at which they were given out, and the coordinator's standing then.
        term, micro: the last term, and the next number of a micro-batch, as far as they were written down.
        cuts: see :class:`Line`.
        done: what was told of the steps that have ended.
        rows: of each of them: who took part, whether it counts, the coordinator's standing after it.
        out: devices that take no part in the round.
    """

    base: Point
    origin: Standing
    term: int = 0
    micro: int = 0
    cuts: list[tuple[int, Point]] = field(default_factory=list)
    done: list[StepDone] = field(default_factory=list)
    rows: list[tuple[tuple[str, ...], bool, Standing]] = field(default_factory=list)
    out: list[str] = field(default_factory=list)

    def line(self, drafts: Mapping[int, Draft]) -> Line:
        """Return the line of the steps that have ended; ``drafts`` by their steps.

        Raises:
            RunError: a step is not among them: the run had other data.
        """
        ended = []
        for done, (participants, applied, standing) in zip(self.done, self.rows, strict=True):
            if done.step not in drafts:
                raise RunError(
                    f"step {done.step} of the interrupted round is none of this round's: its data has changed"
                )
            ended.append(Ended(drafts[done.step], participants, applied, standing))
        return Line(self.base, self.origin, ended, list(self.cuts))

    def _rewind(self, point: Point) -> None:
        count = sum(done.step <= point.step for done in self.done)
        del self.done[count:], self.rows[count:]


class Logbook:
    """Writes a run's progress and reads it again.

    Args:
        directory: where the files lie; None: nothing is written.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._path: Path | None = None

    def note(self, record: Mapping[str, Any]) -> None:
        """Write a record of the coordinator's down. Raises RunError where the disk does not take it."""
        if self._directory is None:
            return
        try:
            if (load := begun(record)) is not None:
                self._begin(load, record)
            elif self._path is not None:
                self._append(record)
        except OSError as error:
            raise RunError(f"cannot write {self._path}: {(error.strerror or str(error)).lower()}") from None

    def _begin(self, load: int, record: Mapping[str, Any]) -> None:
        """Begin a file, or go on with it; no term that was written down may be lost before this one is."""
        if self._directory is None:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        self._path = self._directory / f"progress-{load}.jsonl"
        if "base" in record:
            partial = self._path.with_suffix(".new")
            partial.write_text(json.dumps(record) + "\n", encoding="utf-8")
            partial.replace(self._path)
        else:
            whole = self._path.read_bytes().rfind(b"\n") + 1
            with self._path.open("r+b") as file:  # a line that was cut short would make one with the next
                file.truncate(whole)
            self._append(record)
        for path in self._directory.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and not load - KEPT < int(match[1]) <= load:
                path.unlink()

    def _append(self, record: Mapping[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def read(self, load: int) -> Progress | None:
        """Return how far the run came after the weights were given out for the ``load``-th time; None: not known."""
        if self._directory is None:
            return None
        try:
            lines = (self._directory / f"progress-{load}.jsonl").read_text(encoding="utf-8").splitlines()
        except OSError:
            return None
        return progress_of(lines)

    def last(self) -> tuple[int, int]:
        """Return the last term and the next number of a micro-batch that any file tells of.

        A successor that begins before the last of them must not use these again: what was sent then may still come.
        """
        loads = self._directory.glob("progress-*.jsonl") if self._directory is not None else ()
        return last_of(self.read(int(match[1])) for path in loads if (match := _NAME.fullmatch(path.name)))


def last_of(found: Iterable[Progress | None]) -> tuple[int, int]:
    """Return the last term and the next number of a micro-batch."""
    known = [(progress.term, progress.micro) for progress in found if progress is not None]
    return max((term for term, _ in known), default=0), max((micro for _, micro in known), default=0)


def begun(record: Mapping[str, Any]) -> int | None:
    """Return the load whose records begin, or go on, with this one; None: it belongs to those of the last."""
    point = record.get("base") or record.get("again")
    return point[0] if point else None


def progress_of(lines: Iterable[str]) -> Progress | None:
    """Read the records of one load; None: they do not say where it began. The last line may be cut short."""
    progress: Progress | None = None
    with suppress(ValueError, KeyError, TypeError, IndexError):
        for line in lines:
            record = json.loads(line)
            if "base" in record:
                progress = Progress(Point(*record["base"]), Standing(*record["standing"]))
                progress.cuts = [(term, Point(*point)) for term, *point in record["cuts"]]
            elif progress is not None and "again" not in record:
                _take(progress, record)
            if progress is not None:
                progress.term = max(progress.term, record["term"])
    return progress


def _take(progress: Progress, record: Mapping[str, Any]) -> None:
    if "out" in record:
        progress.out = [str(device) for device in record["out"]]
        return
    if "cut" in record:
        point = Point(*record["cut"])
        progress.cuts.append((record["term"], point))
        progress._rewind(point)  # noqa: SLF001 - its own module
        return
    loss = float("nan") if record["loss"] is None else record["loss"]
    standing, participants = Standing(*record["standing"]), tuple(record["participants"])
    progress.done.append(StepDone(record["step"], loss, record["weight"], record["samples"], record["applied"], {}))
    progress.rows.append((participants, record["counts"], standing))
    progress.micro = max(progress.micro, record["micro"])
