"""Things that watch a run, on the coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgesplit.effects import NodeChanged, StepDone
from edgesplit.training import RoundDone

STOP = "stop"
"""What a callback's ``on_round`` returns to end the run early."""


class Callback:
    """Something that watches a run, on the coordinator. Override what is of interest."""

    def on_start(self, session: Any) -> None:
        """The fleet has joined and holds its weights."""

    def on_step(self, done: StepDone) -> None:
        """A step has ended."""

    def on_round(self, done: RoundDone) -> str | None:
        """A round has ended; return ``"stop"`` to end the run."""

    def on_node(self, change: NodeChanged) -> None:
        """A node was lost, is back, or the fleet has recovered from its loss."""

    def on_checkpoint(self, path: Path) -> None:
        """A checkpoint was written."""

    def on_end(self, session: Any) -> None:
        """The run has ended, well or not."""
