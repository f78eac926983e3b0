"""Edges that share: four of unequal speed against what they could do, and three of four when one is gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from edgesplit.assembly import Model, build_model
from edgesplit.bench.emulated import slowed
from edgesplit.bench.figures import Figure, median_figure, spread
from edgesplit.bench.running import Mortal, mortal, processes
from edgesplit.bench.tasks import BATCH, LR, MOMENTUM, SHARED, SHARED_CUTS
from edgesplit.costs import LayerTimes
from edgesplit.effects import StepDone
from edgesplit.errors import RunError
from edgesplit.experiment import Experiment
from edgesplit.loading import load_task
from edgesplit.observe.report import step_seconds
from edgesplit.placement import placement
from edgesplit.plan import Plan
from edgesplit.session import Session
from edgesplit.topology import Node, Topology

TASK = "edgesplit.bench.tasks:SHARED"
EDGES = ("edge-1", "edge-2", "edge-3", "edge-4")
MICROS = 16
"""Micro-batches of each of the four devices."""

WARM, STEPS, STEPS_OFF, RECOVERY = 3, 4, 2, 2
"""Steps that are not judged, those that are, those without sharing (which take twice as long), those after a loss."""

UNEQUAL = dict(zip(EDGES, (0.05, 0.1, 0.2, 0.2), strict=True))
EQUAL = dict.fromkeys(EDGES, 0.1)
"""Edge -> seconds of its slower action, the backward, on a micro-batch."""

DEVICE_S = 0.01
LEAST_OF_IDEAL, LEAST_REMAINING = 0.95, 0.9


def options(tiers: Sequence[str], steps: int, **more: Any) -> Experiment:
    """Return the options of a run in which these tiers share."""
    values = {
        "task": TASK,
        "topology": "none",
        "tiers": ["device", "edge"],
        "plan": {"planner": "manual", "cuts": list(SHARED_CUTS)},
        "pipeline": {"micros": MICROS, "share": list(tiers)},
        "federation": {"every": "step"},
        "batch_size": BATCH,
        "steps_per_round": WARM + steps,
        "optimizer": {"name": "sgd", "lr": LR, "momentum": MOMENTUM},
        "evaluate": {"every": 0},
        "emulate": True,
        **more,
    }
    return Experiment.from_dict(values, source="bench faults")


def make_plan(model: Model, seconds: Mapping[str, float]) -> Plan:
    """Plan four devices below four edges, emulated at such a speed.

    Args:
        seconds: edge -> of its slower action on a micro-batch.
    """
    nodes = [Node(name="cloud", tier="cloud")]
    nodes += [Node(name=edge, tier="edge", parent="cloud") for edge in EDGES]
    nodes += [Node(name=f"pi-{i}", tier="device", parent=edge) for i, edge in enumerate(EDGES, start=1)]
    made = _rounded(placement(model, Topology.of(nodes), options(["edge"], STEPS)))
    slowest = {**dict.fromkeys((route.device for route in made.routes), DEVICE_S), **seconds}
    return slowed(made, slowest, BATCH // MICROS)


def _rounded(plan: Plan) -> Plan:
    """Return the plan with round times for its layers: those of such small ones cannot be measured well."""
    if plan.profile is None:
        return plan
    times = dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s"), 1e-3)
    return replace(plan, profile={**plan.profile, "layers": [{**la, **times} for la in plan.profile["layers"]]})


def capacity(plan: Plan) -> float:
    """Return the samples a second, forward and backward, of all edges of a plan together."""
    if plan.profile is None or plan.topology is None:
        return 0.0
    times = LayerTimes(plan.profile, Topology.from_dict(plan.topology))
    stages = {route.stages[-1].node: route.stages[-1] for route in plan.routes}.values()
    return sum(1 / sum(times.seconds(node, op, start, stop) for op in "FB") for node, start, stop in stages)


def rates(url: str, plan: Plan, model: Model, tiers: Sequence[str], steps: int = STEPS) -> list[float]:
    """Run a plan and return the samples a second of each judged step."""
    with processes(url, plan, model, options(tiers, steps)) as session:
        session.fit()
        return _rates(session, plan)


def _rates(session: Session, plan: Plan) -> list[float]:
    seconds = step_seconds(session.recorder.events)
    return [len(plan.routes) * BATCH / seconds[step] for step in sorted(seconds)[WARM:]]


def share(url: str, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Run four edges of speeds 4:2:1:1 with and without sharing."""
    model = _model()
    plan = make_plan(model, UNEQUAL)
    ideal = capacity(plan)
    on, off = rates(url, plan, model, ["edge"]), rates(url, plan, model, [], STEPS_OFF)
    say(f"4:2:1:1: {spread(on)[1]:.1f} samples a second with sharing, {spread(off)[1]:.1f} without, of {ideal:.1f}")
    return share_figures(ideal, on, off), {"ideal": ideal, "sharing": on, "not_sharing": off}


def share_figures(ideal: float, on: Sequence[float], off: Sequence[float]) -> list[Figure]:
    """Compare samples a second with those that the edges could do."""
    return [
        median_figure("share_speeds_4_2_1_1_of_ideal", [rate / ideal for rate in on], least=LEAST_OF_IDEAL),
        median_figure("not_sharing_speeds_4_2_1_1_of_ideal", [rate / ideal for rate in off]),
    ]


def killed(url: str, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Run four equal edges, kill one of them in the middle of the round, and go on with three."""
    model = _model()
    plan = make_plan(model, EQUAL)
    last = WARM + STEPS - 1  # step that all four have done

    def on_step(done: StepDone, fleet: Mortal) -> None:
        if done.step == last:
            fleet.kill(EDGES[-1])

    experiment = options(["edge"], 2 * STEPS + RECOVERY, on_node_lost="continue")
    with mortal(url, plan, model, experiment, on_step) as session:
        session.fit()
        left = EDGES[-1] not in session.plan.nodes()
        found = _rates(session, plan)
    if not left:
        raise RunError(f"{EDGES[-1]} was killed after step {last}, and the plan still has it")
    before, after = found[:STEPS], found[STEPS + RECOVERY :]
    say(f"four equal edges: {spread(before)[1]:.1f} samples a second, three of them {spread(after)[1]:.1f}")
    return killed_figures(before, after), {
        "four": before,
        "recovering": found[STEPS : STEPS + RECOVERY],
        "three": after,
    }


def killed_figures(before: Sequence[float], after: Sequence[float]) -> list[Figure]:
    """Compare samples a second after a loss with three quarters of those before it."""
    remaining = 0.75 * spread(before)[1]
    name = "one_of_four_replicas_killed_of_remaining_capacity"
    return [median_figure(name, [rate / remaining for rate in after], least=LEAST_REMAINING)]


def _model() -> Model:
    return build_model(SHARED, options(["edge"], STEPS), source=load_task(TASK).source)
