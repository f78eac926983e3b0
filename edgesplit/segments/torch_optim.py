"""torch's optimizers: read as a spec that every node can follow, or run as they are on nodes with torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from edgesplit.errors import ExperimentError, TaskError
from edgesplit.optimizers import OptimizerSpec, Rule, State

Factory = Callable[[list[tuple[str, nn.Parameter]]], Optimizer]

SPECIFIED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Classes that :func:`spec_of` reads."""

_REFUSED = ("amsgrad", "maximize", "differentiable")


def spec_of(optimizer: Optimizer, named: Sequence[tuple[str, nn.Parameter]]) -> OptimizerSpec:
    """Read the groups of an SGD, Adam or AdamW optimizer.

    Flags that change speed but no result (``foreach``, ``fused``, ``capturable``) are not read.

    Args:
        optimizer: fresh: it has made no step.
        named: the model's parameters by global name. Those in no group get no rule.

    Raises:
        TaskError: another class, an option that is not supported, or a parameter that is not among ``named``.
    """
    kind = type(optimizer)
    if kind not in SPECIFIED:
        raise TaskError(
            f"optimizer {kind.__module__}.{kind.__qualname__} is not supported here: use SGD, Adam or AdamW"
        )
    if optimizer.state:
        raise TaskError(f"optimizer {kind.__name__} has made steps already: return a new one from Task.optimizer")
    names = {id(param): name for name, param in named}
    rules, of = [], {}
    for index, group in enumerate(optimizer.param_groups):
        rules.append(_rule(kind, index, group))
        for param in group["params"]:
            if id(param) not in names:
                shape = tuple(param.shape)
                raise TaskError(f"optimizer's group {index} has a parameter of shape {shape} that is not the model's")
            of[names[id(param)]] = index
    return OptimizerSpec(tuple(rules), of)


def _rule(kind: type[Optimizer], index: int, group: dict[str, Any]) -> Rule:
    for key in _REFUSED:
        if group.get(key):
            raise TaskError(f"optimizer's group {index} sets {key}, which is not supported: drop it")
    values: dict[str, Any] = {"lr": float(group["lr"]), "weight_decay": float(group["weight_decay"])}
    if kind is torch.optim.SGD:
        name = "sgd"
        values |= {"momentum": float(group["momentum"]), "nesterov": bool(group["nesterov"])}
        # torch takes dampening without momentum and ignores it.
        values["dampening"] = float(group["dampening"]) if group["momentum"] else 0.0
    else:
        name = "adamw" if group.get("decoupled_weight_decay", kind is torch.optim.AdamW) else "adam"
        beta1, beta2 = group["betas"]
        values |= {"beta1": float(beta1), "beta2": float(beta2), "eps": float(group["eps"])}
    try:
        return Rule(name=name, **values)
    except ExperimentError as error:
        raise TaskError(f"optimizer's group {index}: {error}") from None


class TorchUpdate:
    """Any torch optimizer behind the signature ``update(params, grads, state, lr)``, for synchronous methods.

    It is built over parameters of its own under their global names. Every call gives it weights and state and takes
    new ones away, so that it writes into nothing that others hold and an update can be taken back. It must treat each
    parameter by itself: an algorithm that looks at all of a model's parameters would depend on the cuts.

    Args:
        factory: ``Task.optimizer``.
    """

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._built: dict[tuple[str, ...], _Built] = {}

    def __call__(
        self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], state: State, lr: float = 1.0
    ) -> tuple[dict[str, Tensor], State]:
        """Apply one update; see :func:`edgesplit.optimizers.update`. State: name -> slot -> tensor.

        Raises:
            TaskError: an optimizer that needs a closure, or that keeps what cannot be taken out of it.
        """
        new_params, new_state = dict(params), dict(state)
        names = tuple(name for name in params if grads.get(name) is not None)
        if not names:
            return new_params, new_state
        if names not in self._built:
            self._built[names] = _Built(self._factory, names, params)
        for name, (value, slots) in self._built[names].step(params, grads, state, lr).items():
            new_params[name] = value.requires_grad_(params[name].requires_grad)
            new_state[name] = slots
        return new_params, new_state


class _Built:
    """The optimizer over one set of parameters."""

    def __init__(self, factory: Factory, names: tuple[str, ...], params: Mapping[str, Tensor]) -> None:
        self.own = {name: nn.Parameter(params[name].detach().clone()) for name in names}
        self.optimizer = _make(factory, self.own)
        self.name = type(self.optimizer).__name__
        closure = inspect.signature(self.optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise TaskError(f"optimizer {self.name} needs a closure, which a split step cannot give: use another")
        for index, group in enumerate(self.optimizer.param_groups):
            if "lr" not in group:
                raise TaskError(f"optimizer {self.name}'s group {index} has no lr: use one with a learning rate")
        self.updated = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        # Some optimizers make state when they are built.
        self.first = {name: _cloned(self.optimizer.state.get(param, {})) for name, param in self.own.items()}

    def step(
        self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], state: State, lr: float
    ) -> dict[str, tuple[Tensor, dict[str, Any]]]:
        for name, param in self.own.items():
            param.data = params[name].detach().clone()
            param.grad = grads[name].detach().to(param.dtype, copy=True)
            self.optimizer.state[param] = _cloned(state.get(name, self.first[name]))
        with self._rates(lr):
            self.optimizer.step()
        done = {}
        for name, param in self.own.items():
            slots = self.optimizer.state.pop(param, {})
            param.grad = None
            if id(param) in self.updated:
                done[name] = param.detach(), {slot: self._checked(slot, value) for slot, value in slots.items()}
        return done

    @contextmanager
    def _rates(self, lr: float) -> Iterator[None]:
        """Multiply the groups' rates inside; afterwards the groups must be as they were before."""
        before = [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * lr
        rates = [group["lr"] for group in self.optimizer.param_groups]
        yield
        for group, options, rate in zip(self.optimizer.param_groups, before, rates, strict=True):
            changed = [key for key, value in options.items() if key != "lr" and group.get(key) != value]
            if changed or group["lr"] is not rate:
                keys = ", ".join(changed) or "lr"
                raise TaskError(
                    f"optimizer {self.name} changes its group's {keys} as it steps, which cannot be taken back: "
                    "give the schedule as Task.lr"
                )
            group["lr"] = options["lr"]

    def _checked(self, slot: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise TaskError(f"optimizer {self.name} keeps {slot!r} as a {kind}: only tensors can be carried")
        return value


def _make(factory: Factory, own: dict[str, nn.Parameter]) -> Optimizer:
    try:
        return factory(list(own.items()))
    except ValueError as error:
        if "empty parameter list" not in str(error):
            raise
        # The factory picks parameters, none of which are here: an optimizer that updates none of these.
        return torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.0)


def _cloned(slots: Mapping[str, Any]) -> dict[str, Any]:
    return {slot: value.clone() if isinstance(value, Tensor) else value for slot, value in slots.items()}
