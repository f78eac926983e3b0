"""What a change of plan moves: bytes beyond those of a round without one, over those of the layers that move."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from edgesplit.assembly import build_model
from edgesplit.bench.figures import Figure
from edgesplit.options import options
from edgesplit.plan import Plan, Route, Stage
from edgesplit.session import Session
from edgesplit.task import Task

WIDTH = 512
LAYERS = 8
"""Linear layers of a MB each: the messages that say what is to be done are small beside them."""


def _points(shard: Any) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(shard.seed)
    x = torch.randn(16, WIDTH, generator=generator)
    return torch.utils.data.TensorDataset(x, torch.randn(16, WIDTH, generator=generator))


TASK = Task(
    model=lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))),
    loss=F.mse_loss,
    train=_points,
)


def _plan(*cuts: int) -> Plan:
    bounds = [0, *cuts, LAYERS]
    stages = tuple(Stage(n, a, b) for n, a, b in zip("abc", bounds, bounds[1:], strict=False))
    return Plan(tuple(str(i) for i in range(LAYERS)), (Route("a", stages),))


def plan_change(url: str, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Count the bytes of a round with and without a change of plan, in a fleet of threads: they are the same anywhere.

    Args:
        url: a broker's; not needed.
        say: told what is going on.
    """
    say("a change of plan")
    before, after = _plan(2, 5), _plan(3, 6)  # layer 2 goes from b to a, layer 5 from c to b
    with tempfile.TemporaryDirectory(prefix="edgesplit-bench-") as directory:
        experiment = options(
            rounds=4, batch_size=16, optimizer={"name": "sgd", "lr": 0.01, "momentum": 0.9}, evaluate={"every": 0}
        )
        model = build_model(TASK, experiment)
        with Session(before, TASK, experiment=experiment, model=model, directory=Path(directory)) as session:
            totals = []
            for number in range(3):
                if number == 2:
                    session.replan(after)
                session.fit(1)
                totals.append(sum(session.links().values()))
            params, _ = session.training.names.of([2, 5])
            held = 2 * sum(session.training.params[name].nbytes for name in params)  # parameters and momentum
    plain, changed = totals[1] - totals[0], totals[2] - totals[1]
    figure = Figure("plan_change_bytes_ratio", (changed - plain) / held, "ratio", most=1.1)
    return [figure], {"round_bytes": plain, "round_bytes_with_change": changed, "layers_bytes": held}
