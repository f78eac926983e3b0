"""How a run looks while it goes on: a live view in a terminal, plain lines elsewhere, or JSON lines."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from edgesplit.callbacks import Callback
from edgesplit.effects import NodeChanged, StepDone
from edgesplit.training import RoundDone

REFRESH_S = 0.2

_SAID = {
    "lost": "is lost",
    "back": "is back",
    "returned": "was started again",
    "recovered": "has recovered, and the fleet goes on",
    "left": "is left out of this round",
    "waits": "is there again",
    "forgetful": "could not come back after a crash",
}


class Progress(Callback):
    """Shows rounds, steps, loss, accuracy, samples a second and bytes per link, on stderr.

    Args:
        rounds: of the run.
        style: ``auto`` (live in a terminal, else plain), ``plain`` or ``json``.
    """

    def __init__(self, rounds: int, *, style: str = "auto") -> None:
        self._rounds, self._console = rounds, Console(stderr=True)
        self._style = ("live" if self._console.is_terminal else "plain") if style == "auto" else style
        self._live: Live | None = None
        self._session: Any = None
        self._step, self._loss, self._samples, self._skipped = 0, float("nan"), 0, 0
        self._metrics: dict[str, float] = {}
        self._round = 0
        self._began = self._drawn = time.monotonic()

    def on_start(self, session: Any) -> None:
        """Begin to show."""
        self._session, self._began, self._round = session, time.monotonic(), session.next_round
        if self._style == "live":
            self._live = Live(self._view(), console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def on_step(self, done: StepDone) -> None:
        """Show a step."""
        self._step, self._samples = done.step + 1, self._samples + done.samples
        self._skipped += not done.applied
        if done.applied:
            self._loss = done.loss
        if self._style == "json":
            self._line({"event": "step", "step": done.step, "loss": done.loss, "applied": done.applied})
        elif not done.applied:
            self._say(f"step {done.step} was not finite and is skipped")
        if self._live is not None and time.monotonic() - self._drawn > REFRESH_S:
            self._drawn = time.monotonic()
            self._live.update(self._view(), refresh=True)

    def on_node(self, change: NodeChanged) -> None:
        """Say what has become of a node."""
        if self._style == "json":
            self._line({"event": "node", "node": change.node, "state": change.state, "reason": change.reason})
        else:
            self._say(f"{change.node} {_SAID[change.state]}{f' ({change.reason})' if change.reason else ''}")

    def on_round(self, done: RoundDone) -> None:
        """Show a round."""
        self._round, self._metrics = done.number + 1, dict(done.metrics)
        rate = done.samples / done.seconds if done.seconds else 0.0
        if self._style == "json":
            values = {"event": "round", "round": done.number, "loss": done.loss, "samples_per_s": rate}
            self._line({**values, **done.metrics})
            return
        shown = "  ".join(f"{name} {value:.4f}" for name, value in done.metrics.items())
        self._say(
            f"round {done.number}/{self._rounds}  step {self._step}  loss {done.loss:.4f}  "
            f"{rate:,.0f} samples/s  {shown}".rstrip()
        )

    def on_end(self, session: Any) -> None:
        """Take the live view away."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _view(self) -> Table:
        table = Table.grid(padding=(0, 2))
        rate = self._samples / max(time.monotonic() - self._began, 1e-9)
        cells = [
            f"round {min(self._round, self._rounds)}/{self._rounds}",
            f"step {self._step}",
            f"loss {self._loss:.4f}",
            f"{rate:,.0f} samples/s",
            *(f"{name} {value:.4f}" for name, value in list(self._metrics.items())[:3]),
        ]
        table.add_row(*cells, style="bold")
        for link, count in list(self._session.links().items())[:12]:
            table.add_row("", link, f"{count / 1e6:,.1f} MB")
        return table

    def _say(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, highlight=False)
        else:
            self._console.print(text, highlight=False, soft_wrap=True)

    @staticmethod
    def _line(values: dict[str, Any]) -> None:
        sys.stderr.write(json.dumps(values) + "\n")
