"""A torch optimizer read as a spec that every node, with torch or without, can follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from edgesplit.errors import ExperimentError, TaskError
from edgesplit.optimizers import OptimizerSpec, Rule

_REFUSED = ("amsgrad", "maximize", "differentiable")


def spec_of(optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]]) -> OptimizerSpec:
    """Read the groups of an SGD, Adam or AdamW optimizer.

    Flags that change speed but no result (``foreach``, ``fused``, ``capturable``) are not read.

    Args:
        optimizer: fresh: it has made no step.
        named: the model's parameters by global name. Those in no group get no rule.

    Raises:
        TaskError: another class, an option that is not supported, or a parameter that is not among ``named``.
    """
    kind = type(optimizer)
    if kind not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
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


def _rule(kind: type[torch.optim.Optimizer], index: int, group: dict[str, Any]) -> Rule:
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
