"""One process, plain torch: what a step of the whole fleet must equal.

Nothing here knows of layers, segments or micro-batches. Random masks come from ``KeyedRandomness`` on the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from edgesplit.segments.base import Samples
from edgesplit.segments.masks import KeyedRandomness
from edgesplit.task import Task

Batches = Mapping[str, tuple[Any, Any]]
"""Device -> its batch ``(x, target)`` of a step, in device order: tensors or flat dicts of tensors."""


class Joint(NamedTuple):
    """A step on the joint batch: the mean loss, its weight, and the mean's gradients (None: frozen or unused)."""

    loss: float
    weight: float
    grads: dict[str, Tensor | None]


def joined(values: Sequence[Any]) -> Any:
    """Concatenate batches along the samples."""
    if isinstance(values[0], Mapping):
        return {name: torch.cat([value[name] for value in values]) for name in values[0]}
    return torch.cat(list(values))


def size(value: Any) -> int:
    return len(next(iter(value.values())) if isinstance(value, Mapping) else value)


def joint_step(model: nn.Module, task: Task, batches: Batches, *, seed: int = 0, step: int = 0) -> Joint:
    """Forward and backward of ``model`` in training mode on the joint batch; its buffers are updated."""
    x = joined([x for x, _ in batches.values()])
    target = joined([target for _, target in batches.values()])
    parts = tuple((device, 0, size(x)) for device, (x, _) in batches.items())
    model.train()
    if task.train_mode is not None:
        task.train_mode(model)
    with KeyedRandomness(model.named_modules(), Samples(seed, step, parts)):
        output = model(x)
    loss = task.loss(output, target)
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    grads: dict[str, Tensor | None] = {name: None for name, _ in model.named_parameters()}
    grads.update(zip(params, found, strict=True))
    return Joint(float(loss.detach()), float(task.weight(target)), grads)


class Trained(NamedTuple):
    """A run in one process: by step the mean loss and the weights (parameters and buffers) after it."""

    losses: list[float]
    weights: list[dict[str, Tensor]]


def train_single(
    task: Task,
    steps: Iterable[tuple[int, Batches]],
    optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer] | None = None,
    *,
    model: nn.Module | None = None,
    lr: Callable[[int], float] | None = None,
    clip_norm: float | None = None,
    seed: int = 0,
) -> Trained:
    """Train with ``torch.optim`` on the joint batch of each step.

    Args:
        task: its model, loss, weight and, where an argument is None, optimizer, lr and clip_norm.
        steps: ``(global step, batches)``.
        optimizer: named parameters -> a torch optimizer.
        model: trained in place, with the weights that it has; None: ``task.model()``.
        lr: global step -> factor on the groups' learning rates.
        clip_norm: bound of the global gradient norm.
        seed: the run's.
    """
    model = task.model() if model is None else model
    make, factor = optimizer or task.optimizer, lr or task.lr
    bound = task.clip_norm if clip_norm is None else clip_norm
    if make is None:
        raise ValueError("neither the call nor the task has an optimizer")
    rule = make(list(model.named_parameters()))
    base = [group["lr"] for group in rule.param_groups]
    trained = Trained([], [])
    for step, batches in steps:
        joint = joint_step(model, task, batches, seed=seed, step=step)
        for name, param in model.named_parameters():
            param.grad = joint.grads[name]
        if bound is not None:
            nn.utils.clip_grad_norm_(model.parameters(), bound)
        for group, start in zip(rule.param_groups, base, strict=True):
            group["lr"] = start * (factor(step) if factor else 1.0)
        rule.step()
        trained.losses.append(joint.loss)
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        trained.weights.append({name: tensor.detach().clone() for name, tensor in tensors.items()})
    return trained
