"""A run from Python: a plan, a Task and a fleet, driven round by round."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from edgesplit import assembly
from edgesplit.assembly import Model, build_model
from edgesplit.bringup import assign, make_conductor, make_federation, make_training
from edgesplit.callbacks import STOP, Callback
from edgesplit.codecs import pack
from edgesplit.conductor import Admit
from edgesplit.effects import NodeChanged, StepDone
from edgesplit.errors import (
    EdgesplitError,
    ExperimentError,
    NodeLost,
    PlanError,
    RunError,
    TaskError,
    TransportTimeout,
    did_you_mean,
)
from edgesplit.evaluation import evaluate
from edgesplit.experiment import Experiment
from edgesplit.fleet import Fleet, Threads
from edgesplit.keeping import Keeper
from edgesplit.observe.audit import Audit
from edgesplit.observe.recorder import Recorder
from edgesplit.options import options
from edgesplit.placement import placement
from edgesplit.plan import Plan
from edgesplit.sharing import with_peers
from edgesplit.splitting import load_weights
from edgesplit.task import COORDINATOR, Shard, Task
from edgesplit.topology import Topology
from edgesplit.training import RoundDone, one_step
from edgesplit.transport.base import Transport
from edgesplit.transport.memory import MemoryTransport

if TYPE_CHECKING:
    from torch import nn


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
        on_step: called with each step that ends, by whatever drives it.
        identity: identifies the run, also when it is resumed; None: a new one.
        resume: go on with the run in ``directory``.
        admit: lets devices in that the plan does not name, see :class:`Admissions`.
        strategy: a Flower strategy object in place of the experiment's.
        say: told, in a line, what people should know while the fleet comes up.

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
        on_step: Callable[[StepDone], None] = lambda done: None,
        identity: str | None = None,
        resume: bool = False,
        admit: Admit | None = None,
        strategy: Any = None,
        say: Callable[[str], None] = lambda text: None,
        **keywords: Any,
    ) -> None:
        if experiment is not None and keywords:
            raise ExperimentError(f"experiment and {', '.join(sorted(keywords))} are both given: put them into one")
        self.task = task
        self.experiment = experiment or options(**keywords)
        plan = with_peers(plan, self.experiment.pipeline.share)
        self.model = model or build_model(task, self.experiment)
        self.callbacks = list(callbacks)
        self._also_on_step, self._say = on_step, say
        self.recorder = recorder or Recorder()
        self.rounds: list[RoundDone] = []
        self._given = self._resumed = 0
        self.changed: list[str] = []  # options that are not those of the run that is resumed
        self._stepped = False
        self._closed = False
        assembly.check_placement(self.model, plan)
        method = assembly.method_for(self.experiment, plan, self.model)
        memory = MemoryTransport()
        self._transport = transport or memory
        self._fleet = fleet or Threads(lambda node: memory, lambda assignment: self.model.kit)
        self._keeper = Keeper(directory, self.experiment, list(task.metrics))
        self._conductor = make_conductor(
            self.experiment,
            plan,
            self.model,
            method,
            transport=self._transport,
            recorder=self.recorder,
            watch=self._fleet.watch,
            on_node=self._on_node,
            note=self._keeper.logbook.note,
            say=say,
            admit=admit,
            audit=Audit(directory / "audit.jsonl" if directory is not None else None),
        )
        self.training = make_training(
            self._conductor,
            self.experiment,
            plan,
            self.model,
            make_federation(self.experiment, plan, strategy),
            self._on_step,
        )
        self._check_strategy()
        try:
            self._fleet.start(plan.nodes())
            self._conductor.join(plan.nodes(), self.experiment.timeouts.join_s)
            assign(self.training, self.model, method, reference or {}, identity or secrets.token_hex(8))
            if resume:
                self.changed = self.resume(self._keeper.last())
            else:
                self.training.load()
        except BaseException as error:
            self._fail(error)
            raise

    @property
    def plan(self) -> Plan:
        """The plan of the moment: without the nodes that are missing."""
        return self._conductor.coordinator.plan

    # -- driving

    def _check_strategy(self) -> None:
        if self.training.federation is not None:
            self.training.federation.check(self.training.groups(), checkpoint=self._keeper.saves)

    def fit(
        self, rounds: int | None = None, *, strategy: Any = None, callbacks: Iterable[Callback] = ()
    ) -> list[RoundDone]:
        """Train rounds, with evaluation and checkpoints as the experiment says.

        Args:
            rounds: how many; None: up to the experiment's last.
            strategy: a Flower strategy object, from now on.
            callbacks: beside the session's own.

        Raises:
            EdgesplitError: the run cannot go on; says what the other nodes were waiting for.
        """
        before = list(self.callbacks)
        self.callbacks += callbacks
        if strategy is not None:
            self.training.federation = make_federation(self.experiment, self.plan, strategy)
            self._check_strategy()
        last = self.experiment.rounds if rounds is None else self.next_round - 1 + rounds
        try:
            for callback in self.callbacks:
                callback.on_start(self)
            while self.next_round <= last:
                done = self._round(self.next_round)
                answers = [callback.on_round(done) for callback in self.callbacks]
                if STOP in answers:
                    break
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            for callback in self.callbacks:
                callback.on_end(self)
            self.callbacks = before
        return self.rounds

    @property
    def next_round(self) -> int:
        """The number of the next round, from 1."""
        return self.rounds[-1].number + 1 if self.rounds else self._resumed + 1

    def replan(self, plan: Plan) -> None:
        """Go on by another plan, from now on: between two rounds only. Layers that change hands move with their state.

        Nodes that are new are started where this session starts nodes; elsewhere they must be started by then.

        Raises:
            PlanError: it is a plan of another model.
            ExperimentError: it does not go with the method or the strategy.
            TransportTimeout: a new node does not come.
        """
        self._want(plan)
        try:
            self._catch_up()
            self._conductor.join(plan.nodes(), self.experiment.timeouts.join_s)
            self.training.adopt_plan()
        except BaseException as error:
            self._fail(error)
            raise

    def _want(self, plan: Plan) -> None:
        """Check a plan, have it when its nodes are there, and start those that are new."""
        if plan.layers != self.plan.layers:
            raise PlanError(
                f"the plan has layers {', '.join(plan.layers)}: the model's are {', '.join(self.plan.layers)}"
            )
        plan = with_peers(plan, self.experiment.pipeline.share)
        assembly.check_placement(self.model, plan)
        assembly.method_for(self.experiment, plan, self.model)
        if new := [node for node in plan.nodes() if node not in self._conductor.coordinator.known]:
            self._fleet.start(new)
            if self._fleet.starts:
                self._conductor.coordinator.known.update(new)
                self._conductor.join(new, self.experiment.timeouts.join_s)
        self._conductor.coordinator.want(plan)

    def _look_for_plan(self) -> None:
        """Take up a plan that was put into the run's folder; one that cannot be is said to be so, and not taken."""
        try:
            plan = self._keeper.next_plan()
            if plan is not None:
                self._want(plan)
        except EdgesplitError as error:
            self._say(f"the plan that was put there is not taken: {error}")
        if self.training.adopt_plan():
            self._say(f"round {self.next_round} begins with another plan")

    def _round(self, number: int) -> RoundDone:
        e = self.experiment
        self._look_for_plan()
        done = self.training.round(number, optimizer=self._keeper.due(number))
        if e.evaluate.every and (number % e.evaluate.every == 0 or number == e.rounds):
            metrics: dict[str, float] = {}
            for place in e.evaluate.where:
                metrics |= self.evaluate(place)
            done = replace(done, metrics=metrics)
        self.rounds.append(done)
        self._keeper.note(done, self.training)
        if self._keeper.due(number) and (path := self._keeper.save(number, self.training, self.training.federation)):
            for callback in self.callbacks:
                callback.on_checkpoint(path)
        return done

    def step(self, batch: Any) -> float:
        """Train one step on a batch given by hand and return its loss.

        Args:
            batch: ``(x, target)``, for a plan with one device, or device -> ``(x, target)``.

        Raises:
            TaskError: no such batch, or a device that the plan does not have.
        """
        given: dict[str, tuple[int, int]] = {}
        asked = {}
        for device, (x, target) in self._batches(batch).items():
            arrays = {f"x/{n}": a for n, a in self.model.kit.to_arrays(x).items()}
            arrays |= {f"target/{n}": a for n, a in self.model.kit.to_arrays(target).items()}
            samples = {len(a) if a.ndim else 0 for a in arrays.values()}
            if len(samples) != 1 or 0 in samples:
                raise TaskError(
                    f"the batch of {device!r} has {sorted(samples)} samples: give x and target the same, at least one"
                )
            given[device] = self._given + 1, samples.pop()
            asked[device] = ({"index": self._given + 1}, pack(arrays, "raw"))
        self._given += 1
        try:
            self._conductor.ask("insert", asked)
            agenda = self.training.drawn
            draft = one_step(agenda.step, given, agenda.lr(agenda.step))
            agenda.step += 1
            losses = [done.loss for done in self._conductor.steps([draft])]
            self._stepped = True
        except BaseException as error:
            self._fail(error)
            raise
        return losses[0]

    def _batches(self, batch: Any) -> Mapping[str, tuple[Any, Any]]:
        devices = [route.device for route in self.plan.routes]
        if not isinstance(batch, Mapping):
            if len(devices) > 1:
                raise TaskError(
                    f"there are {len(devices)} devices: give {{device: (x, target)}}, for example {devices[0]!r}"
                )
            batch = {devices[0]: batch}
        for device, pair in batch.items():
            if device not in devices:
                raise TaskError(f"the plan has no device {device!r}{did_you_mean(str(device), devices)}")
            if not self.training.drawn.sizes[device]:
                raise TaskError(f"{device!r} takes no batches: Task.train gave it no data")
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise TaskError(f"the batch of {device!r} is a {type(pair).__name__}, not a pair (x, target)")
        if not batch:
            raise TaskError("no device has a batch: give {device: (x, target)}")
        return dict(batch)

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
        self._catch_up()
        self._gather_weights()
        found = evaluate(self.model.chain, self.task, self.model.kit, held_out)
        return {f"test/{name}": value for name, value in found.items()}

    def _data_options(self) -> dict[str, Any]:
        return self.experiment.data.model_dump(exclude_none=True)

    def _catch_up(self) -> None:
        """Fetch what steps by hand have made of the weights, of replicas the first node's."""
        if self._stepped:
            self.training.fetch(optimizer=False)
            self.training.adopt()
            self._stepped = False

    def _gather_weights(self) -> None:
        load_weights(self.model.chain.model, self.weights())

    def weights(self) -> dict[str, np.ndarray[Any, Any]]:
        """Parameters and buffers of the gathered model by name, as of the last round's end."""
        return {**self.training.params, **self.training.buffers}

    def gather(self) -> nn.Module:
        """Return the original module with the trained weights."""
        self._catch_up()
        self._gather_weights()
        return self.model.chain.model

    def resume(self, path: Path | None) -> list[str]:
        """Go on from a checkpoint, as if the run had never stopped; its plan may differ.

        Args:
            path: of the checkpoint; None: from the beginning.

        Returns:
            The options that have changed since, in a line each.

        Raises:
            RunError: the checkpoint is damaged, or of another model or seed.
        """
        self._resumed, changed = self._keeper.resume(path, self.training, self.training.federation)
        return changed

    # -- what can be seen

    @property
    def hellos(self) -> Mapping[str, Mapping[str, Any]]:
        """What each node said of itself when it joined."""
        return self._conductor.hellos

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The best round so far by ``evaluate.best``: its name, value and round."""
        return self._keeper.best

    def links(self) -> dict[str, int]:
        """Payload bytes sent so far, ``a->b`` -> bytes, as the nodes last told."""
        told = {**self._conductor.traffic, COORDINATOR: self._transport.traffic(COORDINATOR)}
        return {f"{src}->{dst}": n for src in sorted(told) for dst, n in sorted(told[src].items())}

    # -- the end

    def _on_step(self, done: StepDone) -> None:
        self._also_on_step(done)
        for callback in self.callbacks:
            callback.on_step(done)

    def _on_node(self, change: NodeChanged) -> None:
        self._fleet.changed(change.node, change.state)
        for callback in self.callbacks:
            callback.on_node(change)

    def _fail(self, error: BaseException) -> None:
        """Stop the fleet, and raise the error anew where the other nodes can say what they were waiting for."""
        waiting = self._stop(2.0, f"the run was ended: {' '.join(str(error).split()) or 'interrupted'}")
        if isinstance(error, NodeLost | RunError | TransportTimeout) and waiting:
            others = "; ".join(f"{node!r} waited for {what}" for node, what in waiting.items())
            raise type(error)(f"{error}; {others}") from error

    def _stop(self, timeout: float, error: str | None = None) -> dict[str, str]:
        if self._closed:
            return {}
        self._closed = True
        waiting = self._conductor.stop(list(self._conductor.hellos), timeout, error)
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


def fit(
    task: Task,
    *,
    topology: str | Path | Topology,
    cuts: Sequence[int | str] | None = None,
    callbacks: Iterable[Callback] = (),
    strategy: Any = None,
    **keywords: Any,
) -> Result:
    """Train a Task over a topology, with the nodes as threads of this process.

    Args:
        task: a notebook's works.
        topology: a file or a :class:`Topology`.
        cuts: where to cut the chain; None: as ``plan`` says.
        callbacks: see :class:`Callback`.
        strategy: a name or a Flower strategy object.
        keywords: options, see :func:`edgesplit.options.options`.
    """
    if isinstance(strategy, str):
        keywords["strategy"], strategy = strategy, None
    experiment = options(**keywords)
    model = build_model(task, experiment)
    fleet = topology if isinstance(topology, Topology) else Topology.load(topology)
    plan = placement(model, fleet, experiment, cuts=cuts)
    with Session(plan, task, experiment=experiment, model=model, callbacks=callbacks, strategy=strategy) as session:
        rounds = session.fit()
        return Result(session.gather(), rounds)
