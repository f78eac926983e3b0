"""Brings up a run: the coordinator's parts are made, the nodes are told theirs, and what they have is learnt."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgesplit import assembly
from edgesplit.assembly import Model
from edgesplit.attendance import Attendance, Rule
from edgesplit.conductor import Admit, Conductor
from edgesplit.coordinator import Coordinator
from edgesplit.effects import NodeChanged, StepDone
from edgesplit.emulation import describe as emulated_part
from edgesplit.errors import ExperimentError, did_you_mean
from edgesplit.experiment import Experiment
from edgesplit.federated import Federation
from edgesplit.holding import Names
from edgesplit.methods import Method, check
from edgesplit.observe.audit import Audit
from edgesplit.observe.recorder import Recorder
from edgesplit.plan import Plan
from edgesplit.sheets import Agenda, Cutting
from edgesplit.topology import Topology
from edgesplit.training import Training, sizes_of
from edgesplit.transport.base import Transport
from edgesplit.verdict import LossScale

FIRST_LOSS_SCALE = 65536.0
"""Where a dynamic loss scale begins its search, as torch's does."""


def make_federation(experiment: Experiment, plan: Plan, strategy: Any) -> Federation | None:
    """Return what aggregates replicas between rounds, or None where there is nothing to aggregate.

    Args:
        strategy: a Flower strategy object in place of the experiment's.

    Raises:
        ExperimentError: a strategy object that would have no effect.
    """
    federation = experiment.federation
    _check_tiers(experiment, plan)
    if strategy is None and (federation.strategy != "fedavg" or federation.strategy_args):
        Federation(federation.strategy, federation.strategy_args)  # refuses what is not known, used or not
    if strategy is not None and federation.strategy_args:
        raise ExperimentError("federation.strategy_args has no effect beside a strategy object: give them to that")
    if federation.every == "step" or all(len(nodes) == 1 for nodes in plan.replicas().values()):
        if strategy is not None:
            raise ExperimentError("a strategy has no effect here: no layer has replicas, or every is 'step'")
        return None
    if strategy is not None:
        return Federation(strategy)
    return Federation(federation.strategy, federation.strategy_args)


def _check_tiers(experiment: Experiment, plan: Plan) -> None:
    """Refuse ``federation.tiers`` that name no tier whose layers have replicas."""
    wanted = experiment.federation.tiers
    if wanted is None:
        return
    tiers = plan.tiers()
    replicated = {
        tiers[node] for nodes in plan.replicas().values() if len(nodes) > 1 for node in nodes if node in tiers
    }
    idle = [tier for tier in wanted if tier not in replicated]
    if idle or not wanted:
        known = ", ".join(sorted(replicated)) or "none"
        near = did_you_mean(idle[0], replicated) if idle else ""
        raise ExperimentError(f"federation.tiers is {wanted}, but replicas are on tiers: {known}{near}")


def make_conductor(
    experiment: Experiment,
    plan: Plan,
    model: Model,
    method: Method,
    *,
    transport: Transport,
    recorder: Recorder,
    watch: Callable[[], None],
    on_node: Callable[[NodeChanged], None],
    note: Callable[[Mapping[str, Any]], None],
    audit: Audit,
    say: Callable[[str], None],
    admit: Admit | None,
) -> Conductor:
    """Return the coordinator in its shell."""
    scale = LossScale()
    if experiment.loss_scale == "dynamic":
        scale = LossScale(FIRST_LOSS_SCALE, dynamic=True)
    elif experiment.loss_scale != "off":
        scale = LossScale(float(experiment.loss_scale))
    coordinator = Coordinator(
        plan,
        Cutting(experiment.pipeline.micros, experiment.pipeline.micro_batch_size),
        synchronous=method.synchronous,
        add_replicas=experiment.federation.every == "step",
        clip_norm=assembly.clip_norm(model.task, experiment),
        loss_scale=scale,
        max_skipped=experiment.max_skipped,
        step_timeout=experiment.timeouts.step_s,
        on_lost=experiment.on_lost,
        patience=experiment.patience_s,
        quarantine_after=experiment.limits.quarantine_after,
        first_request=1 + secrets.randbits(48),
    )
    if experiment.federation.every == "step":
        params = model.weights()[0]
        coordinator.like = {
            f"{layer}/{name}": (params[name].shape, params[name].dtype.name)
            for layer, names in enumerate(model.kit.params)
            for name in names
        }
    return Conductor(
        coordinator,
        transport,
        recorder,
        watch=watch,
        on_node=on_node,
        note=note,
        admit=admit,
        audit=audit,
        say=say,
    )


