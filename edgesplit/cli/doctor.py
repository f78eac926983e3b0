"""``edgesplit doctor``: what is installed, and what a broker does."""

from __future__ import annotations

from typing import Annotated

import typer

from edgesplit.cli.access import URL, Ca, Cert, CertKey, ClientId, Mqtt, TopicPrefix, access
from edgesplit.cli.output import Json, Refused, show, show_json


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("doctor")
    def doctor_command(
        broker: Annotated[str | None, typer.Option(metavar="URL", help=f"Also look at this broker: {URL}.")] = None,
        run: Annotated[str | None, typer.Option(help="Try this run's topics; default: a run of its own.")] = None,
        node: Annotated[str | None, typer.Option(help="Try this node's topics, where access rules go by name.")] = None,
        clear_stale: Annotated[
            bool, typer.Option("--clear-stale", help="Clear the retained statuses of runs that are long dead.")
        ] = False,
        ca: Ca = None,
        cert: Cert = None,
        cert_key: CertKey = None,
        topic_prefix: TopicPrefix = None,
        client_id: ClientId = None,
        mqtt: Mqtt = None,
        json_: Json = False,
    ) -> None:
        """Say what is installed and whether a broker does what it must."""
        from edgesplit.doctor import examine

        options = (ca, cert, cert_key, topic_prefix, client_id, mqtt)
        if broker is None and (run or node or clear_stale or any(option is not None for option in options)):
            raise typer.BadParameter("--run, --node, --clear-stale, --ca, --topic-prefix and the like need --broker")
        there = access(broker, *options) if broker is not None else None
        findings = examine(there, run=run, node=node, clear_stale=clear_stale)
        if json_:
            show_json({"ok": all(f.ok for f in findings), "findings": [f.to_json() for f in findings]})
        else:
            for finding in findings:
                show(f"{finding.mark:4}  {finding.name:19} {finding.text}")
                if finding.hint:
                    show(f"{'':27}-> {finding.hint}")
        if not all(finding.ok for finding in findings):
            raise Refused(2)
