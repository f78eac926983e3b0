"""Questions that the coordinator has put to nodes: which are open, who has answered, which are put again. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from edgesplit.codecs import Packed
from edgesplit.recovery import Point
from edgesplit.transport.base import Message

Part = tuple[str, Mapping[str, Any], Mapping[str, Packed]]
"""Kind, meta and arrays of what a node is asked."""

Asked = Mapping[str, Part]
"""Node -> what it is asked."""


@dataclass
class Question:
    """A question that is open.

    Each time that it is asked it has another ``asking`` number, so that no answer to an earlier time counts.
    """

    number: int
    asked: Asked
    replies: dict[str, Message] = field(default_factory=dict)
    asking: int = 0
    point: Point | None = None  # of the weights that a load gives out
    due: bool = False  # to be asked again


class Questions:
    """All that are open.

    Args:
        first: the first number.

    Attributes:
        open: by their numbers.
        recovery: that of a recovery, if one is under way: no other is asked meanwhile.
    """

    def __init__(self, first: int) -> None:
        self.open: dict[int, Question] = {}
        self.recovery: Question | None = None
        self._numbers = count(first)

    @property
    def busy(self) -> bool:
        """Whether any is open."""
        return bool(self.open) or self.recovery is not None

    def put(self, asked: Asked, point: Point | None = None) -> Question:
        """Open a question."""
        question = Question(next(self._numbers), asked, point=point)
        self.open[question.number] = question
        return question

    def inquire(self, asked: Asked) -> Question:
        """Open that of a recovery, in place of another that was open."""
        self.recovery = Question(next(self._numbers), asked)
        return self.recovery

    def ask(self, question: Question) -> dict[str, Part]:
        """Return what to send to whom, so that it is asked, or asked again."""
        question.asking = next(self._numbers) if question.asking else question.number
        question.replies.clear()
        number = {"request": question.asking}
        return {node: (kind, {**meta, **number}, arrays) for node, (kind, meta, arrays) in question.asked.items()}

    def answered_by(self, message: Message) -> Question | None:
        """Return the question that a message answers, as it was last asked."""
        wanted = message.meta.get("request")
        asked = [*self.open.values(), *([self.recovery] if self.recovery is not None else [])]
        question = next((question for question in asked if question.asking == wanted), None)
        return question if question is not None and message.sender in question.asked else None

    def put_off(self) -> None:
        """Have all asked again when the fleet has recovered: an answer that still comes tells of what is taken back."""
        for question in self.open.values():
            question.asking, question.due = next(self._numbers), True
            question.replies.clear()

    def put_again(self) -> list[Question]:
        """Return those that were put off: they are to be asked now."""
        due = [question for question in self.open.values() if question.due]
        for question in due:
            question.due = False
        return due

    def missing(self) -> list[str]:
        """Who has not answered."""
        asked = [self.recovery] if self.recovery is not None else list(self.open.values())
        return sorted({node for question in asked for node in question.asked if node not in question.replies})
