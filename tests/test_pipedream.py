"""``pipedream`` equals its paper's rule, replayed in one process in the order in which the fleet really ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from edgesplit.plan import Plan
from edgesplit.schedule import Action, Event, Micro, Step
from edgesplit.segments.base import Samples
from edgesplit.segments.masks import KeyedRandomness
from edgesplit.sheets import Agenda, Cutting, number
from edgesplit.task import Task
from tests.cases import (
    EXACT,
    FACTORIES,
    RULES,
    Loader,
    Ran,
    Wire,
    apart,
    chain,
    homes,
    memory,
    points_task,
    run,
    seeded,
    tree,
)
from tests.oracle import Factory, Replica, put, state_of

pytestmark = pytest.mark.usefixtures("one_thread")


class Kept(NamedTuple):
    """A forward: what went in, the weights that it used, what came out."""

    x: Any
    weights: dict[str, Tensor]
    output: Any
    updates: int


class Replay:
    """The rule of PipeDream (Harlap et al., section 3.3; Narayanan et al., SOSP 2019) in plain torch.

    A forward uses the newest weights of its stage on its node, its backward those of its own forward, and the mean
    gradient over that micro-batch is applied to the newest ones. Every node has an optimizer of its own.
    """

    def __init__(self, plan: Plan, task: Task, model: nn.Module, factory: Factory) -> None:
        self.plan, self.task, self.model = plan, task, model
        places = homes(plan, model)
        nodes = plan.nodes()
        held = {n: {name for home in places.values() for name, node in home.items() if node == n} for n in nodes}
        self.nodes = {node: Replica(model, held[node], factory) for node in nodes}
        self.holders = {name: [self.nodes[n] for n in nodes if name in held[n]] for name in state_of(model)}
        self.forwards: dict[tuple[int, int], Kept] = {}
        self.values: dict[tuple[str, int, int], Any] = {}
        self.grads: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.updates: Counter[tuple[str, int]] = Counter()
        self.delays: Counter[int] = Counter()
        self.losses: dict[int, tuple[float, float]] = {}

    def round(self, events: Sequence[Event], steps: Mapping[int, tuple[Step, Mapping[str, Any]]]) -> None:
        """Run each node's actions in its order, whenever what they need is there; then make the replicas one."""
        micros = {m.micro: (step, m, batches) for step, batches in steps.values() for m in step.micros}
        left = {node: [e.action for e in events if e.node == node and e.step in steps] for node in self.nodes}
        while any(left.values()):
            ready = [node for node, actions in left.items() if actions and self.is_ready(actions[0], micros)]
            assert ready, {node: str(actions[0]) for node, actions in left.items() if actions}
            for node in ready:
                action = left[node].pop(0)
                self.act(node, action, *micros[action.micro])
        self.average()

    def is_ready(self, action: Action, micros: Mapping[int, Any]) -> bool:
        last = len(self.plan.route(micros[action.micro][1].device).stages) - 1
        if action.op == "F":
            return action.stage == 0 or ("act", action.stage, action.micro) in self.values
        if action.op in "BI" and action.stage < last:
            return ("grad", action.stage, action.micro) in self.values
        return True

    def act(self, node: str, action: Action, step: Step, micro: Micro, batches: Mapping[str, Any]) -> None:
        if action.op == "F":
            self.forward(node, action, step, micro, batches)
        elif action.op in "BI":
            self.backward(node, action, micro, batches)
        elif action.op == "U":
            self.update(node, action, step, micro, batches)

    def layers(self, action: Action, micro: Micro) -> Sequence[str]:
        stage = self.plan.route(micro.device).stages[action.stage]
        return self.plan.layers[stage.start : stage.stop]

    def forward(self, node: str, action: Action, step: Step, micro: Micro, batches: Mapping[str, Any]) -> None:
        replica, key = self.nodes[node], (action.stage, action.micro)
        x = sliced(batches[micro.device][0], micro) if action.stage == 0 else self.values.pop(("act", *key))
        x = leaves(x) if action.stage else x
        weights = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in replica.params.items()}
        value, samples = x, Samples(0, step.step, ((micro.device, micro.start, micro.stop),))
        self.model.train()
        with KeyedRandomness(self.model.named_modules(), samples):
            for name in self.layers(action, micro):
                module = self.model.get_submodule(name)
                state = {
                    n[len(name) + 1 :]: v for n, v in (weights | replica.buffers).items() if n.startswith(name + ".")
                }
                value = functional_call(module, state, (value,))
        if action.stage + 1 < len(self.plan.route(micro.device).stages):
            self.values["act", action.stage + 1, action.micro] = value
        self.forwards[key] = Kept(x, weights, value, self.updates[node, action.stage])

    def backward(self, node: str, action: Action, micro: Micro, batches: Mapping[str, Any]) -> None:
        kept = self.forwards.pop((action.stage, action.micro))
        self.delays[self.updates[node, action.stage] - kept.updates] += 1
        outputs, given = self.outputs(action, kept, micro, batches)
        named = {n: x for n, x in tensors(kept.x).items() if x.requires_grad} if action.stage else {}
        weights = {n: w for n, w in kept.weights.items() if w.requires_grad}
        found = torch.autograd.grad(outputs, [*named.values(), *weights.values()], given, allow_unused=True)
        if action.stage:
            self.values["grad", action.stage - 1, action.micro] = dict(zip(named, found[: len(named)], strict=True))
        pairs = zip(weights, found[len(named) :], strict=True)
        self.grads[action.stage, action.micro] = {name: grad for name, grad in pairs if grad is not None}

    def outputs(self, action: Action, kept: Kept, micro: Micro, batches: Mapping[str, Any]) -> tuple[Any, Any]:
        key = ("grad", action.stage, action.micro)
        if action.stage + 1 < len(self.plan.route(micro.device).stages):
            given = {name: grad for name, grad in self.values.pop(key).items() if grad is not None}
            return [tensors(kept.output)[name] for name in given], list(given.values())
        target = sliced(batches[micro.device][1], micro)
        weight = float(self.task.weight(target))
        loss = self.task.loss(kept.output, target) * weight
        self.losses[action.micro] = float(loss.detach()), weight
        return [loss], [torch.ones_like(loss)]

    def update(self, node: str, action: Action, step: Step, micro: Micro, batches: Mapping[str, Any]) -> None:
        replica, grads = self.nodes[node], self.grads.pop((action.stage, action.micro))
        weight = float(self.task.weight(sliced(batches[micro.device][1], micro)))
        mine = [name for name in replica.passed if name.split(".")[0] in self.layers(action, micro)]
        replica.sums = {name: grad for name, grad in grads.items() if name in mine}
        replica.weights = dict.fromkeys(mine, weight)
        replica.update(step.lr, 1.0)
        self.updates[node, action.stage] += 1

    def average(self) -> None:
        """The weighted mean of each parameter over its replicas; the optimizers keep their state."""
        with torch.no_grad():
            for name, own in self.holders.items():
                weights = [replica.passed[name] for replica in own]
                if len(own) > 1 and name in own[0].params:
                    mean = sum(r.params[name] * w for r, w in zip(own, weights, strict=True)) / sum(weights)
                    for replica in own:
                        replica.params[name].data = mean.clone()
        for replica in self.nodes.values():
            replica.passed = dict.fromkeys(replica.passed, 0.0)
        put(self.model, {name: (own[0].params | own[0].buffers)[name] for name, own in self.holders.items()})


