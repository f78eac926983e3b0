"""Learning-rate schedules: pure functions of the global step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from edgesplit.errors import ExperimentError, did_you_mean

_OPTIONS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    # name: (must be given, may be given)
    "constant": (frozenset(), frozenset({"warmup_steps"})),
    "linear": (frozenset({"total_steps"}), frozenset({"warmup_steps", "min_factor"})),
    "cosine": (frozenset({"total_steps"}), frozenset({"warmup_steps", "min_factor"})),
    "step": (frozenset({"every", "gamma"}), frozenset({"warmup_steps", "min_factor"})),
}


def lr_factor(config: Mapping[str, Any]) -> Callable[[int], float]:
    """Return the factor on the learning rates as a function of the global step.

    Args:
        config: ``name`` and its options. ``constant``: 1. ``linear`` and ``cosine``: from 1 at the end of the
            warm-up to ``min_factor`` (default 0) at ``total_steps`` (warm-up included), and so from there on.
            ``step``: times ``gamma`` after every ``every`` steps that follow the warm-up, not below ``min_factor``.
            With ``warmup_steps`` the factor first rises: ``(step + 1) / warmup_steps``.

    Raises:
        ExperimentError: an unknown name or key, a value out of range, or an option that has no effect.
    """
    options = dict(config)
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in _OPTIONS:
        near = did_you_mean(name, _OPTIONS) if isinstance(name, str) else ""
        raise ExperimentError(f"lr_schedule name {name!r} is not known{near}: use one of {', '.join(_OPTIONS)}")
    _check_keys(name, options)
    warmup = _whole("warmup_steps", options.get("warmup_steps", 0), 0)
    floor = _fraction("min_factor", options.get("min_factor", 0.0))
    after = _after(name, options, warmup, floor)

    def factor(step: int) -> float:
        return (step + 1) / warmup if step < warmup else after(step - warmup)

    return factor


def _after(name: str, options: Mapping[str, Any], warmup: int, floor: float) -> Callable[[int], float]:
    """Return the factor as a function of the steps since the end of the warm-up."""
    if name == "constant":
        return lambda step: 1.0
    if name == "step":
        every, gamma = _whole("every", options["every"], 1), _fraction("gamma", options["gamma"])
        return lambda step: max(gamma ** (step // every), floor)
    total = _whole("total_steps", options["total_steps"], 1)
    if total <= warmup:
        raise ExperimentError(f"lr_schedule's total_steps {total} must be above its warmup_steps {warmup}")
    span = total - warmup
    if name == "linear":
        return lambda step: floor + (1 - floor) * (1 - min(step / span, 1.0))
    return lambda step: floor + (1 - floor) * (1 + math.cos(math.pi * min(step / span, 1.0))) / 2


def _check_keys(name: str, options: Mapping[str, Any]) -> None:
    must, may = _OPTIONS[name]
    known = frozenset().union(*(must | may for must, may in _OPTIONS.values()))
    for key in options:
        if key not in known:
            raise ExperimentError(f"lr_schedule's key {key!r} is not known{did_you_mean(str(key), known)}")
        if key not in must | may:
            raise ExperimentError(f"lr_schedule's {key} has no effect on {name}: drop it")
    missing = sorted(must - set(options))
    if missing:
        raise ExperimentError(
            f"lr_schedule {name} needs {' and '.join(missing)}: give {'it' if len(missing) == 1 else 'them'}"
        )


def _whole(key: str, value: Any, least: int) -> int:
    if type(value) is not int or value < least:
        raise ExperimentError(f"lr_schedule's {key} is {value!r}: give a whole number from {least}")
    return value


def _fraction(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ExperimentError(f"lr_schedule's {key} is {value!r}: give a number from 0 to 1")
    return float(value)
