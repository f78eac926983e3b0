"""Events as a trace that ui.perfetto.dev and chrome://tracing open (Chrome's JSON trace format)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from edgesplit.schedule import Event
from edgesplit.simulate import Transfer

_NODES, _LINKS = 1, 2
_KIND = {"F": "forward", "B": "backward", "I": "backward", "W": "backward", "U": "update"}


def perfetto(events: Iterable[Event], links: Iterable[Transfer] = ()) -> dict[str, Any]:
    """Return the trace: a track a node and one a directed link, arrows along each micro-batch's way.

    Args:
        events: predicted or measured; the earliest begins at 0.
        links: a simulated timeline's ``transfers``.
    """
    events, links = sorted(events, key=lambda e: (e.start, e.node)), list(links)
    zero = min((e.start for e in events), default=0.0)
    nodes = {node: i for i, node in enumerate(dict.fromkeys(e.node for e in events), start=1)}
    wires = {wire: i for i, wire in enumerate(dict.fromkeys((t.src, t.dst) for t in links), start=1)}
    rows = _names(_NODES, "nodes", nodes)
    if wires:
        rows += _names(_LINKS, "links", {f"{src} -> {dst}": i for (src, dst), i in wires.items()})
    for event in events:
        args = {"step": event.step, "stage": event.action.stage, "micro": event.action.micro, "version": event.version}
        where = (_NODES, nodes[event.node])
        rows.append(
            _slice(str(event.action), _KIND[event.action.op], event.start - zero, event.end - zero, where, args)
        )
    rows += _arrows(events, nodes, zero)
    for t in links:
        carried: dict[str, Any] = {"stage": t.stage, "micro": t.micro, "bytes": t.nbytes}
        name = f"{t.kind} {t.stage}:{t.micro}"
        rows.append(_slice(name, t.kind, t.start - zero, t.end - zero, (_LINKS, wires[t.src, t.dst]), carried))
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def write_trace(path: str | Path, events: Iterable[Event], links: Iterable[Transfer] = ()) -> None:
    """Write :func:`perfetto`'s trace as JSON."""
    Path(path).write_text(json.dumps(perfetto(events, links)), encoding="utf-8")


def _names(pid: int, process: str, tracks: dict[str, int]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}]
    for name, tid in tracks.items():
        rows.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
        rows.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
    return rows


def _slice(
    name: str, category: str, start: float, end: float, where: tuple[int, int], args: dict[str, Any]
) -> dict[str, Any]:
    pid, tid = where
    row: dict[str, Any] = {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "args": args}
    return {**row, "ts": start * 1e6, "dur": (end - start) * 1e6}


def _arrows(events: Sequence[Event], nodes: dict[str, int], zero: float) -> list[dict[str, Any]]:
    """An arrow from each forward to the next stage's, and from each backward to the stage's before it."""
    found = {("B" if e.action.op in "BI" else e.action.op, *e.action[1:]): e for e in events}
    rows: list[dict[str, Any]] = []
    for (op, stage, micro, part), event in found.items():
        after = found.get((op, stage + 1 if op == "F" else stage - 1, micro, part)) if op in "FB" else None
        if after is None or after.node == event.node:
            continue
        arrow: dict[str, Any] = {"name": "micro", "cat": "flow", "id": len(rows) // 2 + 1, "pid": _NODES}
        # An arrow belongs to the slice around its time: the middle is inside whatever the rounding.
        middle = (event.start + event.end) / 2
        rows.append({**arrow, "ph": "s", "ts": (middle - zero) * 1e6, "tid": nodes[event.node]})
        rows.append({**arrow, "ph": "f", "bp": "e", "ts": (after.start - zero) * 1e6, "tid": nodes[after.node]})
    return rows
