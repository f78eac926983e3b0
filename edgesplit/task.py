"""What is trained: the one object that a user writes. It says nothing about where.

No torch here: the annotations name its types for the reader and the type checker only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edgesplit.errors import TaskError, Within

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

COORDINATOR = "coordinator"

Metric = Callable[[Any, Any], tuple[Any, Any]]
"""``(output, target) -> (sum, count)``; a metric over a data set is all sums over all counts."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Who asks for data: one device, or the coordinator for the held-out set.

    Attributes:
        name: the node's name; ``"coordinator"`` for the held-out set.
        index: the device's place among the devices, from 0 (-1 for the coordinator).
        count: how many devices there are.
        seed: the run's seed, for a partition that every device computes alike.
        config: the node's free ``config:`` mapping of the topology file.
        data: the experiment's ``data:`` mapping, for example ``{"partition": {"name": "dirichlet", "alpha": 0.5}}``.
    """

    name: str
    index: int
    count: int
    seed: int
    config: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its loss and its data.

    Attributes:
        model: builds the model. Its initial weights are the coordinator's, under the run's seed;
            nodes build it for its structure and get weights by message.
        loss: ``(output, target) ->`` a scalar, the mean over ``weight(target)`` units.
        train: ``shard ->`` a Dataset (``__len__`` and ``__getitem__`` giving ``(x, target)``; shuffled, batched and
            resumed exactly) or an iterable of ``(x, target)`` batches (used as it is, the same on every pass).
        test: the same for evaluation; the coordinator's is the held-out set, a device's its local one.
        weight: ``target ->`` how many units its loss is a mean over: samples by default, tokens for a padded text.
        layers: where cuts may fall: names of submodules, or ``model -> modules``; None: the Sequential's children.
        optimizer: ``[(global parameter name, parameter), ...] ->`` a torch optimizer. None: the experiment file's.
        lr: global step -> factor on every group's learning rate. None: the experiment file's.
        clip_norm: the global gradient norm is clipped to this.
        metrics: name -> :data:`Metric`, computed in evaluation.
        collate: samples -> ``(x, target)``; None: torch's default_collate.
        train_mode: called after ``module.train()`` on each layer, for example to keep a frozen BatchNorm in eval mode.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    train: Callable[[Shard], Any]
    test: Callable[[Shard], Any] | None = None
    weight: Callable[[Any], float | Tensor] = len
    layers: Sequence[str] | Callable[[nn.Module], Sequence[nn.Module]] | None = None
    optimizer: Callable[[list[tuple[str, nn.Parameter]]], Optimizer] | None = None
    lr: Callable[[int], float] | None = None
    clip_norm: float | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    collate: Callable[[Sequence[Any]], Any] | None = None
    train_mode: Callable[[nn.Module], None] | None = None

    def weigh(self, target: Any) -> float:
        """Return ``weight(target)``, checked; the default counts the samples of a dict of named targets too.

        Raises:
            TaskError: it is no finite number from 0 on.
        """
        default: Any = len
        if self.weight is default and isinstance(target, Mapping):
            return float(len(next(iter(target.values()))))
        with Within("Task.weight"):
            weight = float(self.weight(target))
        if not (math.isfinite(weight) and weight >= 0):
            raise TaskError(f"task.weight gives {weight}: it must count the units that the loss is a mean over")
        return weight

    def measure(self, output: Any, target: Any) -> dict[str, tuple[float, float]]:
        """Return the metrics by name, each as (sum, count). An exception of a metric gets its name as a note."""
        found = {}
        for name, metric in self.metrics.items():
            with Within(f"metric {name!r}"):
                total, count = metric(output, target)
                found[name] = float(total), float(count)
        return found
