"""What is exact about a user's own experiment: two steps of the fleet against one process, in plain torch."""

from __future__ import annotations

from edgesplit.verify.checks import Check, verify

__all__ = ["Check", "verify"]
