"""What a node keeps of its state so that it can come back after a crash: files beside it, the newest few.

A file a point, written beside its place and renamed, so that it is whole or not there. Writing runs in a thread of its
own, a step behind the computing; :meth:`Journal.flush` waits for it before the node tells of the next step. A disk that
takes nothing more does not end the training: the node then comes back from what lies there, or from the coordinator.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import shutil
import threading
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from edgesplit.errors import RunError
from edgesplit.recovery import Kept, Point

log = logging.getLogger("edgesplit.journal")

Arrays = Mapping[str, np.ndarray[Any, Any]]

_NAME = re.compile(r"(\d+)-(\d+)-(\d+)(\.full)?\.safetensors")


class _Entry(NamedTuple):
    kept: Kept
    full: bool


class Journal:
    """The points that one node has kept.

    Args:
        directory: for this node's files alone; made when needed.
        run: identifies the run: points of another are of no use.
        layers: identifies the node's layers, likewise.
        sync: have the disk write each point, for hosts that lose power; else the system does so when it likes.
    """

    def __init__(self, directory: Path, *, run: str, layers: str, sync: bool = False) -> None:
        self._directory, self._identity, self._sync = directory, {"run": run, "layers": layers}, sync
        self._entries: dict[Path, _Entry] = {}
        self._problem: str | None = None
        self._work: queue.SimpleQueue[tuple[Path, _Entry, Arrays, Point] | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._waiting = 0
        self._thread: threading.Thread | None = None
        self._find()

    @property
    def problem(self) -> str | None:
        """Why the last point could not be kept; None: it was."""
        return self._problem

    def kept(self) -> list[Kept]:
        """Return the points that can be read again."""
        self.flush()
        return sorted(entry.kept for entry in self._entries.values())

    def keep(self, point: Point, term: int, arrays: Arrays, *, committed: Point, full: bool) -> None:
        """Begin to write a point, and then remove what nobody will ask for again; the arrays must not change any more.

        Args:
            committed: the last point that is known to be final. All may have to go back one step further than that,
                or to the last full state; what was kept of an earlier load goes when a step of this one is final, for
                then all nodes have it.
            full: the arrays are the whole state; else what is missing is as in the last full one before.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="edgesplit-journal", daemon=True)
            self._thread.start()
        path = self._directory / f"{point.load}-{point.step + 1}-{term}{'.full' if full else ''}.safetensors"
        with self._idle:
            self._waiting += 1
        self._work.put((path, _Entry(Kept(point, term), full), dict(arrays), committed))

    def flush(self) -> None:
        """Wait until what was to be kept is written, or could not be."""
        with self._idle:
            self._idle.wait_for(lambda: self._waiting == 0)

    def read(self, kept: Kept) -> dict[str, np.ndarray[Any, Any]] | None:
        """Return the state that was kept. None: it cannot be read."""
        self.flush()
        of_load = {entry: path for path, entry in self._entries.items() if entry.kept.point.load == kept.point.load}
        own = next((path for entry, path in of_load.items() if entry.kept == kept), None)
        full = max((entry for entry in of_load if entry.full and entry.kept.point <= kept.point), default=None)
        if own is None or full is None:
            return None
        try:
            whole = self._load(of_load[full])
            return whole if own == of_load[full] else whole | self._load(own)
        except RunError as error:
            log.warning("%s", error)
            return None

    def forget_after(self, point: Point) -> None:
        """Remove what was kept of later points: it was taken back."""
        self.flush()
        self._remove([path for path, entry in self._entries.items() if entry.kept.point > point])

    def close(self, *, remove: bool = False) -> None:
        """End the thread; ``remove`` the files, when the run has ended as it should."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None
        if remove:
            shutil.rmtree(self._directory, ignore_errors=True)

    # -- inside

    def _find(self) -> None:
        """See what an earlier life has left; what is not this run's, or not whole, is removed."""
        if not self._directory.is_dir():
            return
        for path in self._directory.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and self._is_ours(path):
                load, step, term = map(int, match.groups()[:3])
                self._entries[path] = _Entry(Kept(Point(load, step - 1), term), match[4] is not None)
            elif match or path.name.startswith("."):
                path.unlink(missing_ok=True)

    def _is_ours(self, path: Path) -> bool:
        try:
            with safe_open(path, framework="numpy") as file:
                told = file.metadata() or {}
                if {key: told.get(key) for key in self._identity} != self._identity:
                    return False
            self._load(path)
        except (OSError, SafetensorError, RunError):
            return False
        return True

    def _load(self, path: Path) -> dict[str, np.ndarray[Any, Any]]:
        try:
            with safe_open(path, framework="numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
                if (file.metadata() or {}).get("crc") != _crc(arrays):
                    raise RunError(f"{path} is not as it was written")
        except (OSError, SafetensorError) as error:
            raise RunError(f"cannot read {path}: {error}") from None
        return arrays

    def _run(self) -> None:
        while (task := self._work.get()) is not None:
            path, entry, arrays, committed = task
            try:
                self._write(path, arrays)
                self._entries[path] = entry
                self._prune(committed)
                self._problem = None
            except (OSError, SafetensorError, ValueError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                if self._problem is None:
                    log.warning("cannot keep the state in %s: %s", self._directory, reason)
                self._problem = f"cannot keep its state in {self._directory}: {reason.lower()}"
            with self._idle:
                self._waiting -= 1
                self._idle.notify_all()

    def _write(self, path: Path, arrays: Arrays) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        partial = self._directory / f".{path.name}"
        plain = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}
        try:
            save_file(plain, partial, metadata={**self._identity, "crc": _crc(plain)})
            if self._sync:
                with partial.open("rb") as file:
                    os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise

    def _prune(self, committed: Point) -> None:
        of_load = [entry.kept.point for entry in self._entries.values() if entry.kept.point.load == committed.load]
        last = max((point for point in of_load if point.step < committed.step), default=None)
        if last is not None:
            self._remove(
                [
                    path
                    for path, entry in self._entries.items()
                    if entry.kept.point < last and not (entry.full and entry.kept.point.load == last.load)
                ]
            )

    def _remove(self, paths: list[Path]) -> None:
        for path in paths:
            with suppress(OSError):
                path.unlink()
            self._entries.pop(path, None)


def _crc(arrays: Arrays) -> str:
    """A checksum over all bytes: after a power cut a file may have its length but not its contents."""
    found = 0
    for name in sorted(arrays):
        found = zlib.crc32(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data, found)
    return f"{found:08x}"