def tensors(value: Any) -> dict[str, Tensor]:
    return value if isinstance(value, dict) else {"x": value}


def leaves(value: Any) -> Any:
    """What came over a link: no history, a gradient wanted where the sender wants one."""
    made = {n: x.detach().clone().requires_grad_(x.requires_grad) for n, x in tensors(value).items()}
    return made if isinstance(value, dict) else made["x"]


def sliced(value: Any, micro: Micro) -> Any:
    if isinstance(value, dict):
        return {name: x[micro.start : micro.stop] for name, x in value.items()}
    return value[micro.start : micro.stop]


def replayed(plan: Plan, task: Task, ran: Ran, rounds: int, steps: int, batch: int, micros: int, rule: str) -> Replay:
    """Replay what ``ran`` recorded."""
    devices = [r.device for r in plan.routes]
    loader = Loader(task, devices, batch)
    sizes = {d: [min(batch, len(loader.data[d]) - at) for at in range(0, len(loader.data[d]), batch)] for d in devices}
    agenda, cutting, first = Agenda(sizes), Cutting(micros), 0
    replay = Replay(plan, task, seeded(task), FACTORIES[rule])
    for _ in range(rounds):
        found = {}
        for draft in agenda.round(devices, steps=steps):
            step = number(draft, cutting, first, devices)
            first += len(step.micros)
            found[step.step] = step, loader.take(list(draft.shares))[1]
        replay.round(ran.events, found)
    return replay


def check(plan: Plan, task: Task, wire: Wire, rule: str, rounds: int = 1, **options: Any) -> None:
    steps, batch, micros = 4, 12, 4
    cut = {"steps_per_round": steps, "batch_size": batch, "micros": micros, "rounds": rounds}
    ran = run(plan, task, wire, method="pipedream", **cut, **options, **RULES[rule])
    replay = replayed(plan, task, ran, rounds, steps, batch, micros, rule)
    if plan.stages > 1:
        assert max(replay.delays) > 0, "no backward was late: nothing is shown"
    assert sum(replay.delays.values()) == sum(event.action.op in "BI" for event in ran.events)
    assert apart(ran.weights, state_of(replay.model)) <= EXACT
    totals = replay.losses.values()
    assert sum(step.loss * step.weight for step in ran.steps) == pytest.approx(
        sum(loss for loss, _ in totals), rel=EXACT
    )


PLANS = {
    "two nodes": ([3], ["a", "b"]),
    "four nodes": ([1, 3, 5], ["a", "b", "c", "d"]),
    "U-shape": ([1, 4], ["a", "b", "a"]),
    "device only": ([], ["a"]),
}


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("shape", PLANS)
def test_equals_the_rule_on_a_chain(shape: str, window: int) -> None:
    task = points_task([30])
    check(chain(task, *PLANS[shape]), task, memory, "momentum", window=window)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("cuts", [[1, 4], [1, 3, 5]], ids=["tree", "U-shape"])
def test_equals_the_rule_with_replicas(cuts: list[int], window: int) -> None:
    task = points_task([30, 9, 0, 14])
    check(tree(task, cuts), task, memory, "momentum", rounds=2, window=window)


def test_equals_the_rule_with_split_backwards() -> None:
    task = points_task([30])
    check(chain(task, *PLANS["four nodes"]), task, memory, "momentum", split_backward=True)


def test_equals_the_rule_with_adam() -> None:
    task = points_task([30, 9, 0, 14])
    check(tree(task, [1, 4]), task, memory, "adam", rounds=2)
