"""``edgesplit plan`` and ``edgesplit simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from edgesplit.cli.output import Json, show, show_json


def register(app: typer.Typer) -> None:
    """Add the commands."""

    @app.command("plan")
    def plan_command(
        topology: Annotated[Path, typer.Argument(help="The topology file.")],
        task: Annotated[str, typer.Argument(help="FILE.py:NAME, MODULE:NAME, or a profile (.json).")],
        output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan here.")] = None,
        planner: Annotated[str | None, typer.Option(help="even, or manual (with --cuts).")] = None,
        cuts: Annotated[str | None, typer.Option(help="Layers that begin a stage, by index or name: 3,6")] = None,
        tiers: Annotated[str | None, typer.Option(help="Tiers of the stages: device,edge,cloud")] = None,
        batch_size: Annotated[int, typer.Option(help="Samples of a device in a step.", min=1)] = 32,
        json_: Json = False,
    ) -> None:
        """Decide which layers run where."""
        from edgesplit.topology import Topology

        fleet = Topology.load(topology)
        chosen = planner or ("manual" if cuts else "even")
        wanted = [_cut(text) for text in cuts.split(",")] if cuts else None
        names = tiers.split(",") if tiers else None
        made = _plan(task, fleet, chosen, wanted, names, batch_size)
        if output is not None:
            made.save(output)
        show_json(made.to_json()) if json_ else show(str(made))

    @app.command("replan")
    def replan_command(
        run: Annotated[Path, typer.Argument(help="The run's folder, runs/NAME.")],
        plan: Annotated[Path, typer.Argument(help="A plan.json for the same model.")],
        json_: Json = False,
    ) -> None:
        """Have a run go on by another plan when its next round begins."""
        from edgesplit.errors import RunError
        from edgesplit.keeping import NEXT_PLAN
        from edgesplit.plan import Plan

        made = Plan.load(plan)
        if not (run / "events.jsonl").exists():
            raise RunError(f"{run} is no run's folder: name the one that 'edgesplit run' printed")
        partial = run / f".{NEXT_PLAN}"
        made.save(partial)
        partial.replace(run / NEXT_PLAN)
        told = {"run": str(run), "nodes": list(made.nodes())}
        show_json(told) if json_ else show(f"{run} takes up this plan when its next round begins:\n{made}")

    @app.command("simulate")
    def simulate_command(
        plan: Annotated[Path, typer.Argument(help="A plan.json; it embeds topology and profile.")],
        method: Annotated[str, typer.Option(help="The pipeline method.")] = "1f1b",
        micros: Annotated[int, typer.Option(help="Micro-batches of a device in a step.", min=1)] = 4,
        samples: Annotated[int, typer.Option(help="Samples of a micro-batch.", min=1)] = 1,
        steps: Annotated[int, typer.Option(help="Steps.", min=1)] = 1,
        window: Annotated[int | None, typer.Option(help="Actions a node looks ahead.", min=1)] = None,
        trace: Annotated[Path | None, typer.Option(help="Write a Perfetto trace here.")] = None,
        json_: Json = False,
    ) -> None:
        """Run a plan on a clock of its own: how long a step takes, and who waits."""
        from edgesplit.methods import simulate
        from edgesplit.observe.report import gantt_text
        from edgesplit.observe.trace import write_trace
        from edgesplit.plan import Plan

        timeline = simulate(Plan.load(plan), method=method, micros=micros, samples=samples, steps=steps, window=window)
        if trace is not None:
            write_trace(trace, timeline.events, timeline.transfers)
        if json_:
            busy = timeline.busy
            bytes_ = {f"{a}->{b}": n for (a, b), n in timeline.link_bytes.items()}
            show_json({"seconds": timeline.makespan, "bubble": timeline.bubble, "busy_s": busy, "link_bytes": bytes_})
            return
        show(gantt_text(timeline.events))
        show(f"{timeline.makespan:.6g} s for {steps} step(s), bubble {timeline.bubble:.3f}")


def _cut(text: str) -> int | str:
    return int(text) if text.strip().isdigit() else text.strip()


def _plan(task: str, fleet: Any, planner: str, cuts: Any, tiers: Any, batch_size: int) -> Any:
    import json

    if task.endswith(".json"):
        from edgesplit.errors import PlanError
        from edgesplit.planner import plan
        from edgesplit.profile import Profile

        try:
            data = json.loads(Path(task).read_text(encoding="utf-8"))
        except ValueError as error:
            raise PlanError(f"{task} is no JSON: {error}") from None
        return plan(Profile.from_json(data), fleet, planner=planner, cuts=cuts, tiers=tiers)
    from edgesplit.loading import load_task
    from edgesplit.placement import plan as plan_task

    loaded = load_task(task)
    keywords = {"tiers": tiers} if tiers else {}
    return plan_task(loaded.task, fleet, planner=planner, cuts=cuts, batch_size=batch_size, **keywords)
