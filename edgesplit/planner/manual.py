"""The user says where to cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from edgesplit.errors import PlanError, did_you_mean

if TYPE_CHECKING:
    from edgesplit.planner import Cut, Problem


def cut(problem: Problem) -> Mapping[str, Sequence[int]]:
    """Return the asked cuts, as indices, for each device.

    Raises:
        PlanError: too few or too many, out of order, out of range, or not a layer; a device that is none.
    """
    for device in problem.cuts_by_device:
        if device not in problem.nodes:
            raise PlanError(
                f"cuts_by_device names {device!r}, which is not a device{did_you_mean(device, problem.nodes)}"
            )
    if problem.cuts is None:
        missing = [device for device in problem.nodes if device not in problem.cuts_by_device]
        if missing and problem.stages > 1:
            raise PlanError(f"planner 'manual' has no cuts for {missing[0]!r}: give cuts, or use planner 'even'")
    elif len(problem.cuts_by_device) == len(problem.nodes):
        raise PlanError("cuts has no effect, as cuts_by_device names every device: remove it")
    common = _indices(problem.cuts or (), problem) if len(problem.cuts_by_device) < len(problem.nodes) else ()
    return {
        device: _indices(problem.cuts_by_device[device], problem) if device in problem.cuts_by_device else common
        for device in problem.nodes
    }


def _indices(cuts: Sequence[Cut], problem: Problem) -> tuple[int, ...]:
    stages, layers = problem.stages, len(problem.layers)
    if len(cuts) != stages - 1:
        raise PlanError(f"{len(cuts)} cuts {list(cuts)} were given, {stages} stages need {stages - 1}")
    indices = [_index(at, problem.layers) for at in cuts]
    for at in indices:
        if not 1 <= at <= layers - 1:
            raise PlanError(f"cut {at} is out of range: the chain has {layers} layers, cuts are 1 to {layers - 1}")
    for before, after in pairwise(indices):
        if after <= before:
            raise PlanError(f"cut {after} comes after cut {before}: cuts must ascend, each stage needs a layer")
    return tuple(indices)


def _index(at: Cut, layers: tuple[str, ...]) -> int:
    if isinstance(at, int):
        return at
    if at not in layers:
        raise PlanError(f"cut {at!r} is not a layer{did_you_mean(at, layers)}")
    return layers.index(at)
