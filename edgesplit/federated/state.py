"""What a strategy remembers between rounds (moments, a momentum, the last arrays), as named arrays and back.

Flower's strategies have no state_dict, so their attributes are read. An array kept for each of the group's arrays is
saved under *its* name, not the group's: a run that resumes under another plan finds it again. An entry is named
``<depth>.<attribute>|<kind>|<array or group>``; the depth counts wrappers (differential privacy) from the outside.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from edgesplit.errors import RunError
from edgesplit.federated.grid import Arrays, from_record, to_record
from edgesplit.federated.strategies import inner, name_of

_log = logging.getLogger(__name__)

_OF_GROUP = ("number", "array")
"""Kinds kept once a group; the others once for each of its arrays."""


def save(strategy: Strategy, fresh: Strategy, group: str, names: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Return all that a group's strategy remembers.

    Args:
        strategy: the group's.
        fresh: the same strategy before its first round: what equals it need not be saved.
        group: the group's key.
        names: of the group's arrays, in the order in which the strategy sees them.

    Raises:
        RunError: an attribute has changed and is neither arrays nor a number.
    """
    saved = {}
    for depth, (part, before) in enumerate(zip(inner(strategy), inner(fresh), strict=True)):
        for attribute, value in vars(part).items():
            if isinstance(value, Strategy) or _same(value, vars(before).get(attribute)):
                continue
            packed = _pack(value, group, names)
            if packed is None:
                raise RunError(
                    f"strategy {name_of(part)} keeps {attribute!r} (a {type(value).__name__}), which cannot be saved: "
                    f"run without checkpoints, or choose another strategy"
                )
            kind, arrays = packed
            for name, array in arrays.items():
                saved[f"{depth}.{attribute}|{kind}|{name}"] = array
    return saved


def load(strategy: Strategy, saved: Arrays, group: str, names: Sequence[str]) -> None:
    """Give a fresh strategy what :func:`save` found, as far as it belongs to this group.

    Where only some of the group's arrays have a saved state (the plan has changed which layers are replicated
    together), the group starts afresh, with a warning.

    Raises:
        RunError: the state is of another strategy.
    """
    found: dict[tuple[int, str, str], dict[str, np.ndarray[Any, Any]]] = {}
    for depth, attribute, kind, name, array in entries(strategy, saved):
        if name == group if kind in _OF_GROUP else name in names:
            found.setdefault((depth, attribute, kind), {})[name] = array
    for (_, attribute, kind), arrays in found.items():
        missing = [name for name in names if name not in arrays] if kind not in _OF_GROUP else []
        if missing:
            _log.warning("group %s: no saved %s of %s, so its strategy starts afresh", group, attribute, missing[0])
            return
    for (depth, attribute, kind), arrays in found.items():
        setattr(inner(strategy)[depth], attribute, _unpack(kind, arrays, group, names))


def entries(strategy: Strategy, saved: Arrays) -> Iterator[tuple[int, str, str, str, np.ndarray[Any, Any]]]:
    """Yield ``(depth, attribute, kind, name, array)``; RunError for what is not of this strategy."""
    parts = inner(strategy)
    for key, array in saved.items():
        path, _, rest = key.partition("|")
        kind, _, name = rest.partition("|")
        depth, _, attribute = path.partition(".")
        fits = depth.isdecimal() and int(depth) < len(parts) and attribute in vars(parts[int(depth)])
        if not fits or kind not in (*_OF_GROUP, "record", "dict", "list"):
            raise RunError(
                f"the saved state of the strategy has {attribute or key!r}, which {name_of(strategy)} has not: "
                f"resume with the strategy that it was saved with"
            )
        yield int(depth), attribute, kind, name, array


def _pack(value: Any, group: str, names: Sequence[str]) -> tuple[str, dict[str, np.ndarray[Any, Any]]] | None:
    """Return ``(kind, name -> array)``, or None for what is neither arrays nor a number."""
    if isinstance(value, ArrayRecord) and set(value) == set(names):
        return "record", from_record(value)
    if isinstance(value, Mapping) and set(value) == set(names) and _all_arrays(value.values()):
        return "dict", {name: np.asarray(array) for name, array in value.items()}
    if isinstance(value, (list, tuple)) and len(value) == len(names) and _all_arrays(value):
        return "list", {name: np.asarray(array) for name, array in zip(names, value, strict=True)}
    if isinstance(value, (bool, int, float)):
        return "number", {group: np.asarray(value)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return "array", {group: value}
    return None


def _unpack(kind: str, arrays: Mapping[str, np.ndarray[Any, Any]], group: str, names: Sequence[str]) -> Any:
    if kind == "number":
        return arrays[group].item()
    if kind == "array":
        return arrays[group].copy()
    ordered = {name: arrays[name].copy() for name in names}
    if kind == "record":
        return to_record(ordered)
    return ordered if kind == "dict" else list(ordered.values())


def _all_arrays(values: Any) -> bool:
    # arithmetic on zero-dimensional arrays gives numpy scalars
    return all(isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc" for value in values)


def _same(value: Any, before: Any) -> bool:
    try:
        return value is before or (type(value) is type(before) and bool(value == before))
    except ValueError:  # arrays compare element by element
        return False
