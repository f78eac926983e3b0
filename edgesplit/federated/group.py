"""One group of replicated layers and its strategy: what the strategy may ask, and what it may give.

Flower computes in double precision whatever the dtype of the weights, and the result is rounded once: float32 replicas
that agree stay bit for bit what they are, and Krum's distances between nearly equal replicas do not cancel. The price
is 8 bytes a parameter and replica, on the coordinator, at the round's end.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ConfigRecord, Message
from flwr.serverapp.strategy import Strategy

from edgesplit.errors import RunError
from edgesplit.federated.grid import Arrays, Exchange, TransportGrid, node_id, sole_array_record, to_record
from edgesplit.federated.replies import float_names, widen
from edgesplit.federated.strategies import inner, name_of, needed_nodes

_ROUND = "server-round"


@dataclass(frozen=True, slots=True)
class Group:
    """All layers with the same set of replica nodes.

    Attributes:
        nodes: who holds a replica, in a fixed order.
        arrays: the parameters at the start of the round, by the original model's names.
    """

    nodes: tuple[str, ...]
    arrays: Arrays


class Result(NamedTuple):
    """A group's new arrays (names, shapes and dtypes as before) and the weighted means of the nodes' metrics."""

    arrays: Arrays
    metrics: dict[str, Any]


def configure(strategy: Strategy, number: int, key: str, group: Group, exchange: Exchange) -> list[Message]:
    """Return the strategy's message to each node of a group, in the group's order.

    Raises:
        RunError: it asks for something that our nodes do not do.
    """
    name = " over ".join(name_of(part) for part in inner(strategy))
    if (needed := needed_nodes(strategy)) > len(group.nodes):
        raise RunError(
            f"strategy {name} needs {needed} nodes, and group {key!r} has {len(group.nodes)}: "
            f"lower its min_train_nodes and min_available_nodes"
        )
    record = to_record(widen({name: group.arrays[name] for name in float_names(group.arrays)}))
    grid = TransportGrid(group.nodes, exchange, key)
    try:
        messages = list(strategy.configure_train(number, record, ConfigRecord(), grid))
    except Exception as error:
        raise RunError(f"strategy {name} failed to configure group {key!r} for round {number}: {error}") from error
    by_node = {message.metadata.dst_node_id: message for message in messages}
    asked = [by_node[node_id(node)] for node in group.nodes if node_id(node) in by_node]
    if len(asked) != len(group.nodes) or len(messages) != len(asked):
        raise RunError(
            f"strategy {name} asks {len(messages)} of the {len(group.nodes)} nodes of group {key!r}: every replica of "
            f"a layer trains, so set fraction_train to 1 and choose a round's devices with data.per_round"
        )
    for message in asked:
        for setting in (setting for part in message.content.config_records.values() for setting in part):
            if setting != _ROUND:
                raise RunError(f"strategy {name} sets {setting!r} for its clients, which our nodes do not follow")
        if (sent := sole_array_record(message)) is not record and sent != record:
            raise RunError(f"strategy {name} starts its clients from other arrays than the model's: not offered here")
        message.metadata.group_id = key
    return asked


def aggregate(strategy: Strategy, number: int, key: str, group: Group, replies: list[Message]) -> Result:
    """Return the strategy's result in the dtypes of the group."""
    if not replies:
        return Result(group.arrays, {})
    name = name_of(strategy)
    try:
        # an overflow shows as a result that is not finite, which is refused below by the array's name
        with np.errstate(all="ignore"):
            record, metrics = strategy.aggregate_train(number, replies)
    except Exception as error:
        raise RunError(f"strategy {name} failed on group {key!r} in round {number}: {error}") from error
    if record is None:
        raise RunError(f"strategy {name} gives no result from {len(replies)} nodes of group {key!r}: it needs more")
    floats = set(float_names(group.arrays))
    if set(record) != floats:
        other = min(set(record) ^ floats)
        raise RunError(f"strategy {name} gives other arrays than those of group {key!r}: {other!r} is in one only")
    arrays = dict(group.arrays)
    for array_name, array in record.items():
        value, like = array.numpy(), arrays[array_name]
        if value.shape != like.shape:
            raise RunError(f"strategy {name} gives {array_name!r} shape {value.shape}, not {like.shape}")
        with np.errstate(over="ignore"):
            arrays[array_name] = value.astype(like.dtype, copy=False)
        if not np.isfinite(arrays[array_name]).all():
            raise RunError(f"strategy {name} gives a value of {array_name!r} that is not finite, in round {number}")
    return Result(arrays, dict(metrics or {}))


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Flower's progress lines, several a group and round, to those who ask with ``FLWR_LOG_LEVEL``."""
    logger = logging.getLogger("flwr")
    level = logger.level
    if "FLWR_LOG_LEVEL" not in os.environ:
        logger.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        logger.setLevel(level)
