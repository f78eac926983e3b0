"""Layers computed by torch."""

from __future__ import annotations

from edgesplit.segments.torch.runner import TorchRunner
from edgesplit.segments.torch.values import from_arrays, to_arrays

__all__ = ["TorchRunner", "from_arrays", "to_arrays"]
