"""A user's experiment in one process: plain torch on the original model, no layers, segments or messages."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from edgesplit.assembly import Model, clip_norm
from edgesplit.data import Batch, rows
from edgesplit.experiment import Experiment
from edgesplit.optimizers import OptimizerSpec
from edgesplit.plan import Plan
from edgesplit.segments.base import Samples
from edgesplit.segments.masks import KeyedRandomness
from edgesplit.segments.torch import from_arrays
from edgesplit.sheets import Cutting, Draft, Share, number
from edgesplit.splitting import batch_norm_layers, set_train
from edgesplit.task import Task

Arrays = dict[str, np.ndarray[Any, Any]]

Batches = Mapping[str, Batch]
"""Device -> its batch of a step."""


@dataclass
class _Holder:
    """Whoever updates: one process, or a node with its replicas."""

    params: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer | None
    rates: list[float]
    sums: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)


class Reference:
    """Trains in one process.

    Args:
        plan: says which replicas a device's samples use.
        model: the model with its first weights; it is copied.
        experiment: how it is trained.
        together: one optimizer for all; else one a node, and the weighted mean after each step.
    """

    def __init__(self, plan: Plan, model: Model, experiment: Experiment, *, together: bool) -> None:
        self.task, self.experiment = model.task, experiment
        self.module = copy.deepcopy(model.chain.model)
        self._clip = clip_norm(model.task, experiment)
        self._whole = not batch_norm_layers(model.chain, model.task.train_mode)
        self._devices = [route.device for route in plan.routes]
        self._homes = {device: _homes(device, plan, model, together) for device in self._devices}
        own = dict(self.module.named_parameters())
        self._holders = {}
        for holder in dict.fromkeys(h for home in self._homes.values() for h in home.values()):
            names = [name for name in own if any(home.get(name) == holder for home in self._homes.values())]
            params = {name: nn.Parameter(own[name].detach().clone(), own[name].requires_grad) for name in names}
            named = [(name, param) for name, param in params.items() if param.requires_grad]
            optimizer = make_optimizer(self.task, model.optimizer, named) if named else None
            rates = [group["lr"] for group in optimizer.param_groups] if optimizer else []
            self._holders[holder] = _Holder(params, optimizer, rates)

    def weights(self) -> Arrays:
        """Return the parameters by name."""
        return {name: param.detach().numpy().copy() for name, param in self.module.named_parameters()}

    def step(self, step: int, batches: Batches, lr: float) -> float:
        """Train a step; return its loss, the mean over its weight."""
        loss = self._backward(step, batches)
        clip = 1.0 if self._clip is None else min(1.0, self._clip / (self._norm() + 1e-6))
        for holder in self._holders.values():
            _update(holder, lr, clip)
        self._merge()
        return loss

    def gradients(self, step: int, batches: Batches) -> dict[str, Tensor]:
        """Return the gradients of a step's summed loss by parameter name, where there are any; nothing is updated."""
        self._backward(step, batches)
        return {name: grad for holder in self._holders.values() for name, grad in holder.sums.items()}

    def _backward(self, step: int, batches: Batches) -> float:
        for holder in self._holders.values():
            holder.sums, holder.weights = {}, {}
        set_train(self.module, self.task.train_mode)
        loss = total = 0.0
        for device, start, stop in self._pieces(batches):
            x, target = (from_arrays(rows(part, start, stop)) for part in batches[device])
            weight = self.task.weigh(target)
            samples = Samples(self.experiment.seed, step, ((device, start, stop),))
            with KeyedRandomness(self.module.named_modules(), samples):
                output = self.module(x)
            if weight:
                part = self.task.loss(output, target) * weight
                loss, total = loss + float(part.detach()), total + weight
                self._add(device, part, weight)
        return loss / total if total else math.nan

    def _pieces(self, batches: Batches) -> list[tuple[str, int, int]]:
        """Each device's batch at once; where BatchNorm looks at a micro-batch, each micro-batch."""
        counts = {device: len(next(iter(x.values()))) for device, (x, _) in batches.items()}
        pipeline = self.experiment.pipeline
        cutting = Cutting(1) if self._whole else Cutting(pipeline.micros, pipeline.micro_batch_size)
        draft = Draft(0, {device: Share(0, 0, count) for device, count in counts.items()})
        return [(m.device, m.start, m.stop) for m in number(draft, cutting, 0, self._devices).micros]

    def _add(self, device: str, loss: Tensor, weight: float) -> None:
        named = {name: param for name, param in self.module.named_parameters() if param.requires_grad}
        grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True) if named else ()
        for name, grad in zip(named, grads, strict=True):
            holder = self._holders[self._homes[device][name]]
            holder.weights[name] = holder.weights.get(name, 0.0) + weight
            if grad is not None:
                holder.sums[name] = holder.sums[name] + grad if name in holder.sums else grad

    def _norm(self) -> float:
        """The gradient's norm; where a parameter has replicas, of the weighted mean of their squares."""
        square = 0.0
        for name in dict(self.module.named_parameters()):
            own = [holder for holder in self._holders.values() if name in holder.sums]
            squares = [h.weights[name] * float((h.sums[name] / h.weights[name]).square().sum()) for h in own]
            square += sum(squares) / sum(h.weights[name] for h in own) if own else 0.0
        return math.sqrt(square)

    @torch.no_grad()
    def _merge(self) -> None:
        """Make the replicas of each parameter one: the mean by the weight that passed."""
        for name, param in self.module.named_parameters():
            own = [holder for holder in self._holders.values() if name in holder.params]
            active = [holder for holder in own if holder.weights.get(name)]
            if active:
                param.copy_(_mean([(holder.params[name], holder.weights[name]) for holder in active]))
            for holder in own:
                holder.params[name].data = param.detach().clone()
            if len(own) > 1 and active:
                self._merge_state(name, own, active)

    def _merge_state(self, name: str, own: Sequence[_Holder], active: Sequence[_Holder]) -> None:
        kind = self.experiment.federation.optimizer_state
        if kind == "keep" or not own[0].params[name].requires_grad:
            return
        states = [(_state(holder, name), holder.weights[name]) for holder in active]
        mean = {slot: _mean([(state[slot], weight) for state, weight in states]) for slot in states[0][0]}
        for holder in own:
            _state(holder, name).clear()
            _state(holder, name).update({n: v.clone() for n, v in mean.items()} if kind == "average" else {})


