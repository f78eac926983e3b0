"""What a node keeps of its state so that it can come back after a crash: files beside it, the newest few.

A safetensors file a point, written beside its place and renamed, so that it is whole or not there. A file that nobody
will ask for again is written over instead of removed, and its header is made once for all steps: creating and removing
files would be most of the cost. A large state is written by a thread, a step behind the computing, and
:meth:`Journal.flush` waits for it before the node tells of the next step. A disk that takes nothing more does not end
the training: the node then comes back from what lies there, or from the coordinator.
"""

from __future__ import annotations

import json
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
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from edgesplit.errors import RunError
from edgesplit.recovery import Kept, Point

log = logging.getLogger("edgesplit.journal")

Arrays = Mapping[str, np.ndarray[Any, Any]]

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_Signature = tuple[tuple[str, tuple[int, ...], np.dtype[Any]], ...]

_NO_CRC = "<crc-32>"
"""Where the checksum goes, and as long."""

_SMALL = 1 << 20
"""Bytes up to which handing them to the thread, and writing them one by one, costs more than it saves."""

_NAME = re.compile(r"(\d+)-(\d+)-(\d+)(\.full)?\.safetensors")


class _Entry(NamedTuple):
    kept: Kept
    full: bool


class _Task(NamedTuple):
    path: Path
    entry: _Entry
    arrays: Arrays
    committed: Point


class _Layout(NamedTuple):
    """How arrays of certain names, shapes and types lie in a file: the header around its checksum, names in order."""

    before: bytes
    after: bytes
    names: list[str]


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
        self._layouts: dict[_Signature, _Layout] = {}
        self._spare = directory / ".spare"
        self._problem: str | None = None
        self._work: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._written: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._waiting = 0  # tasks of which that has not been taken
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
        path = self._directory / f"{point.load}-{point.step + 1}-{term}{'.full' if full else ''}.safetensors"
        task = _Task(path, _Entry(Kept(point, term), full), dict(arrays), committed)
        if not self._sync and sum(array.nbytes for array in task.arrays.values()) < _SMALL:
            self.flush()
            self._do(task)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="edgesplit-journal", daemon=True)
            self._thread.start()
        self._waiting += 1
        self._work.put(task)

    def flush(self) -> None:
        """Wait until what was to be kept is written, or could not be."""
        while self._waiting:
            self._written.get()
            self._waiting -= 1

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
                if (file.metadata() or {}).get("crc") != _crc({name: _bytes(array) for name, array in arrays.items()}):
                    raise RunError(f"{path} is not as it was written")
        except (OSError, SafetensorError) as error:
            raise RunError(f"cannot read {path}: {error}") from None
        return arrays

    def _run(self) -> None:
        while (task := self._work.get()) is not None:
            self._do(task)
            self._written.put(None)

    def _do(self, task: _Task) -> None:
        try:
            self._write(task.path, task.arrays)
            self._entries[task.path] = task.entry
            self._prune(task.committed)
            self._problem = None
        except Exception as error:  # noqa: BLE001 whatever it is, the training can go on
            reason = getattr(error, "strerror", None) or str(error)
            if self._problem is None:
                log.warning("cannot keep the state in %s: %s", self._directory, reason)
            self._problem = f"cannot keep its state in {self._directory}: {reason.lower()}"

    def _write(self, path: Path, arrays: Arrays) -> None:
        layout = self._layout(arrays)
        flat = {name: _bytes(array) for name, array in arrays.items()}
        head = layout.before + _crc(flat).encode() + layout.after
        try:
            with self._open() as file:
                parts: list[bytes | memoryview] = [head, *(flat[name].data for name in layout.names)]
                for part in [b"".join(parts)] if sum(map(len, parts)) < _SMALL else parts:
                    file.write(part)
                file.truncate()  # it may have been longer
                if self._sync:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(self._spare, path)  # noqa: PTH105 - Path's takes twice as long, and this is done every step
        except BaseException:
            with suppress(OSError):
                self._spare.unlink()
            raise

    def _open(self) -> BinaryIO:
        try:
            return self._spare.open("r+b")
        except FileNotFoundError:
            self._directory.mkdir(parents=True, exist_ok=True)
            return self._spare.open("wb")

    def _layout(self, arrays: Arrays) -> _Layout:
        signature = tuple((name, array.shape, array.dtype) for name, array in arrays.items())
        if signature not in self._layouts:
            self._layouts[signature] = _lay_out(arrays, self._identity)
        return self._layouts[signature]

    def _prune(self, committed: Point) -> None:
        of_load = [entry.kept.point for entry in self._entries.values() if entry.kept.point.load == committed.load]
        last = max((point for point in of_load if point.step < committed.step), default=None)
        if last is None:
            return
        gone = [
            path
            for path, entry in self._entries.items()
            if entry.kept.point < last and not (entry.full and entry.kept.point.load == last.load)
        ]
        if gone and not self._entries[gone[-1]].full:  # which may be much longer than the next
            path = gone.pop()
            with suppress(OSError):
                os.replace(path, self._spare)  # noqa: PTH105 - as above
            self._entries.pop(path)
        self._remove(gone)

    def _remove(self, paths: list[Path]) -> None:
        for path in paths:
            with suppress(OSError):
                path.unlink()
            self._entries.pop(path, None)


def _lay_out(arrays: Arrays, identity: Mapping[str, str]) -> _Layout:
    """Have safetensors lay the arrays out; their own header then serves for all that are alike."""
    plain = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}
    whole = save(plain, metadata={**identity, "crc": _NO_CRC})
    head = whole[: 8 + int.from_bytes(whole[:8], "little")]
    before, after = head.split(f'"crc":"{_NO_CRC}"'.encode())  # in no name: its quotes would be escaped
    entries = {name: entry for name, entry in json.loads(head[8:]).items() if name != "__metadata__"}
    return _Layout(before + b'"crc":"', b'"' + after, sorted(entries, key=lambda name: entries[name]["data_offsets"]))


def _bytes(array: np.ndarray[Any, Any]) -> _Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _crc(flat: Mapping[str, _Bytes]) -> str:
    """A checksum over all bytes: after a power cut a file may have its length but not its contents."""
    found = 0
    for name in sorted(flat):
        found = zlib.crc32(flat[name].data, found)
    return f"{found:08x}"
