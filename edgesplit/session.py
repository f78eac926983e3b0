"""A run from Python: a plan, a Task and a fleet, driven round by round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from edgesplit import assembly, checkpoint
from edgesplit.assembly import Model, build_model
from edgesplit.codecs import pack
from edgesplit.conductor import Conductor
from edgesplit.coordinator import Coordinator, LossScale, StepDone
from edgesplit.emulation import describe as emulated_part
from edgesplit.errors import EdgesplitError, ExperimentError, NodeLost, RunError
from edgesplit.evaluation import evaluate
from edgesplit.experiment import Experiment
from edgesplit.federated import Federation
from edgesplit.fleet import Fleet, Threads
from edgesplit.observe.recorder import Recorder
from edgesplit.plan import Plan
from edgesplit.planner import plan as make_plan
from edgesplit.profiling import profile_chain
from edgesplit.sheets import Agenda, Cutting
from edgesplit.splitting import load_weights, prove_chain
from edgesplit.task import COORDINATOR, Shard, Task
from edgesplit.topology import Topology
from edgesplit.training import Held, Names, RoundDone, Training, one_step
from edgesplit.transport.base import Transport
from edgesplit.transport.memory import MemoryTransport

if TYPE_CHECKING:
    from torch import nn

STOP = "stop"
"""What a callback's ``on_round`` returns to end the run early."""


class Callback:
    """Something that watches a run, on the coordinator. Override what is of interest."""

    def on_start(self, session: Session) -> None:
        """The fleet has joined and holds its weights."""

    def on_step(self, done: StepDone) -> None:
        """A step has ended."""

    def on_round(self, done: RoundDone) -> str | None:
        """A round has ended; return ``"stop"`` to end the run."""

    def on_checkpoint(self, path: Path) -> None:
        """A checkpoint was written."""

    def on_end(self, session: Session) -> None:
        """The run has ended, well or not."""


@dataclass(frozen=True)
class Result:
    """What :func:`fit` returns: the trained model and what each round gave."""

    model: nn.Module
    rounds: Sequence[RoundDone] = field(default_factory=list)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The last round's."""
        return self.rounds[-1].metrics if self.rounds else {}


