"""A run's folder: what is written where."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgesplit.errors import ExperimentError, RunError
from edgesplit.observe.recorder import earlier
from edgesplit.transport import frames
from edgesplit.transport.key import Key

KEY = "key"


def plain(value: Any) -> Any:
    """Return ``value`` as JSON can say it: it has no nan and no infinity, but null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _as_name(text: str) -> str:
    """What of a file's name can be the beginning of a run's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:32]


class RunDirectory:
    """The folder of one run.

    Attributes:
        path: the folder; ``events.jsonl``, ``metrics.json``, ``model.safetensors``, ``trace.json``, ``key``,
            ``logs/``, ``checkpoints/`` lie in it.
        name: the run's, unique on its broker.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name

    @classmethod
    def open(cls, *, name: str | None, out: Path | None, stem: str, resume: bool) -> RunDirectory:
        """Make the folder of a new run, or find that of one to resume.

        Args:
            name: the run's; None: made of the experiment's name, the time and chance.
            out: the folder; None: ``runs/NAME``.
            stem: the experiment's name.
            resume: the folder must be there already.

        Raises:
            ExperimentError: there is a run in the folder already, or none to resume.
            RunError: the folder cannot be written.
        """
        if resume and name is None and out is None:
            raise ExperimentError("--resume needs the run: name it with --name or its folder with --out")
        if name is not None and not (frames.valid_name(name) and name.strip(".")):
            raise ExperimentError(f"run name {name!r} must be 1 to 64 of A-Z a-z 0-9 . _ -: it becomes a topic")
        fresh = f"{_as_name(stem)}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        path = out if out is not None else Path("runs") / (name or fresh)
        if resume and not any((path / left).exists() for left in ("checkpoints", "state", KEY)):
            raise ExperimentError(f"{path} has no checkpoints to resume from")
        if not resume and _has_begun(path):
            raise ExperimentError(f"{path} holds a run already: resume it with --resume, or choose another folder")
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not (path / KEY).exists():  # nodes that wait for a coordinator that was killed hold the old one
                cls._write_key(path / KEY)
        except OSError as error:
            raise RunError(f"cannot write {path}: {error.strerror}") from None
        return cls(path, name or (f"{_as_name(path.name)}-{secrets.token_hex(3)}" if out is not None else path.name))

    @staticmethod
    def _write_key(path: Path) -> None:
        """The run's key, for its owner only; it never goes over the broker."""
        path.unlink(missing_ok=True)  # its mode may be another's choice
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(Key.new_text())

    @property
    def key_file(self) -> Path:
        """Where the run's key is."""
        return self.path / KEY

    @property
    def identity(self) -> str:
        """What tells this run from another of the same name: made of its key, which it does not give away."""
        key = (self.path / "key").read_bytes()
        return str(hashlib.blake2b(key, digest_size=8, person=b"identity").hexdigest())

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a JSON file at once or not at all. Raises RunError where the disk does not take it."""
        target, partial = self.path / name, self.path / f".{name}.unfinished"
        try:
            partial.write_text(json.dumps(plain(values), indent=2, default=str) + "\n", encoding="utf-8")
            partial.replace(target)
        except OSError as error:
            raise RunError(f"cannot write {target}: {error.strerror}") from None


def _has_begun(path: Path) -> bool:
    """Whether a run in this folder has done anything; one that was refused may be tried again."""
    events = path / "events.jsonl"
    return (events.exists() and events.stat().st_size > 0) or bool(earlier(events))
