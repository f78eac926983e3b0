"""A whole fleet on a virtual clock: the real coordinator and nodes, a network that delays at will, numbers for tensors.

Numbers are taken modulo 2^64, so that sums are exact in any order, and every rule multiplies by odd numbers, so that a
contribution that is lost, doubled or made with the wrong weights changes the result.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from random import Random
from typing import Any

from edgesplit.codecs import Packed
from edgesplit.coordinator import Coordinator
from edgesplit.effects import Effect, Failed, Replied, StepDone
from edgesplit.methods import METHODS, order_of
from edgesplit.node import Keep, NodeMachine, Outcome, Reckon, Run, Serve, Settle, Work
from edgesplit.plan import Plan
from edgesplit.protocol import Commit, Report, Send
from edgesplit.recovery import Kept, Point, one_kept, point_of
from edgesplit.schedule import Action, Step
from edgesplit.sheets import Cutting, Draft
from edgesplit.task import COORDINATOR
from edgesplit.transport.base import DATA_KINDS, Message
from edgesplit.verdict import LossScale

MASK = (1 << 64) - 1
MEMORY = (
    "_pending", "_held", "_micros", "_live", "_steps", "_left", "_reported", "_evaluating", "_losses", "_metrics",
    "_commits", "_verdicts", "_requests", "_keeps", "_passing",
)  # fmt: skip
"""What a NodeMachine remembers; all of it must be empty when nothing is going on."""

Poison = Mapping[int, frozenset[str]]
"""Step -> the nodes that find it not finite."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is run, but for the delays."""

    plan: Plan
    cutting: Cutting
    method: str = "1f1b"
    window: int = 1
    split_backward: bool = False
    every_step: bool = False
    clip: float | None = None
    scale: LossScale = field(default_factory=LossScale)
    frozen: frozenset[int] = frozenset()
    poison: Poison = field(default_factory=dict)
    max_skipped: int = 1000

    @property
    def synchronous(self) -> bool:
        return METHODS[self.method].synchronous

    def coordinator(self, first_request: int = 1) -> Coordinator:
        return Coordinator(
            self.plan,
            self.cutting,
            synchronous=self.synchronous,
            add_replicas=self.every_step,
            clip_norm=self.clip,
            loss_scale=replace(self.scale),
            max_skipped=self.max_skipped,
            step_timeout=math.inf,
            first_request=first_request,
        )

    def machine(self, name: str, barrier: bool) -> NodeMachine:
        def order(steps: Sequence[Step]) -> Sequence[Action]:
            return order_of(
                self.method,
                self.plan,
                steps,
                name,
                split_backward=self.split_backward,
                update_all=self.every_step,
            )

        machine = NodeMachine(
            name, self.plan, order=order, window=self.window, synchronous=self.synchronous, barrier=barrier
        )
        machine.loss_scale = self.scale.value
        return machine


# --- integers for tensors -------------------------------------------------------------------------------------------


