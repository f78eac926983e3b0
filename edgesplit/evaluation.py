"""Evaluates a gathered model in one process."""

from __future__ import annotations

from typing import Any

import torch

from edgesplit.data import TEST_EPOCH, Feed
from edgesplit.errors import Within
from edgesplit.kit import Kit
from edgesplit.segments.torch import from_arrays
from edgesplit.splitting import Chain, modes_kept
from edgesplit.task import COORDINATOR, Task

BATCH = 250
"""Samples at a time; the result is a sum over samples and does not depend on it, but for rounding."""


def evaluate(chain: Chain, task: Task, kit: Kit, source: Any) -> dict[str, float]:
    """Return the loss and the Task's metrics over a data set, each a mean over its own count.

    Args:
        source: a Dataset or an iterable of ``(x, target)`` batches.
    """
    feed = Feed(source, device=COORDINATOR, batch_size=BATCH, seed=0, collate=kit.collate, to_arrays=kit.to_arrays)
    totals: dict[str, tuple[float, float]] = {}

    def add(name: str, value: float, count: float) -> None:
        before = totals.get(name, (0.0, 0.0))
        totals[name] = before[0] + value, before[1] + count

    with torch.no_grad(), modes_kept(chain):
        chain.model.eval()
        for index in range(len(feed.sizes())):
            x, target = (from_arrays(part) for part in feed.batch(TEST_EPOCH, index))
            output = chain.model(x)
            weight = task.weigh(target)
            if weight:
                with Within("Task.loss"):
                    add("loss", float(task.loss(output, target)) * weight, weight)
            for name, measured in task.measure(output, target).items():
                add(name, *measured)
    return {name: value / count for name, (value, count) in totals.items() if count}
