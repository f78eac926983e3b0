"""``edgesplit check``: what can be known of a Task in ten seconds, one fact a line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from edgesplit.assembly import Model, build_model
from edgesplit.data import Batch
from edgesplit.errors import EdgesplitError
from edgesplit.experiment import Experiment
from edgesplit.loading import load_task
from edgesplit.options import options
from edgesplit.placement import feed_of, placement
from edgesplit.plan import Plan, Route, Stage
from edgesplit.segments.base import BARE
from edgesplit.segments.torch import from_arrays, to_arrays
from edgesplit.splitting import Value, modes_kept, prove_chain
from edgesplit.task import COORDINATOR, Shard, Task
from edgesplit.topology import Topology
from edgesplit.verify.checks import compare, exactly
from edgesplit.verify.fleet import first_batches, run_fleet, same_batch, shards
from edgesplit.verify.reference import Reference

COUNTED = 5_000
"""Samples of a shard whose labels are counted."""

CLASSES = 32
"""More different labels than this are no classes."""

HALVES = 1e-10
"""Largest relative difference between a loss and the sum of its halves."""


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that was found out; ``ok`` is False where it must be mended before a run."""

    ok: bool
    text: str


def check_task(
    task: str | Task, experiment: Experiment | None = None, topology: Topology | None = None
) -> Iterator[Fact]:
    """Find out what a run would need to know. Ends after a fact that the others depend on.

    Args:
        task: ``FILE.py:NAME``, ``MODULE:NAME``, an experiment file, or a Task.
        experiment: the options; None: those of the experiment file, or small ones.
        topology: the fleet; None: that of the experiment file, or a device and a server.
    """
    try:
        task, experiment, topology, text = _load(task, experiment, topology)
        yield Fact(True, text)
        yield from _facts(task, experiment, topology)
    except EdgesplitError as error:
        yield Fact(False, str(error))
    except Exception as error:  # noqa: BLE001 - the user's own code may raise anything, and that is the fact
        yield Fact(False, f"the task's code raises {type(error).__name__}: {' '.join(str(error).split())}")


def _load(
    task: str | Task, experiment: Experiment | None, topology: Topology | None
) -> tuple[Task, Experiment, Topology | None, str]:
    args: Mapping[str, Any] | None = None
    base, text = None, "a Task object"
    if isinstance(task, str):
        text = task
        if Path(task).suffix in {".yaml", ".yml"}:
            experiment = Experiment.load(task)
            topology = Topology.load(experiment.topology_path)
            task, args, base = experiment.task, experiment.task_args, experiment.base
        task = load_task(task, args, base).task
        text = f"{text} imports"
    if experiment is None:
        rule = {} if task.optimizer else {"optimizer": {"name": "sgd", "lr": 0.1}}
        experiment = options(batch_size=8, micros=2, **rule)
    return task, experiment, topology, text


def _facts(task: Task, experiment: Experiment, topology: Topology | None) -> Iterator[Fact]:
    model = build_model(task, experiment)
    plan = _device_only(model, topology)
    batch = next(iter(first_batches(plan, model, experiment, 1)[0].values()))
    yield from _layers(model, batch)
    prove_chain(model.chain, from_arrays(batch[0]), train_mode=task.train_mode)
    yield Fact(True, "chain == model, bit for bit, on two batch sizes, in training and evaluation mode")
    exact = exactly(task, experiment, plan)
    yield _weight(task, exact, plan)
    yield _gradients(task, exact, plan)
    yield from _data(plan, model, experiment)
    yield from _split_step(model, exact, topology)


def _device_only(model: Model, topology: Topology | None) -> Plan:
    """A plan that says which devices there are, for their shards; each has the whole chain."""
    names = model.kit.layers
    devices = [node.name for node in topology.devices()] if topology is not None else ["device"]
    routes = tuple(Route(device, (Stage(device, 0, len(names)),)) for device in devices)
    return Plan(names, routes, topology.to_dict() if topology is not None else None)


# -- the model


def _layers(model: Model, batch: Batch) -> Iterator[Fact]:
    """One line a layer: what comes out of it, and what it weighs."""
    params = dict(model.chain.model.named_parameters())
    size = sum(param.numel() * param.element_size() for param in params.values())
    count = sum(param.numel() for param in params.values())
    yield Fact(True, f"{len(model.chain.layers)} layers, {count:,} parameters ({size / 1e6:.3g} MB)")
    value: Value = from_arrays(batch[0])
    with torch.no_grad(), modes_kept(model.chain):
        model.chain.model.eval()
        for index, layer in enumerate(model.chain.layers):
            layer.module.eval()
            value = layer.module(value)
            own = sum(params[name].numel() for name in model.kit.params[index])
            yield Fact(True, f"  layer {index} {layer.name}: {own:,} parameters -> {_shown(value)}")


