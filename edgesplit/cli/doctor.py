"""``edgesplit doctor``: what is installed, and what a broker does."""

from __future__ import annotations

from typing import Annotated

import typer

from edgesplit.cli.output import Json, Refused, show, show_json


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("doctor")
    def doctor_command(
        broker: Annotated[str | None, typer.Option(help="Also look at this broker: mqtt://[user@]host[:port]")] = None,
        topic_prefix: Annotated[str, typer.Option(help="First part of the topics.")] = "edgesplit",
        run: Annotated[str | None, typer.Option(help="Try this run's topics; default: a run of its own.")] = None,
        node: Annotated[str | None, typer.Option(help="Try this node's topics, where access rules go by name.")] = None,
        clear_stale: Annotated[
            bool, typer.Option("--clear-stale", help="Clear the retained statuses of runs that are long dead.")
        ] = False,
        json_: Json = False,
    ) -> None:
        """Say what is installed and whether a broker does what it must."""
        from edgesplit.doctor import examine

        if broker is None and (run or node or clear_stale or topic_prefix != "edgesplit"):
            raise typer.BadParameter(
                "--topic-prefix, --run, --node and --clear-stale are about a broker: name it with --broker"
            )
        findings = examine(broker, prefix=topic_prefix, run=run, node=node, clear_stale=clear_stale)
        if json_:
            show_json({"ok": all(f.ok for f in findings), "findings": [f.to_json() for f in findings]})
        else:
            for finding in findings:
                show(f"{finding.mark:4}  {finding.name:19} {finding.text}")
                if finding.hint:
                    show(f"{'':27}-> {finding.hint}")
        if not all(finding.ok for finding in findings):
            raise Refused(2)
