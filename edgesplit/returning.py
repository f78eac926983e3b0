"""How a fleet comes back to one state after a loss: what its nodes are asked, and in what order. No I/O.

First all say what they have kept: who is in a new life, or under another plan, after it was told its part; the others
after they were halted. Then all return to the newest point that all have, or get what they held when the weights were
last given out. A further loss begins it anew. Before any weights were given out, only parts are told.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgesplit.codecs import Packed
from edgesplit.effects import NodeChanged
from edgesplit.errors import NodeLost
from edgesplit.plan import Plan
from edgesplit.questions import Asked, Part, Question
from edgesplit.recovery import Kept, Line

Spare = Callable[[str], Mapping[str, Packed] | None]
"""What a node held when the weights were last given out; None: that is not known."""


@dataclass
class Returning:
    """Who has what behind it.

    Attributes:
        assigned: what each node was told at first.
        fresh: nodes that have not been told their part: they are in a new life, or it changed.
        returned: nodes in a new life that the fleet has not recovered from.
        asks_what_was_kept: the answers that are awaited are those to the first question, and the second comes.
    """

    assigned: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)
    returned: set[str] = field(default_factory=set)
    asks_what_was_kept: bool = False

    def part(self, node: str) -> Part:
        """What tells a node its part once more."""
        return "assign", {**self.assigned[node], "again": True}, {}

    def anew(self, asked: Asked, nodes: Collection[str]) -> Asked:
        """What the nodes of another plan are asked now.

        Who is still to be told a part must be told that of now. Weights that were being given out are withdrawn: who
        gives them out knows what of them is right after steps that are done again without somebody.
        """
        found: dict[str, Part] = {}
        for node, ask in asked.items():
            if node in nodes and ask[0] != "load":
                found[node] = self.part(node) if ask[0] == "assign" else ask
        return found

    def first(self, nodes: Sequence[str], *, given: bool) -> Asked:
        """What to ask at first; ``given``: weights have been given out."""
        self.asks_what_was_kept = given
        halted: dict[str, Part] = {node: ("halt", {}, {}) for node in nodes if node not in self.fresh} if given else {}
        return {node: self.part(node) for node in self.fresh} | halted

    def second(
        self, line: Line, kept: Mapping[str, Sequence[Kept]], plan: Plan, loss_scale: float, spare: Spare
    ) -> Asked:
        """What to ask then: to be where ``line`` ends.

        Args:
            kept: node -> what it has.

        Raises:
            NodeLost: a node has nothing of it, and it is not known what it held.
        """
        self.asks_what_was_kept = False
        point = {"point": [*line.point()], "loss_scale": loss_scale}
        asked: dict[str, Part] = {}
        for node, points in kept.items():
            own = line.newest(points)
            if own is not None:
                asked[node] = ("return", {**point, "kept": own.to_json()}, {})
                continue
            arrays = spare(node)
            if arrays is None:
                raise NodeLost(f"node {node!r} came back without what it had kept: resume the run")
            layers = list(plan.layers_of(node))
            asked[node] = ("load", {**point, "reset_optimizer": layers, "reset_round": True}, arrays)
        return asked

    def over(self, step: int) -> list[NodeChanged]:
        """The fleet is in one state again, that after ``step``; return whom that brings back."""
        where = f"at the end of step {step}" if step >= 0 else "at the beginning"
        changes = [NodeChanged(node, "recovered", where) for node in sorted(self.returned)]
        self.fresh.clear()
        self.returned.clear()
        return changes


def assigns(questions: Mapping[int, Question]) -> bool:
    """Whether an open question tells nodes their part."""
    return any(kind == "assign" for question in questions.values() for kind, _, _ in question.asked.values())
