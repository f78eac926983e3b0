"""Optimizers as pure functions on numpy arrays or torch tensors, equal to torch.optim.

Nothing is written in place: an update gives new arrays, so the arrays before it stay valid for whoever holds them
(a live forward, an undo copy, a stashed version). Only operators and methods of the arrays are used, so one text
serves both libraries.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from edgesplit.errors import ExperimentError, did_you_mean

Array = Any
"""A numpy array or a torch tensor."""

State = dict[str, dict[str, Any]]
"""Parameter name -> ``{"count": updates so far, "momentum" or "mean" and "square": array}``."""

NAMES = ("sgd", "adam", "adamw")
SLOTS = ("momentum", "mean", "square")

_OPTIONS = {
    "sgd": frozenset({"lr", "momentum", "dampening", "nesterov", "weight_decay", "no_decay"}),
    "adam": frozenset({"lr", "betas", "eps", "weight_decay", "no_decay"}),
    "adamw": frozenset({"lr", "betas", "eps", "weight_decay", "no_decay"}),
}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One group's algorithm and its numbers; the fields mean what they mean in torch.optim.

    Raises:
        ExperimentError: a value out of its range, or an option that this algorithm does not have.
    """

    name: str
    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            near = did_you_mean(str(self.name), NAMES)
            raise ExperimentError(f"optimizer {self.name!r} is not known{near}: use one of {', '.join(NAMES)}")
        for key in ("lr", "momentum", "dampening", "weight_decay", "beta1", "beta2", "eps"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ExperimentError(f"optimizer's {key} is {value!r}: give a finite number")
            if value < 0 and key != "dampening":
                raise ExperimentError(f"optimizer's {key} is {value:g}: it must not be negative")
            object.__setattr__(self, key, float(value))  # no numpy scalars: they would decide the dtype of a product
        if not isinstance(self.nesterov, bool):
            raise ExperimentError(f"optimizer's nesterov is {self.nesterov!r}: give true or false")
        if self.name == "sgd":
            self._check_sgd()
        else:
            self._check_adam()

    def _check_sgd(self) -> None:
        if self.nesterov and (not self.momentum or self.dampening):
            raise ExperimentError(
                f"nesterov needs a momentum above 0 and no dampening (momentum {self.momentum:g}, "
                f"dampening {self.dampening:g}): set them or drop nesterov"
            )
        if self.dampening and not self.momentum:
            raise ExperimentError(f"dampening {self.dampening:g} has no effect without momentum: drop it")

    def _check_adam(self) -> None:
        if self.momentum or self.dampening or self.nesterov:
            raise ExperimentError(f"momentum, dampening and nesterov have no effect on {self.name}: drop them")
        for key in ("beta1", "beta2"):
            if getattr(self, key) >= 1:
                raise ExperimentError(f"optimizer's {key} is {getattr(self, key):g}: it must be below 1")


@dataclass(frozen=True)
class OptimizerSpec:
    """Which rule updates which parameter; a parameter without one is never updated.

    Attributes:
        rules: the groups.
        of: parameter name -> index in ``rules``.
    """

    rules: tuple[Rule, ...]
    of: Mapping[str, int]

    def __post_init__(self) -> None:
        for name, index in self.of.items():
            if type(index) is not int or not 0 <= index < len(self.rules):
                raise ExperimentError(f"parameter {name!r} has rule {index!r}, but there are {len(self.rules)} rules")

    def subset(self, names: Iterable[str]) -> OptimizerSpec:
        """Return the spec of these parameters only (those without a rule stay without one)."""
        return OptimizerSpec(self.rules, {name: self.of[name] for name in names if name in self.of})

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"rules": [asdict(rule) for rule in self.rules], "of": dict(self.of)}

    @classmethod
    def from_json(cls, value: Any) -> OptimizerSpec:
        """Build the spec from :meth:`to_json`'s value, which may come from the network.

        Raises:
            ExperimentError: it is not such a value.
        """
        if not isinstance(value, Mapping) or set(value) != {"rules", "of"}:
            raise ExperimentError("an optimizer must be an object with exactly 'rules' and 'of'")
        rules, of = value["rules"], value["of"]
        if not isinstance(rules, list) or not isinstance(of, Mapping) or not all(isinstance(name, str) for name in of):
            raise ExperimentError("an optimizer's 'rules' must be a list and its 'of' an object")
        return cls(tuple(_rule(rule) for rule in rules), dict(of))


