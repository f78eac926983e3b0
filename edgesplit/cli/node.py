"""``edgesplit node``: take part in a run as one of its nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgesplit.cli.access import URL, Ca, Cert, CertKey, ClientId, Mqtt, TopicPrefix, access
from edgesplit.cli.output import mark_started, say


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("node")
    def node_command(
        names: Annotated[list[str], typer.Argument(help="The node; several share this process.")],
        broker: Annotated[str, typer.Option(metavar="URL", help=URL)],
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
        token_file: Annotated[
            Path | None, typer.Option(metavar="FILE", help="A token that lets in a device that no topology names.")
        ] = None,
        stay: Annotated[bool, typer.Option("--stay", help="Take the next run when one has ended.")] = False,
        coordinator_s: Annotated[
            float, typer.Option(help="Seconds that it stays when the coordinator is gone.", min=0)
        ] = 60.0,
        broker_s: Annotated[float, typer.Option(help="Seconds that it stays when the broker is gone.", min=0)] = 120.0,
        key_file: Annotated[
            str | None,
            typer.Option(
                metavar="FILE",
                envvar="EDGESPLIT_KEY_FILE",
                show_envvar=False,
                help="The run's key, a copy of RUN_DIR/key: sign, and believe nobody else (or EDGESPLIT_KEY_FILE).",
            ),
        ] = None,
        ca: Ca = None,
        cert: Cert = None,
        cert_key: CertKey = None,
        topic_prefix: TopicPrefix = None,
        client_id: ClientId = None,
        mqtt: Mqtt = None,
        local: Annotated[bool, typer.Option("--local", hidden=True)] = False,
    ) -> None:
        """Join a run and do a node's part until it ends."""
        from edgesplit.hosting import run_nodes

        if no_state and state is not None:
            raise typer.BadParameter("goes not with --state: leave one out", param_hint="--no-state")
        run_nodes(
            names,
            broker=access(broker, ca, cert, cert_key, topic_prefix, client_id, mqtt),
            run=run,
            task=task,
            key_file=key_file,
            local=local,
            threads=threads,
            deterministic=deterministic,
            state=state,
            keep=not no_state,
            token_file=token_file,
            stay=stay,
            coordinator_s=coordinator_s,
            broker_s=broker_s,
            on_step=mark_started,
            say=say,
        )
        say(f"{', '.join(names)}: the run has ended")
