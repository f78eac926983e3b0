"""The points of ``task.py``, on nodes that wait where a fault is to find them.

``hold`` beside this file says where: ``NODE WHAT STEP``. The node of that name writes ``held`` when it is about to do
that kind of work in that step or a later one, and goes on when ``hold`` says something else or is gone. What: ``F``,
``E`` (a forward in evaluation), ``B``, ``U``, ``Keep``, ``Settle``, a question of the coordinator's (``fetch``,
``load``), or ``join``: it is being told its part.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

from task import correct, points, skips_a_layer, tied

from edgesplit import engine
from edgesplit.node import Keep, Outcome, Reckon, Run, Settle, Work

__all__ = ["correct", "points", "skips_a_layer", "tied"]

HOLD, HELD = (Path(__file__).resolve().parent / name for name in ("hold", "held"))


def gate(node: str, what: str, step: int) -> None:
    """Wait here if somebody wants it."""
    text = _wanted()
    wanted, _, after = text.rpartition(" ")
    if wanted != f"{node} {what}" or step < int(after):
        return
    HELD.write_text(text)
    while _wanted() == text:
        time.sleep(0.002)


def _wanted() -> str:
    with contextlib.suppress(OSError):
        return HOLD.read_text()
    return ""


def _kind(work: Work, last: int) -> tuple[str, int]:
    if isinstance(work, Run):
        return "E" if work.evaluate else work.action.op, work.step.step
    if isinstance(work, Reckon):
        return "Reckon", work.step.step
    if isinstance(work, Keep):
        return "Keep", work.step
    if isinstance(work, Settle):
        return "Settle", work.commit.step
    return work.message.kind, last + 1


_execute = engine.Engine.execute


def _gated(self: engine.Engine, work: Work) -> Outcome:
    gate(self.name, *_kind(work, self._point.step))
    return _execute(self, work)


if _execute.__name__ != _gated.__name__:
    engine.Engine.execute = _gated  # type: ignore[method-assign]
if sys.argv[1:2] == ["node"]:
    for name in sys.argv[2:]:
        gate(name, "join", 0)