class Session:
    """A fleet at work. A context manager: leaving it stops the nodes.

    Args:
        plan: which layers run where.
        task: what is trained; a notebook's is fine where the nodes are threads.
        experiment: the options; None: those given as keywords, see :func:`options`.
        model: the Task's model where it is built already.
        transport, fleet: how nodes are reached and where they live; None: threads of this process.
        reference: how nodes of other processes find the Task.
        directory: where checkpoints go; None: nowhere.
        recorder: gets the nodes' events.
        callbacks: see :class:`Callback`.
        strategy: a Flower strategy object in place of the experiment's.

    Raises:
        EdgesplitError: the combination cannot be run, or the fleet does not come up.
    """

    def __init__(
        self,
        plan: Plan,
        task: Task,
        *,
        experiment: Experiment | None = None,
        model: Model | None = None,
        transport: Transport | None = None,
        fleet: Fleet | None = None,
        reference: Mapping[str, Any] | None = None,
        directory: Path | None = None,
        recorder: Recorder | None = None,
        callbacks: Iterable[Callback] = (),
        strategy: Any = None,
        **keywords: Any,
    ) -> None:
        if experiment is not None and keywords:
            raise ExperimentError(f"experiment and {', '.join(sorted(keywords))} are both given: put them into one")
        self.plan, self.task = plan, task
        self.experiment = experiment or options(**keywords)
        self.model = model or build_model(task, self.experiment)
        self.directory, self.callbacks = directory, list(callbacks)
        self.recorder = recorder or Recorder()
        self.rounds: list[RoundDone] = []
        self._given = 0
        self._closed = False
        assembly.check_placement(self.model, plan)
        self._method = assembly.method_for(self.experiment, plan, task)
        self._transport = transport or MemoryTransport()
        self._fleet = fleet or Threads(self._transport, lambda assignment: self.model.kit)
        self._federation = self._make_federation(strategy)
        self._conductor = self._make_conductor()
        self.training = self._make_training()
        try:
            self._fleet.start(plan.nodes())
            self._conductor.join(plan.nodes(), self.experiment.timeouts.join_s)
            self._assign(reference or {})
        except BaseException as error:
            raise self._explained(error) from error

    # -- assembly

    def _make_federation(self, strategy: Any) -> Federation | None:
        federation = self.experiment.federation
        if federation.every == "step" or all(len(nodes) == 1 for nodes in self.plan.replicas().values()):
            if strategy is not None:
                raise ExperimentError("a strategy has no effect here: no layer has replicas, or every is 'step'")
            return None
        if strategy is not None:
            return Federation(strategy)
        return Federation(federation.strategy, federation.strategy_args)

    def _make_conductor(self) -> Conductor:
        e = self.experiment
        scale = LossScale()
        if e.loss_scale == "dynamic":
            scale = LossScale(65536.0, dynamic=True)
        elif e.loss_scale != "off":
            scale = LossScale(float(e.loss_scale))
        coordinator = Coordinator(
            self.plan,
            Cutting(e.pipeline.micros, e.pipeline.micro_batch_size),
            synchronous=self._method.synchronous,
            add_replicas=e.federation.every == "step",
            clip_norm=assembly.clip_norm(self.task, e),
            loss_scale=scale,
            max_skipped=e.max_skipped,
            step_timeout=e.timeouts.step_s,
        )
        return Conductor(coordinator, self._transport, self.recorder, watch=self._fleet.watch)

    def _make_training(self) -> Training:
        params, buffers = self.model.weights()
        names = Names(self.model.kit.params, self.model.kit.buffers)
        return Training(
            self._conductor,
            self.plan,
            self.experiment,
            names,
            self._federation,
            params,
            buffers,
            on_step=self._on_step,
        )

    def _assign(self, reference: Mapping[str, Any]) -> None:
        coordinator = self._conductor.coordinator
        topology = Topology.from_dict(self.plan.topology) if self.plan.topology is not None else None
        told = assembly.assignments(
            self.model,
            self.plan,
            self.experiment,
            self._method,
            barrier=coordinator.barrier,
            loss_scale=coordinator.loss_scale.value,
            reference=reference,
            configs={name: node.config for name, node in topology.nodes.items()} if topology else {},
            emulate=self._emulated(topology),
        )
        replies = self._conductor.ask("assign", {node: (a.meta(), {}) for node, a in told.items()})
        sizes = {node: reply.meta.get("sizes", {}) for node, reply in replies.items()}
        devices = [route.device for route in self.plan.routes]
        self.training.test_sizes = {device: list(sizes[device].get("test", [])) for device in devices}
        training_sizes = {device: list(sizes[device].get("train", [])) for device in devices}
        self.training.agenda = agenda = Agenda(training_sizes)
        rounds = self.experiment.rounds
        agenda.lr = assembly.lr_of(self.task, self.experiment, self.training.total_steps(rounds))
        self.training.load()

    def _emulated(self, topology: Topology | None) -> dict[str, dict[str, Any]] | None:
        if not self.experiment.emulate:
            return None
        if topology is None or self.plan.profile is None:
            raise ExperimentError("emulate needs a topology and a profile: plan with es.plan(task, topology)")
        return {node: emulated_part(node, self.plan, self.plan.profile, topology) for node in self.plan.nodes()}

    # -- driving

    def fit(self, rounds: int | None = None, *, callbacks: Iterable[Callback] = ()) -> list[RoundDone]:
        """Train rounds, with evaluation and checkpoints as the experiment says.

        Args:
            rounds: up to which round; None: the experiment's.

        Raises:
            EdgesplitError: the run cannot go on; says what the other nodes were waiting for.
        """
        self.callbacks += callbacks
        last = self.experiment.rounds if rounds is None else rounds + len(self.rounds)
        try:
            for callback in self.callbacks:
                callback.on_start(self)
            while self.next_round <= last:
                done = self._round(self.next_round)
                if any([callback.on_round(done) == STOP for callback in self.callbacks]):
                    break
        except BaseException as error:
            raise self._explained(error) from error
        finally:
            for callback in self.callbacks:
                callback.on_end(self)
        return self.rounds

    @property
    def next_round(self) -> int:
        """The number of the next round, from 1."""
        return self.rounds[-1].number + 1 if self.rounds else 1

    def _round(self, number: int) -> RoundDone:
        e = self.experiment
        saving = self.directory is not None and e.checkpoint.every > 0 and number % e.checkpoint.every == 0
        done = self.training.round(number, optimizer=saving)
        if e.evaluate.every and (number % e.evaluate.every == 0 or number == e.rounds):
            metrics: dict[str, float] = {}
            for place in e.evaluate.where:
                metrics |= self.evaluate(place)
            done = RoundDone(done.number, done.steps, done.loss, done.samples, done.seconds, done.skipped, metrics)
        self.rounds.append(done)
        if saving and self.directory is not None:
            path = self._save(self.directory)
            for callback in self.callbacks:
                callback.on_checkpoint(path)
        return done

    def step(self, batch: Any) -> float:
        """Train one step on a batch given by hand and return its loss.

        Args:
            batch: ``(x, target)``, for a plan with one device, or device -> ``(x, target)``.
        """
        batches = batch if isinstance(batch, Mapping) else {self.plan.routes[0].device: batch}
        given: dict[str, tuple[int, int]] = {}
        asked = {}
        self._given += 1
        for device, (x, target) in batches.items():
            arrays = {f"x/{n}": a for n, a in self.model.kit.to_arrays(x).items()}
            arrays |= {f"target/{n}": a for n, a in self.model.kit.to_arrays(target).items()}
            given[device] = self._given, len(next(iter(arrays.values())))
            asked[device] = ({"index": self._given}, pack(arrays, "raw"))
        try:
            self._conductor.ask("insert", asked)
            agenda = self._agenda
            draft = one_step(agenda.step, given, agenda.lr(agenda.step))
            agenda.step += 1
            losses = [done.loss for done in self._conductor.steps([draft])]
        except BaseException as error:
            raise self._explained(error) from error
        return losses[0]

    @property
    def _agenda(self) -> Agenda:
        if self.training.agenda is None:
            raise RunError("the fleet has not joined yet")
        return self.training.agenda

    def federate(self) -> None:
        """Make the replicas one, after steps driven by hand."""
        self.training.round(self.next_round, [])

    def evaluate(self, where: str = COORDINATOR) -> dict[str, float]:
        """Evaluate the gathered model on the held-out set, or (``"device"``) the devices' own on their test sets."""
        if where == "device":
            return self.training.evaluate_devices()
        if where != COORDINATOR:
            raise ExperimentError(f"evaluate where {where!r}: 'coordinator' or 'device'")
        if self.task.test is None:
            return {}
        devices = len(self.plan.routes)
        shard = Shard(name=COORDINATOR, index=-1, count=devices, seed=self.experiment.seed, data=self._data_options())
        held_out = self.task.test(shard)
        if held_out is None:
            return {}
        self._gather_weights()
        found = evaluate(self.model.chain, self.task, self.model.kit, held_out)
        return {f"test/{name}": value for name, value in found.items()}

    def _data_options(self) -> dict[str, Any]:
        return self.experiment.data.model_dump(exclude_none=True)

    def _gather_weights(self) -> None:
        load_weights(self.model.chain.model, self.weights())

    def weights(self) -> dict[str, np.ndarray[Any, Any]]:
        """Parameters and buffers of the gathered model by name, as of the last round's end."""
        return {**self.training.params, **self.training.buffers}

    def gather(self) -> nn.Module:
        """Return the original module with the trained weights."""
        if self._given:
            self.training.fetch(optimizer=False)
            self.training.adopt()
        self._gather_weights()
        return self.model.chain.model

    # -- checkpoints

    def _save(self, directory: Path) -> Path:
        coordinator, agenda, training = self._conductor.coordinator, self._agenda, self.training
        position = checkpoint.Position(
            round=self.rounds[-1].number,
            step=agenda.step,
            micro=coordinator.next_micro,
            term=coordinator.term,
            seed=self.experiment.seed,
            participation=training.participation,
            positions=dict(agenda.done),
            loss_scale={"value": coordinator.loss_scale.value, "good": coordinator.loss_scale.good},
            experiment=self.experiment.to_dict(),
            plan=Plan(self.plan.layers, self.plan.routes).to_json(),
        )
        saved = checkpoint.Checkpoint(
            position=position,
            model=self.weights(),
            nodes={node: held.arrays for node, held in training.held.items()},
            strategy=self._federation.state() if self._federation else {},
        )
        return checkpoint.save(directory / "checkpoints", saved, self.experiment.checkpoint.keep)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint, as if the run had never stopped; its plan may differ.

        Raises:
            RunError: the checkpoint is damaged, or of another model or seed.
        """
        found = checkpoint.load(path)
        position, training, coordinator = found.position, self.training, self._conductor.coordinator
        if position.seed != self.experiment.seed:
            raise RunError(f"the checkpoint has seed {position.seed}, the experiment {self.experiment.seed}")
        for name, array in self.weights().items():
            if name not in found.model or found.model[name].shape != array.shape:
                raise RunError(f"the checkpoint {path} has no {name!r} of shape {array.shape}: it is of another model")
        training.params = {name: found.model[name] for name in training.params}
        training.buffers = {name: found.model[name] for name in training.buffers}
        agenda = self._agenda
        agenda.step, agenda.done = position.step, {d: int(n) for d, n in position.positions.items()}
        coordinator.next_micro = position.micro
        if position.loss_scale:
            coordinator.loss_scale.value = float(position.loss_scale["value"])
            coordinator.loss_scale.good = int(position.loss_scale["good"])
        training.participation = dict(position.participation)
        if self._federation is not None:
            self._federation.load_state(dict(found.strategy))
        training.load(self._held(found))
        self.rounds = [RoundDone(position.round, 0, math.nan, 0, 0.0, 0)]

    def _held(self, found: checkpoint.Checkpoint) -> dict[str, Held]:
        """What each node of this plan held, or, where it is new, what some node held of its layers."""
        everything = {name: array for node in sorted(found.nodes) for name, array in found.nodes[node].items()}
        held = {}
        for node in self.plan.nodes():
            params, buffers = self.training.names.of(self.plan.layers_of(node))
            arrays = {**everything, **found.nodes.get(node, {})}
            source = Held(arrays)
            own = {f"param/{n}": a for n, a in source.part("param", params).items()}
            own |= {f"buffer/{n}": a for n, a in source.part("buffer", buffers).items()}
            own |= {f"optimizer/{n}": a for n, a in source.part("optimizer", params).items()}
            held[node] = Held(own)
        return held

    # -- the end

    def _on_step(self, done: StepDone) -> None:
        for callback in self.callbacks:
            callback.on_step(done)

    def _explained(self, error: BaseException) -> BaseException:
        """Stop the fleet; return the error with what the other nodes were waiting for."""
        waiting = self._stop(2.0)
        if isinstance(error, NodeLost | RunError) and waiting:
            others = "; ".join(f"{node!r} waited for {what}" for node, what in waiting.items())
            return type(error)(f"{error}; {others}")
        return error

    def _stop(self, timeout: float) -> dict[str, str]:
        if self._closed:
            return {}
        self._closed = True
        waiting = self._conductor.stop(list(self._conductor.hellos), timeout)
        self._fleet.stop(timeout)
        self._transport.close()
        self.recorder.close()
        return waiting

    def close(self) -> None:
        """Stop the nodes."""
        self._stop(10.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


_PIPELINE = ("method", "micros", "micro_batch_size", "window", "split_backward")
_FEDERATION = {"strategy_args": "strategy_args", "every": "every", "optimizer_state": "optimizer_state", "buffers": "buffers"}


def options(**keywords: Any) -> Experiment:
    """Make an experiment of keywords: the keys of ``experiment.yaml``, those of ``pipeline`` and ``federation`` flat.

    >>> options(method="gpipe", micros=4, batch_size=48).pipeline.micros
    4
    """
    data: dict[str, Any] = {"task": "here:task", "topology": "here", "pipeline": {}, "federation": {}}
    for key, value in keywords.items():
        if key in _PIPELINE:
            data["pipeline"][key] = value
        elif key in _FEDERATION:
            data["federation"][_FEDERATION[key]] = value
        elif key in ("pipeline", "federation"):
            data[key] |= value
        else:
            data[key] = value
    return Experiment.from_dict(data, source="options")


def first_batch(model: Model, task: Task, experiment: Experiment, devices: int = 1, config: Any = None) -> Any:
    """Return ``(x, target)`` arrays of the first device's first batch, for proofs and profiles."""
    from edgesplit.data import Feed

    shard = Shard(
        name="device",
        index=0,
        count=devices,
        seed=experiment.seed,
        config=config or {},
        data=experiment.data.model_dump(exclude_none=True),
    )
    feed = Feed(
        model.kit.data(shard, False),
        device=shard.name,
        batch_size=experiment.batch_size,
        seed=experiment.seed,
        collate=model.kit.collate,
        to_arrays=model.kit.to_arrays,
    )
    return feed.batch(0, 0)