def make_optimizer(
    task: Task, spec: OptimizerSpec | None, named: list[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer | None:
    """Return torch's own optimizer over named parameters: the Task's, or what ``spec`` says; None: none has a rule."""
    if task.optimizer is not None:
        optimizer: torch.optim.Optimizer = task.optimizer(named)
        return optimizer
    if spec is None or not any(name in spec.of for name, _ in named):
        return None
    groups = []
    for index, rule in enumerate(spec.rules):
        group: dict[str, Any] = {"params": [p for name, p in named if spec.of.get(name) == index]}
        group |= {"lr": rule.lr, "weight_decay": rule.weight_decay}
        if rule.name == "sgd":
            group |= {"momentum": rule.momentum, "dampening": rule.dampening, "nesterov": rule.nesterov}
        else:
            group |= {"betas": (rule.beta1, rule.beta2), "eps": rule.eps}
        groups.append(group)
    kinds: dict[str, type[torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
    return kinds[spec.rules[0].name](groups)  # type: ignore[call-arg]


def _homes(device: str, plan: Plan, model: Model, together: bool) -> dict[str, str]:
    """Parameter name -> whose replica this device's samples use."""
    return {
        name: "" if together else stage.node
        for stage in plan.route(device).stages
        for layer in range(stage.start, stage.stop)
        for name in model.kit.params[layer]
    }


def _update(holder: _Holder, lr: float, clip: float) -> None:
    if holder.optimizer is None:
        return
    for name, param in holder.params.items():
        param.grad = holder.sums[name] / holder.weights[name] * clip if name in holder.sums else None
    for group, rate in zip(holder.optimizer.param_groups, holder.rates, strict=True):
        group["lr"] = rate * lr
    holder.optimizer.step()


def _state(holder: _Holder, name: str) -> dict[str, Any]:
    return holder.optimizer.state[holder.params[name]] if holder.optimizer else {}


def _mean(values: Sequence[tuple[Tensor, float]]) -> Tensor:
    total = sum(weight for _, weight in values)
    return torch.stack([value.detach() * (weight / total) for value, weight in values]).sum(0)
