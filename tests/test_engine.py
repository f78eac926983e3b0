"""The engine over numpy layers: on the virtual clock against a loop in plain floats, and refusing what is malformed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from edgesplit.codecs import pack, unpack
from edgesplit.data import epoch_order
from edgesplit.engine import Engine
from edgesplit.errors import EdgesplitError, FrameError, RunError, ScheduleError
from edgesplit.kit import Kit
from edgesplit.node import Outcome, Run, Serve, Work
from edgesplit.optimizers import OptimizerSpec, Rule
from edgesplit.plan import Plan, Route, Stage
from edgesplit.protocol import Assignment
from edgesplit.schedule import Action, Micro, Step
from edgesplit.segments.base import Arrays, Output, Samples
from edgesplit.sheets import Agenda, Cutting, Draft, evaluation
from edgesplit.task import COORDINATOR
from edgesplit.transport.base import Message
from edgesplit.verdict import LossScale
from tests.test_simulation import draw_plan
from tests.virtual import Case, Fleet

RULE = Rule(name="sgd", lr=0.01, momentum=0.9, weight_decay=0.1)
BATCH = 4


# --- layers y = p x that count what they see ------------------------------------------------------------------------


class NumpyRunner:
    """A scalar a layer; the loss is the sum of ``w (y - t)^2 / 2``."""

    def __init__(self, start: int, stop: int, last: int) -> None:
        self.start, self.stop, self._last = start, stop, last
        self.same_weights = self.watchful = False
        self.first_bad: str | None = None
        self._live: dict[int, tuple[list[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {}
        self._half: dict[int, dict[str, Any]] = {}

    def forward(
        self,
        micro: int,
        weights: Mapping[str, Any],
        buffers: dict[str, Any],
        inputs: Arrays,
        needs_grad: frozenset[str],
        samples: Samples,
    ) -> Output:
        x, passed = inputs["x"], []
        assert sum(stop - start for _, start, stop in samples.parts) == len(x)
        for layer in range(self.start, self.stop):
            passed.append(x)
            buffers[f"{layer}.n"] += len(x)  # in place, as BatchNorm does
            x = x * weights[f"{layer}.p"]
        self._live[micro] = passed, np.zeros_like(x)
        return Output({"x": x}, frozenset({"x"}))

    def forward_loss(
        self,
        micro: int,
        weights: Mapping[str, Any],
        buffers: dict[str, Any],
        inputs: Arrays,
        needs_grad: frozenset[str],
        samples: Samples,
        target: Arrays,
        weight: float,
        loss_scale: float,
    ) -> Output:
        y = self.forward(micro, weights, buffers, inputs, needs_grad, samples).arrays["x"]
        error, w = y - target["t"], target["w"]
        assert weight == w.sum()
        self._live[micro] = self._live[micro][0], w * error * loss_scale
        return Output({}, loss_sum=float((w * error**2).sum() / 2))

    def evaluate(
        self, weights: Mapping[str, Any], buffers: Mapping[str, Any], inputs: Arrays, target: Arrays | None = None
    ) -> Output:
        x = inputs["x"]
        for layer in range(self.start, self.stop):
            x = x * weights[f"{layer}.p"]
        if target is None:
            return Output({"x": x})
        return Output({}, metrics={"sum": (float(x.sum()), float(len(x)))})

    def backward(self, micro: int, weights: Mapping[str, Any], grads: Arrays) -> tuple[Arrays, dict[str, Any]]:
        back = self.backward_input(micro, weights, grads)
        return back, self.backward_weights(micro, weights)

    def backward_input(self, micro: int, weights: Mapping[str, Any], grads: Arrays) -> Arrays:
        passed, gradient = self._live.pop(micro)
        gradient = grads.get("x", gradient)
        found = {}
        for layer, x in zip(reversed(range(self.start, self.stop)), reversed(passed), strict=True):
            found[f"{layer}.p"] = np.asarray((gradient * x).sum())
            gradient = gradient * weights[f"{layer}.p"]
        self._half[micro] = found
        return {"x": gradient}

    def backward_weights(self, micro: int, weights: Mapping[str, Any]) -> dict[str, Any]:
        return self._half.pop(micro)

    def drop(self, micros: Sequence[int] | None = None) -> None:
        self._live.clear()
        self._half.clear()


class Samples1D:
    """Points of one device; those in ``poisoned`` are not numbers."""

    def __init__(self, count: int, seed: int, poisoned: Sequence[int] = ()) -> None:
        rng = np.random.default_rng(seed)
        self.x, self.t = rng.uniform(-1, 1, count), rng.uniform(-1, 1, count)
        self.w = rng.integers(0, 3, count).astype(np.float64)
        self.x[list(poisoned)] = np.nan

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return self.x[index], self.t[index], self.w[index]


def collate(samples: Sequence[tuple[float, float, float]]) -> tuple[Any, Any]:
    x, t, w = (np.array(column, np.float64) for column in zip(*samples, strict=True))
    return {"x": x}, {"t": t, "w": w}


def make_kit(plan: Plan, data: Mapping[str, Any]) -> Kit:
    layers = range(len(plan.layers))
    return Kit(
        layers=plan.layers,
        params=[[f"{layer}.p"] for layer in layers],
        buffers=[[f"{layer}.n"] for layer in layers],
        frozen=frozenset(),
        fingerprint="numpy",
        runner=lambda start, stop: NumpyRunner(start, stop, len(plan.layers)),
        native=lambda array, trainable: array,
        numpy=np.asarray,
        data=lambda shard, test: data.get(shard.name),
        collate=collate,
        to_arrays=dict,
        weigh=lambda target: float(target["w"].sum()),
    )


def make_assignment(plan: Plan, node: str, **fields: Any) -> Assignment:
    devices = [r.device for r in plan.routes]
    shard = {"index": devices.index(node), "count": len(devices), "config": {}, "data": {}} if node in devices else None
    given = {
        "plan": plan.to_json(), "method": "1f1b", "window": 1, "split_backward": False, "add_replicas": False,
        "barrier": False, "seed": 3, "codecs": {}, "optimizer": spec_of(plan).to_json(), "batch_size": BATCH,
        "loss_scale": 1.0, "shard": shard, "evaluate": True, "task": {}, "fingerprint": "numpy",
    }  # fmt: skip
    return Assignment(**{**given, **fields})


def spec_of(plan: Plan) -> OptimizerSpec:
    return OptimizerSpec((RULE,), {f"{layer}.p": 0 for layer in range(len(plan.layers))})


class Real:
    """The engine behind the harness's interface."""

    def __init__(self, name: str, case: Case, scale: float, data: Mapping[str, Any]) -> None:
        self._case, self._scale = case, scale
        self._told = make_assignment(
            case.plan,
            name,
            method=case.method,
            window=case.window,
            split_backward=case.split_backward,
            add_replicas=case.every_step,
            barrier=case.coordinator().barrier,
            loss_scale=scale,
        )
        self.engine = Engine(name, self._told, make_kit(case.plan, data))

    def machine(self, barrier: bool) -> Any:
        assert barrier == self._told.barrier
        return self.engine.machine()

    def execute(self, work: Work) -> Outcome:
        with np.errstate(all="ignore"):
            return self.engine.execute(work)

    @property
    def weights(self) -> dict[str, bytes]:
        """What a skipped step leaves no trace in (nor in buffers, but the next forwards may have begun there)."""
        store = self.engine.store
        slots = {f"{n}//{slot}": v for n, held in store.state.items() for slot, v in held.items()}
        held = {**store.params, **slots}
        return {name: np.asarray(value).tobytes() for name, value in held.items()}


