"""From an experiment, a Task and a plan to what each node is told: every decision that is made once, before a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from edgesplit.errors import ExperimentError, TaskError, Within
from edgesplit.experiment import Experiment
from edgesplit.kit import Kit
from edgesplit.lr import lr_factor
from edgesplit.methods import METHODS, Method, check, method_of
from edgesplit.optimizers import OptimizerSpec, spec_from_config
from edgesplit.plan import Plan
from edgesplit.protocol import Assignment
from edgesplit.segments.torch import to_arrays
from edgesplit.segments.torch_kit import torch_kit, typed_chain
from edgesplit.segments.torch_optim import SPECIFIED, spec_of
from edgesplit.splitting import Chain, batch_norm_layers, check_cuts, weights_of
from edgesplit.task import Task
from edgesplit.topology import Topology

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, kw_only=True)
class Model:
    """The coordinator's model, built once under the run's seed.

    Attributes:
        chain: its layers.
        kit: what a node of this process computes with.
        optimizer: the rule of each parameter, or None: the Task's own torch optimizer.
    """

    task: Task
    chain: Chain
    kit: Kit
    optimizer: OptimizerSpec | None

    def weights(self) -> tuple[Arrays, Arrays]:
        """Return parameters and buffers of the chain by name, as numpy arrays."""
        params, buffers = weights_of(self.chain, range(len(self.chain.layers)))
        return tuple({n: to_arrays(t)["x"].copy() for n, t in part.items()} for part in (params, buffers))  # type: ignore[return-value]


def build_model(task: Task, experiment: Experiment, *, source: str = "") -> Model:
    """Build the model under the run's seed and decide its optimizer.

    Raises:
        TaskError: the model is no chain of layers.
        ExperimentError: no optimizer is given, or two are.
    """
    if not isinstance(task, Task):
        raise TaskError(f"the task is a {type(task).__name__}, not a Task (a function that returns one must be called)")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(experiment.seed)
        chain = typed_chain(task, experiment.dtype)
    kit = torch_kit(task, chain, dtype=experiment.dtype, source=source)
    return Model(task=task, chain=chain, kit=kit, optimizer=_optimizer(task, chain, experiment))


def _optimizer(task: Task, chain: Chain, experiment: Experiment) -> OptimizerSpec | None:
    named = [(name, param) for name, param in chain.model.named_parameters() if param.requires_grad]
    if task.optimizer is not None and experiment.optimizer is not None:
        raise ExperimentError("the Task has an optimizer and the experiment's optimizer is set: remove one")
    if experiment.optimizer is not None:
        config = experiment.optimizer.model_dump(exclude_none=True)
        return spec_from_config(config, [name for name, _ in named])
    if task.optimizer is None:
        raise ExperimentError("no optimizer: set optimizer in the experiment, or Task.optimizer")
    optimizer = task.optimizer(named)
    if type(optimizer) not in SPECIFIED:
        return None  # one of torch's others, or the user's own: each node runs it on its own parameters
    return spec_of(optimizer, named)


def one_of(task_value: Any, file_value: Any, name: str, key: str) -> Any:
    """Return the one that is set. Raises ExperimentError where both are."""
    if task_value is not None and file_value is not None:
        raise ExperimentError(f"Task.{name} and the experiment's {key} are both set: remove one")
    return task_value if task_value is not None else file_value


def clip_norm(task: Task, experiment: Experiment) -> float | None:
    """Return the global norm that gradients are clipped to. Raises ExperimentError where it cannot be."""
    value: float | None = one_of(task.clip_norm, experiment.clip_norm, "clip_norm", "clip_norm")
    if value is not None and not value > 0:
        raise TaskError(f"Task.clip_norm is {value}, must be above 0")
    return value


def lr_of(task: Task, experiment: Experiment, total_steps: int) -> Callable[[int], float]:
    """Return the factor on the learning rates by global step."""
    schedule = experiment.lr_schedule
    chosen = one_of(task.lr, schedule, "lr", "lr_schedule")
    if chosen is None:
        return lambda step: 1.0
    if schedule is None:
        return partial(_own_lr, chosen)
    config = schedule.model_dump(exclude_none=True)
    if config["name"] in {"linear", "cosine"}:
        config.setdefault("total_steps", max(total_steps, 1))
    return lr_factor(config)


def _own_lr(factor: Callable[[int], float], step: int) -> float:
    with Within("Task.lr"):
        value = float(factor(step))
    if not (math.isfinite(value) and value >= 0):
        raise TaskError(f"Task.lr gives {value:g} for step {step}: it must be a finite number from 0 on")
    return value


def method_for(experiment: Experiment, plan: Plan, model: Model) -> Method:
    """Return the method. Raises ScheduleError where it does not go with the plan or the options."""
    method = method_of(experiment.pipeline.method)
    options = {
        "every": experiment.federation.every,
        "clip_norm": clip_norm(model.task, experiment),
        "loss_scale": None if experiment.loss_scale == "off" else experiment.loss_scale,
        "split_backward": experiment.pipeline.split_backward,
        "window": experiment.pipeline.window,
    }
    check(method, plan, options)
    if model.optimizer is None and not method.synchronous:
        raise ExperimentError(
            f"method {method.name!r} updates by rules that it can repeat on any version: use SGD, Adam or AdamW"
        )
    return method


def check_placement(model: Model, plan: Plan) -> None:
    """Refuse a plan for another chain, and parameters tied across a cut."""
    names = tuple(layer.name for layer in model.chain.layers)
    if plan.layers != names:
        raise TaskError(
            f"the plan is for layers {', '.join(plan.layers)}; the model has {', '.join(names)}: plan again"
        )
    ranges: dict[str, list[tuple[int, int]]] = {}
    for route in plan.routes:
        for index, stage in enumerate(route.stages):
            ranges.setdefault(f"{stage.node} (stage {index})", []).append((stage.start, stage.stop))
    check_cuts(model.chain, ranges)


def remarks(model: Model, plan: Plan, experiment: Experiment) -> list[str]:
    """What a user should know before the run: one line each."""
    lines = []
    if norms := batch_norm_layers(model.chain, model.task.train_mode):
        names = ", ".join(map(repr, norms))
        lines.append(f"{names}: BatchNorm normalises each micro-batch by itself, so micros changes the result")
    replicated = any(len(nodes) > 1 for nodes in plan.replicas().values())
    federation = experiment.federation
    if replicated and federation.every == "round":
        lines.append(f"at each round's end: {federation.strategy}; optimizer state: {federation.optimizer_state}")
        if any(model.kit.buffers):
            lines.append(f"buffers at each round's end: {federation.buffers}")
        if clip_norm(model.task, experiment) is not None:
            lines.append("clip_norm with replicas: the norm is the weighted mean of the replicas', an upper bound")
    if experiment.pipeline.share:
        lines.append("share: who computes what depends on measured speeds, so two runs may differ in the last bits")
    if plan.stages > 1 and any(route.stages[-1].node != route.device for route in plan.routes):
        lines.append("labels leave the devices (a U-shaped placement keeps them); activations leak information too")
    return lines


def assignments(
    model: Model,
    plan: Plan,
    experiment: Experiment,
    method: Method,
    *,
    barrier: bool,
    loss_scale: float,
    reference: Mapping[str, Any],
    identity: str,
    places: Mapping[str, tuple[int, int]],
    configs: Mapping[str, Mapping[str, Any]],
    emulate: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Assignment]:
    """Return what each node is told.

    Args:
        barrier: updates wait for the commit.
        loss_scale: the first step's.
        reference: how another process finds the Task.
        identity: of the run.
        places: device -> its index, and of how many: what its data is cut by.
        configs: device -> its free ``config``.
        emulate: node -> how it plays a slower one.
    """
    if method.name not in METHODS:
        raise ExperimentError(f"method {method.name!r} is not in the table: nodes find it there by name")
    bare = plan.bare().to_json()
    told = {}
    for node in plan.nodes():
        shard = None
        if node in places:
            data = experiment.data.model_dump(exclude_none=True)
            shard = {
                "index": places[node][0],
                "count": places[node][1],
                "config": dict(configs.get(node, {})),
                "data": data,
            }
        told[node] = Assignment(
            plan=bare,
            method=method.name,
            window=experiment.pipeline.window or method.window,
            split_backward=experiment.pipeline.split_backward,
            add_replicas=experiment.federation.every == "step",
            barrier=barrier,
            seed=experiment.seed,
            codecs=codecs_of(node, plan, experiment),
            optimizer=model.optimizer.to_json() if model.optimizer else None,
            batch_size=experiment.batch_size,
            loss_scale=loss_scale,
            shard=shard,
            evaluate="device" in experiment.evaluate.where,
            task={**reference, "dtype": experiment.dtype},
            fingerprint=model.kit.fingerprint,
            emulate=(emulate or {}).get(node),
            run=identity,
            limits={"weight": experiment.limits.device_weight} if experiment.limits.quarantine_after else None,
        )
    return told


def codecs_of(node: str, plan: Plan, experiment: Experiment) -> dict[str, str]:
    """Return the codec of what ``node`` sends to each neighbour: ``down`` to a lower tier, else ``up``."""
    rank = {name: index for index, name in enumerate(plan.nodes())}
    if plan.topology is not None:
        topology = Topology.from_dict(plan.topology)
        rank = {name: topology.tier_order.index(topology.nodes[name].tier) for name in rank}
    codecs: dict[str, str] = {}
    for a, b in plan.links():
        for src, dst in ((a, b), (b, a)):
            if src == node:
                codecs[dst] = experiment.codec.down if rank[dst] < rank[src] else experiment.codec.up
    return codecs
