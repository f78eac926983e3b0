"""Who takes part in a run, and who is missing: by their lives, not by their names alone. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OnLost = Literal["stop", "wait", "continue"]
"""What is done about a node that is lost: end the run at once, wait for it, or go on without it."""


@dataclass(frozen=True, slots=True)
class Absence:
    """Since when a node is missing, in monotonic seconds, and what the network said of it."""

    since: float
    reason: str


class Roster:
    """The nodes that have come to a run.

    Attributes:
        lives: the random number that each living process of a node has told; a new one means that it lost its memory.
        lost: nodes that cannot be reached now.
    """

    def __init__(self) -> None:
        self.lives: dict[str, str] = {}
        self.lost: dict[str, Absence] = {}

    def hello(self, node: str, life: str) -> bool:
        """Note that a node has come; return whether it was here before, in another life."""
        again = node in self.lives and self.lives[node] != life
        self.lives[node] = life
        self.lost.pop(node, None)
        return again

    def here(self, node: str) -> bool:
        """Return whether a node has said hello and is not missing.

        It need not say it again when its connection was broken; and what tells that its former life has ended may come
        after the new one's hello.
        """
        return node in self.lives and node not in self.lost

    def gone(self, node: str, reason: str, now: float) -> bool:
        """Note that a node cannot be reached; return whether that is news."""
        if node in self.lost:
            return False
        self.lost[node] = Absence(now, reason)
        return True

    def back(self, node: str) -> bool:
        """Note that a node can be reached again; return whether it was missing."""
        return self.lost.pop(node, None) is not None
