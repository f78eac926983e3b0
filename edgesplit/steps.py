"""A run's steps by where they stand: still to be published, open, or taken back and to be done again. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from edgesplit import verdict
from edgesplit.codecs import Packed
from edgesplit.effects import StepDone
from edgesplit.plan import Plan
from edgesplit.protocol import Report
from edgesplit.recovery import Ended
from edgesplit.schedule import Event, Micro, Step
from edgesplit.sharing import AHEAD, Router
from edgesplit.sheets import Cutting, Draft, number


@dataclass(frozen=True, slots=True)
class Due:
    """A step to be issued; ``told``: its end was told of before it was taken back."""

    draft: Draft
    evaluate: bool
    told: bool = False


@dataclass
class Open:
    """A step that was issued and has not ended."""

    due: Due
    step: Step
    participants: tuple[str, ...]
    reports: dict[str, Report] = field(default_factory=dict)
    arrays: dict[str, Mapping[str, Packed]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether all have reported."""
        return len(self.reports) == len(self.participants)

    def in_order(self) -> dict[str, Report]:
        """The reports, of all participants, in the plan's order and not in that of their arrival."""
        return {node: self.reports[node] for node in self.participants}

    def missing(self) -> list[str]:
        """Who has not reported."""
        return [node for node in self.participants if node not in self.reports]

    def left_out(self) -> dict[str, int]:
        """Devices whose samples it is done without, and how many."""
        shares = self.due.draft.shares.items()
        return {device: share.samples for device, share in shares if device not in self.step.batches and share.samples}

    def done(self, *, applied: bool) -> StepDone:
        """What is told of it when all have reported."""
        loss, weight = verdict.loss_of(self.reports)
        metrics = verdict.add_metrics([report.metrics for report in self.in_order().values()])
        shares = self.due.draft.shares.items()
        samples = sum(share.samples for device, share in shares if device in self.step.batches)
        return StepDone(self.step.step, loss, weight, samples, applied, metrics)


@dataclass
class Steps:
    """The steps that have not ended for good.

    Attributes:
        cutting: how batches are cut into micro-batches.
        router: chooses ways where nodes share work; None: they do not.
        next_micro: number of the next micro-batch.
        open: issued, in their order.
        later: to be published when there is room: nodes that share are chosen late.
        again: taken back, to be issued when the fleet has recovered.
    """

    cutting: Cutting
    router: Router | None = None
    next_micro: int = 0
    open: deque[Open] = field(default_factory=deque)
    later: list[Due] = field(default_factory=list)
    again: list[Due] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        """Whether there are any."""
        return bool(self.open or self.later or self.again)

    def publish(self, dues: Sequence[Due], plan: Plan, also: Collection[str], absent: Collection[str]) -> list[Open]:
        """Number the steps of one sheet and open them, as many as there is room for: all train, or all evaluate.

        Args:
            also: nodes that take part in every step of training.
            absent: nodes that get nothing where others can have it.
        """
        if self.router is not None:
            room = max(AHEAD - len(self.open), 0)
            other = (at for at, due in enumerate(dues) if due.evaluate != dues[0].evaluate)
            room = min(room, next(other, room))
            dues, self.later = dues[:room], [*dues[room:], *self.later]
        devices = [route.device for route in plan.routes]
        opened = []
        for due in dues:
            step = self._number(due.draft, plan, devices, absent)
            self.next_micro += len(step.micros)
            opened.append(Open(due, step, participants(step, plan, () if due.evaluate else also)))
        self.open.extend(opened)
        return opened

    def _number(self, draft: Draft, plan: Plan, devices: Sequence[str], absent: Collection[str]) -> Step:
        """Number a step's micro-batches, and where nodes share work choose ways by those that are quick and there."""
        router = self.router

        def routes(micros: Sequence[Micro]) -> Sequence[int]:
            return [0] * len(micros) if router is None else router.routes(plan, micros, absent)

        return number(draft, self.cutting, self.next_micro, devices, routes if router is not None else None)

    def observe(self, event: Event) -> None:
        """Learn from a report what an action took, so that the steps to come go round the slow."""
        entry = next((entry for entry in self.open if entry.step.step == event.step), None)
        if self.router is not None and entry is not None and not entry.due.evaluate and entry.step.micros:
            at = event.action.micro - entry.step.micros[0].micro
            if 0 <= at < len(entry.step.micros):
                micro = entry.step.micros[at]
                self.router.observe(event, micro.stop - micro.start)

    def room_for(self) -> list[Due]:
        """Take out those that can be published now that one has ended, where nodes share work."""
        if not self.later or len(self.open) >= AHEAD:
            return []
        if self.open and self.open[0].due.evaluate != self.later[0].evaluate:
            return []
        ready, self.later = self.later, []
        return ready

    def take_back(self, ended: Sequence[Ended]) -> None:
        """Have these done again, and all that had not ended after them."""
        back = (Due(entry.draft, False, told=True) for entry in ended)
        self.again = [*back, *(entry.due for entry in self.open), *self.again, *self.later]
        self.later.clear()
        self.open.clear()

    def taken_back(self) -> list[Due]:
        """Take out those that are to be done again and fit into one sheet: training first."""
        if not self.again:
            return []
        evaluate = self.again[0].evaluate
        ready = [due for due in self.again if due.evaluate == evaluate]
        self.again = [due for due in self.again if due.evaluate != evaluate]
        return ready


def participants(step: Step, plan: Plan, also: Collection[str]) -> tuple[str, ...]:
    """Return who reports a step: the nodes on its micro-batches' ways, and ``also`` these."""
    if not step.micros:
        return ()  # nobody has samples: there is nothing to do or to wait for
    on_route = {place.node for micro in step.micros for place in plan.path(micro.device, micro.route)}
    return tuple(node for node in plan.nodes() if node in on_route or node in also)
