"""What it costs, while nothing happens, that nodes keep their state after every step: with it and without, in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
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
from edgesplit.session import Session
from edgesplit.topology import Node, Topology

TASK = "edgesplit.bench.tasks:DEMO"
HOME = Topology.of(
    [
        Node(name="cloud", tier="cloud"),
        Node(name="edge", tier="edge", parent="cloud"),
        Node(name="pi", tier="device", parent="edge"),
    ]
)
STARTS, PAIRS, BLOCK = 6, 25, 12
"""Starts of both fleets, because starts of the same code differ; pairs of blocks of each start, after one that is not
judged; steps of a block, of which the first is not.

Of two fleets of the very same options the one that was started first took 3 % longer (150 pairs, five starts): so each
side is the first in half of the starts.
"""

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
    for start in range(STARTS):
        done: tuple[list[StepDone], list[StepDone]] = ([], [])
        with ExitStack() as stack:
            fleets: dict[bool, Session] = {}
            for keep in (True, False) if start % 2 else (False, True):
                fleets[keep] = stack.enter_context(
                    processes(url, plan, model, experiment, done[keep].append, keep=keep)
                )
            for keep, session in fleets.items():
                our_block(session, done[keep])
            for pair in range(PAIRS):
                for keep in (True, False) if pair % 2 else (False, True):  # neither always goes first
                    (kept if keep else bare).append(spread(our_block(fleets[keep], done[keep]))[1])
    say(f"keeping state: {1e3 * spread(kept)[1]:.2f} ms a step, without {1e3 * spread(bare)[1]:.2f} ms")
    return overhead_figures(kept, bare), {"keeping_s": kept, "not_keeping_s": bare}


def overhead_figures(kept: Sequence[float], bare: Sequence[float]) -> list[Figure]:
    """The median of the pairs' ratios, less one."""
    values = [a / b - 1.0 for a, b in zip(kept, bare, strict=True)]
    return [median_figure("overhead_fault_free", values, most=MOST)]
