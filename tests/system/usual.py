"""What a start and a step take while nothing happens: what the time that a fault costs is to be held against."""

from __future__ import annotations

import itertools
import statistics
import time
from pathlib import Path
from typing import NamedTuple

from edgesplit.observe.recorder import read_events
from tests.system.command import shell, wait_until
from tests.system.stage import FAULTS, NODES, Stage

TIMES = 3


class Usual(NamedTuple):
    """Seconds: from a node's command to the end of the first step with it, for which all others wait; of a step."""

    start: float
    step: float

    def __str__(self) -> str:
        return (
            f"A node's start, from its command to the end of the first step with it, takes {self.start:.1f} s here "
            f"when nothing has happened, a step {self.step:.2f} s (medians)."
        )


def measure(folder: Path) -> Usual:
    """Start a run whose edge comes last, a few times."""
    starts, steps = [], []
    for _ in range(TIMES):
        with shell(folder) as place, Stage(place, "edge", FAULTS["kill-hand"], rounds=2) as stage:
            stage.start_run()
            wait_until("the run's key", (place.cwd / "runs" / "r" / "key").exists)
            others = [node for node in NODES if node != stage.victim]
            stage.start_node(" ".join(others))
            stage.nodes[" ".join(others)].wait_for("waiting for the coordinator's word", len(others))
            began = time.monotonic()
            stage.start_node(stage.victim)
            wait_until("the first step", lambda: stage.went_on(-1))
            starts.append(time.monotonic() - began)
            stage.end()
            steps += _steps(place.cwd / "runs" / "r" / "events.jsonl")
    return Usual(statistics.median(starts), statistics.median(steps))


def _steps(path: Path) -> list[float]:
    ends: dict[int, float] = {}
    for event in read_events(path):
        ends[event.step] = max(event.end, ends.get(event.step, 0.0))
    return [after - before for before, after in itertools.pairwise(ends[step] for step in sorted(ends))]
