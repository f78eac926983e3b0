"""Figures of a timeline, predicted or measured alike, and the comparison of the two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from edgesplit.errors import RunError
from edgesplit.schedule import Event
from edgesplit.simulate import Timeline


def busy_seconds(events: Iterable[Event]) -> dict[str, float]:
    """Node -> seconds it computed."""
    busy: dict[str, float] = {}
    for event in events:
        busy[event.node] = busy.get(event.node, 0.0) + event.end - event.start
    return busy


def bubble(events: Sequence[Event]) -> float:
    """Idle time of the nodes over their busy time, between the first start and the last end."""
    busy = busy_seconds(events)
    total = sum(busy.values())
    if not total:
        return 0.0
    span = max(e.end for e in events) - min(e.start for e in events)
    return (span * len(busy) - total) / total


def step_seconds(events: Iterable[Event]) -> dict[int, float]:
    """Global step -> seconds from the end of the step before it (the first: from its start) to its own end."""
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for event in events:
        starts[event.step] = min(starts.get(event.step, event.start), event.start)
        ends[event.step] = max(ends.get(event.step, event.end), event.end)
    seconds = {}
    before: float | None = None
    for step in sorted(ends):
        seconds[step] = ends[step] - (starts[step] if before is None else before)
        before = ends[step]
    return seconds


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was predicted against what was measured.

    Attributes:
        steps: step -> (predicted seconds, measured seconds).
        bubbles: predicted and measured, see :func:`bubble`.
    """

    steps: dict[int, tuple[float, float]]
    bubbles: tuple[float, float]

    @property
    def ratio(self) -> float:
        """Measured over predicted seconds of a step, the median over steps."""
        return median(
            measured / predicted if predicted else float("inf") for predicted, measured in self.steps.values()
        )

    def __str__(self) -> str:
        lines = ["step  predicted s  measured s  ratio"]
        for step, (predicted, measured) in self.steps.items():
            ratio = measured / predicted if predicted else float("inf")
            lines.append(f"{step:>4}  {predicted:>11.4f}  {measured:>10.4f}  {ratio:>5.2f}")
        lines.append(f"bubble predicted {self.bubbles[0]:.3f}, measured {self.bubbles[1]:.3f}")
        return "\n".join(lines)


def compare(predicted: Timeline, measured: Sequence[Event]) -> Comparison:
    """Compare the steps that both have.

    Raises:
        RunError: they have none in common.
    """
    ours, theirs = step_seconds(predicted.events), step_seconds(measured)
    common = [step for step in ours if step in theirs]
    if not common:
        raise RunError(
            f"predicted steps {_span(ours)} and measured steps {_span(theirs)} have none in common: "
            "simulate the steps that ran"
        )
    chosen = [event for event in measured if event.step in ours]
    return Comparison({step: (ours[step], theirs[step]) for step in common}, (bubble(predicted.events), bubble(chosen)))


def _span(steps: dict[int, float]) -> str:
    return f"{min(steps)}-{max(steps)}" if steps else "(none)"


def gantt_text(events: Sequence[Event], unit: float | None = None, width: int = 100) -> str:
    """Draw a line a node: a forward as its micro-batch's last digit, a backward as a letter (``a`` is 0), idle ``.``.

    Args:
        unit: seconds of a character; None: so that all fits into ``width``.

    >>> from edgesplit.schedule import Action
    >>> print(gantt_text([Event("n", Action("F", 0, 0), 0.0, 1.0), Event("n", Action("B", 0, 0), 2.0, 4.0)], unit=1.0))
    n  0.aa
    """
    if not events:
        return ""
    zero, end = min(e.start for e in events), max(e.end for e in events)
    unit = unit or (end - zero) / width or 1.0
    rows: dict[str, list[str]] = {}
    size = round((end - zero) / unit)
    for event in sorted(events, key=lambda e: e.start):
        row = rows.setdefault(event.node, ["."] * size)
        if event.action.op == "U":
            continue
        number = event.action.micro
        mark = str(number % 10) if event.action.op == "F" else chr(ord("a") + number % 26)
        for at in range(round((event.start - zero) / unit), round((event.end - zero) / unit)):
            row[at] = mark
    longest = max(map(len, rows))
    return "\n".join(f"{node:<{longest}}  {''.join(row)}" for node, row in rows.items())