def _rule(value: Any) -> Rule:
    known = {item.name for item in fields(Rule)}
    if not isinstance(value, Mapping) or set(value) != known:
        raise ExperimentError(f"an optimizer's rule must be an object with exactly {', '.join(sorted(known))}")
    return Rule(**value)


def update(
    spec: OptimizerSpec, params: Mapping[str, Array], grads: Mapping[str, Array], state: State, lr: float = 1.0
) -> tuple[dict[str, Array], State]:
    """Apply one update, as ``torch.optim`` does.

    Args:
        spec: the rules.
        params: parameters by name, of any float dtype; the arithmetic is done in it.
        grads: gradients by parameter name; a parameter that has none stays as it is, its state untouched.
        state: what earlier updates returned; empty at first and after a reset.
        lr: the global step's factor on every rule's learning rate.

    Returns:
        All parameters and all state: new dicts, new arrays where something changed (with the parameter's
        ``requires_grad``), the same arrays where nothing did.
    """
    new_params, new_state = dict(params), dict(state)
    for name, param in params.items():
        grad, index = grads.get(name), spec.of.get(name)
        if grad is None or index is None:
            continue
        rule = spec.rules[index]
        step = _sgd if rule.name == "sgd" else _adam
        value, slots = step(rule, _plain(param), _cast(_plain(grad), param.dtype), state.get(name, {}), float(lr))
        new_params[name] = _like(param, value)
        new_state[name] = slots
    return new_params, new_state


def _sgd(rule: Rule, param: Array, grad: Array, state: Mapping[str, Any], lr: float) -> tuple[Array, dict[str, Any]]:
    slots: dict[str, Any] = {"count": state.get("count", 0) + 1}
    if rule.weight_decay:
        grad = grad + param * rule.weight_decay
    if rule.momentum:
        old = state.get("momentum")
        momentum = grad * 1.0 if old is None else old * rule.momentum + grad * (1 - rule.dampening)
        slots["momentum"] = _array(momentum, param.dtype)
        grad = grad + momentum * rule.momentum if rule.nesterov else momentum
    return param - grad * (rule.lr * lr), slots


def _adam(rule: Rule, param: Array, grad: Array, state: Mapping[str, Any], lr: float) -> tuple[Array, dict[str, Any]]:
    count, rate = state.get("count", 0) + 1, rule.lr * lr
    if rule.weight_decay and rule.name == "adamw":
        param = param * (1 - rate * rule.weight_decay)
    elif rule.weight_decay:
        grad = grad + param * rule.weight_decay
    mean, square = grad * (1 - rule.beta1), grad * grad * (1 - rule.beta2)
    if "mean" in state:
        mean = mean + state["mean"] * rule.beta1
        square = square + state["square"] * rule.beta2
    # Bias correction in Python floats: a numpy scalar would turn a float32 array into float64.
    root = math.sqrt(1 - rule.beta2**count)
    step = mean * (rate / (1 - rule.beta1**count)) / (_sqrt(square) / root + rule.eps)
    return param - step, {"count": count, "mean": _array(mean, param.dtype), "square": _array(square, param.dtype)}


def _sqrt(value: Array) -> Array:
    return value.sqrt() if hasattr(value, "sqrt") else np.sqrt(value)


def _plain(value: Array) -> Array:
    return value.detach() if hasattr(value, "detach") else value


def _cast(value: Array, dtype: Any) -> Array:
    if value.dtype == dtype:
        return value
    return value.to(dtype) if hasattr(value, "detach") else value.astype(dtype)


def _array(value: Array, dtype: Any) -> Array:
    """Undo what numpy does to 0-d results: it makes them scalars, and before numpy 2 float64 ones."""
    return value if hasattr(value, "detach") else np.asarray(value, dtype)


def _like(param: Array, value: Array) -> Array:
    return (
        value.requires_grad_(param.requires_grad) if hasattr(param, "requires_grad") else np.asarray(value, param.dtype)
    )


def state_arrays(state: State) -> dict[str, Array]:
    """Return optimizer state as flat arrays named ``<parameter>//<slot>``; a count is an int64 scalar."""
    return {
        f"{name}//{slot}": np.asarray(value, np.int64) if isinstance(value, int) else value
        for name, slots in state.items()
        for slot, value in slots.items()
    }


