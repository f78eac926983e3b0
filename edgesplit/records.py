"""What a coordinator writes down for its successor, as records of JSON values; ``logbook.py`` keeps and reads them."""

from __future__ import annotations

import math
from dataclasses import astuple

from edgesplit.effects import Noted, StepDone
from edgesplit.recovery import Ended, Line


def begun(line: Line, term: int) -> Noted:
    """Weights have been given out: a line begins, with all that was cut off before."""
    cuts = [[at, *point] for at, point in line.cuts]
    return Noted({"base": [*line.base], "term": term, "standing": [*astuple(line.origin)], "cuts": cuts})


def taken_up(line: Line, term: int) -> Noted:
    """Another coordinator goes on with a line, where steps of it have ended already."""
    return Noted({"again": [*line.base], "term": term}) if line.ended else begun(line, term)


def cut(line: Line) -> Noted:
    """The line's end was cut off."""
    term, point = line.cuts[-1]
    return Noted({"cut": [*point], "term": term})


def ended(entry: Ended, done: StepDone, term: int, micro: int) -> Noted:
    """A step has ended; ``micro``: number of the next micro-batch."""
    return Noted(
        {
            "step": done.step,
            "term": term,
            "micro": micro,
            "participants": entry.participants,
            "applied": done.applied,
            "counts": entry.applied,
            "standing": astuple(entry.standing),
            "loss": done.loss if math.isfinite(done.loss) else None,
            "weight": done.weight,
            "samples": done.samples,
        }
    )
