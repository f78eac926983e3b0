"""From a model and a topology to a plan: the chain is proven, profiled, and cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgesplit.assembly import Model, build_model
from edgesplit.data import Batch, Feed
from edgesplit.errors import TaskError
from edgesplit.experiment import Experiment
from edgesplit.options import options
from edgesplit.plan import Plan
from edgesplit.planner import plan as make_plan
from edgesplit.profiling import profile_chain
from edgesplit.segments.torch import from_arrays
from edgesplit.splitting import prove_chain
from edgesplit.task import Shard, Task
from edgesplit.topology import Topology


def shard_of(device: str, topology: Topology, experiment: Experiment) -> Shard:
    """Return the shard of a device of the topology."""
    names = [node.name for node in topology.devices()]
    return Shard(
        name=device,
        index=names.index(device),
        count=len(names),
        seed=experiment.seed,
        config=topology.nodes[device].config,
        data=experiment.data.model_dump(exclude_none=True),
    )


def feed_of(model: Model, experiment: Experiment, shard: Shard) -> Feed | None:
    """Return the training batches of a shard, as its node would make them; None where it has no data."""
    source = model.kit.data(shard, False)
    if source is None:
        return None
    return Feed(
        source,
        device=shard.name,
        batch_size=experiment.batch_size,
        seed=experiment.seed,
        collate=model.kit.collate,
        to_arrays=model.kit.to_arrays,
    )


def first_batch(model: Model, topology: Topology, experiment: Experiment) -> Batch:
    """Return the first batch of the first device that has one, for proofs and profiles.

    Raises:
        TaskError: no device has data.
    """
    for device in topology.devices():
        feed = feed_of(model, experiment, shard_of(device.name, topology, experiment))
        full = [index for index, samples in enumerate(feed.sizes()) if samples] if feed is not None else []
        if feed is not None and full:
            return feed.batch(0, full[0])
    raise TaskError("no device has any samples: Task.train gave nothing for all of them")


def placement(
    model: Model,
    topology: Topology,
    experiment: Experiment,
    *,
    tiers: Sequence[str] | None = None,
    cuts: Sequence[int | str] | None = None,
) -> Plan:
    """Prove the chain, profile it, and plan.

    Args:
        tiers, cuts: in place of the experiment's.

    Raises:
        TaskError: the model is no chain of its layers.
        PlanError: there is no such placement.
    """
    x, target = (from_arrays(part) for part in first_batch(model, topology, experiment))
    prove_chain(model.chain, x, train_mode=model.task.train_mode)
    chosen = experiment.plan
    return make_plan(
        profile_chain(model.chain, x, target),
        topology,
        planner="manual" if cuts is not None else chosen.planner,
        tiers=tiers if tiers is not None else experiment.tiers,
        cuts=cuts if cuts is not None else chosen.cuts,
        cuts_by_device=chosen.cuts_by_device,
        state_arrays=_state_arrays(model),
    )


def _state_arrays(model: Model) -> int:
    """How many arrays of a parameter's size the optimizer keeps for it, at most."""
    if model.optimizer is None:
        return 2
    return max((2 if rule.name != "sgd" else int(rule.momentum > 0) for rule in model.optimizer.rules), default=0)


def plan(task: Any, topology: Topology | str | Path, **keywords: Any) -> Plan:
    """Plan a Task over a topology.

    Args:
        task: a :class:`Task`, a profile, or the names of a chain's layers.
        topology: the fleet, or its file.
        keywords: for a Task, options as in :func:`edgesplit.options.options`, and ``tiers``, ``cuts``, ``planner``;
            otherwise those of :func:`edgesplit.planner.plan`.
    """
    if isinstance(task, Topology) or callable(task):
        raise TaskError(f"plan takes a Task and then a topology, not a {type(task).__name__} first")
    fleet = topology if isinstance(topology, Topology) else Topology.load(topology)
    if not isinstance(task, Task):
        return make_plan(task, fleet, **keywords)
    cuts, planner = keywords.pop("cuts", None), keywords.pop("planner", None)
    if planner is not None:
        keywords["plan"] = {"planner": planner}
    if task.optimizer is None:
        keywords.setdefault("optimizer", {"name": "sgd", "lr": 0.1})
    experiment = options(**keywords)
    return placement(build_model(task, experiment), fleet, experiment, cuts=cuts)