# --- the same in plain floats ---------------------------------------------------------------------------------------


class Loop:
    """Every replica by itself, one sample at a time."""

    def __init__(self, case: Case, data: Mapping[str, Samples1D], initial: Mapping[int, float]) -> None:
        self.case, self.plan, self.data = case, case.plan, data
        self.holders = case.plan.replicas()
        self.p = {(n, la): initial[la] for la, nodes in self.holders.items() for n in nodes}
        self.momentum: dict[tuple[str, int], float] = {}
        self.seen = dict.fromkeys(self.p, 0)
        self.total = dict.fromkeys(self.p, 0.0)

    def samples(self, device: str, epoch: int, index: int) -> list[int]:
        order = epoch_order(3, device, epoch, len(self.data[device]))
        return [int(i) for i in order[index * BATCH : (index + 1) * BATCH]]

    def step(self, draft: Draft, clip: float | None) -> tuple[bool, float, float]:
        grads = dict.fromkeys(self.p, 0.0)
        weights = dict.fromkeys(self.p, 0.0)
        seen = dict.fromkeys(self.p, 0)
        loss = total = 0.0
        for device, share in draft.shares.items():
            where = [(s.node, la) for s in self.plan.route(device).stages for la in range(s.start, s.stop)]
            for i in self.samples(device, share.epoch, share.index):
                x, t, w = (float(v) for v in self.data[device][i])
                inputs = []
                for key in where:
                    inputs.append(x)
                    x *= self.p[key]
                    weights[key] += w
                    seen[key] += 1
                loss += w * (x - t) ** 2 / 2
                total += w
                g = w * (x - t)
                for key, value in zip(reversed(where), reversed(inputs), strict=True):
                    grads[key] += g * value
                    g *= self.p[key]
        if not all(map(math.isfinite, grads.values())):
            return False, loss, total
        if self.case.every_step:
            for layer, nodes in self.holders.items():
                for part in (grads, weights):
                    whole = sum(part[n, layer] for n in nodes)
                    part.update({(n, layer): whole for n in nodes})
        factor = 1.0
        if clip is not None:
            square = 0.0
            for layer, nodes in self.holders.items():
                of = nodes[:1] if self.case.every_step else nodes
                if whole := sum(weights[n, layer] for n in of):
                    for n in of:
                        if weights[n, layer]:
                            square += weights[n, layer] * (grads[n, layer] / weights[n, layer]) ** 2 / whole
            factor = min(1.0, clip / (math.sqrt(square) + 1e-6))
        for key, weight in weights.items():
            self.seen[key] += seen[key]
            self.total[key] += weight
            if weight:
                g = grads[key] / weight * factor + 0.1 * self.p[key]
                self.momentum[key] = g + 0.9 * self.momentum[key] if key in self.momentum else g
                self.p[key] -= 0.01 * draft.lr * self.momentum[key]
        return True, loss, total

    def average(self) -> dict[int, float]:
        mean = {}
        for layer, nodes in self.holders.items():
            weights = [self.total[n, layer] for n in nodes]
            if sum(weights):
                mean[layer] = sum(self.total[n, layer] * self.p[n, layer] for n in nodes) / sum(weights)
                self.p.update({(n, layer): mean[layer] for n in nodes})
        self.total = dict.fromkeys(self.p, 0.0)
        return mean


