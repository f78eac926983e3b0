"""What Flower does between rounds: each group of replicated layers is aggregated by its own copy of a strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, Message, MessageType, RecordDict
from flwr.serverapp.strategy import FedAvg, Strategy

from edgesplit.errors import EdgesplitError, ExperimentError, RunError
from edgesplit.federated import state as states
from edgesplit.federated.grid import Arrays, Exchange, Reply, Request, TransportGrid, node_id
from edgesplit.federated.group import Group, Result, aggregate, configure, quiet
from edgesplit.federated.replies import agree, check_finite, check_fits, check_weight, float_names, is_float, widen
from edgesplit.federated.strategies import copy_of, make_strategy

Train = Callable[[list[Request]], list[Reply]]
"""Trains one round and returns each asked node's replica; called once a round, also with nothing asked."""


class _Held(NamedTuple):
    strategy: Strategy
    names: tuple[str, ...]


class Federation:
    """Aggregates the replicas of every group with a Flower strategy; each group has its own copy of it.

    Groups of one node, and groups without floating-point arrays, are not aggregated. Integer arrays of a group are
    frozen parameters: they stay what they are (counters belong to :func:`average`).

    Args:
        strategy: a name (:data:`~edgesplit.federated.strategies.STRATEGIES`) or an object of flwr.serverapp.strategy.
        strategy_args: arguments of the named strategy.

    Raises:
        ExperimentError: no such strategy or argument.
    """

    def __init__(self, strategy: str | Strategy = "fedavg", strategy_args: Mapping[str, Any] | None = None) -> None:
        self._fresh = make_strategy(strategy, strategy_args)
        self._held: dict[str, _Held] = {}
        self._loaded: dict[str, np.ndarray[Any, Any]] = {}

    def check(self, groups: Mapping[str, Group], *, checkpoint: bool = False) -> None:
        """Try the strategy on each group with one number in place of each array; changes nothing.

        Args:
            groups: by key.
            checkpoint: also try to save its state.

        Raises:
            ExperimentError: it asks nodes for something they do not do (settings beyond the round's number, a sample
                of the nodes, other arrays), cannot aggregate so few nodes, or has a state that cannot be saved.
        """
        for key, group in _aggregated(groups).items():
            small = Group(group.nodes, {name: np.zeros(1) for name in float_names(group.arrays)})
            trial = Federation(self._fresh)
            try:
                trial.run_round(
                    1, {key: small}, lambda requests: [Reply(r.node, r.group, r.arrays, 1) for r in requests]
                )
                if checkpoint:
                    trial.state()
            except EdgesplitError as error:
                raise ExperimentError(str(error)) from error

    def run_round(self, number: int, groups: Mapping[str, Group], train: Train) -> dict[str, Result]:
        """Ask the strategies what each node gets, train, and aggregate.

        Args:
            number: the round's, from 1.
            groups: by key; a group keeps its strategy's state as long as it has the same key and arrays.
            train: given one request for every node of every aggregated group.

        Returns:
            The aggregated groups' results. Where no node has a weight, the group's arrays as they were.

        Raises:
            RunError: a strategy asks for what nodes do not do, a reply does not fit its group or is not finite, or the
                strategy gives no (finite) result.
        """
        if number < 1:
            raise RunError(f"round {number}: rounds of a strategy count from 1")
        shared = _aggregated(groups)
        exchange = checked_exchange(train, shared)
        with quiet():
            strategies = {key: self._strategy(key, group) for key, group in shared.items()}
            messages: list[Message] = []
            for key, group in shared.items():
                messages += configure(strategies[key], number, key, group, exchange)
            grid = TransportGrid(dict.fromkeys(node for group in shared.values() for node in group.nodes), exchange)
            replies: dict[str, list[Message]] = {key: [] for key in shared}
            for message in grid.send_and_receive(messages):
                replies[message.metadata.group_id].append(message)
            return {key: aggregate(strategies[key], number, key, group, replies[key]) for key, group in shared.items()}

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return what the strategies remember, as arrays for a checkpoint; empty for one without state.

        Raises:
            RunError: the strategy remembers something that cannot be saved.
        """
        saved = dict(self._loaded)
        for key, held in self._held.items():
            saved.update(states.save(held.strategy, self._fresh, key, held.names))
        return saved

    def load_state(self, arrays: Arrays) -> None:
        """Take up a state saved by :meth:`state`; each group finds its own by the names of its arrays.

        Raises:
            RunError: it is the state of another strategy.
        """
        self._loaded = {name: np.array(array) for name, array in arrays.items()}
        self._held = {}
        for _ in states.entries(self._fresh, self._loaded):
            pass  # each entry is checked as it is read

    def _strategy(self, key: str, group: Group) -> Strategy:
        """Return the group's strategy. A new group (another plan) takes over what is remembered of its arrays."""
        names = tuple(float_names(group.arrays))
        held = self._held.get(key)
        if held is not None and held.names == names:
            return held.strategy
        strategy = copy_of(self._fresh)
        if self._held or self._loaded:
            remembered = self.state()
            states.load(strategy, remembered, key, names)
            # the groups that these arrays were in are no more
            self._loaded = remembered
            self._held = {k: h for k, h in self._held.items() if k != key and not set(h.names) & set(names)}
        self._held[key] = _Held(strategy, names)
        return strategy


