"""Small models, data and plans, the batches that a fleet must see, and how to run it: shared by several suites."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from edgesplit.assembly import Model, build_model
from edgesplit.callbacks import Callback
from edgesplit.data import epoch_order
from edgesplit.effects import StepDone
from edgesplit.options import options
from edgesplit.plan import Plan, Route, Stage
from edgesplit.schedule import Event
from edgesplit.session import Session
from edgesplit.task import Shard, Task
from edgesplit.training import RoundDone
from tests.oracle import Batches, Factory, Homes, Trained, train_replicas, train_single

DEMOS = Path(__file__).resolve().parents[1] / "demos"
FEATURES, CLASSES = 6, 4

# --- models and data ------------------------------------------------------------------------------------------------


def mlp(dropout: float = 0.3) -> nn.Module:
    """Six layers, smooth, with dropout; default torch weights in float64."""
    layers = [
        ("a", nn.Linear(FEATURES, 10)),
        ("b", nn.Tanh()),
        ("drop", nn.Dropout(dropout)),
        ("c", nn.Linear(10, 10)),
        ("d", nn.Tanh()),
        ("e", nn.Linear(10, CLASSES)),
    ]
    return nn.Sequential(OrderedDict(layers)).double()


def normed() -> nn.Module:
    """Six layers, two of them BatchNorm."""
    layers = [
        ("a", nn.Linear(FEATURES, 8)),
        ("norm1", nn.BatchNorm1d(8)),
        ("b", nn.Tanh()),
        ("c", nn.Linear(8, 8)),
        ("norm2", nn.BatchNorm1d(8)),
        ("e", nn.Linear(8, CLASSES)),
    ]
    return nn.Sequential(OrderedDict(layers)).double()


class Points:
    """``count`` random points and classes; those named in ``poisoned`` are not numbers."""

    def __init__(self, count: int, seed: int, poisoned: Sequence[int] = ()) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, CLASSES, (count,), generator=generator)
        self.x[list(poisoned), 0] = torch.nan

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def right(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """The accuracy metric."""
    return (output.argmax(-1) == target).sum(), len(target)


def points_task(
    sizes: Sequence[int] = (96,),
    model: Callable[[], nn.Module] = mlp,
    poisoned: Mapping[int, Sequence[int]] | None = None,
    **fields: Any,
) -> Task:
    """A Task whose ``i``-th device has ``sizes[i]`` points."""
    bad = poisoned or {}
    return Task(
        **{
            "model": model,
            "loss": F.cross_entropy,
            "train": lambda shard: Points(sizes[shard.index], shard.index, bad.get(shard.index, ())),
            "test": lambda shard: Points(30, 100 + shard.index),
            "metrics": {"accuracy": right},
            **fields,
        }
    )


class First:
    """The first ``count`` samples of another data set."""

    def __init__(self, whole: Any, count: int) -> None:
        self.whole, self.count = whole, min(count, len(whole))
        if hasattr(whole, "set_epoch"):
            self.set_epoch = whole.set_epoch

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.whole[index]


@cache
def demo(name: str) -> ModuleType:
    """The module of ``demos/<name>/task.py``."""
    spec = importlib.util.spec_from_file_location(f"case_{name}", DEMOS / name / "task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def shortened(task: Task, sizes: Sequence[int]) -> Task:
    """The task with only ``sizes[i]`` samples on the ``i``-th device, made once; nothing to test on."""
    made: dict[tuple[int, int, int], Any] = {}

    def train(shard: Shard) -> First:
        key = shard.index, shard.count, shard.seed
        if key not in made:
            made[key] = task.train(shard)
        return First(made[key], sizes[shard.index])

    return dataclasses.replace(task, train=train, test=None)


def digits(sizes: Sequence[int], **fields: Any) -> Task:
    """The CNN of ``demos/mnist``, in float64: nine layers."""
    task: Task = demo("mnist").mnist(width=2, dtype="float64")
    return dataclasses.replace(shortened(task, sizes), **fields)


def english(sizes: Sequence[int]) -> Task:
    """The transformer of ``demos/text``, in float64: four layers, all batches of one length.

    It brings AdamW with groups, warm-up and clipping.
    """
    return shortened(demo("text").text(context=20, pad_to=20, dtype="float64", width=8), sizes)


# --- plans ----------------------------------------------------------------------------------------------------------


def names_of(task: Task) -> tuple[str, ...]:
    """The layers of a Sequential."""
    return tuple(name for name, _ in task.model().named_children())


def route(nodes: Sequence[str], cuts: Sequence[int], layers: int) -> Route:
    """The layers ``0 .. cuts[0] .. layers`` on the nodes in turn."""
    bounds = [0, *cuts, layers]
    assert len(nodes) == len(cuts) + 1
    return Route(nodes[0], tuple(Stage(n, a, b) for n, a, b in zip(nodes, bounds, bounds[1:], strict=False)))


def chain(task: Task, cuts: Sequence[int], nodes: Sequence[str] | None = None) -> Plan:
    """One device's route; a node may come again."""
    layers = names_of(task)
    nodes = nodes or [f"n{i}" for i in range(len(cuts) + 1)]
    return Plan(layers, (route(nodes, cuts, len(layers)),))