def _shown(value: Any) -> str:
    """Shapes without the batch, and bytes of a sample."""
    arrays = to_arrays(value)
    each = sum(array.nbytes // max(len(array), 1) for array in arrays.values())
    parts = [
        f"{'' if name == BARE else name + ' '}{list(array.shape[1:])} {array.dtype.name}"
        for name, array in arrays.items()
    ]
    return f"{', '.join(parts)}, {each:,} B a sample"


def _weight(task: Task, experiment: Experiment, plan: Plan) -> Fact:
    """The loss of a batch is the weighted mean of the losses of two uneven parts, if weight and loss go together."""
    model = build_model(task, experiment)
    x, target = next(iter(first_batches(plan, model, experiment, 1)[0].values()))
    samples = len(next(iter(x.values())))
    if samples < 2:
        return Fact(True, "loss weight: not checked, the first batch has one sample")
    with torch.no_grad(), modes_kept(model.chain):
        model.chain.model.eval()
        output, wanted = model.chain.model(from_arrays(x)), from_arrays(target)
        cut = max(1, samples // 3)
        whole = _sum(task, output, wanted)
        parts = [_sum(task, _part(output, *bounds), _part(wanted, *bounds)) for bounds in ((0, cut), (cut, samples))]
    apart = abs(sum(parts) - whole) / max(abs(whole), 1e-300)
    bound = HALVES if experiment.dtype == "float64" else 1e-5
    said = f"loss weight: {cut} and {samples - cut} samples, each by its weight, are {apart:.1e} off the whole"
    if apart <= bound:
        return Fact(True, said)
    return Fact(False, f"{said} (bound {bound:g}): task.weight must count what task.loss is a mean over")


def _sum(task: Task, output: Any, target: Any) -> float:
    weight = task.weigh(target)
    return float(task.loss(output, target)) * weight if weight else 0.0


def _part(value: Any, start: int, stop: int) -> Any:
    if isinstance(value, Mapping):
        return {name: item[start:stop] for name, item in value.items()}
    return value[start:stop]


def _gradients(task: Task, experiment: Experiment, plan: Plan) -> Fact:
    """Which parameters get a gradient."""
    model = build_model(task, experiment)
    reference = Reference(plan, model, experiment, together=True)
    grads = reference.gradients(0, first_batches(plan, model, experiment, 1)[0])
    named = dict(model.chain.model.named_parameters())
    frozen = [name for name, param in named.items() if not param.requires_grad]
    unused = [name for name, param in named.items() if param.requires_grad and name not in grads]
    bad = [name for name, grad in grads.items() if not bool(torch.isfinite(grad).all())]
    text = f"gradients: {len(grads)} of {len(named)} parameters"
    text += "".join(f"; {what}: {_listed(names)}" for what, names in (("frozen", frozen), ("unused", unused)) if names)
    if bad:
        return Fact(False, f"{text}; not finite: {_listed(bad)}: look at the data and the loss")
    return Fact(bool(grads), text if grads else f"{text}: nothing can be trained")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# -- the data


def _data(plan: Plan, model: Model, experiment: Experiment) -> Iterator[Fact]:
    for shard in shards(plan, experiment):
        yield _shard(shard, model, experiment)
    if model.task.test is not None:
        held_out = replace(shards(plan, experiment)[0], name=COORDINATOR, index=-1, config={})
        source = model.task.test(held_out)
        size = "none" if source is None else f"{len(source):,} samples" if hasattr(source, "__len__") else "batches"
        yield Fact(True, f"held-out data: {size}")


def _shard(shard: Shard, model: Model, experiment: Experiment) -> Fact:
    feed = feed_of(model, experiment, shard)
    sizes = feed.sizes() if feed is not None else []
    if feed is None or not sizes:
        return Fact(True, f"data of {shard.name}: no samples; it sits out")
    first = feed.batch(0, 0)
    again = feed_of(model, experiment, shard)
    if again is None or not same_batch(first, again.batch(0, 0)):
        return Fact(
            False,
            f"data of {shard.name}: other values on a second pass: draw from set_epoch(epoch), or a run cannot resume",
        )
    x, target = (_shown(from_arrays(part)) for part in first)
    text = f"data of {shard.name}: {sum(sizes):,} samples in {len(sizes)} batches; x {x}; target {target}"
    labels: Counter[int] = Counter()
    for index in range(len(sizes)):
        array = feed.batch(0, index)[1].get(BARE)
        if array is None or array.ndim != 1 or array.dtype.kind not in "iu" or labels.total() >= COUNTED:
            break
        labels.update(array.tolist())
    if 0 < len(labels) <= CLASSES:
        shown = " ".join(f"{label}:{count}" for label, count in sorted(labels.items()))
        text += f"; labels {shown}" + (f" (first {labels.total():,})" if labels.total() < sum(sizes) else "")
    return Fact(True, text)


# -- a split step


def _split_step(model: Model, exact: Experiment, topology: Topology | None) -> Iterator[Fact]:
    model = build_model(model.task, exact)
    plan = placement(model, topology, exact) if topology is not None else _halved(model)
    batches = first_batches(plan, model, exact, 1)
    where = " -> ".join(stage.node for stage in plan.routes[0].stages)
    for check in compare(plan, model.task, exact, batches, run_fleet(plan, model.task, exact, batches)):
        yield Fact(check.holds, f"one split step ({where}), {check.name}: {check.note}")


def _halved(model: Model) -> Plan:
    """A device and a server; where parameters are tied across the middle, at the nearest cut that tears none."""
    names = model.kit.layers
    count = len(names)
    for cut in sorted(range(1, count), key=lambda cut: abs(2 * cut - count)):
        before, after = (
            {n for layer in part for n in layer} for part in (model.kit.params[:cut], model.kit.params[cut:])
        )
        if not before & after:
            return Plan(names, (Route("device", (Stage("device", 0, cut), Stage("server", cut, count))),))
    return Plan(names, (Route("device", (Stage("device", 0, count),)),))