def fetched(fleet: Fleet) -> dict[str, tuple[dict[str, np.ndarray[Any, Any]], dict[int, float]]]:
    replies = fleet.ask("fetch", {node: ({"optimizer": True}, {}) for node in fleet.case.plan.nodes()})
    return {n: (unpack(m.arrays), dict(m.meta["weights"])) for n, m in replies.items()}


def simulate(seed: int) -> int:
    """Run a random fleet; return how many of its steps were skipped."""
    rng = Random(seed)
    plan = draw_plan(rng)
    every_step = rng.random() < 0.5
    nodes = [stage.node for stage in plan.routes[0].stages]
    looping = len(plan.routes) == 1 and len(set(nodes)) < len(nodes)
    data = {
        r.device: Samples1D(count, seed + i, [j for j in range(count) if rng.random() < 0.03])
        for i, r in enumerate(plan.routes)
        if (count := rng.choice([0, 3, 7, 10]) or 5 * (i == 0))
    }
    case = Case(
        plan=plan,
        cutting=Cutting(rng.randint(1, 3)),
        method="breadth-first" if looping else rng.choice(["gpipe", "1f1b", "breadth-first"]),
        window=rng.choice([1, 2]),
        split_backward=rng.random() < 0.3,
        every_step=every_step,
        clip=rng.choice([None, 0.05]),
        scale=rng.choice([LossScale(), LossScale(8.0), LossScale(4.0, dynamic=True, growth_interval=2)]),
    )
    fleet = Fleet(case, rng, lambda name, case, scale: Real(name, case, scale, data))
    initial = {layer: 0.8 + 0.1 * layer for layer in range(len(plan.layers))}
    loop = Loop(case, data, initial)
    first = {
        node: {f"param/{la}.p": np.array(initial[la]) for la in plan.layers_of(node)}
        | {f"buffer/{la}.n": np.array(0) for la in plan.layers_of(node)}
        for node in plan.nodes()
    }
    fleet.ask("load", {node: ({}, pack(arrays)) for node, arrays in first.items()})
    sizes = {d: node.engine.engine.sizes()["train"] for d, node in fleet.nodes.items()}
    for device, source in data.items():
        assert sizes[device] == [len(loop.samples(device, 0, i)) for i in range(-(-len(source) // BATCH))]
    agenda = Agenda({r.device: sizes[r.device] for r in plan.routes}, lambda step: 1 + step % 3)
    for _ in range(3):
        drafts = agenda.round([r.device for r in plan.routes], **rng.choice([{"epochs": 1}, {"steps": 4}]))
        for draft, done in zip(drafts, fleet.train(drafts), strict=True):
            applied, loss, total = loop.step(draft, case.clip)
            assert (done.applied, done.weight) == (applied, total)
            if applied and total:
                assert done.loss == pytest.approx(loss / total, rel=1e-9)
        if rng.random() < 0.5:
            tests = list(evaluation(sizes, agenda.step))
            for draft, done in zip(tests, fleet.train(tests, evaluate=True), strict=True):
                counts = {device: values["sum"][1] for device, values in done.metrics.items()}
                assert counts == {device: share.samples for device, share in draft.shares.items()}
        held = fetched(fleet)
        for (node, layer), p in loop.p.items():
            arrays, weights = held[node]
            assert arrays[f"param/{layer}.p"] == pytest.approx(p, rel=1e-9)
            assert arrays[f"buffer/{layer}.n"] == loop.seen[node, layer]
            assert weights[layer] == loop.total[node, layer]
            momentum = loop.momentum.get((node, layer))
            assert (momentum is None) == (f"optimizer/{layer}.p//momentum" not in arrays)
            if momentum is not None:
                assert arrays[f"optimizer/{layer}.p//momentum"] == pytest.approx(momentum, rel=1e-9)
        mean = loop.average()
        if every_step:
            for layer, nodes in plan.replicas().items():
                assert len({held[n][0][f"param/{layer}.p"].tobytes() for n in nodes}) == 1
        told = {
            n: {f"param/{la}.p": np.array(mean[la]) for la in plan.layers_of(n) if la in mean} for n in plan.nodes()
        }
        fleet.ask("load", {node: ({"reset_round": True}, pack(arrays)) for node, arrays in told.items()})
    fleet.settle()
    return sum(not step.applied for step in fleet.steps)


def test_any_fleet_equals_a_loop_over_samples() -> None:
    skipped = 0
    for seed in range(24):
        try:
            skipped += simulate(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert skipped > 10


# --- what is refused ------------------------------------------------------------------------------------------------

CHAIN = Plan(("l0", "l1"), (Route("d", (Stage("d", 0, 1), Stage("c", 1, 2))),))
STEP = Step(0, (Micro(0, "d", 0, 2),), {"d": (0, 0)})


def engine_of(name: str, data: Mapping[str, Any] | None = None, **fields: Any) -> Engine:
    made = Engine(name, make_assignment(CHAIN, name, **fields), make_kit(CHAIN, data or {}))
    layers = CHAIN.layers_of(name)
    made.store.load({f"{la}.p": np.array(0.5) for la in layers}, {f"{la}.n": np.array(0) for la in layers}, {})
    return made


def serve(engine: Engine, kind: str, meta: Mapping[str, Any] | None = None, **arrays: Any) -> Outcome:
    named = {name.replace("__", "/"): np.asarray(value) for name, value in arrays.items()}
    return engine.execute(Serve(Message(kind=kind, sender=COORDINATOR, meta=meta or {}, arrays=pack(named))))


def test_a_forward_without_data() -> None:
    engine = engine_of("d")
    assert engine.sizes() == {"train": [], "test": []}
    with pytest.raises(RunError, match="'d' has no training data for 0F0"):
        engine.execute(Run(Action("F", 0, 0), STEP, STEP.micros[0], to="c"))
    with pytest.raises(RunError, match="'d' has no test data for 0F0"):
        engine.execute(Run(Action("F", 0, 0), STEP, STEP.micros[0], to="c", evaluate=True))


def test_the_test_set_is_only_made_where_it_is_wanted() -> None:
    assert engine_of("d", {"d": Samples1D(6, 0)}).sizes() == {"train": [4, 2], "test": [4, 2]}
    assert engine_of("d", {"d": Samples1D(6, 0)}, evaluate=False).sizes() == {"train": [4, 2], "test": []}


def test_an_activation_that_wants_gradients_of_what_it_does_not_carry() -> None:
    act = Message(kind="act", sender="d", stage=1, meta={"needs": ["x", "mask"]}, arrays=pack({"x": np.ones(2)}))
    with pytest.raises(FrameError, match=r"act of 1F0 wants gradients of \['mask'\], which it does not carry"):
        engine_of("c").execute(Run(Action("F", 1, 0), STEP, STEP.micros[0], act=act, last=True))


@pytest.mark.parametrize(
    ("kind", "meta", "arrays", "text"),
    [
        ("juggle", {}, {}, "'d' does not know what 'juggle' asks"),
        ("load", {}, {"weights__0.p": 1.0}, "a load message carries 'weights/0.p'"),
        ("load", {}, {"param__1.p": 1.0}, "parameter '1.p' is not on this node"),
        ("load", {}, {"param__0.p": [1.0, 2.0]}, r"parameter '0.p' has shape \(2,\), but \(\) is held"),
        ("load", {}, {"param__0.p": np.float32(1)}, "parameter '0.p' has dtype float32, but float64 is held"),
        ("load", {}, {"optimizer__0.p//velocity": 1.0}, "is no optimizer state"),
        ("load", {}, {"optimizer__1.p//count": 1}, "is not on this node"),
        ("insert", {"index": 1}, {"x__x": [1.0]}, "takes no batches: it is no device"),
    ],
)
def test_requests_that_cannot_be_served(kind: str, meta: Any, arrays: Any, text: str) -> None:
    engine = engine_of("d")
    with pytest.raises(EdgesplitError, match=text):
        serve(engine, kind, meta, **arrays)
    assert engine.store.params["0.p"] == 0.5


def test_a_batch_given_by_hand() -> None:
    engine = engine_of("d", {"d": Samples1D(6, 0)})
    serve(engine, "insert", {"index": 5}, x__x=[1.0, 2.0], target__t=[0.0, 0.0], target__w=[1.0, 1.0])
    step = replace(STEP, batches={"d": (-2, 5)})
    assert engine.execute(Run(Action("F", 0, 0), step, STEP.micros[0], to="c")).weight == 2.0
    for index in ("5", None, 2.5):
        with pytest.raises(RunError, match="takes no batches"):
            serve(engine, "insert", {"index": index}, x__x=[1.0])


def test_assignments_that_cannot_be() -> None:
    with pytest.raises(ScheduleError, match="no method is called '2fb1'"):
        engine_of("d", method="2fb1")
    with pytest.raises(RunError, match="'d' was given no optimizer"):
        engine_of("d", optimizer=None)
