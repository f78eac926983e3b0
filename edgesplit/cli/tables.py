"""``edgesplit methods`` and ``schema``."""

from __future__ import annotations

import typer

from edgesplit.cli.output import Json, show, show_json, show_table


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


def _strategies() -> tuple[list[str], dict[str, str]]:
    try:
        from edgesplit.federated import REFUSED, STRATEGIES
    except ImportError:
        return [], {}
    return list(STRATEGIES), dict(REFUSED)
