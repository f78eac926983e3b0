"""What the doctor says: one line a fact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact.

    Attributes:
        name: of what was looked at; each occurs once.
        ok: whether a run can live with it.
        text: what was found, with the values.
        hint: what to do about it, or how to have it better; empty: nothing.
        values: the same for programs.
    """

    name: str
    ok: bool
    text: str
    hint: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mark(self) -> str:
        """In one word: ``ok``, ``hint`` or ``FAIL``."""
        if not self.ok:
            return "FAIL"
        return "hint" if self.hint else "ok"

    def to_json(self) -> dict[str, Any]:
        """As ``edgesplit doctor --json`` prints it."""
        return {
            "name": self.name,
            "ok": self.ok,
            "text": self.text,
            "hint": self.hint,
            "values": dict(self.values),
        }