@cache
def number(*key: Any) -> int:
    """A number that depends on nothing but ``key``."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest())


def initial(layer: int) -> int:
    return number("weight", layer)


def weight_of(device: str, epoch: int, index: int, start: int, stop: int) -> float:
    """What the loss of these samples is a mean over; often not their number, sometimes nothing."""
    return float(number("w", device, epoch, index, start, stop) % 4 + (stop - start) // 2)


def through(layer: int, weight: int, x: int) -> int:
    return (x * (2 * weight + 1) + layer) & MASK


def loss_of(output: int, target: int) -> int:
    return (output ^ target) & MASK


def updated(weight: int, gradient: int, total: float, lr: float, clip: float) -> int:
    """Not additive: the same gradients in other steps, or steps in another order, give another weight."""
    rate = round(lr * 1000) * 2 + round(clip * 2**20)
    return (weight * 6364136223846793005 + gradient * 1442695040888963407 + int(total) * 97 + rate) & MASK


def push(step: int, layer: int, *where: Any) -> int:
    """What an asynchronous update adds to a layer: the sum tells which were made, in whatever order."""
    return number("push", step, layer, *where)


def square_of(gradient: int) -> float:
    return float(gradient % 1009)


def wrap(**values: int) -> dict[str, Packed]:
    return {name: Packed("raw", "uint64", (), value.to_bytes(8, "little")) for name, value in values.items()}


def unwrap(message: Message | None) -> dict[str, int]:
    return {name: int.from_bytes(packed.data, "little") for name, packed in message.arrays.items()} if message else {}


@dataclass
class _Pass:
    """A micro-batch between its forward and its backward: the inputs of its layers and the weights it saw."""

    inputs: list[int]
    weights: list[int]
    seed: int  # of the backward, on the last stage
    gradients: dict[int, int] = field(default_factory=dict)
    scale: int = 0


State = tuple[dict[int, int], dict[int, float]]


@dataclass
class Disk:
    """In place of :class:`edgesplit.journal.Journal`: what a crash leaves, and what it may lose."""

    kept: dict[Point, tuple[int, State]] = field(default_factory=dict)
    unwritten: dict[Point, tuple[int, State]] = field(default_factory=dict)

    def flush(self) -> None:
        self.kept |= self.unwritten
        self.unwritten.clear()

    def crash(self, rng: Random) -> None:
        for point in list(self.unwritten):
            if rng.random() < 0.5:
                self.kept[point] = self.unwritten[point]
        self.unwritten.clear()

    def forget_after(self, point: Point) -> None:
        self.flush()
        self.kept = {p: held for p, held in self.kept.items() if p <= point}

    def prune(self, committed: Point) -> None:
        self.flush()
        points = [p for p in self.kept if p.load == committed.load]
        last = max((p for p in points if p.step < committed.step), default=None)
        if last is not None:
            base = min(points)
            self.kept = {p: held for p, held in self.kept.items() if p >= last or p == base}

    def read(self, kept: Kept) -> State:
        term, (weights, total) = self.kept[kept.point]
        assert term == kept.term
        return dict(weights), dict(total)


class IntEngine:
    """In place of :class:`edgesplit.engine.Engine`."""

    def __init__(
        self, name: str, case: Case, scale: float, disk: Disk | None = None, before: IntEngine | None = None
    ) -> None:
        self.name, self.case, self.loss_scale = name, case, scale
        self.disk, self.point = disk or Disk(), Point(0, -1)
        self.layers = case.plan.layers_of(name)
        self.weights = {layer: initial(layer) for layer in self.layers}
        if before is not None:
            self.weights |= {layer: weight for layer, weight in before.weights.items() if layer in self.weights}
        self.total: dict[int, float] = dict.fromkeys(self.layers, 0.0)
        self.shared = {la for la, nodes in case.plan.replicas().items() if len(nodes) > 1} if case.every_step else set()
        self.sums: dict[int, dict[int, tuple[int | None, float]]] = {}  # step -> layer -> gradient, weight
        self.undo: dict[int, dict[int, int]] = {}
        self.live: dict[tuple[int, int], _Pass] = {}
        self.pending: dict[tuple[int, int], dict[int, int]] = {}
        self.scales: dict[int, set[int]] = defaultdict(set)
        self.reckoned: dict[int, float] = {}  # step -> the loss scale that its gradients were divided by
        self.counted: Counter[tuple[int, int, int, int]] = Counter()  # asynchronous: (stage, micro, step, layer)

    def machine(self, barrier: bool) -> NodeMachine:
        return self.case.machine(self.name, barrier)

    def execute(self, work: Work) -> Outcome:
        if isinstance(work, Run):
            return {"F": self.forward, "B": self.backward, "I": self.backward, "W": self.finish, "U": self.update}[
                work.action.op
            ](work)
        if isinstance(work, Reckon):
            return self.reckon(work)
        if isinstance(work, Settle):
            return self.settle(work.commit)
        if isinstance(work, Keep):
            return self.keep(Point(self.point.load, work.step), work.term)
        return self.serve(work.message)

    def span(self, run: Run) -> range:
        assert run.micro is not None
        stage = self.case.plan.path(run.micro.device, run.micro.route)[run.action.stage]
        assert stage.node == self.name
        return range(stage.start, stage.stop)

    def forward(self, run: Run) -> Outcome:
        micro, span, stage = run.micro, self.span(run), run.action.stage
        assert micro is not None
        where = (micro.device, *run.step.batches[micro.device], micro.start, micro.stop)
        weight, target = weight_of(*where), number("y", *where)
        if stage:
            assert run.act is not None
            assert run.act.weight == weight, "the weight travels with the micro-batch"
            assert run.act.sender == self.case.plan.path(micro.device, micro.route)[stage - 1].node
            x = unwrap(run.act)["x"]
        else:
            assert run.act is None
            x = number("x", *where)
        inputs, weights = [], [self.weights[layer] for layer in span]
        for layer, w in zip(span, weights, strict=True):
            inputs.append(x)
            x = through(layer, w, x)
        seed = 0
        if run.last:
            if stage:
                assert unwrap(run.target) == {"y": target}
            seed = loss_of(x, target)
        if not run.evaluate:
            held = _Pass(inputs, weights, seed, scale=int(self.loss_scale))
            assert (stage, micro.micro) not in self.live, f"{run.action} twice"
            self.live[stage, micro.micro] = held
        trainable = any(layer not in self.case.frozen for layer in range(span.stop))
        lost = self.name in self.case.poison.get(run.step.step, ())
        return Outcome(
            arrays={} if run.last else wrap(x=x),
            needs=frozenset({"x"}) if trainable and not run.last else frozenset(),
            target=wrap(y=target) if stage == 0 and not run.last else None,
            weight=weight,
            loss_sum=(math.nan if lost else float(seed % 997)) if run.last else 0.0,
            metrics={"m": (float(x % 101), weight)} if run.last and run.evaluate else {},
        )

    def backward(self, run: Run) -> Outcome:
        key, span = (run.action.stage, run.action.micro), self.span(run)
        held = self.live[key]
        if self.case.synchronous:
            assert held.weights == [self.weights[layer] for layer in span], f"{run.action} sees other weights than F"
        given = unwrap(run.grad)
        assert run.last or bool(given) == any(layer not in self.case.frozen for layer in range(span.stop))
        gradient = held.seed if run.last else given.get("x", 0)
        held.scale = held.scale if run.last else given.get("s", 0)
        if held.scale:
            self.scales[run.step.step].add(held.scale)
        for layer, x, w in zip(reversed(span), reversed(held.inputs), reversed(held.weights), strict=True):
            if layer not in self.case.frozen:
                held.gradients[layer] = (gradient * x) & MASK
            gradient = (gradient * (2 * w + 1)) & MASK
        needed = span.start > 0 and any(layer not in self.case.frozen for layer in range(span.start))
        assert (run.to is not None) == needed
        if run.action.op == "B":
            self.finish(run)
        return Outcome(arrays=wrap(x=gradient, s=held.scale) if run.to else {})

    def finish(self, run: Run) -> Outcome:
        key, span, step = (run.action.stage, run.action.micro), self.span(run), run.step.step
        held = self.live.pop(key)
        if not self.case.synchronous:
            self.pending[key] = held.gradients
            return Outcome()
        sums = self.sums.setdefault(step, {})
        for layer in span:
            gradient, weight = sums.get(layer, (None, 0.0))
            if layer in held.gradients:
                gradient = ((gradient or 0) + held.gradients[layer]) & MASK
            sums[layer] = gradient, weight + run.weight
        return Outcome()

    def update(self, run: Run) -> Outcome:
        step, stage = run.step.step, run.action.stage
        if not self.case.synchronous:
            assert run.micro is not None
            self.pending.pop((stage, run.action.micro))
            where = (run.micro.device, *run.step.batches[run.micro.device], run.micro.start, run.micro.stop)
            for layer in self.span(run):
                self.counted[stage, run.action.micro, step, layer] += 1
                self.weights[layer] = (self.weights[layer] + push(step, layer, *where)) & MASK
            return Outcome()
        clip = 1.0
        assert self.reckoned.get(step, self.loss_scale) == self.loss_scale, "a step's own scale until its update"
        if run.commit is not None:
            told = Commit.of(run.commit.meta)
            assert told.step == step
            assert told.apply
            clip = told.clip
            self.adopt(step, run.commit)
        undo = self.undo.setdefault(step, {})
        for layer in self.owned(stage):
            assert layer not in undo, f"layer {layer} is updated twice in step {step}"
            undo[layer] = self.weights[layer]
            gradient, weight = self.sums.get(step, {}).get(layer, (None, 0.0))
            if gradient is not None and weight:
                self.weights[layer] = updated(self.weights[layer], gradient, weight, run.step.lr, clip)
        return Outcome()

    def owned(self, stage: int) -> set[int]:
        """The layers that the stage's update is for: a layer under two stages is the later one's."""
        hosted = self.case.plan.hosted(self.name)
        under = {at: {la for start, stop in spans for la in range(start, stop)} for at, spans in hosted.items()}
        return under[stage] - {la for later, layers in under.items() if later > stage for la in layers}

    def adopt(self, step: int, commit: Message) -> None:
        arrays = unwrap(commit)
        assert {int(name.partition("/")[0]) for name in arrays} <= self.shared & set(self.layers)
        for layer, weight in commit.meta["weights"]:
            self.sums.setdefault(step, {})[layer] = arrays.get(f"{layer}/p"), weight

    def reckon(self, work: Reckon) -> Outcome:
        step = work.step.step
        if work.evaluate:
            return Outcome(report=Report(step))
        self.disk.flush()
        finite = self.name not in self.case.poison.get(step, ())
        if not self.case.synchronous:
            return Outcome(report=Report(step, skipped=int(not finite)))
        assert self.scales.pop(step, set()) <= {int(self.loss_scale)}, "one loss scale for a step, everywhere"
        self.reckoned[step] = self.loss_scale
        sums = self.sums.get(step, {})
        layers = {la: (w, square_of(g) if g is not None and w else 0.0) for la, (g, w) in sums.items()}
        arrays = {f"{la}/p": g for la, (g, _) in sums.items() if la in self.shared and g is not None}
        culprit = None if finite else f"l{self.layers[0]}"
        return Outcome(report=Report(step, finite, layers, culprit=culprit), arrays=wrap(**arrays))

    def settle(self, commit: Commit) -> Outcome:
        self.loss_scale = commit.loss_scale
        if commit.apply:
            self.undo.pop(commit.step, None)
            self.reckoned.pop(commit.step, None)
            for layer, (_, weight) in self.sums.pop(commit.step, {}).items():
                self.total[layer] += weight
            self.point = Point(self.point.load, commit.step)
            return Outcome()
        self.disk.forget_after(Point(self.point.load, commit.step - 1))
        for step in sorted((s for s in self.undo if s >= commit.step), reverse=True):
            self.weights |= self.undo.pop(step)
        self.sums = {step: sums for step, sums in self.sums.items() if step < commit.step}
        self.reckoned = {step: scale for step, scale in self.reckoned.items() if step < commit.step}
        self.scales = defaultdict(set, {step: s for step, s in self.scales.items() if step < commit.step})
        self.live.clear()
        return Outcome()

    def keep(self, point: Point, term: int) -> Outcome:
        total = dict(self.total)
        for step in self.undo:
            for layer, (_, weight) in self.sums.get(step, {}).items():
                total[layer] += weight
        self.disk.unwritten[point] = term, (dict(self.weights), total)
        if len(self.disk.kept) > 3:
            self.disk.prune(self.point)
        return Outcome()

    def told(self) -> dict[str, Any]:
        return {"kept": [Kept(point, term).to_json() for point, (term, _) in self.disk.kept.items()]}

    def go_back(self, message: Message) -> Outcome:
        self.point = point_of(message.meta["point"])
        kept = one_kept(message.meta["kept"])
        self.weights, self.total = self.disk.read(kept)
        self.disk.forget_after(kept.point)
        self.loss_scale = message.meta["loss_scale"]
        for held in (self.sums, self.undo, self.live, self.pending, self.scales, self.reckoned):
            held.clear()
        return Outcome()

    def serve(self, message: Message) -> Outcome:
        self.disk.flush()
        if message.kind == "halt":
            return Outcome(meta=self.told())
        if message.kind == "return":
            return self.go_back(message)
        assert not self.undo, "between two steps nothing is uncommitted"
        if message.kind == "fetch":
            arrays = wrap(**{str(layer): weight for layer, weight in self.weights.items()})
            return Outcome(arrays=arrays, meta={"weights": [[la, w] for la, w in self.total.items()]})
        for name, value in unwrap(message).items():
            assert int(name) in self.weights
            self.weights[int(name)] = value
        self.total = dict.fromkeys(self.layers, 0.0)
        self.loss_scale = message.meta.get("loss_scale", self.loss_scale)
        self.point = point_of(message.meta["point"])
        self.disk.forget_after(Point(self.point.load, self.point.step - 1))  # what was kept before was taken back
        self.keep(self.point, message.term)
        self.disk.flush()
        return Outcome()


# --- the clock and the network --------------------------------------------------------------------------------------


@dataclass
class Node:
    machine: NodeMachine
    engine: Any
    inbox: deque[Message] = field(default_factory=deque)
    busy_until: float = 0.0
    ran: list[tuple[float, Work]] = field(default_factory=list)
    settled: set[int] = field(default_factory=set)
    updated: set[int] = field(default_factory=set)
    snapshots: list[Any] = field(default_factory=list)


class Stuck(AssertionError):
    """Nothing more will happen, and something is still awaited."""


class Fleet:
    """Coordinator, nodes and what is under way between them."""

    def __init__(
        self, case: Case, rng: Random, engine: Callable[[str, Case, float], Any] = IntEngine, *, check: bool = True
    ) -> None:
        self.case, self._rng, self._check = case, rng, check
        self.coordinator = case.coordinator()
        self.barrier, scale = self.coordinator.barrier, self.coordinator.loss_scale.value
        engines = {name: engine(name, case, scale) for name in case.plan.nodes()}
        self.nodes = {name: Node(made.machine(self.barrier), made) for name, made in engines.items()}
        self.now = 0.0
        self.steps: list[StepDone] = []
        self.clips: dict[int, float] = {}
        self.committed: dict[int, bool] = {}
        self._events: list[tuple[float, int, str, Message | None]] = []
        self._count = count()
        self._last: dict[tuple[str, str], float] = {}
        self._terms: dict[str, int] = defaultdict(int)
        self._slow = {name: 10 ** rng.uniform(-2, 1) for name in self.nodes}
        self._far: dict[tuple[str, str], float] = {}
        self._hasty = rng.random() < 0.2  # no delay at all

    # -- what the driver may do

    def train(self, *sheets: Sequence[Draft], evaluate: bool = False) -> list[StepDone]:
        """Issue sheets, one right after the other, and run until all of their steps have ended."""
        begin = len(self.steps)
        for drafts in sheets:
            self._act(self.coordinator.issue(drafts, self.now, evaluate=evaluate))
        self._until_idle()
        return self.steps[begin:]

    def ask(self, kind: str, to: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Packed]]]) -> Mapping[str, Message]:
        wanted, effects = self.coordinator.request(kind, to, self.now)
        replies = [e for e in [*self._act(effects), *self._until_idle()] if isinstance(e, Replied)]
        assert [reply.request for reply in replies] == [wanted]
        return replies[0].replies

    def settle(self) -> None:
        """Let everything under way arrive; then nothing may be left anywhere."""
        while self._events:
            self._turn()
        for name, node in self.nodes.items():
            left = {part: held for part in MEMORY if (held := getattr(node.machine, part))}
            assert not left, f"{name} still holds {left}"
            assert node.machine.waiting_for() is None
            assert node.machine.next() is None
        assert not self.coordinator.busy

    # -- inside

    def _until_idle(self) -> list[Effect]:
        effects: list[Effect] = []
        while self.coordinator.busy:
            if not self._events:
                waiting = {name: node.machine.waiting_for() for name, node in self.nodes.items()}
                raise Stuck(f"the coordinator waits in vain; the nodes for {waiting}")
            effects += self._turn()
        return effects

    def _turn(self) -> Sequence[Effect]:
        self.now, _, to, message = heapq.heappop(self._events)
        if to == COORDINATOR:
            assert message is not None
            return self._act(self.coordinator.receive(message, self.now))
        node = self.nodes[to]
        if message is not None:
            node.inbox.append(message)
        if self.now >= node.busy_until:
            self._work(to, node)
        return []

    def _work(self, name: str, node: Node) -> None:
        while node.inbox:
            node.machine.receive(node.inbox.popleft())
        assert node.machine.term >= self._terms[name], "terms only grow"
        self._terms[name] = node.machine.term
        work = node.machine.next()
        if work is None:
            return
        assert self._rng.random() < 0.9 or node.machine.next() == work, "next() changes nothing"
        if self._check:
            self._before(name, node, work)
        outcome = node.engine.execute(work)
        sends = node.machine.done(work, outcome)
        node.ran.append((self.now, work))
        if self._check:
            self._after(node, work)
        node.busy_until = self.now + (0.0 if self._hasty else self._slow[name] * self._rng.random())
        for send in sends:
            self._send(name, send, node.busy_until)
        heapq.heappush(self._events, (node.busy_until, next(self._count), name, None))

    def _before(self, name: str, node: Node, work: Work) -> None:
        if not self.case.synchronous:
            return
        if isinstance(work, Run) and work.action.op == "U":
            step = work.step.step
            reckoned = {w.step.step for _, w in node.ran if isinstance(w, Reckon) and not w.evaluate}
            before = {other for other in reckoned if other < step}
            assert before <= node.settled, f"{name}: update of step {step} before the commit of {before - node.settled}"
            assert node.updated - node.settled <= {step}, "at most one uncommitted version"
            if self.barrier:
                assert self.committed[step], "an update that needs the commit waits for it"
            node.updated.add(step)

    def _after(self, node: Node, work: Work) -> None:
        if isinstance(work, Settle):
            step = work.commit.step
            if work.commit.apply:
                node.snapshots.append(dict(node.engine.weights))
            elif node.snapshots:
                assert node.engine.weights == node.snapshots[-1], "a skipped step leaves no trace"
            node.settled |= {s for s in node.updated if s >= step} | {step}
            if not work.commit.apply:
                ran = {w.step.step for _, w in node.ran if isinstance(w, Reckon) and w.step.step >= step}
                node.settled |= ran
                node.updated -= {s for s in node.updated if s > step}
        elif isinstance(work, Serve):
            node.snapshots = [dict(node.engine.weights)]

    def _act(self, effects: Sequence[Effect]) -> Sequence[Effect]:
        assert self.coordinator.term >= self._terms[COORDINATOR]
        self._terms[COORDINATOR] = self.coordinator.term
        for effect in effects:
            if isinstance(effect, Send):
                self._note(effect.message)
                self._send(COORDINATOR, effect, self.now)
            elif isinstance(effect, StepDone):
                self.steps.append(effect)
        for effect in effects:
            if isinstance(effect, Failed):
                raise effect.error
        return effects

    def _note(self, message: Message) -> None:
        if message.kind == "commit":
            told = Commit.of(message.meta)
            assert self.committed.setdefault(told.step, told.apply) == told.apply
            assert self.clips.setdefault(told.step, told.clip) == told.clip

    def _send(self, sender: str, send: Send, at: float) -> None:
        pair = sender, send.to
        if pair not in self._far:
            self._far[pair] = 10 ** self._rng.uniform(-3, 1.5)
        delay = 0.0 if self._hasty else self._far[pair] * self._rng.expovariate(1.0)
        self._last[pair] = due = max(at + delay, self._last.get(pair, 0.0))  # in order, per sender
        message = send.message
        if message.kind not in DATA_KINDS:
            message = replace(message, meta=json.loads(json.dumps(message.meta, allow_nan=False)))
        heapq.heappush(self._events, (due, next(self._count), send.to, message))
