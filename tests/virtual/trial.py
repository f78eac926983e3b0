"""One seed: a tiny run in a faulty world, held against the same in one process."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from edgesplit.coordinator import Coordinator
from edgesplit.effects import StepDone
from edgesplit.protocol import Commit
from edgesplit.sheets import Draft
from edgesplit.task import COORDINATOR
from edgesplit.transport.reliable import Settings
from tests.virtual.draw import Tiny, draw_tiny
from tests.virtual.faults import Faults, draw_faults
from tests.virtual.fleet import MEMORY, Case, unwrap, wrap
from tests.virtual.oracle import Oracle, present
from tests.virtual.process import Process
from tests.virtual.programs import Ask, CoordinatorProgram, NodeProgram, Script, Train
from tests.virtual.world import Client, World

PATIENCE_S = 300.0
"""How long a run may go on after the last fault: timeouts double up to 15 s, and several may follow each other."""

SETTINGS = [
    Settings(),
    Settings(),
    Settings(window_bytes=4096, window_frames=8, inbox_bytes=8192, inbox_frames=16),
    Settings(window_bytes=1024, window_frames=2, inbox_bytes=2048, inbox_frames=3),
]


class Trial:
    """A world with a coordinator and its nodes, ready to run."""

    def __init__(self, seed: int, faults: Faults | None = None) -> None:
        rng = Random(seed)
        self.seed = seed
        self.tiny: Tiny = draw_tiny(rng)
        self.faults = faults or draw_faults(rng)
        self.world = World(rng.getrandbits(64), self.faults)
        self.oracle = Oracle(self.case)
        self.wanted: Counter[tuple[str, int, int]] = Counter()
        self._chunk_size = rng.choice([224, 512, 4096, 4096])
        self._settings = replace(rng.choice(SETTINGS))
        self._hasty = rng.random() < 0.2
        self._slow: dict[str, float] = {}
        self.committed: dict[int, bool] = {}
        self.clips: dict[int, float] = {}
        self.world.add(COORDINATOR, self._coordinator)
        for name in self.case.plan.nodes():
            self._slow[name] = 0.0 if self._hasty else 10 ** rng.uniform(-4, -1.3)
            self.world.add(name, self._node(name), frozenset({COORDINATOR}))

    @property
    def case(self) -> Case:
        return self.tiny.case

    @property
    def driver(self) -> CoordinatorProgram:
        program = self.world.processes[COORDINATOR].program
        assert isinstance(program, CoordinatorProgram)
        return program

    @property
    def nodes(self) -> dict[str, NodeProgram]:
        found = {name: process.program for name, process in self.world.processes.items()}
        return {name: program for name, program in found.items() if isinstance(program, NodeProgram)}

    def run(self) -> None:
        """Run to the end of the script, then until all is acknowledged; then nothing may be left anywhere."""
        self.world.run(lambda: self.driver.done and self._quiet(), self.faults.calm + PATIENCE_S)
        for name, program in self.nodes.items():
            left = {part: held for part in MEMORY if (held := getattr(program.machine, part))}
            assert not left, f"{name} still holds {left}"
            engine = program.engine
            assert engine is not None
            assert not any((engine.undo, engine.live, engine.sums, engine.pending)), f"{name} has not finished"
        assert not self.driver.coordinator.busy

    def _quiet(self) -> bool:
        """Nothing is under way, and the last commits are settled."""
        return all(not process.endpoint.missing() for process in self.world.processes.values()) and all(
            program.waits_for() is None and program.next_deadline() == math.inf for program in self.nodes.values()
        )

    # Processes

    def _node(self, name: str) -> Any:
        def make(client: Client, disk: dict[str, Any]) -> Process:
            life, rng, slow = self.world.lives[name], self.world.rng, self._slow[name]
            program = NodeProgram(name, self.case, disk, life=life, rng=rng, slow=slow)
            return Process(self.world, name, client, program, self._chunk_size, self._settings)

        return make

    def _coordinator(self, client: Client, disk: dict[str, Any]) -> Process:
        program = CoordinatorProgram(self._lenient(), self._script(), told=self._note)
        return Process(self.world, COORDINATOR, client, program, self._chunk_size, self._settings)

    def _lenient(self) -> Coordinator:
        """One that ends no run for a broken connection."""
        coordinator = self.case.coordinator()
        coordinator.on_lost, coordinator.patience = "wait", math.inf
        return coordinator

    def _note(self, told: Commit) -> None:
        assert self.committed.setdefault(told.step, told.apply) == told.apply, "one verdict on a step"
        assert self.clips.setdefault(told.step, told.clip) == told.clip

    # The script, and what must come of it

    def _script(self) -> Script:
        coordinator = self.driver.coordinator
        meta = {"barrier": coordinator.barrier, "loss_scale": coordinator.loss_scale.value}
        yield Ask("assign", {node: (meta, {}) for node in self.case.plan.nodes()})
        *rounds, last = self.tiny.rounds
        for sheets in rounds:
            yield from self._train(sheets)
            yield from self._check_weights()
            yield from self._mix()
        yield from self._train(last)
        yield from self._check_weights()

    def _train(self, sheets: Sequence[Sequence[Draft]]) -> Script:
        done = yield Train(sheets)
        drafts = [draft for sheet in sheets for draft in sheet]
        if self.case.synchronous:
            self._compare(drafts, done)
        else:
            assert [step.step for step in done] == [draft.step for draft in drafts]
            self.wanted += self.oracle.updates(drafts)
            self.oracle.push(drafts)

    def _compare(self, drafts: Sequence[Draft], done: Sequence[StepDone]) -> None:
        """Every micro-batch counts once: replay the steps and compare what was said of each."""
        assert [step.step for step in done] == [draft.step for draft in drafts]
        for draft, step in zip(drafts, done, strict=True):
            clip = self.clips.get(draft.step, 1.0)
            counts, loss, total, norm = self.oracle.step(draft, clip)
            assert step.applied == counts
            assert step.samples == sum(share.samples for share in present(draft).values())
            assert step.weight == total
            if counts:
                assert step.loss == loss / total if total else math.isnan(step.loss)
                if self.case.clip is not None:
                    assert math.isclose(clip, min(1.0, self.case.clip / (norm + 1e-6)), rel_tol=1e-9)

    def _check_weights(self) -> Script:
        """Fetch what every node holds: weights, and the weight of the samples that made them."""
        nodes, oracle = self.case.plan.nodes(), self.oracle
        held = yield Ask("fetch", {node: ({}, {}) for node in nodes})
        if not self.case.synchronous:
            self._check_counts()
        values = {(node, int(name)): value for node in nodes for name, value in unwrap(held[node]).items()}
        weights = {(node, layer): w for node in nodes for layer, w in held[node].meta["weights"]}
        assert values == oracle.weights, "the weights are those of one process"
        assert {key: w for key, w in weights.items() if w} == {key: w for key, w in oracle.total.items() if w}

    def _check_counts(self) -> None:
        """Asynchronous: the weights depend on the order, but every update of every micro-batch is made once."""
        found: Counter[tuple[str, int, int]] = Counter()
        for name, program in self.nodes.items():
            assert program.engine is not None
            assert set(program.engine.counted.values()) <= {1}
            found.update((name, step, layer) for _, _, step, layer in program.engine.counted)
        assert found == self.wanted

    def _mix(self) -> Script:
        """Make the replicas of a layer one, everywhere."""
        oracle, mixed = self.oracle, self.oracle.aggregate()
        nodes = self.case.plan.nodes()
        mine = {n: {str(la): v for la, v in mixed.items() if n in oracle.shared[la]} for n in nodes}
        yield Ask("load", {node: ({"reset_round": True}, wrap(**mine[node])) for node in nodes})


def trial(seed: int) -> Trial:
    """Run a seed; an error that it raises names the seed."""
    made = Trial(seed)
    try:
        made.run()
    except BaseException as error:
        error.add_note(f"seed {seed}: python -m tests.virtual --start {seed} --seeds 1")
        raise
    return made