def average(replies: Sequence[Reply]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the mean of optimizer state or buffers over replicas, by weight; of integers and booleans the maximum.

    An array that all replicas agree on (a mask, say) is returned as it is. Where no reply has a weight, all count
    alike.

    Args:
        replies: at least one, all of one group.

    Raises:
        RunError: replies differ in names, shapes or dtypes, or an array to be averaged is not finite.
    """
    if not replies:
        raise RunError("nothing to average: no node of the group replied")
    first = replies[0]
    for reply in replies:
        check_weight(reply)
        check_fits(reply, first.arrays)
    result = {name: np.array(array) for name, array in first.arrays.items()}
    differing = [name for name in result if not agree([reply.arrays[name] for reply in replies])]
    floats = [name for name in differing if is_float(result[name])]
    for name in set(differing) - set(floats):
        result[name] = np.asarray(np.max(np.stack([reply.arrays[name] for reply in replies]), axis=0))
    if floats:
        result.update(_mean(replies, {name: result[name] for name in floats}))
    return result


def _mean(replies: Sequence[Reply], like: Arrays) -> Arrays:
    """Return FedAvg's mean of the arrays named in ``like``."""
    counted = [reply for reply in replies if reply.weight > 0]
    weighted = [(reply, reply.weight) for reply in counted] or [(reply, 1) for reply in replies]
    for reply, _ in weighted:
        check_finite(reply, like)
    answers = [
        Reply(reply.node, reply.group, widen({name: reply.arrays[name] for name in like}), weight)
        for reply, weight in weighted
    ]
    grid = TransportGrid((reply.node for reply in answers), lambda requests: answers, answers[0].group)
    ask = RecordDict({"arrays": ArrayRecord()})
    messages = [grid.create_message(ask, MessageType.TRAIN, node_id(reply.node), reply.group) for reply, _ in weighted]
    with quiet():
        group = Group(tuple(reply.node for reply in answers), like)
        return aggregate(FedAvg(), 1, answers[0].group, group, grid.send_and_receive(messages)).arrays


def checked_exchange(train: Train, groups: Mapping[str, Group]) -> Exchange:
    """Return an exchange that trains, checks the replies against their groups and leaves out those without weight."""

    def exchange(requests: list[Request]) -> list[Reply]:
        asked = [
            Request(request.node, request.group, groups[request.group].arrays, request.config) for request in requests
        ]
        return [reply for reply in map(checked, train(asked)) if reply.weight > 0]

    def checked(reply: Reply) -> Reply:
        check_weight(reply)
        group = groups.get(reply.group)
        if group is None or reply.weight == 0:
            return reply  # a group that nobody asked for is refused by the grid
        check_fits(reply, group.arrays)
        names = float_names(group.arrays)
        check_finite(reply, names)
        return Reply(reply.node, reply.group, widen({n: reply.arrays[n] for n in names}), reply.weight, reply.metrics)

    return exchange


def _aggregated(groups: Mapping[str, Group]) -> dict[str, Group]:
    return {key: group for key, group in groups.items() if len(group.nodes) > 1 and float_names(group.arrays)}
