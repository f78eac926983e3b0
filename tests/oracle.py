"""One process, plain torch: what a step of the whole fleet must equal.

Nothing here knows of layers, segments or micro-batches. Random masks come from ``KeyedRandomness`` on the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from edgesplit.segments.base import Samples
from edgesplit.segments.masks import KeyedRandomness
from edgesplit.task import Task

Batches = Mapping[str, tuple[Any, Any]]
"""Device -> its batch ``(x, target)`` of a step, in device order: tensors or flat dicts of tensors."""

Factory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""Named parameters -> a torch optimizer."""

Homes = Mapping[str, Mapping[str, str]]
"""Device -> name of a parameter or buffer -> the node whose replica of it that device's samples use."""


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
    optimizer: Factory | None = None,
    *,
    model: nn.Module | None = None,
    lr: Callable[[int], float] | None = None,
    clip_norm: float | None = None,
    seed: int = 0,
) -> Trained:
    """Train with ``torch.optim`` on the joint batch of each step.

    A step whose gradients are not all finite changes nothing; it has used its number and its data.

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
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        joint = joint_step(model, task, batches, seed=seed, step=step)
        if finite(joint.grads):
            for name, param in model.named_parameters():
                param.grad = joint.grads[name]
            if bound is not None:
                nn.utils.clip_grad_norm_(model.parameters(), bound)
            for group, start in zip(rule.param_groups, base, strict=True):
                group["lr"] = start * (factor(step) if factor else 1.0)
            rule.step()
        else:
            put(model, buffers)
        trained.losses.append(joint.loss)
        trained.weights.append(state_of(model))
    return trained


def finite(grads: Mapping[str, Tensor | None]) -> bool:
    return all(grad is None or bool(grad.isfinite().all()) for grad in grads.values())


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters and buffers."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def put(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give ``model`` these parameters and buffers."""
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in values:
                tensor.copy_(values[name])


class Replica:
    """What one node holds: parameters, buffers and an optimizer of its own."""

    def __init__(self, model: nn.Module, names: set[str], factory: Factory) -> None:
        trained = {name: param.requires_grad for name, param in model.named_parameters()}
        state = {name: value for name, value in state_of(model).items() if name in names}
        self.params = {n: nn.Parameter(v, requires_grad=trained[n]) for n, v in state.items() if n in trained}
        self.buffers = {n: v for n, v in state.items() if n not in trained}
        self.named = [(name, param) for name, param in self.params.items() if param.requires_grad]
        self.rule = factory(self.named) if self.named else None
        self.base = [group["lr"] for group in self.rule.param_groups] if self.rule else []
        self.passed = dict.fromkeys(state, 0.0)  # weight in this round
        self.sums: dict[str, Tensor] = {}  # of this step
        self.weights: dict[str, float] = {}

    def add(self, name: str, grad: Tensor | None, weight: float) -> None:
        self.weights[name] = self.weights.get(name, 0.0) + weight
        if grad is not None:
            self.sums[name] = self.sums.get(name, torch.zeros_like(grad)) + grad * weight

    def update(self, factor: float, clip: float) -> None:
        for name, weight in self.weights.items():
            self.passed[name] += weight
        if self.rule is None:
            return
        for name, param in self.named:
            param.grad = self.sums[name] / self.weights[name] * clip if name in self.sums else None
        for group, start in zip(self.rule.param_groups, self.base, strict=True):
            group["lr"] = start * factor
        self.rule.step()

    def slots(self, name: str) -> dict[str, Tensor]:
        return self.rule.state[self.params[name]] if self.rule else {}


