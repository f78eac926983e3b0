"""``edgesplit bench``: the figures of docs/benchmarks.md, reproducible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from edgesplit.cli.output import Json, Refused, show, show_json


def register(app: typer.Typer) -> None:
    """Add the commands."""
    bench = typer.Typer(help="Reprint the figures of docs/benchmarks.md.", no_args_is_help=True)
    app.add_typer(bench, name="bench")

    @bench.callback()
    def bench_command() -> None:
        """Reprint the figures of docs/benchmarks.md."""

    @bench.command("pipeline")
    def pipeline_command(json_: Json = False) -> None:
        """Measured against simulated under emulation, and against torch.distributed.pipelining."""
        from edgesplit.bench.pipeline import measure

        _print(measure(), json_)

    @bench.command("faults")
    def faults_command(json_: Json = False) -> None:
        """Nodes that share work, one of them gone, and what keeping state costs."""
        from edgesplit.bench.faults import measure

        _print(measure(), json_)

    @bench.command("transport")
    def transport_command(json_: Json = False) -> None:
        """Our transport against raw paho, over mosquitto and the embedded broker."""
        from edgesplit.bench.transport import measure

        _print(measure(), json_)


def _print(found: Mapping[str, Any], json_: bool) -> None:
    if json_:
        show_json(found)
    else:
        for figure in found["figures"]:
            mark = "ok  " if figure["ok"] else "FAIL"
            show(f"{mark}  {figure['name']:50} {figure['value']:.4g} {figure['unit']}  (bound: {figure['bound']})")
    if not all(figure["ok"] for figure in found["figures"]):
        raise Refused(1)
