"""``edgesplit node``: take part in a run as one of its nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgesplit.cli.output import mark_started, say


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("node")
    def node_command(
        names: Annotated[list[str], typer.Argument(help="The node; several share this process.")],
        broker: Annotated[str, typer.Option(help="mqtt://[user@]host[:port]")],
        run: Annotated[str | None, typer.Option(help="The run; default: the one that waits for this node.")] = None,
        task: Annotated[str | None, typer.Option(help="FILE.py:NAME or MODULE:NAME on this machine.")] = None,
        threads: Annotated[int, typer.Option(help="Compute threads.", min=1)] = 1,
        deterministic: Annotated[
            bool, typer.Option("--deterministic", help="Torch's deterministic algorithms.")
        ] = False,
        state: Annotated[
            Path | None, typer.Option(help="Folder for what the node needs to come back after a crash.")
        ] = None,
        no_state: Annotated[
            bool, typer.Option("--no-state", help="Keep nothing: after a crash the round's beginning must do.")
        ] = False,
        coordinator_s: Annotated[
            float, typer.Option(help="Seconds that it stays when the coordinator is gone.", min=0)
        ] = 60.0,
        broker_s: Annotated[float, typer.Option(help="Seconds that it stays when the broker is gone.", min=0)] = 120.0,
        local: Annotated[bool, typer.Option("--local", hidden=True)] = False,
    ) -> None:
        """Join a run and do a node's part until it ends."""
        from edgesplit.hosting import run_nodes

        if no_state and state is not None:
            raise typer.BadParameter("goes not with --state: leave one out", param_hint="--no-state")
        run_nodes(
            names,
            broker=broker,
            run=run,
            task=task,
            local=local,
            threads=threads,
            deterministic=deterministic,
            state=state,
            keep=not no_state,
            coordinator_s=coordinator_s,
            broker_s=broker_s,
            on_step=mark_started,
            say=say,
        )
        say(f"{', '.join(names)}: the run has ended")
