"""``edgesplit run`` and ``edgesplit check``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from edgesplit.cli.access import URL, Ca, Cert, CertKey, ClientId, Mqtt, TopicPrefix, said
from edgesplit.cli.output import Json, Refused, mark_started, say, show, show_json, show_table


def register(app: typer.Typer) -> None:
    """Add the commands."""

    @app.command("run")
    def run_command(
        experiment: Annotated[Path, typer.Argument(help="The experiment file.")],
        overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example pipeline.micros=4")] = None,
        name: Annotated[str | None, typer.Option(help="The run's name: unique on its broker.")] = None,
        out: Annotated[Path | None, typer.Option(help="The run's folder (default: runs/NAME).")] = None,
        broker: Annotated[str | None, typer.Option(metavar="URL", help=f"{URL}; nodes join from elsewhere.")] = None,
        ca: Ca = None,
        cert: Cert = None,
        cert_key: CertKey = None,
        topic_prefix: TopicPrefix = None,
        client_id: ClientId = None,
        mqtt: Mqtt = None,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Prove, plan and simulate; start nothing.")] = False,
        verify: Annotated[bool, typer.Option("--verify", help="First compare two steps with one process.")] = False,
        deterministic: Annotated[
            bool, typer.Option("--deterministic", help="Torch's deterministic algorithms.")
        ] = False,
        resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
        log_format: Annotated[str, typer.Option(help="auto, plain or json: how progress is shown.")] = "auto",
        json_: Json = False,
    ) -> None:
        """Train an experiment: start the broker and the nodes, train, evaluate, checkpoint."""
        overrides = [*(overrides or []), *said(broker, ca, cert, cert_key, topic_prefix, client_id, mqtt)]
        _read(experiment, overrides)
        from edgesplit.launch import Launch, run

        if log_format not in {"auto", "plain", "json"}:
            raise typer.BadParameter(f"--log-format is {log_format!r}: auto, plain or json")
        launch = Launch(
            experiment=experiment,
            overrides=overrides,
            name=name,
            out=out,
            resume=resume,
            deterministic=deterministic,
            style=log_format,
            say=say,
            on_step=lambda done: mark_started(),
        )
        if verify:
            _verify(launch)
        if dry_run:
            _dry_run(launch, json_)
            return
        summary = run(launch)
        show_json(summary) if json_ else _show(summary)

    @app.command("check")
    def check_command(
        task: Annotated[str, typer.Argument(help="FILE.py:NAME, MODULE:NAME, or an experiment file.")],
        json_: Json = False,
    ) -> None:
        """Check a task in ten seconds: the chain, the loss weight, gradients, data, one split step."""
        from edgesplit.checking import check_task

        facts = []
        for fact in check_task(task):
            facts.append(fact)
            if not json_:
                show(f"{'ok    ' if fact.ok else 'FAILED'}  {fact.text}")
        if json_:
            show_json({"ok": all(f.ok for f in facts), "facts": [{"ok": f.ok, "text": f.text} for f in facts]})
        if not all(fact.ok for fact in facts):
            raise Refused(2)


def _read(experiment: Path, overrides: list[str]) -> None:
    """Find what is wrong in the files before torch is loaded, which takes seconds."""
    from edgesplit.experiment import Experiment
    from edgesplit.topology import Topology

    Topology.load(Experiment.load(experiment, overrides).topology_path)


def _verify(launch: Any) -> None:
    from edgesplit.launch import prepare
    from edgesplit.verify import verify

    experiment, loaded, _, plan = prepare(launch)
    checks = verify(plan, loaded.task, experiment)
    for check in checks:
        say(f"{'holds' if check.holds else 'FAILS'}  {check.name}: {check.note}")
    if not all(check.holds for check in checks):
        raise Refused(2)


def _dry_run(launch: Any, json_: bool) -> None:
    from edgesplit.launch import predicted_step, prepare

    experiment, _, _, plan = prepare(launch)
    seconds = predicted_step(plan, experiment)
    if json_:
        show_json({"plan": plan.to_json(), "predicted_s": seconds})
        return
    show(str(plan))
    if seconds is not None:
        show(f"predicted: {seconds:.4g} s a step")


def _show(summary: dict[str, Any]) -> None:
    show_table(
        "nodes",
        ["node", "tier", "pid", "layers"],
        [[n, v["tier"], v["pid"], ", ".join(v["layers"])] for n, v in summary["nodes"].items()],
    )
    show("")
    rows = [[link, f"{count / 1e6:,.2f} MB"] for link, count in summary["links"].items()]
    show_table("links", ["link", "sent"], rows)
    show("")
    for key, value in summary["metrics"].items():
        show(f"{key:24} {value:.4f}")
    show(f"{'rounds':24} {summary['rounds']}  ({summary['steps']} steps, {summary['skipped']} skipped)")
    show(f"{'samples/s':24} {summary['samples_per_s']:,.0f}")
    for key in ("bubble", "predicted_s", "measured_s"):
        if summary[key] is not None:
            show(f"{key:24} {summary[key]:.4g}")
    show(f"{'seconds':24} {summary['seconds']:.1f}")
    show(f"{'weights (sha256)':24} {summary['weights'][:16]}")
    show(f"{'folder':24} {summary['directory']}")
