"""The run's control logic as a state machine: what follows from reports, answers, losses, offences. No I/O, no clock.

The shell (``conductor.py``) sends what it says to send, feeds it the answers, and acts on its other effects. Beside it,
each with its own data: ``steps.py`` (which are open), ``questions.py``, ``returning.py`` (the way back to one state),
``verdict.py`` (what a step comes to), ``offences.py``, ``records.py`` (what is written down).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgesplit import records, verdict
from edgesplit.codecs import Packed, pack
from edgesplit.effects import Effect, Failed, NodeChanged, Offended, Replied, StepDone
from edgesplit.errors import NodeLost, RunError, TransportTimeout
from edgesplit.offences import Offences, offenders
from edgesplit.plan import Plan
from edgesplit.protocol import MOST_REASON, Commit, Report, Send, Sheet
from edgesplit.questions import Asked, Question, Questions
from edgesplit.recovery import Ended, Line, Point, Standing, kept_of
from edgesplit.replanning import without
from edgesplit.returning import Returning, Spare, assigns
from edgesplit.roster import Absence, OnLost, Roster
from edgesplit.sharing import Router
from edgesplit.sheets import Cutting, Draft
from edgesplit.steps import Due, Open, Steps
from edgesplit.task import COORDINATOR
from edgesplit.transport.base import Message
from edgesplit.verdict import LossScale, Sums, Weights

INDISPENSABLE_S = 600.0
"""How long a node is waited for that the others cannot do without."""

Reassign = Callable[[Plan], Mapping[str, Mapping[str, Any]]]
"""Another plan -> what each of its nodes is to be told."""


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
        quarantine_after: a device is left out after so many offences, where the others can go on; None: never.
        on_lost, patience: whether a lost node is waited for, and for how many seconds.
        first_request: number of its first question. What was answered to a coordinator that died may reach its
            successor, so their numbers must not meet.
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
        on_lost: OnLost = "stop",
        quarantine_after: int | None = None,
        patience: float = 60.0,
        first_request: int = 1,
    ) -> None:
        self.synchronous, self.clip_norm = synchronous, clip_norm
        self.loss_scale = loss_scale or LossScale()
        self.max_skipped, self.step_timeout = max_skipped, step_timeout
        self.term = 0
        self.skipped = 0
        self._skipped_in_row = 0
        self._adds = add_replicas
        self.wanted = plan  # what it is when nobody is missing
        self.known = set(plan.nodes())
        self.reassign: Reassign = lambda plan: {}
        self.missed: dict[str, dict[int, int]] = {}  # device -> step -> samples that were left out
        self.steps = Steps(cutting, Router() if plan.peers else None)
        self._set_plan(plan)
        self.questions = Questions(first_request)
        self._progress_at: float | None = None
        self.on_lost, self.patience = on_lost, patience
        self.offences = Offences(quarantine_after)
        self.roster = Roster()
        self.line = Line(Point(0, -1), self._standing())
        self.spare: Spare = lambda node: None
        self._returning = Returning()
        self._malformed: dict[str, str] = {}  # what was wrong with the last message of a node that was dropped
        self.like: Mapping[str, tuple[tuple[int, ...], str]] = {}  # "layer/parameter" -> shape and dtype

    def _set_plan(self, plan: Plan) -> None:
        self.plan = plan
        self._nodes = plan.nodes()
        self._devices = [route.device for route in plan.routes]
        shared = {layer: nodes for layer, nodes in plan.replicas().items() if len(nodes) > 1}
        self._shared = shared if self._adds else {}
        if self.steps.router is not None:
            self.steps.router.adopt(plan)

    @property
    def busy(self) -> bool:
        """Whether steps are open or requests unanswered."""
        return self.steps.busy or self.questions.busy

    @property
    def barrier(self) -> bool:
        """Whether an update needs the commit's answer."""
        scaled = self.loss_scale.dynamic or self.loss_scale.value != 1.0
        return self.synchronous and (self.clip_norm is not None or scaled or bool(self._shared))

    # -- steps

    def issue(self, drafts: Sequence[Draft], now: float, *, evaluate: bool = False) -> list[Effect]:
        """Publish the steps ahead to every node."""
        dues = [Due(draft, evaluate) for draft in drafts]
        if self.steps.later:
            self.steps.later += dues
            return []
        return self._publish(dues, now)

    def _publish(self, dues: Sequence[Due], now: float) -> list[Effect]:
        """Send the sheet of these steps, or of those for which there is room."""
        self._progress_at = now
        sharing = {node for nodes in self._shared.values() for node in nodes}
        opened = self.steps.publish(dues, self.plan, sharing, self.roster.lost)
        evaluate = any(entry.due.evaluate for entry in opened)
        sheet = Sheet(tuple(entry.step for entry in opened), evaluate, self.loss_scale.dynamic and not evaluate)
        sends: list[Effect] = [self._send(node, "sheet", sheet.meta()) for node in self._nodes]
        return [*sends, *self._close_complete(now)]

    # -- requests

    def request(
        self,
        kind: str,
        to: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Packed]]],
        now: float,
    ) -> tuple[int, list[Effect]]:
        """Ask nodes for something; :class:`Replied` with the number returned comes when all have answered.

        Nodes that were left out are not asked. If somebody is left out while weights are given out (``load``), nobody
        has taken them, and there are no replies: give out all that the nodes held, not what had changed since.
        """
        self._progress_at = now
        to = {node: part for node, part in to.items() if node in self._nodes}
        asked = {node: (kind, meta, arrays) for node, (meta, arrays) in to.items()}
        point = None
        if kind == "assign":
            self._returning.assigned |= {node: meta for node, (meta, _) in to.items()}
        elif kind == "load":
            point = Point(self.line.base.load + 1, self.line.point().step)
            asked = {node: (kind, {**meta, "point": [*point]}, arrays) for node, (meta, arrays) in to.items()}
        question = self.questions.put(asked, point)
        return question.number, self._ask(question)

    def _ask(self, question: Question) -> list[Effect]:
        if not question.asked:
            return self._answered(question)  # nobody is left to
        return [self._send(node, *part) for node, part in self.questions.ask(question).items()]

    # -- events

    def receive(self, message: Message, now: float) -> list[Effect]:
        """Take a message from a node. Raises FrameError where it is malformed."""
        if message.sender not in self.known:
            return []
        if message.kind == "hello":
            return self._hello(message, now)
        if message.kind == "status":
            return self._status(message, now)
        if message.sender not in self._nodes:
            return []  # it was left out
        if message.kind == "failed" and self.offences.after is not None and message.sender in self._devices:
            what = f"it failed: {message.meta.get('error', 'no reason given')}"
            return self.offend(message.sender, what, now, grave=True)
        if message.kind == "offence":
            return self._accused(message, now)
        if message.kind == "failed":
            return [Failed(RunError(f"{message.sender!r} failed: {message.meta.get('error', 'no reason given')}"))]
        if message.kind == "report":
            return self._report(message, now)
        return self._reply(message, now)

    def malformed(self, message: Message, error: str, now: float) -> list[Effect]:
        """Note that a message was dropped because it is none: its sender is named if it is waited for in vain."""
        if message.sender not in self._nodes:
            return []
        self._malformed[message.sender] = f"{message.kind!r}: {error}"
        return self.offend(message.sender, f"it sent a message that is none: {error}", now)

    # -- offences

    def offend(self, node: str, what: str, now: float, value: Any = None, *, grave: bool = False) -> list[Effect]:
        """Note what a node did that it may not; a device that does so too often is left out, where that can be.

        Args:
            value: what was found, where it is a value.
            grave: the step cannot go on after it.
        """
        what = what[:MOST_REASON]
        told: list[Effect] = [Offended(node, what, value)]
        if node not in self._devices or not self.offences.note(node, grave=grave):
            return [*told, Failed(RunError(f"{node!r}: {what}"))] if grave else told
        plan = without(self.plan, {node})
        if plan is None or self.line.base.load == 0:
            return [*told, Failed(RunError(f"{node!r}: {what}; the others cannot go on without it"))] if grave else told
        self.offences.barred[node] = what
        told.append(Offended(node, f"left out for good after {self.offences.counts[node]} offences", out=True))
        if not self.busy:
            return [*told, NodeChanged(node, "left", f"for good: {what}")]  # with the next plan
        return [*told, *self._leave_out({node: Absence(now, f"for good: {what}")}, plan, now)]

    def _accused(self, message: Message, now: float) -> list[Effect]:
        """A node cannot compute with what a device has sent. Devices do not judge each other."""
        device, what = message.meta.get("device"), str(message.meta.get("what"))
        if message.term != self.term or device not in self._devices or message.sender in self._devices:
            return []
        return self.offend(device, what, now, grave=True)

    def _status(self, message: Message, now: float) -> list[Effect]:
        node, reason = message.sender, str(message.meta.get("reason") or "its connection closed")
        if message.meta.get("state") != "offline":
            if not self.roster.back(node):
                return []
            self._progress_at = now
            return [NodeChanged(node, "back")]
        if not self.roster.gone(node, reason, now):
            return []
        if node not in self._nodes:
            return []
        if self.on_lost == "stop" and self.busy:
            return [Failed(NodeLost(f"node {node!r} was lost {self._where()} ({reason})"))]
        return [NodeChanged(node, "lost", reason)]

    def _where(self) -> str:
        return f"in step {self.steps.open[0].step.step}" if self.steps.open else "between two steps"

    def _reply(self, message: Message, now: float) -> list[Effect]:
        question = self.questions.answered_by(message)
        if question is None:
            return []
        self._progress_at = now
        recovers = question is self.questions.recovery
        if recovers:
            kept_of(message.meta)  # one that is malformed is no answer
        question.replies[message.sender] = message
        if len(question.replies) < len(question.asked):
            return []
        if recovers:
            self.questions.recovery = None
            return self._recovering(question.replies, now)
        return self._answered(question)

    def _answered(self, question: Question) -> list[Effect]:
        del self.questions.open[question.number]
        effects: list[Effect] = [Replied(question.number, question.replies)]
        if question.point is not None and question.replies:
            self.line.rebase(question.point, self._standing())
            return [records.begun(self.line, self.term), *effects]
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Note the time. A run without progress for ``step_timeout`` seconds has failed."""
        if not self.busy or self._progress_at is None:
            return []
        if any(node in self._nodes for node in self.roster.lost):
            self._progress_at = now  # it is known what is waited for
            return self._overdue(now)
        if now - self._progress_at < self.step_timeout:
            return []
        what = f"no progress {self._where()} for {self.step_timeout:g} s"
        missing = self.missing()
        wrong = [
            f"{node!r} sent a message that is none ({self._malformed[node]})"
            for node in missing
            if node in self._malformed
        ]
        why = "".join(f"; {text}: run the same version everywhere" for text in wrong[:1])
        return [Failed(TransportTimeout(f"{what}: nothing from {', '.join(map(repr, missing))}{why}"))]

    def _overdue(self, now: float) -> list[Effect]:
        lost = {node: absence for node, absence in self.roster.lost.items() if node in self._nodes}
        if self.on_lost == "continue" and self.line.base.load > 0 and (plan := without(self.plan, lost)) is not None:
            return self._leave_out(lost, plan, now)
        patience = {"stop": 0.0, "wait": self.patience, "continue": INDISPENSABLE_S}[self.on_lost]
        late = f" and did not come back within {patience:g} s" if self.on_lost != "stop" else ""
        overdue = [f"{node!r} ({one.reason})" for node, one in lost.items() if now - one.since >= patience]
        return [Failed(NodeLost(f"node {', '.join(overdue)} was lost {self._where()}{late}"))] if overdue else []

    def missing(self) -> list[str]:
        """Who is waited for."""
        if self.questions.recovery is None and self.steps.open:
            return self.steps.open[0].missing()
        return self.questions.missing()

    # -- nodes that start anew

    def _hello(self, message: Message, now: float) -> list[Effect]:
        here = self.roster.here(message.sender)
        again = self.roster.hello(message.sender, str(message.meta.get("life"))[:64])
        if message.sender in self.offences.barred:
            return []
        if message.sender not in self._nodes:
            return [] if here and not again else [NodeChanged(message.sender, "waits", "it joins with the next round")]
        if not again or not self._returning.assigned:
            return []
        if self.on_lost == "stop":
            return [Failed(NodeLost(f"node {message.sender!r} was lost {self._where()} (it was started again)"))]
        self._returning.fresh.add(message.sender)
        self._returning.returned.add(message.sender)
        return [NodeChanged(message.sender, "returned"), *self._recover(now)]

    def _recover(self, now: float) -> list[Effect]:
        """Begin to bring everybody back to one state: ask what they have kept. A recovery under way begins anew."""
        self._progress_at = now
        self.questions.put_off()
        given = self.line.base.load > 0
        if not given and assigns(self.questions.open):
            return self._go_on(now)
        self.term += given
        return self._inquire(self._returning.first(self._nodes, given=given))

    def _inquire(self, asked: Asked) -> list[Effect]:
        return self._ask(self.questions.inquire(asked))

    def _recovering(self, replies: Mapping[str, Message], now: float) -> list[Effect]:
        """All have answered: have them go back to the newest point that all have kept, or go on if they are there."""
        if not self._returning.asks_what_was_kept:
            return self._go_on(now)
        kept = {node: kept_of(reply.meta) for node, reply in replies.items()}
        self.steps.take_back(self.line.rewind(self.term, self.line.common(kept) or 0))
        self._resume_standing(self.line.standing())
        try:
            asked = self._returning.second(self.line, kept, self.plan, self.loss_scale.value, self.spare)
        except NodeLost as error:
            return [Failed(error)]
        return [records.cut(self.line), *self._inquire(asked)]

    # -- another plan

    def _leave_out(self, lost: Mapping[str, Absence], plan: Plan, now: float) -> list[Effect]:
        """Go on without these nodes: the others take another plan, and do again what is not final without them."""
        effects: list[Effect] = [NodeChanged(node, "left", absence.reason) for node, absence in lost.items()]
        self.take_plan(plan)
        for question in self.questions.open.values():
            question.asked = self._returning.anew(question.asked, self._nodes)
        self._returning.fresh = set(self._nodes)
        return effects + self._recover(now)

    def take_plan(self, plan: Plan) -> Mapping[str, Mapping[str, Any]]:
        """Work by another plan from now on; return what its nodes are to be told."""
        self._set_plan(plan)
        self._returning.assigned = dict(self.reassign(plan))
        return self._returning.assigned

    def want(self, plan: Plan) -> None:
        """Have another plan when the next round begins and its nodes are there."""
        self.wanted = plan
        self.known |= set(plan.nodes())

    def next_plan(self) -> Plan:
        """Return the plan for the next round: that which is wanted, without those who are not there.

        Who takes part now and is away for a moment stays, where nodes that are lost are waited for.
        """
        stay = set() if self.on_lost == "continue" else set(self.plan.nodes())
        missing = {node for node in self.wanted.nodes() if node not in stay and not self.roster.here(node)}
        missing |= self.offences.barred.keys()
        return without(self.wanted, missing) or self.plan

    def resume(self, line: Line, term: int, micro: int, now: float) -> list[Effect]:
        """Take up a run that has stopped somewhere on ``line``; all nodes have joined and been told their part.

        Args:
            term, micro: the last term, and the next number of a micro-batch, as far as they are known.
        """
        self._progress_at = now
        self.line, self.term = line, max(term, self.term) + 1
        self.steps.next_micro = max(micro, self.steps.next_micro)
        return [records.taken_up(line, self.term), *self._inquire(self._returning.first(self._nodes, given=True))]

    def _go_on(self, now: float) -> list[Effect]:
        """The fleet is in one state again: issue what was taken back, and ask again what was not answered."""
        return [*self._returning.over(self.line.point().step), *self._catch_up(now)]

    def _catch_up(self, now: float) -> list[Effect]:
        """Once all issued steps have ended: issue what was taken back, then ask what was not answered.

        A question must not overtake a step: one that is skipped leaves the nodes idle for a moment.
        """
        if self.steps.open or self.questions.recovery is not None:
            return []
        if ready := self.steps.taken_back():
            return self._publish(ready, now)
        return [effect for question in self.questions.put_again() for effect in self._ask(question)]

    def _standing(self) -> Standing:
        return Standing(self.loss_scale.value, self.loss_scale.good, self.skipped, self._skipped_in_row)

    def _resume_standing(self, standing: Standing) -> None:
        self.loss_scale.value, self.loss_scale.good = standing.loss_scale, standing.good
        self.skipped, self._skipped_in_row = standing.skipped, standing.skipped_in_row

    # -- reports and commits

    def _report(self, message: Message, now: float) -> list[Effect]:
        if message.term != self.term:
            return []
        report = Report.of(message.meta)
        mine = [layer for layer, nodes in self._shared.items() if message.sender in nodes]
        verdict.check_sums(message, mine, self.like)
        for entry in self.steps.open:
            if entry.step.step == report.step and message.sender in entry.participants:
                entry.reports[message.sender] = verdict.its_own(report, message.sender, entry.step, self.plan)
                entry.arrays[message.sender] = message.arrays
                self._progress_at = now
        return self._close_complete(now)

    def _close_complete(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while self.steps.open and self.questions.recovery is None and self.steps.open[0].complete:
            effects += self._close(self.steps.open.popleft(), now)
        return effects + self._publish_later(now) + self._catch_up(now)

    def _publish_later(self, now: float) -> list[Effect]:
        """Where nodes share work: publish the next steps, now that one has ended."""
        ready = self.steps.room_for() if self.questions.recovery is None else []
        return self._publish(ready, now) if ready else []

    def _close(self, entry: Open, now: float) -> list[Effect]:
        if entry.due.evaluate:
            return [*self._tell_ended(entry), *self._tell(entry, entry.done(applied=True))]
        if not entry.participants:
            return self._end(entry, applied=True)
        if not self.synchronous:
            return [*self._tell_ended(entry), *self._close_asynchronous(entry)]
        reports, scale = entry.in_order(), self.loss_scale.value
        sums, weights = verdict.add_replicas(reports, entry.arrays, self._shared)
        guilty, broken = offenders(entry.step, entry.reports, self._devices) if self.offences.after else ({}, set())
        finite = verdict.is_finite(reports, sums) and not broken
        clip = verdict.clip_factor(reports, sums, weights, norm=self.clip_norm, scale=scale) if finite else 1.0
        searching = self.loss_scale.note(finite)
        if not finite and guilty and (broken or not searching):
            return self._without_the_guilty(entry, guilty, now, searching)
        if not finite:
            return self._skip(entry, now, searching)
        self._skipped_in_row = 0
        commit = Commit(entry.step.step, True, clip, self.loss_scale.value)
        to = self._nodes if self.loss_scale.dynamic else entry.participants
        return [*self._commit(to, commit, sums, weights), *self._end(entry, applied=True)]

    def _tell_ended(self, entry: Open) -> list[Effect]:
        """Say that a step without a commit has ended: nodes that are ahead wait for it."""
        if not self.steps.open:
            return []
        return [self._send(node, "ended", {"step": entry.step.step}) for node in self._nodes]

    def _close_asynchronous(self, entry: Open) -> list[Effect]:
        bad = [(node, report) for node, report in entry.reports.items() if report.skipped]
        if not bad:
            self._skipped_in_row = 0
            return self._end(entry, applied=True)
        self.skipped += 1
        self._skipped_in_row += 1
        effects = self._end(entry, applied=False)
        if self._skipped_in_row >= self.max_skipped:
            effects.append(Failed(verdict.not_finite(entry.step.step, entry.in_order(), self.max_skipped)))
        return effects

    def _end(self, entry: Open, *, applied: bool) -> list[Effect]:
        """Note that a training step stands. An asynchronous one counts whatever was left out of it."""
        counts = applied or not self.synchronous
        for device, samples in entry.left_out().items():
            self.missed.setdefault(device, {})[entry.step.step] = samples
        ended, done = Ended(entry.due.draft, entry.participants, counts, self._standing()), entry.done(applied=applied)
        self.line.ended.append(ended)
        return [records.ended(ended, done, self.term, self.steps.next_micro), *self._tell(entry, done)]

    @staticmethod
    def _tell(entry: Open, done: StepDone) -> list[Effect]:
        return [] if entry.due.told else [done]

    def _without_the_guilty(self, entry: Open, guilty: Mapping[str, str], now: float, searching: bool) -> list[Effect]:
        """Skip a step, or have it done again without those who have spoilt too many."""
        effects: list[Effect] = []
        self.steps.open.appendleft(entry)  # where somebody is left out, all that is open is done again
        for device, what in guilty.items():
            effects += self.offend(device, what, now, value=f"step {entry.step.step}")
        if self.questions.recovery is not None:
            return effects
        self.steps.open.popleft()
        return [*effects, *self._skip(entry, now, searching)]

    def _skip(self, entry: Open, now: float, searching: bool) -> list[Effect]:
        """A non-finite step: put back everywhere, and issue what follows again under a new term."""
        self.skipped += 1
        self._skipped_in_row += not searching
        self.term += 1
        commit = Commit(entry.step.step, False, 1.0, self.loss_scale.value)
        effects: list[Effect] = [self._send(node, "commit", commit.meta()) for node in self._nodes]
        self.line.cut(self.term, Point(self.line.base.load, entry.step.step - 1))
        effects += [records.cut(self.line), *self._end(entry, applied=False)]
        if self._skipped_in_row >= self.max_skipped:
            return [*effects, Failed(verdict.not_finite(entry.step.step, entry.in_order(), self.max_skipped))]
        again = [later.due for later in self.steps.open]
        self.steps.open.clear()
        return [*effects, *(self._publish(again, now) if again else [])]

    def _commit(self, nodes: Sequence[str], commit: Commit, sums: Sums, weights: Weights) -> list[Effect]:
        """Tell nodes that a step counts, and of the layers that they share what all have added up."""
        effects: list[Effect] = []
        for node in nodes:
            layers = {layer for layer, holders in self._shared.items() if node in holders}
            mine = {name: a for name, a in sums.items() if int(name.partition("/")[0]) in layers}
            meta = {**commit.meta(), "weights": [[layer, weights[layer]] for layer in sorted(layers)]}
            effects.append(self._send(node, "commit", meta, pack(mine, "raw")))
        return effects

    def _send(self, to: str, kind: str, meta: Mapping[str, Any], arrays: Mapping[str, Packed] | None = None) -> Send:
        return Send(to, Message(kind=kind, sender=COORDINATOR, term=self.term, meta=meta, arrays=arrays or {}))