PARENTS = {"d1": "e1", "d2": "e1", "d3": "e2", "d4": "e2"}
"""Four devices, two edges; the cloud is ``c``."""


def tree(task: Task, cuts: Sequence[int], devices: Sequence[str] = tuple(PARENTS)) -> Plan:
    """Devices -> edges -> cloud; with a third cut the last layers are back on the device; without cuts all are."""
    layers = names_of(task)
    stages = {d: [d, PARENTS[d], "c", d][: len(cuts) + 1] for d in devices}
    return Plan(layers, tuple(route(stages[d], cuts, len(layers)) for d in devices))


def homes(plan: Plan, model: nn.Module) -> Homes:
    """Which node's replica a device's samples use, for every parameter and buffer."""
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    return {
        r.device: {
            name: next(stage.node for stage in r.stages if name.split(".")[0] in plan.layers[stage.start : stage.stop])
            for name in names
        }
        for r in plan.routes
    }


PLANS: dict[str, Callable[[Task], Plan]] = {
    "device only": lambda task: chain(task, []),
    "two nodes": lambda task: chain(task, [2]),
    "three nodes": lambda task: chain(task, [1, 4]),
    "four nodes": lambda task: chain(task, [1, 3, 5]),
    "U-shape": lambda task: chain(task, [1, 4], ["a", "b", "a"]),
    "longer U-shape": lambda task: chain(task, [1, 3, 5], ["a", "b", "c", "a"]),
}
"""One device's routes for the six layers of :func:`mlp`."""

SIZES = {"48 in 4": (96, 48, 4), "50 in 7": (100, 50, 7), "a short last batch": (98, 48, 4)}
"""Samples of a device, of a step, and micro-batches."""

METHODS = ("gpipe", "1f1b", "breadth-first")
"""The synchronous methods that need no looping placement."""


def alternating(*cases: Sequence[Any]) -> list[tuple[Any, ...]]:
    """All combinations, each with one of two optimizers in turn."""
    return [(*case, ("clipped AdamW", "momentum")[i % 2]) for i, case in enumerate(itertools.product(*cases))]


def uneven(size: str) -> tuple[list[int], int, int]:
    """A size for four devices: unequal shares, and one device has none."""
    samples, batch, micros = SIZES[size]
    return [samples, samples // 3, 0, batch + 5], batch, micros


# --- what a fleet must see ------------------------------------------------------------------------------------------


class Loader:
    """The batches of every device, from the rule: shuffled anew in each epoch, the last one of an epoch shorter."""

    def __init__(self, task: Task, devices: Sequence[str], batch_size: int, seed: int = 0) -> None:
        self.batch_size, self.seed, self.collate = batch_size, seed, task.collate or default_collate
        shards = [Shard(name=d, index=i, count=len(devices), seed=seed) for i, d in enumerate(devices)]
        self.data = {shard.name: task.train(shard) for shard in shards}
        self.turns = dict.fromkeys(devices, 0)
        self.step = 0

    def count(self, device: str) -> int:
        """Batches in an epoch."""
        data = self.data[device]
        return 0 if data is None else -(-len(data) // self.batch_size)

    def take(self, devices: Sequence[str]) -> tuple[int, Batches]:
        """The next step, in which these devices take part."""
        batches = {}
        for device in devices:
            epoch, index = divmod(self.turns[device], self.count(device))
            self.turns[device] += 1
            data = self.data[device]
            if hasattr(data, "set_epoch"):
                data.set_epoch(epoch)
            rows = epoch_order(self.seed, device, epoch, len(data))[index * self.batch_size :][: self.batch_size]
            batches[device] = tuple(self.collate([data[int(row)] for row in rows]))
        self.step += 1
        return self.step - 1, batches

    def steps(self, count: int) -> list[tuple[int, Batches]]:
        """Steps in which every device that has samples takes part."""
        return [self.take([d for d in self.data if self.count(d)]) for _ in range(count)]

    def epoch(self) -> Iterator[tuple[int, Batches]]:
        """One pass of each device; those that have finished sit out."""
        left = {device: self.count(device) for device in self.data}
        while active := [device for device, batches in left.items() if batches]:
            yield self.take(active)
            left = {device: batches - (device in active) for device, batches in left.items()}


# --- running a fleet ------------------------------------------------------------------------------------------------

Wire = Callable[[Model], dict[str, Any]]
"""A model -> the transport and the fleet for a :class:`Session`."""


def memory(model: Model) -> dict[str, Any]:
    """Threads over memory: the session's own."""
    return {}


class Steps(Callback):
    """Keeps what each step gave."""

    def __init__(self) -> None:
        self.done: list[StepDone] = []

    def on_step(self, done: StepDone) -> None:
        self.done.append(done)


@dataclass
class Ran:
    """What a run gave."""

    steps: list[StepDone]
    weights: dict[str, np.ndarray[Any, Any]]
    rounds: list[RoundDone] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]


def open_session(
    plan: Plan,
    task: Task,
    wire: Wire = memory,
    directory: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    **keywords: Any,
) -> Session:
    """A session in float64 without evaluation, unless told otherwise."""
    experiment = options(**{"dtype": "float64", "evaluate": {"every": 0}, **keywords})
    model = build_model(task, experiment)
    return Session(plan, task, experiment=experiment, model=model, directory=directory, say=say, **wire(model))


def run(plan: Plan, task: Task, wire: Wire = memory, **keywords: Any) -> Ran:
    """Train a fleet to its end."""
    watch = Steps()
    with open_session(plan, task, wire, **keywords) as session:
        rounds = session.fit(callbacks=[watch])
        weights = session.weights()
    return Ran(watch.done, weights, list(rounds), session.recorder.events)


# --- what is trained with, once for us and once for torch -----------------------------------------------------------


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    groups: dict[float, list[nn.Parameter]] = {0.1: [], 0.0: []}
    for name, param in named:
        groups[0.0 if name.endswith("bias") else 0.1].append(param)
    return torch.optim.AdamW([{"params": params, "weight_decay": d} for d, params in groups.items()], lr=0.02)


def momentum(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for _, param in named], lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for _, param in named], lr=0.2, weight_decay=0.01)


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 4)


