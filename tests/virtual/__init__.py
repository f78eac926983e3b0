"""The whole protocol on a virtual clock.

``fleet``: real coordinator and nodes, messages that are late. ``world`` and ``process``: also the real transport, over
a broker and links that lose, repeat, garble and stop. ``trial``: one run of that, compared with ``oracle``.
``recover``: one whose processes crash.
"""

from tests.virtual.draw import route
from tests.virtual.fleet import (
    MASK,
    MEMORY,
    Case,
    Fleet,
    IntEngine,
    Node,
    Stuck,
    initial,
    loss_of,
    number,
    square_of,
    through,
    unwrap,
    updated,
    weight_of,
    wrap,
)
from tests.virtual.oracle import Oracle, mix, present

__all__ = [
    "MASK",
    "MEMORY",
    "Case",
    "Fleet",
    "IntEngine",
    "Node",
    "Oracle",
    "Stuck",
    "initial",
    "loss_of",
    "mix",
    "number",
    "present",
    "route",
    "square_of",
    "through",
    "unwrap",
    "updated",
    "weight_of",
    "wrap",
]
