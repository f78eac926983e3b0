"""Flower between rounds. The only package that imports flwr; it runs on the coordinator."""

from __future__ import annotations

from edgesplit.federated.grid import Reply, Request, TransportGrid
from edgesplit.federated.group import Group, Result
from edgesplit.federated.rounds import Federation, average
from edgesplit.federated.strategies import REFUSED, STRATEGIES, make_strategy

__all__ = [
    "REFUSED",
    "STRATEGIES",
    "Federation",
    "Group",
    "Reply",
    "Request",
    "Result",
    "TransportGrid",
    "average",
    "make_strategy",
]