def train_replicas(
    task: Task,
    homes: Homes,
    rounds: Iterable[Iterable[tuple[int, Batches]]],
    optimizer: Factory,
    *,
    model: nn.Module,
    state: str = "keep",
    lr: Callable[[int], float] = lambda step: 1.0,
    clip_norm: float | None = None,
    seed: int = 0,
) -> Trained:
    """Replay the rule of federated rounds (DESIGN.md, "What a step computes").

    Every node has an optimizer of its own. In a step its replica of a layer moves by the mean gradient over the
    samples that passed it there. At a round's end each parameter and buffer becomes the mean over its replicas,
    weighted by what passed them in the round (integers: the maximum); the optimizers keep their state, start anew, or
    take the mean of it. A non-finite step changes nothing anywhere.

    Args:
        homes: where each device's samples go.
        state: ``keep``, ``reset`` or ``average``, of what has replicas.
        clip_norm: on the norm whose square is, for each parameter, the weighted mean of its replicas' squares.

    Returns:
        Losses by step, weights by round.
    """
    nodes = dict.fromkeys(node for home in homes.values() for node in home.values())
    held = {n: {name for home in homes.values() for name, node in home.items() if node == n} for n in nodes}
    replicas = {node: Replica(model, names, optimizer) for node, names in held.items()}
    trained = Trained([], [])
    for steps in rounds:
        for replica in replicas.values():
            replica.passed = dict.fromkeys(replica.passed, 0.0)
        for step, batches in steps:
            trained.losses.append(_replica_step(task, homes, replicas, batches, model, lr(step), clip_norm, seed, step))
        merged = {}
        for name in state_of(model):
            own = [replica for node, replica in replicas.items() if name in held[node]]
            merged[name] = _merge(name, own, state)
        put(model, merged)
        trained.weights.append(state_of(model))
    return trained


def _replica_step(
    task: Task,
    homes: Homes,
    replicas: Mapping[str, Replica],
    batches: Batches,
    model: nn.Module,
    factor: float,
    clip_norm: float | None,
    seed: int,
    step: int,
) -> float:
    before = {node: {n: b.clone() for n, b in replica.buffers.items()} for node, replica in replicas.items()}
    for replica in replicas.values():
        replica.sums, replica.weights = {}, {}
    loss = total = 0.0
    for device, batch in batches.items():
        home = homes[device]
        put(model, {n: (replicas[h].params | replicas[h].buffers)[n] for n, h in home.items()})
        joint = joint_step(model, task, {device: batch}, seed=seed, step=step)
        loss, total = loss + joint.loss * joint.weight, total + joint.weight
        for name, grad in joint.grads.items():
            replicas[home[name]].add(name, grad, joint.weight)
        for name, buffer in model.named_buffers():
            replicas[home[name]].buffers[name] = buffer.detach().clone()
            replicas[home[name]].weights[name] = replicas[home[name]].weights.get(name, 0.0) + joint.weight
    if all(finite(replica.sums) for replica in replicas.values()):
        clip = 1.0 if clip_norm is None else min(1.0, clip_norm / (_norm(list(replicas.values())) + 1e-6))
        for replica in replicas.values():
            replica.update(factor, clip)
    else:
        for node, replica in replicas.items():
            replica.buffers = before[node]
    return loss / total


def _norm(replicas: Sequence[Replica]) -> float:
    square = 0.0
    for name in dict.fromkeys(name for replica in replicas for name in replica.sums):
        own = [replica for replica in replicas if name in replica.sums]
        mean_squares = [float((r.sums[name] / r.weights[name]).square().sum()) for r in own]
        square += float(np.average(mean_squares, weights=[r.weights[name] for r in own]))
    return float(np.sqrt(square))


def _merge(name: str, own: Sequence[Replica], state: str) -> Tensor:
    """Make the replicas of ``name`` one and return it."""
    active = [replica for replica in own if replica.passed[name] > 0] or list(own)
    weights = [replica.passed[name] for replica in active] if active[0].passed[name] > 0 else [1.0] * len(active)
    values = [(replica.params | replica.buffers)[name].detach() for replica in active]
    mean = _mean(values, weights)
    for replica in own:
        if name in replica.buffers:
            replica.buffers[name] = mean.clone()
        else:
            replica.params[name].data = mean.clone()
    if len(own) > 1 and name in own[0].params:
        slots = [replica.slots(name) for replica in active]
        shared = {slot: _mean([s[slot] for s in slots], weights) for slot in slots[0]} if state == "average" else {}
        for replica in own if state != "keep" else ():
            replica.slots(name).clear()
            replica.slots(name).update({slot: value.clone() for slot, value in shared.items()})
    return mean


def _mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    if not values[0].is_floating_point():
        return torch.stack(list(values)).amax(0)
    return sum((v * w for v, w in zip(values, weights, strict=True)), torch.zeros_like(values[0])) / sum(weights)
