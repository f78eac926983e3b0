"""Where a fleet can go back to after a loss: points that nodes keep, and which of them all have. No I/O.

A node keeps its state after the update of every step. When one starts anew, everybody goes back to the newest step
that all have, and what follows is done again: the same data, masks and order, so the same weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from edgesplit.errors import FrameError
from edgesplit.sheets import Draft


class Point(NamedTuple):
    """A state of the run: after ``step``, of the weights that were given out for the ``load``-th time.

    ``step`` is the last one in it; -1: none has been.
    """

    load: int
    step: int


class Kept(NamedTuple):
    """A point as a node has kept it, with the term in which it was made."""

    point: Point
    term: int

    def to_json(self) -> list[int]:
        """Plain JSON values."""
        return [*self.point, self.term]


def one_kept(row: Any) -> Kept:
    """Read a kept point. Raises FrameError where it is malformed."""
    return kept_of({"kept": [row]})[0]


def kept_of(meta: Mapping[str, Any]) -> list[Kept]:
    """Read what a node says that it has kept. Raises FrameError where that is malformed."""
    rows = meta.get("kept", [])
    if not isinstance(rows, list):
        raise FrameError(f"kept points are {rows!r}, which is no list")
    for row in rows:
        if not (isinstance(row, list) and len(row) == 3 and all(type(value) is int for value in row)):
            raise FrameError(f"a kept point is {row!r}, which is none")
    return [Kept(Point(load, step), term) for load, step, term in rows]


def point_of(value: Any) -> Point:
    """Read a point. Raises FrameError where it is malformed."""
    match value:
        case [int(load), int(step)] if type(load) is int and type(step) is int and load >= 0 and step >= -1:
            return Point(load, step)
    raise FrameError(f"a point is {value!r}, must be [load, step]")


@dataclass(frozen=True, slots=True)
class Standing:
    """What the coordinator itself remembers from step to step, to go back with the nodes."""

    loss_scale: float
    good: int
    skipped: int
    skipped_in_row: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A step that has ended since the weights were given out."""

    draft: Draft
    participants: tuple[str, ...]
    applied: bool
    standing: Standing


@dataclass
class Line:
    """The steps that stand, since the weights were last given out, and what was cut off.

    Attributes:
        base: the point at which they were given out.
        origin: the coordinator's standing then.
        ended: the steps since.
        cuts: ``(term, point)``: whatever was kept in an earlier term counts up to this point only.
    """

    base: Point
    origin: Standing
    ended: list[Ended] = field(default_factory=list)
    cuts: list[tuple[int, Point]] = field(default_factory=list)

    def point(self, count: int | None = None) -> Point:
        """Return the point after the first ``count`` steps; None: after all."""
        ended = self.ended if count is None else self.ended[:count]
        return Point(self.base.load, ended[-1].draft.step) if ended else self.base

    def standing(self) -> Standing:
        """Return the coordinator's standing after the last step."""
        return self.ended[-1].standing if self.ended else self.origin

    def rebase(self, base: Point, standing: Standing) -> None:
        """Begin anew: the weights have been given out."""
        self.base, self.origin, self.ended = base, standing, []

    def cut(self, term: int, point: Point) -> None:
        """From ``term`` on, nothing that was kept after ``point`` counts."""
        self.cuts.append((term, point))

    def rewind(self, term: int, count: int) -> list[Ended]:
        """Go back to the first ``count`` steps; return the others."""
        back = self.ended[count:]
        del self.ended[count:]
        self.cut(term, self.point())
        return back

    def counts(self, kept: Kept) -> bool:
        """Whether what was kept lies on this line."""
        in_time = all(kept.point <= last for term, last in self.cuts if term > kept.term)
        return kept.point.load == self.base.load and in_time

    def newest(self, kept: Iterable[Kept]) -> Kept | None:
        """Return the newest kept point that counts: a node's state at the end of this line."""
        return max((one for one in kept if self.counts(one) and one.point <= self.point()), default=None)

    def common(self, kept: Mapping[str, Iterable[Kept]]) -> int | None:
        """Return how many of the steps every node can keep; None: some have not even kept the base."""
        reach = [self._reach(node, {k.point.step for k in of_node if self.counts(k)}) for node, of_node in kept.items()]
        shared = set.intersection(*reach) if reach else {len(self.ended)}
        return max(shared, default=None)

    def _reach(self, node: str, steps: Collection[int]) -> set[int]:
        """The counts of steps after which the node's state is one of those kept, because nothing passed it since."""
        found: set[int] = set()
        valid = self.base.step in steps
        if valid:
            found.add(0)
        for count, ended in enumerate(self.ended, start=1):
            passed = ended.applied and node in ended.participants
            valid = ended.draft.step in steps or (valid and not passed)
            if valid:
                found.add(count)
        return found
