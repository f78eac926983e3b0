"""One node's part in a run, as a state machine: no thread, socket, clock or arithmetic inside.

The shell (``worker.py``) feeds it messages and asks for work; it says what to do next and, once that is done, what to
send. The rules are DESIGN's "What a step computes": an order is a priority within a window; a synchronous step is
reported after its last backward, updated in order, and settled by the coordinator's commit; at most one version is
uncommitted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from edgesplit.codecs import Packed
from edgesplit.errors import FrameError
from edgesplit.mailbox import Key, Mailbox
from edgesplit.plan import Plan, Stage
from edgesplit.protocol import Commit, Report, Send, Sheet
from edgesplit.schedule import Action, Micro, Step
from edgesplit.task import COORDINATOR
from edgesplit.transport.base import DATA_KINDS, Message

HALTING = frozenset({"halt", "return"})
"""Questions that end whatever a node is doing."""

SERVED = frozenset({"halt", "return", "fetch", "load", "insert"})
"""Questions that a node answers; others are not ours."""

MOST_REQUESTS = 1024
"""Open questions, and words on steps that passed this node by; more are not taken."""


@dataclass(frozen=True, slots=True)
class Run:
    """Work: an action.

    Attributes:
        act, target, grad: the messages that it consumes.
        to: where its output goes, if anywhere.
        weight: of the micro-batch, in a backward.
        last: the stage is its route's last.
        evaluate: a forward without a graph, on the test set.
        commit: the coordinator's answer, for an update that needs it.
    """

    action: Action
    step: Step
    micro: Micro | None = None
    act: Message | None = None
    target: Message | None = None
    grad: Message | None = None
    to: str | None = None
    weight: float = 0.0
    last: bool = False
    evaluate: bool = False
    commit: Message | None = None


@dataclass(frozen=True, slots=True)
class Reckon:
    """Work: reckon up a step (weights, squares, finite) for the report."""

    step: Step
    evaluate: bool = False


@dataclass(frozen=True, slots=True)
class Settle:
    """Work: make a step's update final, or put back what was there before it."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class Keep:
    """Work: keep the state after ``step``, whose updates have all been made, so that the node can come back to it."""

    step: int
    term: int


@dataclass(frozen=True, slots=True)
class Serve:
    """Work: answer a question of the coordinator's, between steps."""

    message: Message


