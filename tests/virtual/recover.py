"""One seed: a tiny run whose processes crash, the coordinator too, and which must come to what it does undisturbed."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from edgesplit.coordinator import Coordinator
from edgesplit.effects import NodeChanged, StepDone
from edgesplit.logbook import Progress, begun, last_of, progress_of
from edgesplit.plan import Plan
from edgesplit.protocol import Commit
from edgesplit.recovery import Line, Point, Standing
from edgesplit.replanning import moved
from edgesplit.roster import OnLost
from edgesplit.sheets import Agenda, Draft, evaluation
from edgesplit.task import COORDINATOR
from tests.virtual.draw import REPLICATED, SHAPES, draw_tiny
from tests.virtual.faults import Faults, draw_crashes
from tests.virtual.fleet import MEMORY, Case, initial, unwrap, wrap
from tests.virtual.oracle import Oracle, present
from tests.virtual.process import Process
from tests.virtual.programs import Ask, CoordinatorProgram, NodeProgram, Resume, Save, Script, Train
from tests.virtual.trial import PATIENCE_S, SETTINGS
from tests.virtual.world import Client, World

Held = dict[str, dict[int, int]]
"""Node -> layer -> weight."""


class Book:
    """In place of :class:`edgesplit.logbook.Logbook`: the same records, on a disk of the virtual world."""

    KEPT = 2

    def __init__(self, disk: dict[str, Any]) -> None:
        self._files: dict[int, list[str]] = disk.setdefault("log", {})
        self._load: int | None = None

    def note(self, record: Mapping[str, Any]) -> None:
        if (load := begun(record)) is not None:
            self._load = load
            for other in list(self._files):
                if not load - self.KEPT < other <= load:
                    del self._files[other]
            if "base" in record:
                self._files[load] = []
        if self._load is not None:
            self._files[self._load].append(json.dumps(record))

    def read(self, load: int) -> Progress | None:
        return progress_of(self._files[load]) if load in self._files else None

    def last(self) -> tuple[int, int]:
        return last_of(map(self.read, self._files))


@dataclass(frozen=True)
class Checkpoint:
    """What a coordinator writes down after a round."""

    round: int
    load: int
    step: int
    micro: int
    term: int
    scale: float
    good: int
    held: Held


@dataclass
class Expected:
    """What a round must come to, whoever finishes it: of each step what the oracle says, then what is held."""

    steps: list[tuple[bool, float, float, float]] = field(default_factory=list)
    weights: dict[tuple[str, int], int] = field(default_factory=dict)
    totals: dict[tuple[str, int], float] = field(default_factory=dict)
    mixed: dict[int, int] = field(default_factory=dict)
    tests: list[dict[str, tuple[float, float]]] = field(default_factory=list)


class Recovery:
    """A world with a coordinator and its nodes, all of which may crash."""

    def __init__(self, seed: int, faults: Faults | None = None, *, on_lost: OnLost = "wait") -> None:
        rng = Random(seed)
        self.seed, self.on_lost = seed, on_lost
        self.case: Case = draw_tiny(rng, SHAPES if on_lost == "wait" else REPLICATED).case
        self.nodes = self.case.plan.nodes()
        self.rounds = self._draw_rounds(rng)
        self.cut = rng.random() < 0.5  # a round's steps come in two sheets
        self.every = rng.choice([1, 1, 2])  # rounds between two checkpoints
        self.faults = faults or draw_crashes(rng, self.nodes)
        if on_lost == "continue":
            self.faults.down = 0.3, 1.3  # long enough to be missed
        self.world = World(rng.getrandbits(64), self.faults)
        self.oracle = Oracle(self.case)
        self.expected: dict[int, Expected] = {}
        self.plans: dict[int, Plan] = {}  # by which plan each step was done at last
        self.became: Counter[str] = Counter()  # what became of the nodes
        self._begun = {1: (dict(self.oracle.weights), replace(self.oracle.scale))}  # how each round begins
        self.committed: dict[int, bool] = {}
        self.clips: dict[int, float] = {}
        self._chunk_size = rng.choice([224, 512, 4096, 4096])
        self._settings = replace(rng.choice(SETTINGS))
        self._slow: dict[str, float] = {}
        hasty = rng.random() < 0.2
        self.world.add(COORDINATOR, self._coordinator)
        for name in self.nodes:
            self._slow[name] = 0.0 if hasty else 10 ** rng.uniform(-4, -1.3)
            self.world.add(name, self._node(name), frozenset({COORDINATOR}))

    def _draw_rounds(self, rng: Random) -> list[list[Draft]]:
        devices = [route.device for route in self.case.plan.routes]
        agenda = Agenda({d: [rng.randint(2, 5) for _ in range(2)] for d in devices}, lambda step: 1 + step % 3)
        evaluates = rng.random() < 0.2 and self.on_lost == "wait"
        self.tests = {d: [rng.randint(0, 3)] for d in devices} if evaluates else {}
        return [agenda.round(devices, steps=rng.choice([1, 2, 3, 4])) for _ in range(rng.choice([1, 1, 2, 3]))]

    # -- the run

    def run(self) -> None:
        """Run until the script has come to its end and everybody is idle; then look at what there is."""
        self.world.run(self._over, self.faults.calm + PATIENCE_S)
        weights, _ = self._begun[len(self.rounds) + 1]
        for name in self._coordinator_program().coordinator.plan.nodes():
            program = self._program(name)
            machine, engine = program.machine, program.engine
            assert machine is not None
            assert engine is not None
            left = {part: held for part in MEMORY if (held := getattr(machine, part))}
            assert not left, f"{name} still holds {left}"
            assert not any((engine.undo, engine.live, engine.sums, engine.pending)), f"{name} has not finished"
            for layer in engine.layers:
                assert engine.weights[layer] == weights[name, layer], f"{name} ends with other weights"
                assert engine.total[layer] == 0.0

    def _over(self) -> bool:
        """Those who take part are idle, and all that was sent has been acknowledged."""
        driver = self._coordinator_program()
        processes = self.world.processes
        if processes[COORDINATOR].client.dead or not driver.done or driver.coordinator.busy:
            return False
        if any(process.client.dead or process.endpoint.missing() for process in processes.values()):
            return False
        programs = [self._program(name) for name in driver.coordinator.plan.nodes()]
        return all(program.waits_for() is None and program.next_deadline() == math.inf for program in programs)

    def _coordinator_program(self) -> CoordinatorProgram:
        program = self.world.processes[COORDINATOR].program
        assert isinstance(program, CoordinatorProgram)
        return program

    def _program(self, name: str) -> NodeProgram:
        program = self.world.processes[name].program
        assert isinstance(program, NodeProgram)
        return program

    def _node(self, name: str) -> Any:
        def make(client: Client, disk: dict[str, Any]) -> Process:
            life, rng, slow = self.world.lives[name], self.world.rng, self._slow[name]
            program = NodeProgram(name, self.case, disk, life=life, rng=rng, slow=slow)
            return Process(self.world, name, client, program, self._chunk_size, self._settings)

        return make

    def _coordinator(self, client: Client, disk: dict[str, Any]) -> Process:
        coordinator, book = self.case.coordinator(self.world.lives[COORDINATOR] << 20), Book(disk)
        coordinator.on_lost, coordinator.patience = self.on_lost, math.inf
        driver = Driver(self, coordinator, book, disk, again=self.world.lives[COORDINATOR] > 1)
        pause = math.inf if self.on_lost == "wait" else 0.5
        program = CoordinatorProgram(
            coordinator, driver.script(), note=driver.note, told=self._told, changed=self._changed, pause=pause
        )
        return Process(self.world, COORDINATOR, client, program, self._chunk_size, self._settings)

    def _changed(self, change: NodeChanged) -> None:
        self.became[change.state] += 1

    def _told(self, told: Commit) -> None:
        """Every life decides the same, unless somebody was left out since."""
        if self.on_lost == "wait":
            assert self.committed.setdefault(told.step, told.apply) == told.apply, "one verdict on a step"
            assert self.clips.setdefault(told.step, told.clip) == told.clip
        self.clips[told.step] = told.clip

    # -- what must come of it

    def expect(self, number: int, plan: Plan) -> Expected:
        """What round ``number`` comes to where nobody crashes.

        Asked for when it has ended, by ``plan``: only then are its clip factors known, and who was left out of a step.
        """
        if number in self.expected and self.on_lost == "wait":
            return self.expected[number]
        oracle, found = self.oracle, Expected()
        weights, scale = self._begun[number]
        oracle.weights, oracle.scale = dict(weights), replace(scale)
        oracle.total.clear()
        for draft in self.drafts(number):
            oracle.use(self.plans[draft.step])
            if self.case.synchronous:
                found.steps.append(oracle.step(draft, self.clips.get(draft.step, 1.0)))
            else:
                oracle.push([draft])
        oracle.use(plan)
        found.weights, found.totals = dict(oracle.weights), {key: w for key, w in oracle.total.items() if w}
        found.mixed = oracle.aggregate()
        found.tests = [oracle.evaluate(draft) for draft in self.test_drafts(number)]
        self.expected[number] = found
        return found

    def begins(self, number: int, given: Held) -> None:
        """Round ``number`` begins with these weights."""
        weights = {(node, layer): value for node, layers in given.items() for layer, value in layers.items()}
        self._begun[number] = self._begun[1][0] | weights, replace(self.oracle.scale)

    def drafts(self, number: int) -> list[Draft]:
        """The steps of a round, without the samples that were left out of them."""
        drafts = []
        for draft in self.rounds[number - 1]:
            here = {route.device for route in self.plans[draft.step].routes}
            drafts.append(replace(draft, shares={d: share for d, share in draft.shares.items() if d in here}))
        return drafts

    def test_drafts(self, number: int) -> list[Draft]:
        return list(evaluation(self.tests, self.rounds[number - 1][-1].step + 1))

    def check_steps(self, number: int, done: Sequence[StepDone]) -> None:
        """Every step was told once and in order, and every micro-batch counts once in it."""
        assert [step.step for step in done] == [draft.step for draft in self.rounds[number - 1]]
        if self.on_lost == "continue":
            return  # what was told of a step before somebody was left out of it stands
        drafts, found = self.drafts(number), self.expected[number]
        for draft, step, (counts, loss, total, norm) in zip(drafts, done, found.steps, strict=self.case.synchronous):
            clip = self.clips.get(draft.step, 1.0)
            assert (step.applied, step.weight) == (counts, total)
            assert step.samples == sum(share.samples for share in present(draft).values())
            if counts:
                assert step.loss == loss / total if total else math.isnan(step.loss)
                if self.case.clip is not None and total:
                    assert math.isclose(clip, min(1.0, self.case.clip / (norm + 1e-6)), rel_tol=1e-9)


class Driver:
    """One life of the coordinator's session: what Session, Training and Keeper do, as a script."""

    def __init__(
        self, trial: Recovery, coordinator: Coordinator, book: Book, disk: dict[str, Any], *, again: bool
    ) -> None:
        self.trial, self.coordinator, self.book, self.disk, self.again = trial, coordinator, book, disk, again
        self.given = self.initial(self.plan)
        coordinator.spare = lambda node: wrap(**{str(la): v for la, v in self.given[node].items()})
        coordinator.reassign = self.parts
        self.first, self.ended = 1, list[StepDone]()

    @property
    def plan(self) -> Plan:
        return self.coordinator.plan

    @staticmethod
    def initial(plan: Plan) -> Held:
        return {node: {layer: initial(layer) for layer in plan.layers_of(node)} for node in plan.nodes()}

    def parts(self, plan: Plan) -> dict[str, dict[str, Any]]:
        c = self.coordinator
        told: dict[str, Any] = {"barrier": c.barrier, "loss_scale": c.loss_scale.value}
        if self.trial.on_lost == "continue":
            told["plan"] = plan.to_json()
        return dict.fromkeys(plan.nodes(), told)

    def note(self, record: Mapping[str, Any]) -> None:
        self.book.note(record)
        if "step" in record:
            self.trial.plans[record["step"]] = self.plan

    def script(self) -> Script:
        trial = self.trial
        yield Ask("assign", {node: (meta, {}) for node, meta in self.parts(self.plan).items()})
        if self.again:
            assert (yield self._take_up()) == []
        else:
            yield self._load(self.given)
        for number in range(self.first, len(trial.rounds) + 1):
            yield from self._round(number)

    def _round(self, number: int) -> Script:
        trial = self.trial
        done, self.ended = self.ended, []
        left = trial.rounds[number - 1][len(done) :]
        sheets = [left[:1], left[1:]] if trial.cut else [left]
        done += yield Train(sheets)
        replies = yield Ask("fetch", {node: ({}, {}) for node in self.plan.nodes()})
        held = {node: {int(name): value for name, value in unwrap(reply).items()} for node, reply in replies.items()}
        found = trial.expect(number, self.plan)
        trial.check_steps(number, done)
        for node, layers in held.items():
            assert layers == {la: found.weights[node, la] for la in layers}, "the weights are those of one process"
            weights = {la: w for la, w in replies[node].meta["weights"] if w}
            assert weights == {la: w for (n, la), w in found.totals.items() if n == node}
        yield from self._distribute(held, found.mixed)
        trial.begins(number + 1, self.given)
        if tests := trial.test_drafts(number):
            told = yield Train([tests], evaluate=True)
            if trial.case.synchronous:
                assert [{d: v["m"] for d, v in step.metrics.items()} for step in told] == found.tests
        if number % trial.every == 0:
            yield Save(self._save(number))

    def _distribute(self, held: Held, mixed: dict[int, int]) -> Script:
        """As Training: give replicas what has changed, and where somebody comes or goes, everybody another plan."""
        changed = {node: {la: mixed[la] for la in layers if la in mixed} for node, layers in held.items()}
        whole = {node: layers | changed[node] for node, layers in held.items()}
        before, after = self.plan, self.coordinator.next_plan()
        if after.routes == before.routes:
            after = before
        else:
            self.given = spread(self.given, after)
            told = self.coordinator.take_plan(after)
            yield Ask("assign", {node: ({**meta, "again": True}, {}) for node, meta in told.items()})
            whole = spread(whole, after)
            changed = {
                node: {la: value for la, value in whole[node].items() if la in new or la in changed.get(node, {})}
                for node, new in moved(before, after).items()
            }
        same = self.plan is after and (after is before or self.trial.on_lost == "wait")
        replies = (yield self._load(changed)) if same else {}
        while not replies:  # somebody was left out, or is back
            replies = yield self._load(whole)
        self.given = {node: whole[node] for node in self.plan.nodes()}

    def _load(self, arrays: Held) -> Ask:
        meta = {"reset_round": True, "loss_scale": self.coordinator.loss_scale.value}
        return Ask("load", {n: (meta, wrap(**{str(la): v for la, v in a.items()})) for n, a in arrays.items()})

    def _save(self, number: int) -> Any:
        c = self.coordinator
        found = Checkpoint(
            round=number,
            load=c.line.base.load,
            step=self.trial.rounds[number - 1][-1].step + 1,
            micro=c.steps.next_micro,
            term=c.term,
            scale=c.loss_scale.value,
            good=c.loss_scale.good,
            held=self.given,
        )
        return lambda: self.disk.update(checkpoint=found)

    def _take_up(self) -> Resume:
        """As resuming.take_up and Training.take_up do."""
        found, trial, coordinator = self.disk.get("checkpoint"), self.trial, self.coordinator
        load, step, standing = 1, 0, Standing(coordinator.loss_scale.value, 0, 0, 0)
        if found is not None:
            self.first, self.given = found.round + 1, spread(found.held, self.plan)
            trial.begins(self.first, self.given)
            coordinator.steps.next_micro, coordinator.term = found.micro, found.term
            load, step, standing = found.load, found.step, Standing(found.scale, found.good, 0, 0)
        line = Line(Point(load, step - 1), standing)
        progress = self.book.read(load)
        if progress is not None and progress.base == line.base:
            drafts = trial.rounds[self.first - 1] if self.first <= len(trial.rounds) else []
            line = progress.line({draft.step: draft for draft in drafts})
            self.ended = list(progress.done)
        return Resume(line, *self.book.last())


def spread(nodes: Held, plan: Plan) -> Held:
    """What each node of a plan is to hold, as holding.spread says."""
    some = {layer: value for node in sorted(nodes) for layer, value in nodes[node].items()}
    return {n: {la: nodes.get(n, {}).get(la, some[la]) for la in plan.layers_of(n)} for n in plan.nodes()}


def recover(seed: int, on_lost: OnLost = "wait") -> Recovery:
    """Run a seed; an error that it raises names the seed."""
    made = Recovery(seed, on_lost=on_lost)
    try:
        made.run()
    except BaseException as error:
        kind = "recover" if on_lost == "wait" else on_lost
        error.add_note(f"seed {seed}: python -m tests.virtual {kind} --start {seed} --seeds 1")
        raise
    return made


def go_on(seed: int) -> Recovery:
    """Run a seed in which whoever is lost is left out, as far as the others can do without it."""
    return recover(seed, "continue")