def state_from_arrays(arrays: Mapping[str, Array], slots: Collection[str] | None = SLOTS) -> State:
    """Undo :func:`state_arrays`.

    Args:
        arrays: the flat arrays, which may come from the network.
        slots: the names of slots beside ``count`` that may come; None: any, and a count is not asked for.

    Raises:
        ExperimentError: a name that is not ``<parameter>//<slot>`` with such a slot, a count that is not a whole
            number from 1, or a parameter's state that is not whole.
    """
    state: State = {}
    for key, value in arrays.items():
        name, found, slot = key.rpartition("//")
        if not found or (slots is not None and slot not in ("count", *slots)):
            raise ExperimentError(f"{key!r} is no optimizer state: it must end in //count or //{' or //'.join(SLOTS)}")
        state.setdefault(name, {})[slot] = _count(key, value) if slots and slot == "count" else value
    for name, held in state.items() if slots is not None else ():
        if "count" not in held or ("mean" in held) != ("square" in held):
            raise ExperimentError(f"optimizer state of {name!r} has only {', '.join(sorted(held))}: it is not whole")
    return state


def _count(key: str, value: Array) -> int:
    if tuple(value.shape) != () or float(value) != int(value) or int(value) < 1:
        raise ExperimentError(f"{key!r} must be one whole number from 1")
    return int(value)


def spec_from_config(config: Mapping[str, Any], parameter_names: Iterable[str]) -> OptimizerSpec:
    """Build the spec of an experiment file's ``optimizer:`` mapping.

    Args:
        config: ``{name, lr, momentum, dampening, nesterov, weight_decay, no_decay, betas, eps}``; ``no_decay`` is a
            regular expression, searched in parameter names, of those that weight decay spares. As in torch, adamw
            decays by 0.01 unless told otherwise.
        parameter_names: global names of the parameters to train.

    Raises:
        ExperimentError: a key that is unknown, a value out of range, or an option that has no effect.
    """
    options, names = dict(config), list(parameter_names)
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in NAMES:
        near = did_you_mean(name, NAMES) if isinstance(name, str) else ""
        raise ExperimentError(f"optimizer name {name!r} is not known{near}: use one of {', '.join(NAMES)}")
    _check_keys(name, options)
    if "lr" not in options:
        raise ExperimentError(f"optimizer {name} has no lr: give one, for example lr: 0.05")
    betas, pattern = options.pop("betas", None), options.pop("no_decay", None)
    values: dict[str, Any] = {
        key: value if key == "nesterov" else _number(key, value) for key, value in options.items()
    }
    if betas is not None:
        if not isinstance(betas, (list, tuple)) or len(betas) != 2:
            raise ExperimentError(f"optimizer's betas are {betas!r}: give two numbers, for example [0.9, 0.999]")
        values["beta1"], values["beta2"] = (_number("betas", beta) for beta in betas)
    values.setdefault("weight_decay", 0.01 if name == "adamw" else 0.0)
    rule = Rule(name=name, **values)
    if pattern is None:
        return OptimizerSpec((rule,), dict.fromkeys(names, 0))
    if not rule.weight_decay:
        raise ExperimentError(f"no_decay {pattern!r} has no effect without weight_decay: drop it or set weight_decay")
    spared = Rule(**{**asdict(rule), "weight_decay": 0.0})
    return OptimizerSpec((rule, spared), _spare(str(pattern), names))


def _spare(pattern: str, names: list[str]) -> dict[str, int]:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ExperimentError(f"no_decay {pattern!r} is no regular expression: {error}") from None
    of = {name: int(expression.search(name) is not None) for name in names}
    if len(set(of.values())) == 1:
        which = "all" if any(of.values()) else "none"
        raise ExperimentError(
            f"no_decay {pattern!r} matches {which} of the {len(names)} parameters: correct or drop it"
        )
    return of


def _check_keys(name: str, options: Mapping[str, Any]) -> None:
    known = frozenset().union(*_OPTIONS.values())
    for key in options:
        if key in ("amsgrad", "maximize"):
            raise ExperimentError(f"optimizer's {key} is not supported: drop it")
        if key not in known:
            raise ExperimentError(f"optimizer's key {key!r} is not known{did_you_mean(str(key), known)}")
        if key not in _OPTIONS[name]:
            raise ExperimentError(f"optimizer's {key} has no effect on {name}: drop it")


def _number(key: str, value: Any) -> float:
    try:
        return float("" if isinstance(value, bool) else value)  # a string too: YAML reads 5e-4 as one
    except (TypeError, ValueError):
        raise ExperimentError(f"optimizer's {key} is {value!r}: give a number") from None
