"""Tiny runs, drawn: a chain, a tree or a U, two or three steps of a few micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from edgesplit.methods import METHODS
from edgesplit.plan import Plan, Route, Stage
from edgesplit.sheets import Agenda, Cutting, Draft
from edgesplit.verdict import LossScale
from tests.virtual.fleet import Case

SHAPES = {
    "chain": ["d0 c", "d0 n1 c", "d0 n1 n2 c"],
    "tree": ["d0 c; d1 c", "d0 c; d1 c; d2 c", "d0 e c; d1 e c", "d0 e c; d1 c"],
    "u": ["d0 c d0", "d0 e c d0", "d0 c d0; d1 c d1", "d0 e c d0; d1 e c d1"],
}
"""Routes by nodes, one device's after the other."""

REPLICATED = {
    "tree": ["d0 c; d1 c", "d0 c; d1 c; d2 c", "d0 e0 c; d1 e1 c", "d0 e0 c; d1 e1 c; d2 e1 c", "d0 e c; d1 e c"],
    "u": ["d0 c d0; d1 c d1", "d0 e0 c d0; d1 e1 c d1"],
}
"""Those in which there is somebody whom the others can do without."""

METHODS_DRAWN = sorted(name for name in METHODS if name != "interleaved")
"""Interleaved needs loops, which are none of the shapes."""


@dataclass(frozen=True)
class Tiny:
    """A run: its rounds' steps, each round as the sheets that they are published in."""

    shape: str
    case: Case
    rounds: list[list[list[Draft]]]


def route(nodes: Sequence[str], cuts: Sequence[int], layers: int) -> Route:
    bounds = [0, *cuts, layers]
    return Route(nodes[0], tuple(Stage(n, a, b) for n, (a, b) in zip(nodes, pairwise(bounds), strict=True)))


def draw_tiny(rng: Random, shapes: Mapping[str, Sequence[str]] = SHAPES) -> Tiny:
    shape = rng.choice(sorted(shapes))
    paths = [path.split() for path in rng.choice(shapes[shape]).split("; ")]
    layers = max(map(len, paths)) + rng.randint(0, 1)
    cuts = {n: sorted(rng.sample(range(1, layers), n - 1)) for n in sorted({len(path) for path in paths})}
    plan = Plan(tuple(f"l{i}" for i in range(layers)), tuple(route(p, cuts[len(p)], layers) for p in paths))
    method = rng.choice(METHODS_DRAWN)
    synchronous = METHODS[method].synchronous
    case = Case(
        plan=plan,
        cutting=Cutting(None, rng.choice([2, 2, 3, 4])) if rng.random() < 0.7 else Cutting(rng.randint(1, 2)),
        method=method,
        window=rng.choice([1, 1, 2]) if "window>1" in METHODS[method].allows else 1,
        split_backward=rng.random() < 0.2,
        every_step=synchronous and rng.random() < 0.3,
        clip=rng.choice([None, None, 5.0]) if synchronous else None,
        scale=LossScale(4.0, dynamic=True, growth_interval=2) if synchronous and rng.random() < 0.25 else LossScale(),
        frozen=frozenset({0}) if rng.random() < 0.1 else frozenset(),
        poison={rng.randrange(3): frozenset({rng.choice(plan.nodes())})} if rng.random() < 0.15 else {},
    )
    return Tiny(shape, case, _draw_rounds(rng, [path[0] for path in paths]))


def _draw_rounds(rng: Random, devices: Sequence[str]) -> list[list[list[Draft]]]:
    """Two or three steps, in one round or two, in one sheet each or two."""
    agenda = Agenda({device: [rng.randint(2, 5) for _ in range(2)] for device in devices}, lambda step: 1 + step % 3)
    drafts = agenda.round(devices, steps=rng.choice([2, 2, 3]))
    if rng.random() < 0.5:
        return [[drafts[:1]], [drafts[1:]]]
    return [[drafts]] if rng.random() < 0.5 else [[drafts[:1], drafts[1:]]]
