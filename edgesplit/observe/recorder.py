"""Collects the events of a run, and writes them as JSON lines."""

from __future__ import annotations

import json
import re
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TextIO

from edgesplit.errors import RunError, ScheduleError
from edgesplit.schedule import Action, Event

MOST_BYTES = 64 << 20
"""Bytes of a file of events, about: then it becomes ``events.jsonl.1``, and a new one begins."""

MOST_FILES = 4
"""Files of earlier events; the oldest goes when there are more."""

MOST_EVENTS = 200_000
"""Events in memory, the last ones, where there is no file."""

MOST_BESIDE_FILE = 20_000
"""Events in memory, the last ones, where a file has all: some 10 MB."""


class Recorder:
    """Keeps events in the order in which they were added; any thread may add.

    Args:
        path: a file that each event is appended to at once, one JSON object a line; None: memory only.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS if path is None else MOST_BESIDE_FILE)
        self._file: TextIO | None = None
        self._path = Path(path) if path is not None else None
        self._size = 0
        if self._path is not None:
            _drop_cut_line(self._path)
            self._file = self._path.open("a", encoding="utf-8", buffering=1)
            self._size = self._path.stat().st_size

    def add(self, event: Event) -> None:
        """Keep an event; after :meth:`close` in memory only.

        Raises:
            RunError: the disk does not take it; later ones are kept in memory.
        """
        with self._lock:
            self._events.append(event)
            if self._file is not None and self._path is not None:
                line = json.dumps(to_json(event), separators=(",", ":")) + "\n"
                try:
                    self._file.write(line)
                    self._size += len(line)
                    if self._size >= MOST_BYTES:
                        self._turn_over(self._path)
                except OSError as error:
                    self._let_go()
                    raise RunError(f"cannot write {str(self._path)!r}: {str(error.strerror).lower()}") from None

    def _turn_over(self, path: Path) -> None:
        """Begin a new file."""
        self._let_go()
        rotate(path, MOST_FILES)
        self._file, self._size = path.open("a", encoding="utf-8", buffering=1), 0

    @property
    def events(self) -> list[Event]:
        """A copy of the events so far: of the last :data:`MOST_EVENTS`, or :data:`MOST_BESIDE_FILE`."""
        with self._lock:
            return list(self._events)

    def close(self) -> None:
        """Close the file; may be called twice."""
        with self._lock:
            self._let_go()

    def _let_go(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # what a full disk has not taken is tried again here
                self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _drop_cut_line(path: Path) -> None:
    """Shorten a file to its last whole line: a crash or a full disk may have cut one, and more follow now."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def to_json(event: Event) -> dict[str, Any]:
    """Plain JSON values of an event."""
    return {**event._asdict(), "action": str(event.action)}


def from_json(data: Any) -> Event:
    """The inverse of :func:`to_json`.

    Raises:
        ScheduleError: not an event.
    """
    match data:
        case {
            "node": str(node),
            "action": str(action),
            "start": int() | float() as start,
            "end": int() | float() as end,
            "step": int(step),
            "version": int(version),
        }:
            return Event(node, Action.parse(action), float(start), float(end), step, version)
    raise ScheduleError(f"{data!r} is not an event: it needs node, action, start, end, step and version")


def read_events(path: str | Path) -> list[Event]:
    """Read what a :class:`Recorder` wrote, earlier files first. A last line that a crash cut short is left out.

    Raises:
        RunError: there is no such file, or a line of it is no event.
    """
    path = Path(path)
    files = [*earlier(path), *([path] if path.exists() or not earlier(path) else [])]
    return [event for file in files for event in _read(file)]


def earlier(path: Path) -> list[Path]:
    """Return the files that :func:`rotate` made of ``path``, the oldest first."""
    found = [
        (int(match[1]), file)
        for file in path.parent.glob(f"{path.name}.*")
        if (match := re.fullmatch(r"\.([1-9]\d{0,5})", file.name[len(path.name) :]))
    ]
    return [file for _, file in sorted(found, reverse=True)]


def rotate(path: Path, most: int) -> None:
    """Rename ``path`` to ``path.1``, that which was there to ``path.2``, and so on up to ``most``. Raises OSError."""
    for file in earlier(path):
        number = int(file.name.rpartition(".")[2])
        if number >= most:
            file.unlink()
        else:
            file.rename(path.with_name(f"{path.name}.{number + 1}"))
    path.rename(path.with_name(f"{path.name}.1"))


def _read(path: Path) -> list[Event]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise RunError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RunError(f"{path.name} is not text: {error}") from None
    events = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            events.append(from_json(json.loads(line)))
        except (ValueError, ScheduleError) as error:
            raise RunError(f"{path.name} line {number} is not an event: {error}") from None
    return events
