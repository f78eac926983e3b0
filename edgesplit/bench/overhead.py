"""What it costs, while nothing happens, that nodes keep their state after every step: with it and without, in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from edgesplit.assembly import build_model
from edgesplit.bench.figures import Figure, median_figure, spread
from edgesplit.bench.running import processes
from edgesplit.bench.tasks import BATCH, DEMO, DEMO_CUTS, LR, MOMENTUM
from edgesplit.bench.versus import our_block
from edgesplit.effects import StepDone
from edgesplit.experiment import Experiment
from edgesplit.loading import load_task
from edgesplit.placement import placement
from edgesplit.topology import Node, Topology

TASK = "edgesplit.bench.tasks:DEMO"
HOME = Topology.of(
    [
        Node(name="cloud", tier="cloud"),
        Node(name="edge", tier="edge", parent="cloud"),
        Node(name="pi", tier="device", parent="edge"),
    ]
)
STARTS, PAIRS, BLOCK = 5, 30, 12
"""Starts of both fleets, because starts of the same code differ; pairs of blocks of each start, after one that is not
judged; steps of a block, of which the first is not."""

MOST = 0.03


def options() -> Experiment:
    """Return the options of both sides."""
    values = {
        "task": TASK,
        "topology": "none",
        "plan": {"planner": "manual", "cuts": list(DEMO_CUTS)},
        "pipeline": {"micros": 2},
        "batch_size": BATCH,
        "rounds": PAIRS + 1,
        "steps_per_round": BLOCK,
        "optimizer": {"name": "sgd", "lr": LR, "momentum": MOMENTUM},
        "evaluate": {"every": 0},
    }
    return Experiment.from_dict(values, source="bench faults")


def overhead(url: str, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Take blocks of steps with and without keeping, in turn; each block's median counts."""
    experiment = options()
    model = build_model(DEMO, experiment, source=load_task(TASK).source)
    plan = placement(model, HOME, experiment)
    kept: list[float] = []
    bare: list[float] = []
    for _ in range(STARTS):
        done: tuple[list[StepDone], list[StepDone]] = ([], [])
        with (
            processes(url, plan, model, experiment, done[0].append) as keeping,
            processes(url, plan, model, experiment, done[1].append, keep=False) as forgetting,
        ):
            our_block(keeping, done[0])
            our_block(forgetting, done[1])
            for pair in range(PAIRS):
                for side in (0, 1) if pair % 2 else (1, 0):  # neither always goes first
                    session, blocks = ((keeping, kept), (forgetting, bare))[side]
                    blocks.append(spread(our_block(session, done[side]))[1])
    say(f"keeping state: {1e3 * spread(kept)[1]:.2f} ms a step, without {1e3 * spread(bare)[1]:.2f} ms")
    return overhead_figures(kept, bare), {"keeping_s": kept, "not_keeping_s": bare}


def overhead_figures(kept: Sequence[float], bare: Sequence[float]) -> list[Figure]:
    """The median of the pairs' ratios, less one."""
    values = [a / b - 1.0 for a, b in zip(kept, bare, strict=True)]
    return [median_figure("overhead_fault_free", values, most=MOST)]