RULES: dict[str, dict[str, Any]] = {
    "clipped AdamW": {
        "optimizer": {"name": "adamw", "lr": 0.02, "weight_decay": 0.1, "no_decay": "bias$"},
        "lr_schedule": {"name": "constant", "warmup_steps": 4},
        "clip_norm": 0.3,
    },
    "momentum": {
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    },
    "clipped momentum": {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "clip_norm": 0.3},
    "adam": {"optimizer": {"name": "adam", "lr": 0.01}},
    "sgd": {"optimizer": {"name": "sgd", "lr": 0.2, "weight_decay": 0.01}},
}
FACTORIES: dict[str, Factory] = {
    "clipped AdamW": adamw,
    "momentum": momentum,
    "clipped momentum": lambda named: torch.optim.SGD([param for _, param in named], lr=0.1, momentum=0.9),
    "sgd": sgd,
    "adam": lambda named: torch.optim.Adam([param for _, param in named], lr=0.01),
}


def seeded(task: Task, seed: int = 0) -> nn.Module:
    """The task's model as the coordinator builds it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return task.model()


def one_process(task: Task, rule: str, steps: Iterable[tuple[int, Batches]], model: nn.Module | None = None) -> Trained:
    """Train by one of :data:`RULES` in one process; the task may bring clipping."""
    clipped = rule == "clipped AdamW"
    return train_single(
        task,
        steps,
        FACTORIES[rule],
        model=model or seeded(task),
        lr=warm_up if clipped else None,
        clip_norm=RULES[rule].get("clip_norm"),
    )


def by_rounds(
    task: Task, plan: Plan, rounds: Sequence[Sequence[tuple[int, Batches]]], rule: str, state: str = "keep"
) -> Trained:
    """Train replicas by one of :data:`RULES` in rounds, as DESIGN says: an optimizer each, then the weighted mean."""
    model = seeded(task)
    return train_replicas(
        task,
        homes(plan, model),
        rounds,
        FACTORIES[rule],
        model=model,
        state=state,
        lr=warm_up if rule == "clipped AdamW" else lambda step: 1.0,
        clip_norm=RULES[rule].get("clip_norm"),
    )


# --- comparing ------------------------------------------------------------------------------------------------------

EXACT = 1e-12


def equal(ran: Ran, want: Trained, bound: float = EXACT) -> None:
    """Assert the same losses of the steps that were applied, and the same weights at the end."""
    losses = [(step.loss, loss) for step, loss in zip(ran.steps, want.losses, strict=True) if step.applied]
    assert apart(*zip(*losses, strict=True)) <= bound
    assert apart(ran.weights, want.weights[-1]) <= bound


def as_numpy(value: Any) -> np.ndarray[Any, Any]:
    return value.detach().numpy() if isinstance(value, Tensor) else np.asarray(value)


def apart(got: Any, want: Any) -> float:
    """The largest difference, relative to the largest value of its array; of named arrays the worst."""
    if isinstance(want, Mapping):
        assert set(got) == set(want)
        return max(apart(got[name], want[name]) for name in want)
    got, want = as_numpy(got).astype(np.float64), as_numpy(want).astype(np.float64)
    assert got.shape == want.shape
    if not want.size:
        return 0.0
    assert np.isfinite(got).all()
    return float(np.abs(got - want).max() / (np.abs(want).max() or 1.0))


def distance(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """The Euclidean distance of two models."""
    return float(np.sqrt(sum(((as_numpy(a[name]).astype(np.float64) - as_numpy(b[name])) ** 2).sum() for name in b)))


def identical(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Bit for bit."""
    return set(a) == set(b) and all(as_numpy(a[n]).tobytes() == as_numpy(b[n]).tobytes() for n in a)
