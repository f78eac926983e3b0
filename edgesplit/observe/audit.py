"""A file of what nodes did that they may not: a line each, and not more than can be read."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgesplit.errors import RunError

MOST_A_MINUTE = 10
"""Lines about one node and one thing; the others are counted."""

MOST_KINDS = 4096
"""Nodes and things that are told apart."""


class Audit:
    """Writes ``audit.jsonl``: ``{"time", "node", "what", "value"}`` a line; ``also`` says how many were left out.

    Args:
        path: the file; None: nothing is written.
        clock: seconds since the epoch.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        self._minutes: dict[tuple[str, str], tuple[float, int]] = {}  # since when, and how many

    def note(self, node: str, what: str, value: Any = None) -> None:
        """Write a line. Raises RunError where the disk does not take it."""
        now = self._clock()
        since, count = self._minutes.get((node, what), (now, 0))
        left_out = max(count - MOST_A_MINUTE, 0)
        if now - since >= 60:
            since, count = now, 0
        elif (node, what) not in self._minutes and len(self._minutes) >= MOST_KINDS:
            return
        self._minutes[node, what] = since, count + 1
        if count >= MOST_A_MINUTE or self._path is None:
            return
        line: dict[str, Any] = {"time": round(now, 3), "node": node, "what": what}
        if value is not None:
            line["value"] = value if not isinstance(value, float) or math.isfinite(value) else str(value)
        if count == 0 and left_out:
            line["also"] = left_out
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, default=str) + "\n")
        except OSError as error:
            raise RunError(f"cannot write {str(self._path)!r}: {str(error.strerror).lower()}") from None
