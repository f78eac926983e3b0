"""A user's experiment as a fleet of threads, on batches given by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgesplit.assembly import Model, build_model
from edgesplit.data import Batch, Feed
from edgesplit.errors import TaskError
from edgesplit.experiment import Experiment
from edgesplit.placement import feed_of
from edgesplit.plan import Plan
from edgesplit.segments.torch import from_arrays
from edgesplit.session import Session
from edgesplit.task import Shard, Task
from edgesplit.topology import Topology
from edgesplit.verify.reference import Arrays, Batches


def shards(plan: Plan, experiment: Experiment) -> list[Shard]:
    """Return the shard of each of the plan's devices, as its node is told it."""
    topology = Topology.from_dict(plan.topology) if plan.topology is not None else None
    devices = [route.device for route in plan.routes]
    return [
        Shard(
            name=device,
            index=index,
            count=len(devices),
            seed=experiment.seed,
            config=topology.nodes[device].config if topology else {},
            data=experiment.data.model_dump(exclude_none=True),
        )
        for index, device in enumerate(devices)
    ]


def first_batches(plan: Plan, model: Model, experiment: Experiment, count: int) -> list[dict[str, Batch]]:
    """Return the first batches of every device that has any.

    Raises:
        TaskError: no device has samples.
    """
    found: list[dict[str, Batch]] = [{} for _ in range(count)]
    for shard in shards(plan, experiment):
        feed: Feed | None = feed_of(model, experiment, shard)
        for turn, step in enumerate(found if feed is not None and feed.sizes() else ()):
            step[shard.name] = feed.batch(*divmod(turn, len(feed.sizes())))  # type: ignore[union-attr]
    if not found[0]:
        raise TaskError("no device has any samples: Task.train gave nothing for all of them")
    return found


def same_batch(a: Batch, b: Batch) -> bool:
    """Whether two batches are the same bit for bit."""
    return all(
        part.keys() == other.keys() and all(np.array_equal(part[n], other[n], equal_nan=False) for n in part)
        for part, other in zip(a, b, strict=True)
    )


@dataclass(frozen=True)
class Trained:
    """What a fleet gave.

    Attributes:
        losses: by step.
        weights: the parameters at the end.
        start: and before the first step.
        rates: factor on the learning rates by step.
    """

    losses: list[float]
    weights: Arrays
    start: Arrays
    rates: list[float]


def run_fleet(plan: Plan, task: Task, experiment: Experiment, batches: Sequence[Batches]) -> Trained:
    """Train the fleet, as threads over memory; replicas become one after each step."""
    model = build_model(task, experiment)
    start = model.weights()[0]
    with Session(plan, task, experiment=experiment, model=model) as session:
        lr, losses = session.training.drawn.lr, []
        for step in batches:
            given = {device: tuple(from_arrays(part) for part in batch) for device, batch in step.items()}
            losses.append(session.step(given))
            session.federate()
        weights = {name: session.training.params[name] for name in start}
        return Trained(losses, weights, start, [lr(index) for index in range(len(batches))])


def distance(a: Arrays, b: Arrays) -> float:
    """Return the Euclidean distance of two models, relative to the second's norm; infinite where not finite."""
    apart = math.sqrt(sum(float(np.square(a[name].astype(np.float64) - b[name]).sum()) for name in b))
    norm = math.sqrt(sum(float(np.square(value.astype(np.float64)).sum()) for value in b.values()))
    return apart / (norm or 1.0) if math.isfinite(apart) and math.isfinite(norm) else math.inf
