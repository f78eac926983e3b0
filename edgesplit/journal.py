"""What a node keeps of its state so that it can come back after a crash: files beside it, the newest few.

A safetensors file a point, with a checksum: one that is not whole counts as not there. The few files of steps stay open
and are written over, each with one system call, and a header is made once for all steps: to create, rename and remove
files, as whole states have it, would be most of the cost. A large state is written by a thread, a step behind the
computing, and :meth:`Journal.flush` waits for it before the node tells of the next step. A disk that takes nothing more
does not end the training: the node then comes back from what lies there, or from the coordinator.
"""

from __future__ import annotations

import itertools
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
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from edgesplit.errors import RunError
from edgesplit.recovery import Kept, Point

log = logging.getLogger("edgesplit.journal")

Arrays = Mapping[str, np.ndarray[Any, Any]]

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_Signature = tuple[tuple[str, tuple[int, ...], np.dtype[Any]], ...]

_STATE = "{crc:08x} {load:020d} {step:020d} {term:020d}"
"""What a file's header says of its contents, always as long: their checksum, and the point; steps count from 1."""

_NO_STATE = _STATE.format(crc=0, load=0, step=0, term=0)

_SMALL = 1 << 20
"""Bytes up to which handing them to the thread, and writing them one by one, costs more than it saves."""

_NAME = re.compile(r"(whole|step)-[-\d]+\.safetensors")


class _Entry(NamedTuple):
    kept: Kept
    full: bool


