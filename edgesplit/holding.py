"""What nodes hold: read from their answers, told apart by kind and layer, handed from one plan to another. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgesplit.codecs import unpack
from edgesplit.errors import RunError
from edgesplit.plan import Plan
from edgesplit.transport.base import Message

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Names:
    """Global parameter and buffer names by layer."""

    params: Sequence[Sequence[str]]
    buffers: Sequence[Sequence[str]]

    def of(self, layers: Sequence[int]) -> tuple[list[str], list[str]]:
        """Parameter and buffer names of these layers."""
        params = dict.fromkeys(name for layer in layers for name in self.params[layer])
        buffers = dict.fromkeys(name for layer in layers for name in self.buffers[layer])
        return list(params), list(buffers)

    def own(self, layers: Sequence[int], arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Of what is held (``param/...``, ``buffer/...``, ``optimizer/...``), what belongs to these layers."""
        wanted = {name for names in self.of(layers) for name in names}
        return {key: array for key, array in arrays.items() if key.partition("/")[2].partition("//")[0] in wanted}


@dataclass
class Held:
    """What a node holds, as fetched at a round's end: flat names ``param/...``, ``buffer/...``, ``optimizer/...``."""

    arrays: Arrays
    weights: dict[int, float] = field(default_factory=dict)

    def part(self, kind: str, names: Sequence[str] | None = None) -> Arrays:
        """The arrays of one kind: those of ``names``, or (optimizer state) those that belong to them."""
        found = {name.partition("/")[2]: a for name, a in self.arrays.items() if name.startswith(f"{kind}/")}
        if names is None:
            return found
        wanted = set(names)
        return {name: a for name, a in found.items() if name.partition("//")[0] in wanted}


def read(reply: Message, layers: Sequence[int], names: Names, params: Arrays, buffers: Arrays) -> Held:
    """Read what a node with these layers says that it holds.

    Args:
        params, buffers: the model's, to compare shapes and dtypes.

    Raises:
        RunError: it says something else.
    """
    node, rows = reply.sender, reply.meta.get("weights")
    if not isinstance(rows, list) or not all(map(_is_weight, rows)):
        raise RunError(f"{node!r} sent its weights in a form that is not ours: run the same version everywhere")
    own_params, own_buffers = names.of(layers)
    known = {f"{kind}/{name}" for kind, own in (("param", own_params), ("buffer", own_buffers)) for name in own}
    known |= {f"optimizer/{name}" for name in own_params}
    ours = {name: array for name, array in unpack(reply.arrays).items() if name.partition("//")[0] in known}
    held = Held(ours, {layer: float(weight) for layer, weight in rows})
    for kind, wanted, like in (("param", own_params, params), ("buffer", own_buffers, buffers)):
        found = held.part(kind)
        for name in wanted:
            if name not in found or found[name].shape != like[name].shape or found[name].dtype != like[name].dtype:
                raise RunError(f"{node!r} sent no {kind} {name!r} of the model's shape and dtype")
    return held


def _is_weight(row: Any) -> bool:
    """Whether a row is a layer and its weight."""
    return isinstance(row, list) and len(row) == 2 and type(row[0]) is int and type(row[1]) in (int, float)


def spread(nodes: Mapping[str, Mapping[str, Any]], plan: Plan, names: Names) -> dict[str, Arrays]:
    """What each node of a plan is to hold: what it held; of layers that are new to it, what some node held."""
    some = Held({name: array for node in sorted(nodes) for name, array in nodes[node].items()})
    found: dict[str, Arrays] = {}
    for node in plan.nodes():
        own = Held(dict(nodes.get(node, {})))
        params, buffers = names.of(plan.layers_of(node))
        known = own.part("param").keys() | own.part("buffer").keys()
        arrays: Arrays = {}
        # A layer that it had without optimizer state has had no update there: others' state is not its own.
        for kind, wanted in (("param", params), ("buffer", buffers), ("optimizer", params)):
            parts = own.part(kind, wanted) | some.part(kind, [name for name in wanted if name not in known])
            arrays |= {f"{kind}/{name}": array for name, array in parts.items()}
        found[node] = arrays
    return found