def make_training(
    conductor: Conductor,
    experiment: Experiment,
    plan: Plan,
    model: Model,
    federation: Federation | None,
    on_step: Callable[[StepDone], None],
) -> Training:
    """Return the rounds of the run."""
    params, buffers = model.weights()
    names = Names(model.kit.params, model.kit.buffers)
    return Training(conductor, plan, experiment, names, federation, params, buffers, on_step=on_step)


def assign(training: Training, model: Model, method: Method, reference: Mapping[str, Any], identity: str) -> None:
    """Tell every node its part, and learn what data the devices have.

    Args:
        reference: how nodes of other processes find the Task.
        identity: of the run.

    Raises:
        EdgesplitError: a node refuses, or the method cannot carry a batch that a device has.
    """
    conductor, plan, experiment = training.conductor, training.plan, training.experiment
    topology = Topology.from_dict(plan.topology) if plan.topology is not None else None

    def parts(plan: Plan) -> dict[str, dict[str, Any]]:
        for route in plan.routes:
            places.setdefault(route.device, (len(places), max(len(places) + 1, len(devices))))
        told = assembly.assignments(
            model,
            plan,
            experiment,
            method,
            barrier=conductor.coordinator.barrier,
            loss_scale=conductor.coordinator.loss_scale.value,
            reference=reference,
            identity=identity,
            places=places,
            configs={name: node.config for name, node in topology.nodes.items()} if topology else {},
            emulate=_emulated(plan, topology) if experiment.emulate else None,
        )
        return {node: assignment.meta() for node, assignment in told.items()}

    devices = [route.device for route in plan.routes]
    places: dict[str, tuple[int, int]] = {}  # of the data: a device keeps its own, whoever comes and goes
    conductor.coordinator.reassign = parts
    if topology is not None:
        training.attendance = Attendance(
            {node.name: Rule(node.hours, node.max_mb_per_round) for node in topology.devices()}
        )
    replies = conductor.ask("assign", {node: (meta, {}) for node, meta in parts(plan).items()})
    sizes: dict[str, Sequence[int]] = {device: sizes_of(replies[device], "train") for device in devices}
    training.test_sizes = {device: sizes_of(replies[device], "test") for device in devices}
    _check_cutting(conductor.coordinator.steps.cutting, method, plan, sizes)
    training.agenda = agenda = Agenda(sizes)
    agenda.lr = assembly.lr_of(model.task, experiment, training.total_steps(experiment.rounds))


def _check_cutting(cutting: Cutting, method: Method, plan: Plan, sizes: Mapping[str, Sequence[int]]) -> None:
    """Refuse, before the first step, a batch (such as a short last one) that the method cannot carry."""
    for samples in sorted({size for batches in sizes.values() for size in batches}):
        check(method, plan, {"micros": len(cutting.bounds(samples))})


def _emulated(plan: Plan, topology: Topology | None) -> dict[str, dict[str, Any]]:
    if topology is None or plan.profile is None:
        raise ExperimentError("emulate needs a topology and a profile: plan with es.plan(task, topology)")
    return {node: emulated_part(node, plan, plan.profile, topology) for node in plan.nodes()}
