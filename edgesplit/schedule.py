"""A schedule is data: the order in which every node runs its forwards, backwards and updates.

A :data:`Schedule` is a pure function that orders one node's forwards and backwards (:mod:`edgesplit.methods` has
them); the passes below it insert the updates and halve the backwards. Orders that are one :func:`merge` of two sorted
lists need two numbers a node: how many micro-batches pass its stages together, and how many forwards run ahead.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple

from edgesplit.errors import ScheduleError

if TYPE_CHECKING:
    from edgesplit.plan import Plan, Stage

Op = Literal["F", "B", "I", "W", "U"]

_TEXT = re.compile(r"(\d+)([FBIWU])(\d+)(?:\.(\d+))?")


class Action(NamedTuple):
    """One unit of work: ``2F0`` is the forward of micro-batch 0 on stage 2, ``2F0.1`` that of its slice 1.

    ``F`` forward; ``B`` backward, or its halves ``I`` (gradient of the input, sent upstream first) and ``W``
    (gradient of the weights); ``U`` the update of a stage. The ``micro`` of a ``U`` is the last micro-batch whose
    gradient it applies: for a synchronous method the last of the whole step, whoever ran it.
    """

    op: Op
    stage: int
    micro: int
    slice: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.micro}" + (f".{self.slice}" if self.slice else "")

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read what ``str`` wrote.

        Raises:
            ScheduleError: ``text`` is no action.
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ScheduleError(f"{text!r} is not an action: write stage, one of F B I W U, micro-batch, as in '2F0'")
        stage, op, micro, part = found.groups()
        return cls(op, int(stage), int(micro), int(part or 0))  # type: ignore[arg-type]


class Event(NamedTuple):
    """An action that ran, on a node, from ``start`` to ``end`` in seconds. Simulator and workers both emit these.

    ``step`` is the global step; ``version`` the weight version used (``U``: the version made).
    """

    node: str
    action: Action
    start: float
    end: float
    step: int = 0
    version: int = 0


class Micro(NamedTuple):
    """A micro-batch of the sheet: samples ``start`` to ``stop`` of the batch that ``device`` has in that step.

    ``route`` says which of the ways that the plan leaves it is taken, see :meth:`edgesplit.plan.Plan.path`.
    """

    micro: int
    device: str
    start: int
    stop: int
    route: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a sheet.

    Attributes:
        step: the global number, from 0.
        micros: all micro-batches of all devices, by number.
        batches: device -> (epoch, index of the batch in it), for each device with samples in this step.
        lr: factor on the learning rates.
    """

    step: int
    micros: tuple[Micro, ...]
    batches: Mapping[str, tuple[int, int]]
    lr: float = 1.0


Orders = dict[str, list[Action]]
"""Node -> its actions in order."""


class Visit(NamedTuple):
    """A micro-batch on a node: the ``position``-th of the flow passes as ``stage``."""

    position: int
    stage: int


class Flow:
    """Which nodes the micro-batches of some steps pass.

    A *position* counts the flow's micro-batches from 0, whatever their global numbers.

    Attributes:
        micros: the micro-batches by position.
        paths: by position, the stages that it passes.
        visits: node -> its visits by position, then stage; only nodes that have any.
    """

    def __init__(self, plan: Plan, steps: Sequence[Step]) -> None:
        devices = {route.device for route in plan.routes}
        self.micros = [micro for step in steps for micro in step.micros]
        self.paths: list[tuple[Stage, ...]] = []
        self.visits: dict[str, list[Visit]] = {}
        self._sharing = plan.sharing()
        for position, micro in enumerate(self.micros):
            if micro.device not in devices:
                raise ScheduleError(f"micro-batch {micro.micro} is of device {micro.device!r}, which has no route")
            self.paths.append(plan.path(micro.device, micro.route))
            for index, stage in enumerate(self.paths[-1]):
                self.visits.setdefault(stage.node, []).append(Visit(position, index))

    @cached_property
    def distinct(self) -> frozenset[tuple[Stage, ...]]:
        """The paths, each once."""
        return frozenset(self.paths)

    @cached_property
    def passed(self) -> dict[str, int]:
        """Node -> how many of the micro-batches pass it, at least once."""
        return {node: len({visit.position for visit in visits}) for node, visits in self.visits.items()}

    @cached_property
    def hosts(self) -> dict[int, int]:
        """Stage -> how many nodes micro-batches pass as that stage."""
        pairs = {(visit.stage, node) for node, visits in self.visits.items() for visit in visits}
        return dict(Counter(stage for stage, _ in pairs))

    def units(self, stage: int, node: str) -> float:
        """How long a visit takes on paper, where a micro-batch enters in each unit.

        One for each node that hosts the stage, less for a node with more than its even share. Of nodes that share the
        work by their speeds each has as much to do as the whole flow is long, however few its micro-batches are.
        """
        even = len(self.micros) / self.passed[node]
        return even if node in self._sharing else min(even, self.hosts[stage])


Schedule = Callable[[Flow, str], list[Action]]
"""``(flow, node) ->`` its forwards and backwards in order, without updates."""


def merge(forwards: Iterable[Action], backwards: Iterable[Action], warmup: int) -> Iterator[Action]:
    """Run ``warmup`` forwards, then a forward and a backward in turn, then the other backwards."""
    forwards, backwards = iter(forwards), iter(backwards)
    yield from islice(forwards, warmup)
    for forward in forwards:
        yield forward
        yield next(backwards)
    yield from backwards


