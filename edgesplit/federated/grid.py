"""Flower's ``Grid`` over our own way of reaching nodes: all that a Flower strategy knows of the network.

Flower's messages exist on the coordinator only; nodes see plain arrays and never import Flower.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid

from edgesplit.errors import ExperimentError, RunError

if TYPE_CHECKING:
    from flwr.supercore.run import Run

Arrays = Mapping[str, np.ndarray[Any, Any]]

WEIGHT = "num-examples"
"""Flower's name for what a reply counts for in an average."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a strategy asks of one node in a round.

    Attributes:
        node: its name.
        group: key of the group of layers that the node holds a replica of.
        arrays: the group's arrays at the start of the round, by the original model's names; read-only.
        config: the strategy's configuration, for example ``{"server-round": 3}``.
    """

    node: str
    group: str
    arrays: Arrays
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a node's replica has become.

    Attributes:
        node, group: those of the request.
        arrays: the same names, shapes and dtypes as the group's.
        weight: sum of the weights (samples, tokens) that passed the node's layers of this group in the round.
        metrics: name -> number; averaged by weight.
    """

    node: str
    group: str
    arrays: Arrays
    weight: float
    metrics: Mapping[str, float] = field(default_factory=dict)


Exchange = Callable[[list[Request]], list[Reply]]
"""Asks nodes and waits for their replies; a node that was lost has none."""


def node_id(name: str) -> int:
    """Return the Flower id of a node: the same in every process and run, positive, 63 bits."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def enable_messages() -> None:
    """Make ``flwr.app.Message`` usable outside Flower's own runtime; where it is already, do nothing.

    From 1.42 on a message takes its sender from the process's ``TaskIdentity``, which is private to Flower. This is
    the only place that touches it.

    Raises:
        ExperimentError: this version of Flower makes messages in yet another way.
    """
    if _can_make_messages():
        return
    try:
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    except (ImportError, AttributeError, TypeError):
        pass  # judged below by what counts: whether a message can be made
    if not _can_make_messages():
        raise ExperimentError(
            f"flwr {version('flwr')} makes messages in a way that edgesplit does not know: install 'flwr>=1.42,<1.43'"
        )


def _can_make_messages() -> bool:
    try:
        Message(RecordDict(), dst_node_id=1, message_type=MessageType.TRAIN)
    except (RuntimeError, AttributeError, TypeError):
        return False
    return True


class TransportGrid(Grid):
    """The nodes of one group, as a Flower strategy sees them.

    Every message is a train request for one group: the group's key travels in the message's ``group_id``. Deadlines
    are the exchange's own (a lost node simply has no reply), so ``timeout`` is not needed here.

    Args:
        nodes: names of the nodes that a strategy may choose from.
        exchange: reaches them; called once by each ``push_messages``.
        group: key given to messages that carry no ``group_id``.
    """

    def __init__(self, nodes: Iterable[str], exchange: Exchange, group: str = "") -> None:
        enable_messages()
        self._names = {node_id(name): name for name in nodes}
        self._exchange = exchange
        self._group = group
        self._run: Run | None = None
        self._replies: dict[str, Message] = {}
        self._numbers = itertools.count(1)

    def set_run(self, run: Run) -> None:
        """Keep the Flower run that this grid belongs to."""
        self._run = run

    @property
    def run(self) -> Run:
        """The Flower run; there is none unless ``set_run`` was called."""
        if self._run is None:
            raise RunError("this grid belongs to no flower run: call set_run first")
        return self._run

    def get_node_ids(self) -> list[int]:
        """Return the ids of the nodes, in the order they were given."""
        return list(self._names)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a message to one node."""
        return Message(content, dst_node_id=dst_node_id, message_type=message_type, group_id=group_id, ttl=ttl)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Exchange all messages at once; return an id for each, to pull its reply by."""
        sent = list(messages)
        requests = self.requests(sent)
        asked = {(request.node, request.group): message for request, message in zip(requests, sent, strict=True)}
        if len(asked) < len(requests):
            raise RunError("two requests to one node for one group: a strategy may ask each node once a round")
        ids = {key: str(next(self._numbers)) for key in asked}
        for reply in self._exchange(requests):
            key = (reply.node, reply.group)
            if key not in asked:
                raise RunError(f"node {reply.node!r} replied for group {reply.group!r}, which it was not asked for")
            if ids[key] in self._replies:
                raise RunError(f"node {reply.node!r} replied twice for group {reply.group!r}")
            self._replies[ids[key]] = to_message(reply, asked[key])
        return list(ids.values())

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies there are, in the order of the ids; each once."""
        return [self._replies.pop(key) for key in list(message_ids) if key in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Exchange all messages; return the replies in the order of the messages, whoever was fastest."""
        return self.pull_messages(self.push_messages(messages))

    def requests(self, messages: Sequence[Message]) -> list[Request]:
        """Return Flower's messages as our requests.

        Raises:
            RunError: a message is not a train message to a node of this grid with one record of arrays.
        """
        decoded: dict[int, Arrays] = {}  # strategies send one record to all nodes: decode it once
        return [self._request(message, decoded) for message in messages]

    def _request(self, message: Message, decoded: dict[int, Arrays]) -> Request:
        metadata = message.metadata
        name = self._names.get(metadata.dst_node_id)
        if name is None:
            raise RunError(f"a strategy asks node id {metadata.dst_node_id}, which is not in this group")
        if metadata.message_type != MessageType.TRAIN:
            raise RunError(f"a strategy sends {metadata.message_type!r} to {name!r}: only 'train' goes through flower")
        record = sole_array_record(message)
        if id(record) not in decoded:
            decoded[id(record)] = from_record(record)
        config = {key: value for part in message.content.config_records.values() for key, value in part.items()}
        return Request(name, metadata.group_id or self._group, decoded[id(record)], config)


def sole_array_record(message: Message) -> ArrayRecord:
    """Return the one record of arrays in a message; RunError where there is none, or more than one."""
    records = list(message.content.array_records.values())
    if len(records) != 1:
        raise RunError(f"a strategy's message has {len(records)} records of arrays; it must have one")
    return records[0]


def to_message(reply: Reply, request: Message) -> Message:
    """Return a reply of ours as Flower's, under the keys that the strategy's own request used."""
    if WEIGHT in reply.metrics:
        raise RunError(f"node {reply.node!r} reports a metric {WEIGHT!r}, which is flower's name for the weight")
    metrics = MetricRecord({WEIGHT: _number(reply.weight)})
    for name, value in reply.metrics.items():
        metrics[name] = _number(value)
    key = next(iter(request.content.array_records), "arrays")
    return Message(RecordDict({key: to_record(reply.arrays), "metrics": metrics}), reply_to=request)


def _number(value: float) -> float:
    """Return a plain Python number: a numpy float64 would turn Flower's float32 arithmetic into float64."""
    return int(value) if isinstance(value, (int, np.integer)) else float(value)


def to_record(arrays: Arrays) -> ArrayRecord:
    """Return arrays as Flower's record: every dtype and shape exactly, also empty and zero-dimensional ones."""
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def from_record(record: ArrayRecord) -> dict[str, np.ndarray[Any, Any]]:
    """Return a record's arrays, read-only (they may be shared between requests)."""
    arrays = {name: array.numpy() for name, array in record.items()}
    for array in arrays.values():
        array.setflags(write=False)
    return arrays
