"""The run's control logic as a state machine: sheets, reports, commits, terms, requests. No I/O, no clock.

The shell (``session.py``) sends what it says to send, feeds it the answers, and acts on its other effects.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from edgesplit.codecs import Packed, pack, unpack
from edgesplit.errors import FrameError, NodeLost, RunError, TransportTimeout
from edgesplit.plan import Plan
from edgesplit.protocol import Commit, Report, Send, Sheet
from edgesplit.schedule import Step
from edgesplit.sheets import Cutting, Draft, number
from edgesplit.task import COORDINATOR
from edgesplit.transport.base import Message


@dataclass(frozen=True, slots=True)
class StepDone:
    """Effect: a step has ended. ``loss`` is the weighted mean over the step (nan where it has no weight)."""

    step: int
    loss: float
    weight: float
    samples: int
    applied: bool
    metrics: Mapping[str, Mapping[str, tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Replied:
    """Effect: every node asked has answered a request."""

    request: int
    replies: Mapping[str, Message]


@dataclass(frozen=True, slots=True)
class Failed:
    """Effect: the run cannot go on."""

    error: Exception


Effect = Send | StepDone | Replied | Failed


@dataclass
class LossScale:
    """What the loss is multiplied by before the backward (Micikevicius et al., 2018, section 3.2)."""

    value: float = 1.0
    dynamic: bool = False
    growth_interval: int = 2000
    good: int = 0

    def note(self, finite: bool) -> bool:
        """Note a step's outcome; return whether a non-finite one was only the scale's search."""
        if not self.dynamic:
            return False
        if finite:
            self.good += 1
            if self.good % self.growth_interval == 0:
                self.value *= 2.0
            return False
        self.good = 0
        searching = self.value > 1.0
        self.value = max(self.value / 2.0, 1.0)
        return searching


@dataclass
class _Open:
    """A step that was issued and has not ended."""

    draft: Draft
    step: Step
    participants: tuple[str, ...]
    evaluate: bool
    reports: dict[str, Report] = field(default_factory=dict)
    arrays: dict[str, Mapping[str, Packed]] = field(default_factory=dict)


@dataclass
class _Request:
    nodes: set[str]
    replies: dict[str, Message] = field(default_factory=dict)


class Coordinator:
    """Issues steps, decides their commits, collects answers.

    Args:
        plan: the routes.
        cutting: how batches are cut into micro-batches.
        synchronous: steps end with a commit.
        add_replicas: ``federation.every: step``: the replicas' gradient sums are added before the update.
        clip_norm: the global norm is clipped to this.
        loss_scale: see :class:`LossScale`.
        max_skipped: non-finite steps in a row that end the run.
        step_timeout: seconds without any report while steps are open that end the run.
    """

    def __init__(
        self,
        plan: Plan,
        cutting: Cutting,
        *,
        synchronous: bool = True,
        add_replicas: bool = False,
        clip_norm: float | None = None,
        loss_scale: LossScale | None = None,
        max_skipped: int = 3,
        step_timeout: float = 120.0,
    ) -> None:
        self.plan, self.cutting = plan, cutting
        self.synchronous, self.clip_norm = synchronous, clip_norm
        self.loss_scale = loss_scale or LossScale()
        self.max_skipped, self.step_timeout = max_skipped, step_timeout
        self.term = 0
        self.next_micro = 0
        self.skipped = 0
        self._skipped_in_row = 0
        self._nodes = plan.nodes()
        self._devices = [route.device for route in plan.routes]
        replicas = plan.replicas()
        shared = {layer: nodes for layer, nodes in replicas.items() if len(nodes) > 1}
        self._shared = shared if add_replicas else {}
        self._open: deque[_Open] = deque()
        self._requests: dict[int, _Request] = {}
        self._request_numbers = count(1)
        self._progress_at: float | None = None

    @property
    def busy(self) -> bool:
        """Whether steps are open or requests unanswered."""
        return bool(self._open or self._requests)

    @property
    def barrier(self) -> bool:
        """Whether an update needs the commit's answer."""
        scaled = self.loss_scale.dynamic or self.loss_scale.value != 1.0
        return self.synchronous and (self.clip_norm is not None or scaled or bool(self._shared))

    # -- steps

    def issue(self, drafts: Sequence[Draft], now: float, *, evaluate: bool = False) -> list[Effect]:
        """Publish the steps ahead to every node."""
        return [*self._publish(drafts, now, evaluate), *self._close_complete(now)]

    def _publish(self, drafts: Sequence[Draft], now: float, evaluate: bool) -> list[Effect]:
        self._progress_at = now
        opened = []
        for draft in drafts:
            step = number(draft, self.cutting, self.next_micro, self._devices)
            self.next_micro += len(step.micros)
            opened.append(_Open(draft, step, self._participants(step, evaluate), evaluate))
        self._open.extend(opened)
        sheet = Sheet(tuple(entry.step for entry in opened), evaluate)
        return [self._send(node, "sheet", sheet.meta()) for node in self._nodes]

    def _participants(self, step: Step, evaluate: bool) -> tuple[str, ...]:
        if not step.micros:
            return ()  # nobody has samples: there is nothing to do or to wait for
        on_route = {place.node for device in step.batches for place in self.plan.route(device).stages}
        if not evaluate:
            on_route |= {node for nodes in self._shared.values() for node in nodes}
        return tuple(node for node in self._nodes if node in on_route)

    # -- requests

    def request(
        self,
        kind: str,
        to: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Packed]]],
        now: float,
    ) -> tuple[int, list[Effect]]:
        """Ask nodes for something; :class:`Replied` with the number returned comes when all have answered."""
        self._progress_at = now
        number_ = next(self._request_numbers)
        self._requests[number_] = _Request(set(to))
        sends = [self._send(node, kind, {**meta, "request": number_}, arrays) for node, (meta, arrays) in to.items()]
        return number_, list(sends)

    # -- events

    def receive(self, message: Message, now: float) -> list[Effect]:
        """Take a message from a node. Raises FrameError where it is malformed."""
        if message.sender not in self._nodes:
            return []
        if message.kind == "status":
            return self._status(message)
        if message.kind == "failed":
            return [Failed(RunError(f"{message.sender!r} failed: {message.meta.get('error', 'no reason given')}"))]
        if message.kind == "report":
            return self._report(message, now)
        return self._reply(message, now)

    def _status(self, message: Message) -> list[Effect]:
        if message.meta.get("state") != "offline" or not self.busy:
            return []
        reason = message.meta.get("reason") or "its connection closed"
        return [Failed(NodeLost(f"node {message.sender!r} was lost {self._where()} ({reason})"))]

    def _where(self) -> str:
        return f"in step {self._open[0].step.step}" if self._open else "between two steps"

    def _reply(self, message: Message, now: float) -> list[Effect]:
        wanted = message.meta.get("request")
        request = self._requests.get(wanted) if isinstance(wanted, int) else None
        if request is None or message.sender not in request.nodes:
            return []
        self._progress_at = now
        request.replies[message.sender] = message
        if len(request.replies) < len(request.nodes):
            return []
        del self._requests[message.meta["request"]]
        return [Replied(message.meta["request"], request.replies)]

    def tick(self, now: float) -> list[Effect]:
        """Note the time. A run without progress for ``step_timeout`` seconds has failed."""
        if not self.busy or self._progress_at is None or now - self._progress_at < self.step_timeout:
            return []
        if self._open:
            missing = [node for node in self._open[0].participants if node not in self._open[0].reports]
        else:
            missing = sorted({n for r in self._requests.values() for n in r.nodes - set(r.replies)})
        what = f"no progress {self._where()} for {self.step_timeout:g} s: nothing from {', '.join(map(repr, missing))}"
        return [Failed(TransportTimeout(what))]

    # -- reports and commits

    def _report(self, message: Message, now: float) -> list[Effect]:
        if message.term != self.term:
            return []
        report = Report.of(message.meta)
        self._check_sums(message)
        for entry in self._open:
            if entry.step.step == report.step and message.sender in entry.participants:
                entry.reports[message.sender] = report
                entry.arrays[message.sender] = message.arrays
                self._progress_at = now
        return self._close_complete(now)

    def _check_sums(self, message: Message) -> None:
        known = {str(layer) for layer, nodes in self._shared.items() if message.sender in nodes}
        for name in message.arrays:
            if name.partition("/")[0] not in known:
                raise FrameError(f"a report of {message.sender!r} carries {name!r}, which is of no layer it shares")

    def _close_complete(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while self._open and len(self._open[0].reports) == len(self._open[0].participants):
            effects += self._close(self._open.popleft(), now)
        return effects

    def _close(self, entry: _Open, now: float) -> list[Effect]:
        if entry.evaluate or not entry.participants:
            return [self._done(entry, applied=True)]
        if not self.synchronous:
            return self._close_asynchronous(entry)
        sums, weights = self._add_replicas(entry)
        finite = all(map(_finite, entry.reports.values())) and all(np.isfinite(a).all() for a in sums.values())
        scale = self.loss_scale.value
        clip = self._clip(entry, sums, weights) if finite else 1.0  # by the scale of this step's gradients
        searching = self.loss_scale.note(finite)
        if not finite:
            return [*self._skip(entry, now, searching), self._done(entry, applied=False)]
        self._skipped_in_row = 0
        commit = Commit(entry.step.step, True, clip, self.loss_scale.value)
        # A new scale is news to nodes that sat this step out too.
        to = entry.participants if commit.loss_scale == scale else self._nodes
        return [*self._commit(to, commit, sums, weights), self._done(entry, applied=True)]

    def _close_asynchronous(self, entry: _Open) -> list[Effect]:
        bad = [(node, report) for node, report in entry.reports.items() if report.skipped]
        if not bad:
            self._skipped_in_row = 0
            return [self._done(entry, applied=True)]
        self.skipped += 1
        self._skipped_in_row += 1
        effects: list[Effect] = [self._done(entry, applied=False)]
        if self._skipped_in_row >= self.max_skipped:
            effects.append(Failed(self._not_finite(entry)))
        return effects

    def _done(self, entry: _Open, *, applied: bool) -> StepDone:
        losses = {micro: pair for report in entry.reports.values() for micro, pair in report.losses.items()}
        total = weight = 0.0
        for micro in sorted(losses):  # in micro-batch order: the same bits whoever computed them
            total += losses[micro][0]
            weight += losses[micro][1]
        metrics = {device: values for report in entry.reports.values() for device, values in report.metrics.items()}
        samples = sum(share.samples for share in entry.draft.shares.values())
        loss = total / weight if weight else math.nan
        return StepDone(entry.step.step, loss, weight, samples, applied, metrics)

    def _skip(self, entry: _Open, now: float, searching: bool) -> list[Effect]:
        """A non-finite step: put back everywhere, and issue what follows again under a new term."""
        self.skipped += 1
        self._skipped_in_row += not searching
        self.term += 1
        commit = Commit(entry.step.step, False, 1.0, self.loss_scale.value)
        effects: list[Effect] = [self._send(node, "commit", commit.meta()) for node in self._nodes]
        if self._skipped_in_row >= self.max_skipped:
            return [*effects, Failed(self._not_finite(entry))]
        again = [later.draft for later in self._open]
        self._open.clear()
        return [*effects, *(self._publish(again, now, evaluate=False) if again else [])]

    def _not_finite(self, entry: _Open) -> RunError:
        reports = [(node, entry.reports[node]) for node in entry.participants]  # not in the order of their arrival
        bad = [(node, report.culprit) for node, report in reports if report.skipped or not report.finite]
        node, layer = bad[0] if bad else (entry.participants[-1], None)
        where = f"last in layer {layer!r} on {node!r}" if layer else f"last in {node!r}"
        sources = [(node, report.source) for node, report in reports if report.source]
        if sources:
            node, source = sources[0]
            where = f"first in {source} on {node!r}"
        first = entry.step.step - self.max_skipped + 1
        return RunError(
            f"{self.max_skipped} steps in a row were not finite (steps {first} to {entry.step.step}), "
            f"{where}: lower the learning rate, clip the norm, or look at that device's data"
        )

    def _add_replicas(self, entry: _Open) -> tuple[dict[str, np.ndarray[Any, Any]], dict[int, float]]:
        """Add the gradient sums and weights of replicated layers, in node order."""
        if not self._shared:
            return {}, {}
        sums: dict[str, np.ndarray[Any, Any]] = {}
        weights: dict[int, float] = dict.fromkeys(self._shared, 0.0)
        for node in entry.participants:
            for layer, (weight, _) in entry.reports[node].layers.items():
                if layer in weights:
                    weights[layer] += weight
            for name, array in unpack(entry.arrays[node]).items():
                if name in sums and (sums[name].shape, sums[name].dtype) != (array.shape, array.dtype):
                    raise FrameError(f"the sum of {name!r} of {node!r} has another shape or dtype than other replicas'")
                sums[name] = sums[name] + array if name in sums else array
        return sums, weights

    def _clip(self, entry: _Open, sums: Mapping[str, np.ndarray[Any, Any]], weights: Mapping[int, float]) -> float:
        """Factor that brings the global norm to ``clip_norm``: min(1, c / (norm + 1e-6)), as torch clips."""
        if self.clip_norm is None:
            return 1.0
        square = 0.0
        for name, array in sums.items():
            layer = int(name.partition("/")[0])
            if weights[layer]:
                mean = array.astype(np.float64) / (weights[layer] * self.loss_scale.value)
                square += float(np.vdot(mean, mean))
        by_layer: dict[int, list[tuple[float, float]]] = {}
        for node in entry.participants:  # in node order, not that of arrival: the same bits in every run
            for layer, pair in entry.reports[node].layers.items():
                if layer not in self._shared:
                    by_layer.setdefault(layer, []).append(pair)
        for pairs in by_layer.values():
            total = sum(weight for weight, _ in pairs)
            if total:
                square += sum(weight * sq for weight, sq in pairs) / total
        return min(1.0, self.clip_norm / (math.sqrt(square) + 1e-6))

    def _commit(
        self,
        nodes: Sequence[str],
        commit: Commit,
        sums: Mapping[str, np.ndarray[Any, Any]],
        weights: Mapping[int, float],
    ) -> list[Effect]:
        effects: list[Effect] = []
        for node in nodes:
            layers = {layer for layer, holders in self._shared.items() if node in holders}
            mine = {name: a for name, a in sums.items() if int(name.partition("/")[0]) in layers}
            meta = {**commit.meta(), "weights": [[layer, weights[layer]] for layer in sorted(layers)]}
            effects.append(self._send(node, "commit", meta, pack(mine, "raw")))
        return effects

    def _send(self, to: str, kind: str, meta: Mapping[str, Any], arrays: Mapping[str, Packed] | None = None) -> Send:
        return Send(to, Message(kind=kind, sender=COORDINATOR, term=self.term, meta=meta, arrays=arrays or {}))


def _finite(report: Report) -> bool:
    """Whether the gradients are, as the node found, and the losses: one that is not may have gradients that are."""
    return report.finite and all(math.isfinite(total) for total, _ in report.losses.values())