def merged(flow: Flow, node: str, group: int, warmup: int) -> list[Action]:
    """The merge of ``node``'s forwards and backwards, both a group of positions at a time, stage by stage."""
    visits = flow.visits.get(node, [])
    ahead = sorted(visits, key=lambda v: (v.position // group, v.stage, v.position))
    back = sorted(visits, key=lambda v: (v.position // group, -v.stage, v.position))
    return list(
        merge(
            (Action("F", v.stage, flow.micros[v.position].micro) for v in ahead),
            (Action("B", v.stage, flow.micros[v.position].micro) for v in back),
            warmup,
        )
    )


def halve_backwards(actions: Iterable[Action]) -> Iterator[Action]:
    """Replace each ``B`` by ``I`` and then ``W``: upstream gets its gradient before the weights get theirs."""
    for action in actions:
        if action.op == "B":
            yield action._replace(op="I")
            yield action._replace(op="W")
        else:
            yield action


def hosted_layers(plan: Plan, node: str) -> dict[int, set[int]]:
    """Stage -> the layers that ``node`` runs as that stage of any route."""
    layers: dict[int, set[int]] = {}
    for route in plan.routes:
        for index, stage in enumerate(route.stages):
            if stage.node == node:
                layers.setdefault(index, set()).update(range(stage.start, stage.stop))
    return layers


def updated_layers(plan: Plan, node: str) -> dict[int, set[int]]:
    """Stage -> the layers that its ``U`` updates on ``node`` (synchronous methods).

    Every layer of the node is in exactly one: a layer that is hosted under two stages belongs to the later one.
    Stages that no layer is left to are absent.
    """
    hosted = hosted_layers(plan, node)
    taken: set[int] = set()
    owned: dict[int, set[int]] = {}
    for stage in sorted(hosted, reverse=True):
        if mine := hosted[stage] - taken:
            owned[stage] = mine
            taken |= mine
    return dict(sorted(owned.items()))


def add_step_updates(
    actions: Sequence[Action], plan: Plan, steps: Sequence[Step], node: str, *, update_all: bool = False
) -> list[Action]:
    """Insert for each step the ``U`` of each stage after the last backward that touches its layers.

    Args:
        update_all: a stage whose layers no micro-batch of the step passed on this node is updated too, at the
            step's end (gradients of replicas are added up over nodes: ``every: step``).
    """
    owned = updated_layers(plan, node)
    step_of = {micro.micro: index for index, step in enumerate(steps) for micro in step.micros}
    device_of = {micro.micro: micro.device for step in steps for micro in step.micros}
    touches = {  # (device, stage of its route) -> stages whose layers it adds gradients to
        (route.device, index): [
            u for u, layers in owned.items() if not layers.isdisjoint(range(stage.start, stage.stop))
        ]
        for route in plan.routes
        for index, (stage, nodes) in enumerate(zip(route.stages, plan.choices(route.device), strict=True))
        if node in nodes
    }
    last: dict[tuple[int, int], int] = {}
    end = [-1] * len(steps)
    for at, action in enumerate(actions):
        index = step_of[action.micro]
        end[index] = at
        if action.op in "BW":
            for stage in touches[device_of[action.micro], action.stage]:
                last[index, stage] = at
    inserted: dict[int, list[Action]] = {}
    before = -1
    for index, step in enumerate(steps):
        if not step.micros:
            continue
        before = max(before, end[index])
        for stage in owned:
            if update_all or (index, stage) in last:
                inserted.setdefault(last.get((index, stage), before), []).append(
                    Action("U", stage, step.micros[-1].micro)
                )
    order = inserted.get(-1, [])
    for at, action in enumerate(actions):
        order.append(action)
        order.extend(inserted.get(at, ()))
    return order


def add_micro_updates(actions: Iterable[Action]) -> Iterator[Action]:
    """Insert ``U`` after each whole backward (cadence ``micro``): it updates the layers of that stage of the route."""
    for action in actions:
        yield action
        if action.op in "BW":
            yield Action("U", action.stage, action.micro)


def step_order(
    schedule: Schedule,
    plan: Plan,
    step: Step,
    node: str,
    *,
    split_backward: bool = False,
    update_all: bool = False,
) -> list[Action]:
    """Return the actions of ``node`` for one synchronous step; see :func:`add_step_updates` for ``update_all``.

    Raises:
        ScheduleError: the schedule cannot carry these micro-batches, or a device of the step has no route.
    """
    return flow_order(
        schedule, Flow(plan, [step]), plan, [step], node, split_backward=split_backward, update_all=update_all
    )


def flow_order(
    schedule: Schedule,
    flow: Flow,
    plan: Plan,
    steps: Sequence[Step],
    node: str,
    *,
    split_backward: bool = False,
    update_all: bool = False,
) -> list[Action]:
    """Return the actions of ``node`` for steps that flow without a flush between, an update a stage and step."""
    actions = schedule(flow, node)
    if split_backward:
        actions = list(halve_backwards(actions))
    return add_step_updates(actions, plan, steps, node, update_all=update_all)


def even_steps(
    plan: Plan, micros: int | Mapping[str, int], samples: int = 1, *, steps: int = 1, first: int = 0
) -> list[Step]:
    """Make the steps of a dry run: every device has ``micros`` micro-batches of ``samples`` samples a step.

    Numbers are dealt so that devices alternate in proportion to their micro-batches.
    """
    shares = {r.device: micros if isinstance(micros, int) else micros.get(r.device, 0) for r in plan.routes}
    place = {device: index for index, device in enumerate(shares)}
    turns = sorted(
        ((turn + 0.5) / share, place[device], device, turn) for device, share in shares.items() for turn in range(share)
    )
    return [
        Step(
            first + index,
            tuple(
                Micro((first + index) * len(turns) + number, device, turn * samples, (turn + 1) * samples)
                for number, (_, _, device, turn) in enumerate(turns)
            ),
            {device: (0, first + index) for device, share in shares.items() if share},
        )
        for index in range(steps)
    ]
