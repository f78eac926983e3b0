"""Predicted against measured: a device, an edge server and a cloud, emulated by three processes over a real broker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgesplit.assembly import Model, build_model
from edgesplit.bench.figures import Figure, median_figure, spread
from edgesplit.bench.running import processes
from edgesplit.bench.tasks import BATCH, CHAIN, CHAIN_CUTS, LR, MOMENTUM
from edgesplit.costs import LayerTimes
from edgesplit.errors import PlanError
from edgesplit.experiment import Experiment
from edgesplit.loading import load_task
from edgesplit.methods import simulate
from edgesplit.observe.report import step_seconds
from edgesplit.placement import placement
from edgesplit.plan import Plan
from edgesplit.topology import Node, Topology

MICROS = 8
WARM, STEPS = 3, 10
"""Steps that are not judged, and those that are."""

SLOWEST_S = {"pi": 0.055, "edge": 0.050, "cloud": 0.050}
"""Node -> seconds of its slowest action on a micro-batch; each node's ``gflops`` is set to what makes it so."""

TASK = "edgesplit.bench.tasks:CHAIN"
NODES = (
    Node(name="cloud", tier="cloud"),
    Node(name="edge", tier="edge", parent="cloud", up_mbps=400, down_mbps=400, latency_ms=8),
    Node(name="pi", tier="device", parent="edge", up_mbps=200, down_mbps=200, latency_ms=4),
)
BROKER_AT = "edge"
SEQUENTIAL = "sequential"
"""Split learning with one micro-batch a step: no two nodes ever compute at once."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is predicted and then run: a method and its number of micro-batches."""

    name: str
    method: str
    micros: int


CASES = (Case("gpipe", "gpipe", MICROS), Case("1f1b", "1f1b", MICROS), Case(SEQUENTIAL, "gpipe", 1))


def options(case: Case) -> Experiment:
    """Return the options of a case."""
    values = {
        "task": TASK,
        "topology": "none",
        "plan": {"planner": "manual", "cuts": list(CHAIN_CUTS)},
        "pipeline": {"method": case.method, "micros": case.micros},
        "batch_size": BATCH,
        "steps_per_round": WARM + STEPS,
        "optimizer": {"name": "sgd", "lr": LR, "momentum": MOMENTUM},
        "evaluate": {"every": 0},
        "emulate": True,
    }
    return Experiment.from_dict(values, source="bench pipeline")


def slowed(plan: Plan, slowest: Mapping[str, float], samples: int) -> Plan:
    """Give the plan's nodes the speed at which their slowest action on ``samples`` samples takes so many seconds.

    Args:
        plan: with a profile and a topology whose nodes have no ``gflops``.
        slowest: node -> seconds.
    """
    if plan.topology is None or plan.profile is None:
        raise PlanError("a plan without a profile and a topology has no speeds to set")
    topology = Topology.from_dict(plan.topology)
    times = LayerTimes(plan.profile, topology)
    nodes = []
    for node in topology.nodes.values():
        stage = next((stage for route in plan.routes for stage in route.stages if stage.node == node.name), None)
        if stage is None:  # it is there to connect others
            nodes.append(node)
            continue
        real = max(times.seconds(node.name, op, stage.start, stage.stop) for op in "FB") * samples
        nodes.append(replace(node, gflops=plan.profile["gflops"] * real / slowest[node.name]))
    return replace(plan, topology=Topology.of(nodes, topology.links, topology.broker_at).to_dict())


def predicted_steps(plan: Plan, case: Case) -> list[float]:
    """Simulate a case and return the seconds of each judged step, from the end of the step before it."""
    timeline = simulate(plan, method=case.method, micros=case.micros, samples=BATCH // case.micros, steps=WARM + STEPS)
    return judged(step_seconds(timeline.events))


def judged(steps: Mapping[int, float]) -> list[float]:
    """Return the seconds of the steps after the first :data:`WARM`."""
    return [seconds for step, seconds in sorted(steps.items()) if step - min(steps) >= WARM]


def measured_steps(url: str, plan: Plan, model: Model, case: Case) -> list[float]:
    """Run a case and return the seconds of each judged step, from the end of the step before it."""
    with processes(url, plan, model, options(case)) as session:
        session.fit()
        return judged(step_seconds(session.recorder.events))


def emulate(url: str, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Predict every case, then run it; return the figures, and seconds by case."""
    model = build_model(CHAIN, options(CASES[0]), source=load_task(TASK).source)
    plan = slowed(
        placement(model, Topology.of(NODES, broker_at=BROKER_AT), options(CASES[0])), SLOWEST_S, BATCH // MICROS
    )
    predicted = {case.name: predicted_steps(plan, case) for case in CASES}
    for name, steps in predicted.items():
        say(f"predicted: {name} {1e3 * spread(steps)[1]:.1f} ms a step")
    measured = {}
    for case in CASES:
        measured[case.name] = measured_steps(url, plan, model, case)
        say(f"measured:  {case.name} {1e3 * spread(measured[case.name])[1]:.1f} ms a step")
    return figures(predicted, measured), {"predicted_s": predicted, "measured_s": measured}


def figures(predicted: Mapping[str, list[float]], measured: Mapping[str, list[float]]) -> list[Figure]:
    """Compare seconds a step by case: measured over predicted, and the same of the speed-up over one micro-batch."""
    found = []
    for name in predicted:
        if name == SEQUENTIAL:
            continue
        ratios = [b / a for a, b in zip(predicted[name], measured[name], strict=True)]
        found.append(median_figure(f"emulated_step_measured_over_simulated_{name}", ratios, least=0.98, most=1.08))
    for name in predicted:
        if name == SEQUENTIAL:
            continue
        speedup = [spread(steps[SEQUENTIAL])[1] / spread(steps[name])[1] for steps in (predicted, measured)]
        found.append(
            Figure(f"emulated_speedup_measured_over_simulated_{name}", speedup[1] / speedup[0], "ratio", 0.9, 1.1)
        )
    return found