class _Task(NamedTuple):
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
        self._entries: dict[str, _Entry] = {}
        self._layouts: dict[_Signature, _Layout] = {}
        self._files: dict[str, int] = {}  # those of steps that are open
        self._free: list[str] = []  # those of points that nobody will ask for, to be written over
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
        task = _Task(_Entry(Kept(point, term), full), dict(arrays), committed)
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
        own = next((path for path, entry in self._entries.items() if entry.kept == kept), None)
        full = self._full_before(kept)
        if own is None or full is None:
            return None
        try:
            whole = self._load(full)
            return whole if own == full else whole | self._load(own)
        except RunError as error:
            log.warning("%s", error)
            return None

    def forget_after(self, point: Point) -> None:
        """Remove what was kept of later points: it was taken back."""
        self.flush()
        later = [path for path, entry in self._entries.items() if entry.kept.point > point]
        self._remove([*later, *self._free])  # the free ones may be of steps of this load that are done anew

    def close(self, *, remove: bool = False) -> None:
        """End the thread; ``remove`` the files, when the run has ended as it should."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None
        for path in list(self._files):
            os.close(self._files.pop(path))
        if remove:
            shutil.rmtree(self._directory, ignore_errors=True)

    # -- inside

    def _find(self) -> None:
        """See what an earlier life has left; what is not this run's, or not whole, is removed."""
        if not self._directory.is_dir():
            return
        for path in self._directory.iterdir():
            match = _NAME.fullmatch(path.name)
            kept = self._kept_in(str(path)) if match else None
            if match and kept is not None:
                self._entries[str(path)] = _Entry(kept, match[1] == "whole")
            elif match or path.name.startswith("."):
                path.unlink(missing_ok=True)
        # One that was to be written over may be of an earlier load, whose whole state is gone.
        self._remove([path for path, entry in self._entries.items() if self._full_before(entry.kept) is None])

    def _full_before(self, kept: Kept) -> str | None:
        """The file of the last full state of its load up to this point; None: there is none."""
        found = {
            entry: path
            for path, entry in self._entries.items()
            if entry.full and entry.kept.point.load == kept.point.load and entry.kept.point <= kept.point
        }
        return found[max(found)] if found else None

    def _kept_in(self, path: str) -> Kept | None:
        """What is kept in a file; None: it is not this run's, or not whole."""
        try:
            with safe_open(path, framework="numpy") as file:
                told = file.metadata() or {}
                if {key: told.get(key) for key in self._identity} != self._identity:
                    return None
            self._load(path)
            _, load, step, term = told["state"].split()
            return Kept(Point(int(load), int(step) - 1), int(term))
        except (OSError, SafetensorError, RunError, ValueError):
            return None

    def _load(self, path: str) -> dict[str, np.ndarray[Any, Any]]:
        try:
            with safe_open(path, framework="numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
                crc = _crc({name: _bytes(array) for name, array in arrays.items()})
                if (file.metadata() or {}).get("state", "").split(" ")[0] != f"{crc:08x}":
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
            write = self._write_whole if task.entry.full else self._write_step
            self._entries[write(task.entry.kept, task.arrays)] = task.entry
            self._prune(task.committed)
            self._problem = None
        except Exception as error:  # noqa: BLE001 whatever it is, the training can go on
            reason = getattr(error, "strerror", None) or str(error)
            if self._problem is None:
                log.warning("cannot keep the state in %s: %s", self._directory, reason)
            self._problem = f"cannot keep its state in {self._directory}: {reason.lower()}"

    def _write_step(self, kept: Kept, arrays: Arrays) -> str:
        """Write over a file that is free, or a new one; return its name."""
        path = self._free.pop() if self._free else self._new()
        parts = self._parts(kept, arrays)
        length = sum(map(len, parts))
        try:
            if path not in self._files:
                self._files[path] = self._open(path)
            file = self._files[path]
            os.lseek(file, 0, os.SEEK_SET)
            for part in [b"".join(parts)] if length < _SMALL else parts:
                _write_all(file, memoryview(part))
            if os.fstat(file).st_size > length:  # what was there before was longer
                os.ftruncate(file, length)
            if self._sync:
                os.fsync(file)
        except BaseException:
            self._remove([path])
            raise
        return path

    def _new(self) -> str:
        number = next(n for n in itertools.count() if self._path(f"step-{n}") not in self._entries)
        return self._path(f"step-{number}")

    def _write_whole(self, kept: Kept, arrays: Arrays) -> str:
        """Write a file beside its place, and rename it; return its name."""
        path = self._path(f"whole-{kept.point.load}-{kept.point.step + 1}-{kept.term}")
        unfinished = f"{self._directory}/.unfinished"
        file = self._open(unfinished)
        try:
            for part in self._parts(kept, arrays):
                _write_all(file, memoryview(part))
            if self._sync:
                os.fsync(file)
            os.replace(unfinished, path)  # noqa: PTH105 - paths are strings here
        except BaseException:
            self._remove([unfinished])
            raise
        finally:
            os.close(file)
        return path

    def _path(self, stem: str) -> str:
        return f"{self._directory}/{stem}.safetensors"

    def _parts(self, kept: Kept, arrays: Arrays) -> list[bytes | memoryview]:
        """What a file holds, in order."""
        layout = self._layout(arrays)
        flat = {name: _bytes(array) for name, array in arrays.items()}
        point = kept.point
        state = _STATE.format(crc=_crc(flat), load=point.load, step=point.step + 1, term=kept.term)
        return [layout.before, state.encode(), layout.after, *(flat[name].data for name in layout.names)]

    def _open(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT
        try:
            return os.open(path, flags)
        except FileNotFoundError:
            self._directory.mkdir(parents=True, exist_ok=True)
            return os.open(path, flags)

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
        steps = [path for path in gone if not self._entries[path].full]
        for path in steps:
            del self._entries[path]
        self._free += steps
        self._remove([path for path in gone if path in self._entries])

    def _remove(self, paths: list[str]) -> None:
        for path in paths:
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108 - as above
            if path in self._files:
                os.close(self._files.pop(path))
            if path in self._free:
                self._free.remove(path)
            self._entries.pop(path, None)


def _write_all(file: int, part: memoryview) -> None:
    """Write all of it: a system call may take less."""
    while part:
        part = part[os.write(file, part) :]


def _lay_out(arrays: Arrays, identity: Mapping[str, str]) -> _Layout:
    """Have safetensors lay the arrays out; their own header then serves for all that are alike."""
    plain = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}
    whole = save(plain, metadata={**identity, "state": _NO_STATE})
    head = whole[: 8 + int.from_bytes(whole[:8], "little")]
    before, after = head.split(f'"state":"{_NO_STATE}"'.encode())  # in no name: its quotes would be escaped
    entries = {name: entry for name, entry in json.loads(head[8:]).items() if name != "__metadata__"}
    return _Layout(before + b'"state":"', b'"' + after, sorted(entries, key=lambda name: entries[name]["data_offsets"]))


def _bytes(array: np.ndarray[Any, Any]) -> _Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _crc(flat: Mapping[str, _Bytes]) -> int:
    """A checksum over all bytes: after a power cut a file may have its length but not its contents."""
    found = 0
    for name in sorted(flat):
        found = zlib.crc32(flat[name].data, found)
    return found