def fit(
    task: Task,
    *,
    topology: str | Path | Topology,
    tiers: Sequence[str] | None = None,
    cuts: Sequence[int | str] | None = None,
    callbacks: Iterable[Callback] = (),
    strategy: Any = None,
    **keywords: Any,
) -> Result:
    """Train a Task over a topology, with the nodes as threads of this process.

    Args:
        task: a notebook's works.
        topology: a file or a :class:`Topology`.
        tiers, cuts: see :func:`edgesplit.planner.plan`.
        callbacks: see :class:`Callback`.
        strategy: a name or a Flower strategy object.
        keywords: options, see :func:`options`.
    """
    by_name = isinstance(strategy, str)
    if by_name:
        keywords["federation"] = {**keywords.get("federation", {}), "strategy": strategy}
    experiment = options(**keywords)
    fleet = topology if isinstance(topology, Topology) else Topology.load(topology)
    model = build_model(task, experiment)
    placed = placement(model, task, experiment, fleet, tiers=tiers, cuts=cuts)
    with Session(
        placed,
        task,
        experiment=experiment,
        model=model,
        callbacks=callbacks,
        strategy=None if by_name else strategy,
    ) as session:
        rounds = session.fit()
        return Result(session.gather(), rounds)


def placement(
    model: Model,
    task: Task,
    experiment: Experiment,
    topology: Topology,
    *,
    tiers: Sequence[str] | None = None,
    cuts: Sequence[int | str] | None = None,
) -> Plan:
    """Prove the chain, profile it, and plan."""
    from edgesplit.segments.torch import from_arrays

    devices = topology.devices()
    config = devices[0].config if devices else {}
    x, target = first_batch(model, task, experiment, len(devices), config)
    values = from_arrays(x), from_arrays(target)
    prove_chain(model.chain, values[0], train_mode=task.train_mode)
    profile = profile_chain(model.chain, *values)
    chosen = experiment.plan
    return make_plan(
        profile,
        topology,
        planner="manual" if cuts is not None else chosen.planner,
        tiers=tiers if tiers is not None else experiment.tiers,
        cuts=cuts if cuts is not None else chosen.cuts,
        cuts_by_device=chosen.cuts_by_device,
    )


__all__ = ["Callback", "EdgesplitError", "Result", "Session", "fit", "options", "placement"]
