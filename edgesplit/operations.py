"""Counts the multiplications and additions of what torch computes, by torch's own formulas.

torch's counter imports its compiler, a second of each run's start; here nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from edgesplit.dispatch import Dispatch

__all__ = ["Operations"]


class Operations(Dispatch):
    """Counts while it is entered; what has no formula and is not made of operations that have one costs nothing.

    Attributes:
        total: floating-point operations so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        formula = flop_registry.get(func._overloadpacket)  # noqa: SLF001 - what torch keeps its formulas by
        if formula is None and func is not torch.ops.prim.device.default:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=out)
        return out