Work = Run | Reckon | Settle | Keep | Serve


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the engine made of a piece of work.

    Attributes:
        arrays: what to send, encoded for the receiver.
        needs: of an ``F``: the names whose gradient must come back.
        target: of a first stage's ``F``: the encoded target.
        weight, loss_sum, version: of the micro-batch.
        metrics: of a last stage's ``F`` in evaluation.
        report: of a Reckon.
        meta: of a Serve, or flags of a data message.
    """

    arrays: Mapping[str, Packed] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()
    target: Mapping[str, Packed] | None = None
    weight: float = 0.0
    loss_sum: float = 0.0
    version: int = 0
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    report: Report | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Live:
    """What a node remembers of a micro-batch on one stage between its forward and its backward."""

    sends_grad: bool
    awaits_grad: bool
    weight: float


class NodeMachine:
    """Follows the orders of the sheets.

    Args:
        name: this node.
        plan: the routes.
        order: steps of a sheet -> this node's actions in order.
        window: how many actions ahead may be run if the first is not ready (an update never counts).
        synchronous: steps are reported before their update and settled by a commit.
        barrier: the update needs the commit's answer (clipping, loss scale, replicas' sums).
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        *,
        order: Callable[[Sequence[Step]], Sequence[Action]],
        window: int = 1,
        synchronous: bool = True,
        barrier: bool = False,
    ) -> None:
        self.name, self.plan, self.window = name, plan, window
        self.synchronous, self.barrier = synchronous, barrier
        self.term = 0
        self.loss_scale = 1.0
        self._order = order
        self._nodes = frozenset(plan.nodes())
        self._devices = frozenset(route.device for route in plan.routes)
        self._pending: deque[Action] = deque()
        self._held = Mailbox()
        self._micros: dict[int, tuple[Step, Micro]] = {}
        self._live: dict[tuple[int, int], _Live] = {}
        self._steps: deque[Step] = deque()  # not yet settled, in order
        self._left: dict[int, int] = {}  # step -> actions to run before its report
        self._reported: set[int] = set()
        self._evaluating: set[int] = set()
        self._losses: dict[int, dict[int, tuple[float, float]]] = {}
        self._metrics: dict[int, dict[str, dict[str, tuple[float, float]]]] = {}
        self._commits: dict[int, Message] = {}
        self._verdicts: deque[Commit] = deque()  # on steps that are taken back or had no part for this node
        self._keeps: deque[int] = deque()  # steps whose updates are made
        self._passing: deque[int] = deque()  # steps that pass this node by, whose commits it must know nevertheless
        self._requests: deque[Message] = deque()
        # Without commits a node could run away from those behind it, which then hold all that it sends: of the steps
        # of a sheet that the fleet has not ended, the number after the last micro-batch.
        self._ends: deque[tuple[int, int]] = deque()
        self.lead = _lead(plan) + window

    @property
    def dropped(self) -> int:
        """Messages that nothing here waits for."""
        return self._held.dropped

    @property
    def halted(self) -> bool:
        """Whether the coordinator has ended what was planned."""
        return not self._steps and bool(self._requests) and self._requests[0].kind in HALTING

    # -- messages in

    def receive(self, message: Message) -> None:
        """Take a message. Raises FrameError where a control message is malformed."""
        if message.kind in DATA_KINDS:
            if message.term >= self.term and message.sender in self._nodes:
                self._held.put(message)
        elif message.sender != COORDINATOR or message.term < self.term:
            return
        elif message.kind == "sheet":
            self._take_sheet(Sheet.of(message.meta))
        elif message.kind == "commit":
            commit = Commit.of(message.meta)
            if commit.apply and commit.step in self._left:
                self._commits[commit.step] = message
            elif not commit.apply:
                self._roll_back(commit, message.term)
            elif len(self._verdicts) < MOST_REQUESTS:
                self._verdicts.append(commit)  # a step that passed this node by
        elif message.kind == "ended":
            ended = message.meta.get("step")
            while self._ends and isinstance(ended, int) and self._ends[0][0] <= ended:
                self._ends.popleft()
        elif message.kind in SERVED:
            if message.kind in HALTING:
                self._halt(message.term)
            if len(self._requests) < MOST_REQUESTS:
                self._requests.append(message)
        else:
            self._held.dropped += 1

    def _halt(self, term: int) -> None:
        """Drop all that was planned and all that is under way: the coordinator will say where to go on."""
        self.term = term
        for step in list(self._steps):
            self._forget(step)
        for held in (self._pending, self._verdicts, self._keeps, self._passing, self._requests, self._ends):
            held.clear()
        for named in (self._live, self._held, self._commits):
            named.clear()

    def _roll_back(self, commit: Commit, term: int) -> None:
        """Drop what was planned from ``commit.step`` on; the engine's part is the next piece of work."""
        self._verdicts.append(commit)
        self.term = term
        self._pending = deque(a for a in self._pending if self._micros[a.micro][0].step < commit.step)
        self._live = {key: live for key, live in self._live.items() if self._micros[key[1]][0].step < commit.step}
        self._keeps = deque(step for step in self._keeps if step < commit.step)
        self._passing = deque(step for step in self._passing if step < commit.step)
        for step in [step for step in self._steps if step.step >= commit.step]:
            self._forget(step)
        self._held.renew(term)

    def _take_sheet(self, sheet: Sheet) -> None:
        if strange := {device for step in sheet.steps for device in step.batches} - self._devices:
            raise FrameError(f"a sheet message is malformed: device {min(strange)!r} has no route")
        for micro in (micro for step in sheet.steps for micro in step.micros):
            if micro.route >= self.plan.ways(micro.device):
                raise FrameError(f"a sheet message is malformed: {micro.device!r} has no way {micro.route}")
        numbers = [micro.micro for step in sheet.steps for micro in step.micros]
        if len(set(numbers)) < len(numbers) or not self._micros.keys().isdisjoint(numbers):
            raise FrameError("a sheet message is malformed: a micro-batch's number is used twice")
        steps = [*(step.step for step in self._steps), *(step.step for step in sheet.steps)]
        if any(a >= b for a, b in pairwise(steps)):
            raise FrameError("a sheet message is malformed: its steps do not follow each other")
        actions = self._forwards(sheet) if sheet.evaluate else self._order(sheet.steps)
        self._pending.extend(actions)
        if not self._steps:
            self._ends.clear()  # of a sheet before, whose steps have all ended
        if sheet.evaluate or not self.synchronous:
            self._ends.extend((step.step, step.micros[-1].micro + 1) for step in sheet.steps if step.micros)
        by_micro = {micro.micro: (step, micro) for step in sheet.steps for micro in step.micros}
        counts: dict[int, int] = {}
        for action in actions:
            number = by_micro[action.micro][0].step
            counts[number] = counts.get(number, 0) + (action.op != "U" or not self.synchronous)
        for step in sheet.steps:
            if step.step in counts:
                self._micros.update({micro.micro: (step, micro) for micro in step.micros})
                self._steps.append(step)
                self._left[step.step] = counts[step.step]
                if sheet.evaluate:
                    self._evaluating.add(step.step)
            elif sheet.everyone and step.micros:
                self._passing.append(step.step)
        self._held.expect(
            {key: sender for action in actions for key, sender in self._needs(action, by_micro[action.micro][1])},
            max(by_micro, default=-1) + 1,
        )

    def _needs(self, action: Action, micro: Micro) -> Iterator[tuple[Key, tuple[str, str]]]:
        """Yield the messages that an action consumes, each with who is to send it and of whose micro-batch it is."""
        stages, (op, stage, number, part) = self._path(micro), action
        if op == "F" and stage:
            yield ("act", stage, number, part), (stages[stage - 1].node, micro.device)
            if stage == len(stages) - 1:
                yield ("target", stage, number, part), (micro.device, micro.device)
        elif op in "BI" and stage + 1 < len(stages):
            yield ("grad", stage, number, part), (stages[stage + 1].node, micro.device)

    def _forwards(self, sheet: Sheet) -> list[Action]:
        return [
            Action("F", stage, micro.micro)
            for step in sheet.steps
            for stage in range(self.plan.stages)
            for micro in step.micros
            if stage < len(path := self._path(micro)) and path[stage].node == self.name
        ]

    def _path(self, micro: Micro) -> tuple[Stage, ...]:
        return self.plan.path(micro.device, micro.route)

    # -- what to do next

    def next(self) -> Work | None:
        """Return the next piece of work, or None where something must arrive first. Changes nothing."""
        if self._verdicts and not (self._steps and self._steps[0].step < self._verdicts[0].step):
            return Settle(self._verdicts[0])
        if self._steps:
            step = self._steps[0]
            if self._settled_by_commit(step):
                return Settle(Commit.of(self._commits[step.step].meta))
        if self._keeps:  # what others wait for goes first; the next report and the next update do not
            run = self._first_ready()
            return run if run is not None and run.action.op != "U" else Keep(self._keeps[0], self.term)
        if (due := self._report_due()) is not None:
            return Reckon(due, due.step in self._evaluating)
        if (run := self._first_ready()) is not None:
            return run
        if self._requests and not self._steps:
            return Serve(self._requests[0])
        return None

    def _settled_by_commit(self, step: Step) -> bool:
        done = not self._pending or self._micros[self._pending[0].micro][0].step > step.step
        return done and step.step in self._reported and step.step in self._commits

    def _report_due(self) -> Step | None:
        for step in self._steps:
            if step.step in self._reported:
                continue
            behind = self._pending and self._micros[self._pending[0].micro][0].step < step.step
            return step if self._left[step.step] == 0 and not behind else None
        return None

    def _first_ready(self) -> Run | None:
        seen = 0
        earlier: list[Action] = []
        for action in self._pending:
            if seen == self.window or (self._passing and self._passing[0] < self._step_of(action)):
                break
            if self._too_far(action):  # nothing overtakes it: the order of updates must not depend on the others' speed
                break
            run = self._ready(action, earlier)
            if run is not None:
                return run
            earlier.append(action)
            seen += action.op != "U"
        return None

    def _ready(self, action: Action, earlier: Sequence[Action]) -> Run | None:
        step, micro = self._micros[action.micro]
        if action.op == "U":
            return self._ready_update(action, step, earlier)
        stages = self._path(micro)
        last = action.stage == len(stages) - 1
        if action.op == "F":
            return self._ready_forward(action, step, micro, earlier)
        live = self._live.get((action.stage, action.micro))
        if live is None or (action.op == "W" and self._first_of(earlier, "I", action)):
            return None
        to = stages[action.stage - 1].node if action.stage and live.sends_grad and action.op != "W" else None
        grad = None
        if action.op != "W" and live.awaits_grad:
            grad = self._held.get(("grad", action.stage, action.micro, action.slice))
            if grad is None:
                return None
        return Run(action, step, micro, grad=grad, to=to, weight=live.weight, last=last)

    def _too_far(self, action: Action) -> bool:
        """Whether a forward must wait for the slowest of the fleet."""
        return action.op == "F" and bool(self._ends) and action.micro >= self._ends[0][1] + self.lead

    def _step_of(self, action: Action) -> int:
        return self._micros[action.micro][0].step

    @staticmethod
    def _first_of(earlier: Sequence[Action], op: str, action: Action) -> bool:
        return any(a.op == op and a[1:] == action[1:] for a in earlier)

    def _ready_forward(self, action: Action, step: Step, micro: Micro, earlier: Sequence[Action]) -> Run | None:
        if self.synchronous and any(before.op == "U" and self._step_of(before) < step.step for before in earlier):
            return None  # the weights that this forward must see are not there yet
        stages = self._path(micro)
        last = action.stage == len(stages) - 1
        act = target = None
        if action.stage:
            act = self._held.get(("act", action.stage, action.micro, action.slice))
            if act is None:
                return None
        if last and action.stage:
            target = self._held.get(("target", action.stage, action.micro, action.slice))
            if target is None:
                return None
        to = None if last else stages[action.stage + 1].node
        return Run(
            action, step, micro, act=act, target=target, to=to, last=last, evaluate=step.step in self._evaluating
        )

    def _ready_update(self, action: Action, step: Step, earlier: Sequence[Action]) -> Run | None:
        if not self.synchronous:
            done = not any(before.stage == action.stage and before.micro == action.micro for before in earlier)
            return Run(action, step, self._micros[action.micro][1]) if done else None
        if earlier or step is not self._steps[0]:
            return None
        commit = self._commits.get(step.step)
        if self.barrier and commit is None:
            return None
        return Run(action, step, commit=commit)

    # -- what was done

    def done(self, work: Work, outcome: Outcome) -> list[Send]:
        """Note that ``work`` was done and return what to send."""
        if isinstance(work, Run):
            return self._done_run(work, outcome)
        if isinstance(work, Reckon):
            return self._done_reckon(work, outcome)
        if isinstance(work, Settle):
            self._done_settle(work.commit)
            return []
        if isinstance(work, Keep):
            self._keeps.popleft()
            return []
        self._requests.popleft()
        self.loss_scale = work.message.meta.get("loss_scale", self.loss_scale)
        meta = {"request": work.message.meta.get("request"), **outcome.meta}
        return [self._to_coordinator(f"{work.message.kind}ed", meta, outcome.arrays)]

    def _done_run(self, run: Run, outcome: Outcome) -> list[Send]:
        action, sends = run.action, []
        self._pending.remove(action)
        if action.op != "U" or not self.synchronous:
            self._left[run.step.step] -= 1
        elif not any(a.op == "U" and self._step_of(a) == run.step.step for a in self._pending):
            self._keeps.append(run.step.step)
        if action.op == "F":
            sends = self._done_forward(run, outcome)
        elif action.op in "BI":
            self._held.take(("grad", action.stage, action.micro, action.slice))
            if run.to is not None:
                weight = self._live[action.stage, action.micro].weight
                sends = [self._data("grad", run.to, action, action.stage - 1, outcome.arrays, weight, outcome.version)]
        if action.op in "BW":
            del self._live[action.stage, action.micro]
        return sends

    def _done_forward(self, run: Run, outcome: Outcome) -> list[Send]:
        action, act = run.action, run.act
        for kind in ("act", "target"):
            self._held.take((kind, action.stage, action.micro, action.slice))
        if not run.evaluate:
            sends_grad = act is not None and bool(act.meta.get("needs"))
            self._live[action.stage, action.micro] = _Live(sends_grad, bool(outcome.needs), outcome.weight)
        sends = []
        if run.to is not None:
            meta = {"needs": sorted(outcome.needs)}
            weight, version = outcome.weight, outcome.version
            sends = [self._data("act", run.to, action, action.stage + 1, outcome.arrays, weight, version, meta)]
            if outcome.target is not None and run.micro is not None:
                sends += self._send_target(run.micro, action, outcome)
        if run.last and run.micro is not None:
            step = run.step.step
            self._losses.setdefault(step, {})[action.micro] = (outcome.loss_sum, outcome.weight)
            totals = self._metrics.setdefault(step, {}).setdefault(run.micro.device, {})
            for name, (value, count) in outcome.metrics.items():
                before = totals.get(name, (0.0, 0.0))
                totals[name] = (before[0] + value, before[1] + count)
        return sends

    def _send_target(self, micro: Micro, action: Action, outcome: Outcome) -> list[Send]:
        stages = self._path(micro)
        last = len(stages) - 1
        send = self._data("target", stages[last].node, action, last, outcome.target or {}, outcome.weight, 0)
        if send.to == self.name:  # both ends of a U-shape: labels never leave the device
            self._held.put(send.message)
            return []
        return [send]

    def _done_reckon(self, work: Reckon, outcome: Outcome) -> list[Send]:
        step = work.step.step
        report = outcome.report or Report(step)
        losses, metrics = self._losses.pop(step, {}), self._metrics.pop(step, {})
        report = replace(report, losses=losses, metrics=metrics)
        if self.synchronous and not work.evaluate:
            self._reported.add(step)
        else:
            self._forget(work.step)
        return [self._to_coordinator("report", {**report.meta(), **outcome.meta}, outcome.arrays)]

    def _done_settle(self, commit: Commit) -> None:
        self.loss_scale = commit.loss_scale
        if self._verdicts and commit is self._verdicts[0]:
            self._verdicts.popleft()
            if self._passing and self._passing[0] == commit.step:
                self._passing.popleft()
        else:
            self._forget(self._steps[0])

    def _forget(self, step: Step) -> None:
        self._steps.remove(step)
        self._left.pop(step.step, None)
        self._reported.discard(step.step)
        self._evaluating.discard(step.step)
        self._commits.pop(step.step, None)
        self._losses.pop(step.step, None)
        self._metrics.pop(step.step, None)
        for micro in step.micros:
            self._micros.pop(micro.micro, None)
        self._held.forget({micro.micro for micro in step.micros})

    # -- messages out

    def _data(
        self,
        kind: str,
        to: str,
        action: Action,
        stage: int,
        arrays: Mapping[str, Packed],
        weight: float,
        version: int,
        meta: Mapping[str, Any] | None = None,
    ) -> Send:
        message = Message(
            kind=kind,
            sender=self.name,
            stage=stage,
            micro=action.micro,
            slice=action.slice,
            term=self.term,
            weight=weight,
            version=version,
            loss_scale=self.loss_scale,
            meta=meta or {},
            arrays=arrays,
        )
        return Send(to, message)

    def _to_coordinator(self, kind: str, meta: Mapping[str, Any], arrays: Mapping[str, Packed]) -> Send:
        return Send(COORDINATOR, Message(kind=kind, sender=self.name, term=self.term, meta=meta, arrays=arrays))

    # -- what it waits for, for errors

    def waiting_for(self) -> str | None:
        """Say what the node waits for, such as ``grad of 0B212 from 'edge-2'``; None where it is idle."""
        if self._pending:
            action = self._pending[0]
            step, micro = self._micros[action.micro]
            stages = self._path(micro)
            if self._passing and self._passing[0] < step.step:
                return f"the commit of step {self._passing[0]}"
            if self._too_far(action):
                return f"the others to end step {self._ends[0][0]}, before it may run {action} of step {step.step}"
            if action.op == "U":
                return f"the commit of step {self._steps[0].step}"
            if action.op == "F" and action.stage:
                kind, source = "act", stages[action.stage - 1].node
                if self._held.get(("act", action.stage, action.micro, action.slice)) is not None:
                    kind, source = "target", micro.device
            elif action.op in "BI" and action.stage + 1 < len(stages):
                kind, source = "grad", stages[action.stage + 1].node
            else:
                return f"its turn to run {action}"
            return f"{kind} of {action} from {source!r} (step {step.step})"
        if self._steps:
            return f"the commit of step {self._steps[0].step}"
        return None


def _lead(plan: Plan) -> int:
    """How many micro-batches a forward may be ahead of the step that the fleet is at, where no commit holds it back.

    As many as any order of a method runs forwards before a backward of an earlier micro-batch: twice the length of the
    longest route, a stage counting for each node that shares it. So this never holds up what the step needs.
    """
    longest = max((len(route.stages) for route in plan.routes), default=0)
    sharing = [len({r.stages[i].node for r in plan.routes if i < len(r.stages)}) for i in range(longest)]
    return 2 * sum(sharing)
