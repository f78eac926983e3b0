"""``edgesplit methods``, ``schema`` and ``doctor``."""

from __future__ import annotations

from typing import Annotated

import typer

from edgesplit.cli.access import URL, Ca, Cert, CertKey, ClientId, Mqtt, TopicPrefix, access
from edgesplit.cli.output import Json, Refused, show, show_json, show_table


def register(app: typer.Typer) -> None:
    """Add the commands."""

    @app.command("methods")
    def methods_command(json_: Json = False) -> None:
        """Show the pipeline methods and what each allows, and the federated strategies."""
        from edgesplit.methods import FEATURES, table

        rows = table()
        strategies, refused = _strategies()
        if json_:
            show_json({"methods": rows, "strategies": strategies, "refused": refused})
            return
        columns = ["method", "update", "weights", *FEATURES]
        cells = [
            [r["name"], f"a {r['cadence']}", r["policy"], *("yes" if r[f] else "-" for f in FEATURES)] for r in rows
        ]
        show_table("pipeline methods", columns, cells)
        show("")
        for row in rows:
            show(f"{row['name']}: {row['note']} ({row['paper']})")
        show("")
        show("strategies: " + (", ".join(strategies) or "none: pip install 'edgesplit[flower]'"))
        for name, why in refused.items():
            show(f"not here: {name}: {why}")

    @app.command("schema")
    def schema_command() -> None:
        """Print the JSON schemas of the experiment and the topology file."""
        from edgesplit.experiment import schema

        show_json(schema())

    @app.command("doctor")
    def doctor_command(
        broker: Annotated[str | None, typer.Option(metavar="URL", help=f"Also look at this broker: {URL}.")] = None,
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
        if broker is None and any(option is not None for option in options):
            raise typer.BadParameter("--ca, --cert, --topic-prefix and the like need --broker")
        findings = examine(access(broker, *options) if broker is not None else None)
        if json_:
            show_json({"ok": all(f.ok for f in findings), "findings": [f._asdict() for f in findings]})
        else:
            for finding in findings:
                show(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.name:18} {finding.text}")
        if not all(finding.ok for finding in findings):
            raise Refused(2)


def _strategies() -> tuple[list[str], dict[str, str]]:
    try:
        from edgesplit.federated import REFUSED, STRATEGIES
    except ImportError:
        return [], {}
    return list(STRATEGIES), dict(REFUSED)
