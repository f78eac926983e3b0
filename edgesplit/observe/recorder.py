"""Collects the events of a run, and writes them as JSON lines."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TextIO

from edgesplit.errors import RunError, ScheduleError
from edgesplit.schedule import Action, Event


class Recorder:
    """Keeps events in the order in which they were added; any thread may add.

    Args:
        path: a file that each event is appended to at once, one JSON object a line; None: memory only.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._file: TextIO | None = None
        self._path = str(path)
        if path is not None:
            _drop_cut_line(Path(path))
            self._file = Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed by close

    def add(self, event: Event) -> None:
        """Keep an event; after :meth:`close` in memory only.

        Raises:
            RunError: the disk does not take it; later ones are kept in memory.
        """
        with self._lock:
            self._events.append(event)
            if self._file is not None:
                try:
                    self._file.write(json.dumps(to_json(event), separators=(",", ":")) + "\n")
                except OSError as error:
                    self._let_go()
                    raise RunError(f"cannot write {self._path!r}: {str(error.strerror).lower()}") from None

    @property
    def events(self) -> list[Event]:
        """A copy of the events so far."""
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
    """Read what a :class:`Recorder` wrote. A last line that a crash cut short is left out.

    Raises:
        RunError: there is no such file, or a line of it is no event.
    """
    path = Path(path)
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
