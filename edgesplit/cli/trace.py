"""``edgesplit trace``: a run's timeline for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgesplit.cli.output import Json, show, show_json


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("trace")
    def trace_command(
        folder: Annotated[Path, typer.Argument(help="A run's folder.")],
        output: Annotated[
            Path | None, typer.Option("-o", "--output", help="Default: trace.json in the folder.")
        ] = None,
        json_: Json = False,
    ) -> None:
        """Write a run's events as a Perfetto trace, and say how busy each node was."""
        from edgesplit.observe.recorder import read_events
        from edgesplit.observe.report import bubble, busy_seconds
        from edgesplit.observe.trace import write_trace

        events = read_events(folder / "events.jsonl")
        target = output or folder / "trace.json"
        write_trace(target, events)
        busy = busy_seconds(events)
        if json_:
            idle = bubble(events) if events else None
            show_json({"trace": str(target), "events": len(events), "bubble": idle, "busy_s": busy})
            return
        show(f"{len(events)} events in {target}: open it at ui.perfetto.dev")
        for node, seconds in busy.items():
            show(f"{node:20} busy {seconds:.2f} s")
