"""Flower's strategies by name, with their arguments checked, and what of a strategy we cannot honour."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from edgesplit.errors import ExperimentError, did_you_mean

STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "fedavg": flower.FedAvg,
    "fedavgm": flower.FedAvgM,
    "fedadagrad": flower.FedAdagrad,
    "fedadam": flower.FedAdam,
    "fedyogi": flower.FedYogi,
    "fedmedian": flower.FedMedian,
    "fedtrimmedavg": flower.FedTrimmedAvg,
    "krum": flower.Krum,
    "multikrum": flower.MultiKrum,
    "bulyan": flower.Bulyan,
}
"""Those that need nothing of a node but its arrays and their weight."""

REFUSED: dict[str, str] = {
    "fedprox": "its clients add a proximal term to their loss",
    "qfedavg": "its clients report the loss that they trained on",
    "fedxgbbagging": "its clients train trees, not arrays",
    "fedxgbcyclic": "its clients train trees, not arrays",
}
"""Flower's other strategies, and what their clients must do that a node of ours does not."""

_NO_EFFECT = {
    "fraction_train": "every replica of a layer trains; choose a round's devices with data.per_round",
    "fraction_evaluate": "evaluation does not go through flower; see evaluate.where",
    "min_evaluate_nodes": "evaluation does not go through flower; see evaluate.where",
    "evaluate_metrics_aggr_fn": "evaluation does not go through flower; see evaluate.where",
    "weighted_by_key": "edgesplit makes the messages itself",
    "arrayrecord_key": "edgesplit makes the messages itself",
    "configrecord_key": "edgesplit makes the messages itself",
}


def make_strategy(strategy: str | Strategy = "fedavg", args: Mapping[str, Any] | None = None) -> Strategy:
    """Return the strategy of that name, or a copy of the object.

    Args:
        strategy: a key of :data:`STRATEGIES`, or any object of ``flwr.serverapp.strategy``.
        args: keyword arguments of the named strategy's constructor.

    Raises:
        ExperimentError: no such strategy or argument, an argument without effect, or an object that is none.
    """
    args = args or {}
    if isinstance(strategy, str):
        return _by_name(strategy, args)
    if inspect.isclass(strategy):
        raise ExperimentError(f"strategy {strategy.__name__} is a class: pass an object, {strategy.__name__}(...)")
    if not isinstance(strategy, Strategy):
        raise ExperimentError(
            f"strategy is a {type(strategy).__name__}: pass a name or an object of flwr.serverapp.strategy"
        )
    if args:
        raise ExperimentError(f"strategy_args go with a strategy's name: give them to {name_of(strategy)}(...) itself")
    return copy_of(strategy)


def copy_of(strategy: Strategy) -> Strategy:
    """Return an independent copy: a strategy with state has one state per group."""
    try:
        return copy.deepcopy(strategy)
    except Exception as error:
        raise ExperimentError(
            f"strategy {name_of(strategy)} cannot be copied, and each group of layers needs its own: {error}"
        ) from error


def name_of(strategy: Strategy) -> str:
    """Return what to call a strategy in a message."""
    return type(strategy).__name__


def inner(strategy: Strategy) -> list[Strategy]:
    """Return the strategy and those it wraps (as Flower's differential-privacy wrappers do), outermost first."""
    found = [strategy]
    while isinstance(wrapped := getattr(found[-1], "strategy", None), Strategy):
        found.append(wrapped)
    return found


def needed_nodes(strategy: Strategy) -> int:
    """Return how many nodes a group must have, or Flower would wait for more for ever."""
    names = ("min_train_nodes", "min_available_nodes")
    return max(int(getattr(part, name, 0)) for part in inner(strategy) for name in names)


def _by_name(name: str, args: Mapping[str, Any]) -> Strategy:
    if name in REFUSED:
        raise ExperimentError(f"strategy {name!r} cannot run here: {REFUSED[name]}; choose from {_names()}")
    if name not in STRATEGIES:
        raise ExperimentError(f"no strategy {name!r}{did_you_mean(name, STRATEGIES)}: choose from {_names()}")
    known = inspect.signature(STRATEGIES[name]).parameters
    for argument in args:
        if argument not in known:
            raise ExperimentError(
                f"strategy {name!r} has no argument {argument!r}{did_you_mean(argument, known)}: "
                f"it takes {', '.join(sorted(set(known) - set(_NO_EFFECT)))}"
            )
        if argument in _NO_EFFECT:
            raise ExperimentError(f"strategy_args.{argument} has no effect here: {_NO_EFFECT[argument]}")
    try:
        return STRATEGIES[name](**args)
    except Exception as error:
        raise ExperimentError(f"strategy {name!r} refuses its arguments {dict(args)!r}: {error}") from error


def _names() -> str:
    return ", ".join(sorted(STRATEGIES))
