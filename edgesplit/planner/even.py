"""Equal shares: the slowest stage of a route is as fast as cuts can make it.

The baseline that other planners are measured against. It looks at one micro-batch on one route: it knows nothing of
links, or of how many devices share an edge server.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgesplit.planner import Problem


def cut(problem: Problem) -> Mapping[str, Sequence[int]]:
    """Return one set of cuts for all devices.

    A layer costs its measured forward and backward time, or 1 without a profile. A stage is as fast as the slowest
    of its nodes in the topology; if one of the nodes has no ``gflops``, all stages count as equally fast. No stage
    gets more than its smallest node's ``memory_mb`` where that is possible.
    """
    if problem.costs is None:
        costs = [1.0] * len(problem.layers)
    else:
        costs = [layer.forward_s + layer.input_grad_s + layer.weight_grad_s for layer in problem.costs]
    limits = [_smallest(problem, stage) for stage in range(problem.stages)]

    def fits(stage: int, start: int, stop: int) -> bool:
        return problem.memory_mb(set(range(start, stop)), [(start, stop)]) <= limits[stage]

    speeds = _speeds(problem)
    cuts = partition(costs, speeds, fits)
    if cuts is None:  # nothing fits: the best cuts without limits give the error its figures
        cuts = partition(costs, speeds, lambda stage, start, stop: True)
    return dict.fromkeys(problem.nodes, cuts or ())


def partition(
    costs: Sequence[float], speeds: Sequence[float], fits: Callable[[int, int, int], bool]
) -> tuple[int, ...] | None:
    """Cut ``costs`` into a run for each speed so that the largest ``sum / speed`` is least.

    Exact, by dynamic programming in O(stages x layers^2). Of equally good cuts it takes those with the least sum of
    squared times, so that the other stages are even too.

    Args:
        costs: of the layers.
        speeds: of the stages, in order.
        fits: whether ``stage`` may have layers ``start`` to ``stop``.

    Returns:
        The first layer of each stage but the first; None where nothing fits.
    """
    sums = [0.0, *accumulate(costs)]

    def seconds(stage: int, start: int, stop: int) -> float:
        return (sums[stop] - sums[start]) / speeds[stage] if fits(stage, start, stop) else math.inf

    slowest, _ = _search(len(costs), len(speeds), lambda so_far, *run: max(so_far, seconds(*run)))
    if math.isinf(slowest):
        return None

    def squares(so_far: float, stage: int, start: int, stop: int) -> float:
        time = seconds(stage, start, stop)
        return so_far + time * time if time <= slowest else math.inf

    return _search(len(costs), len(speeds), squares)[1]


def _search(layers: int, stages: int, add: Callable[[float, int, int, int], float]) -> tuple[float, tuple[int, ...]]:
    """Return the least total, and its cuts; ``add(so_far, stage, start, stop)`` is the total with one more stage."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # where a stage ends -> total, starts so far
    for stage in range(stages):
        ends = range(stage + 1, layers - (stages - stage - 1) + 1)
        best = {
            stop: min(
                (add(best[start][0], stage, start, stop), (*best[start][1], start)) for start in best if start < stop
            )
            for stop in ends
        }
    total, starts = best[layers]
    return total, starts[1:]


def _speeds(problem: Problem) -> list[float]:
    known = [
        [problem.topology.nodes[nodes[stage]].gflops for nodes in problem.nodes.values()]
        for stage in range(problem.stages)
    ]
    found = [[speed for speed in stage if speed is not None] for stage in known]
    if any(len(speeds) < len(stage) for speeds, stage in zip(found, known, strict=True)):
        return [1.0] * problem.stages
    return [min(speeds) for speeds in found]


def _smallest(problem: Problem, stage: int) -> float:
    limits = [problem.topology.nodes[nodes[stage]].memory_mb for nodes in problem.nodes.values()]
    return min((limit for limit in limits if limit is not None), default=math.inf)
