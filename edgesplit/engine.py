"""Executes a node's work on its own layers: the arithmetic behind the state machine. Knows no network and no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from edgesplit.codecs import Packed, pack, unpack
from edgesplit.data import Feed, rows
from edgesplit.errors import FrameError, RunError, Spoiled
from edgesplit.journal import Journal
from edgesplit.kit import Kit
from edgesplit.methods import method_of, order_of
from edgesplit.node import Keep, NodeMachine, Outcome, Reckon, Run, Settle, Work
from edgesplit.offences import weight_fits
from edgesplit.optimizers import OptimizerSpec
from edgesplit.plan import Plan
from edgesplit.protocol import Assignment, Commit, Report
from edgesplit.recovery import Point, one_kept, point_of
from edgesplit.schedule import Action, Micro, Step, updated_layers
from edgesplit.segments.base import Arrays, Output, Samples, SegmentRunner
from edgesplit.task import Shard
from edgesplit.transport.base import Message
from edgesplit.weights import Exported, Latest, LayerStore, Snapshot, Stash, WeightPolicy

POLICIES: Mapping[str, Callable[[LayerStore, Sequence[str]], WeightPolicy]] = {"latest": Latest, "stash": Stash}
"""Weight policy by the name that the table of methods uses."""


class Engine:
    """One node's layers, data and runners.

    Args:
        name: the node.
        assignment: its part in the run.
        kit: the Task made ready.
        journal: where it keeps its state; None: nowhere.
        before: the engine of the plan before, whose data and layers it takes over.
    """

    def __init__(
        self,
        name: str,
        assignment: Assignment,
        kit: Kit,
        journal: Journal | None = None,
        before: Engine | None = None,
    ) -> None:
        self.name, self.assignment, self.kit, self.journal = name, assignment, kit, journal
        self.plan = Plan.from_json(assignment.plan)
        self.method = method_of(assignment.method)
        self.layers = self.plan.layers_of(name)
        self.loss_scale = assignment.loss_scale
        replicas = self.plan.replicas()
        self._shared = [i for i in self.layers if len(replicas[i]) > 1] if assignment.add_replicas else []
        self._updates = updated_layers(self.plan, name)
        self._names = kit.layers
        self._runners: dict[tuple[int, int], SegmentRunner] = {}
        self._policies: dict[tuple[int, int], WeightPolicy] = {}
        self._feeds = {test: self._feed(test) for test in (False, True)} if before is None else before.feeds(assignment)
        self.store = self._make_store()
        if before is not None:
            self.store.inherit(before.store)
        self._begun: list[int] = []  # steps not settled, in order
        self._adopted: int | None = None
        self._skipped: dict[tuple[int, int], int] = {}
        self._searching = False  # the last step was not finite: where does it begin?
        self._limits = assignment.limits
        self._offences: dict[int, dict[str, str]] = {}  # step -> device -> what it did
        self._point = Point(0, -1)  # the last load, and the last step that is final

    def _make_store(self) -> LayerStore:
        a, kit = self.assignment, self.kit
        mine = {self._names[i]: kit.params[i] for i in self.layers}
        names = [name for params in mine.values() for name in params]
        extra: dict[str, Any] = {}
        if a.optimizer is not None:
            spec = OptimizerSpec.from_json(a.optimizer)
        elif kit.update is not None:
            spec = OptimizerSpec((), {})
            extra = {"update": kit.update(names), "slots": None}
        else:
            raise RunError(f"{self.name!r} was given no optimizer")
        buffers = {self._names[i]: kit.buffers[i] for i in self.layers}
        return LayerStore(mine, buffers, spec, frozen=kit.frozen & set(names), to_native=kit.native, **extra)

    def machine(self) -> NodeMachine:
        """Return the state machine that this engine works for."""
        a = self.assignment

        def order(steps: Sequence[Step]) -> Sequence[Action]:
            return order_of(
                self.method,
                self.plan,
                steps,
                self.name,
                split_backward=a.split_backward,
                update_all=bool(a.add_replicas),
            )

        machine = NodeMachine(
            self.name,
            self.plan,
            order=order,
            window=a.window,
            synchronous=self.method.synchronous,
            barrier=a.barrier,
        )
        machine.loss_scale = self.loss_scale
        return machine

    def neighbours(self) -> set[str]:
        """Return the nodes that this one sends to: beside it on a route, or at the end of its own."""
        ends = [(route.device, node) for route in self.plan.routes for node in self.plan.choices(route.device)[-1]]
        found = {node for pair in (*self.plan.links(), *ends) if self.name in pair for node in pair}
        return found - {self.name}

    # -- data

    def feeds(self, assignment: Assignment) -> dict[bool, Feed | None]:
        """Return the data (False: training, True: test) for another assignment of this node in the same run.

        A run's data does not depend on its plan, and reading it may take long.
        """
        if assignment.shard != self.assignment.shard:
            raise RunError(f"{self.name!r} is told of other data in the middle of the run")
        return self._feeds

    def _feed(self, test: bool) -> Feed | None:
        shard = self.assignment.shard
        if shard is None or (test and not self.assignment.evaluate):
            return None
        who = Shard(
            name=self.name,
            index=shard["index"],
            count=shard["count"],
            seed=self.assignment.seed,
            config=shard["config"],
            data=shard["data"],
        )
        source = self.kit.data(who, test)
        if source is None:
            return None
        return Feed(
            source,
            device=self.name,
            batch_size=self.assignment.batch_size,
            seed=self.assignment.seed,
            collate=self.kit.collate,
            to_arrays=self.kit.to_arrays,
        )

    def sizes(self) -> dict[str, list[int]]:
        """Return the samples in each batch of an epoch, and of the test set; empty where there is none."""
        train, test = self._feeds[False], self._feeds[True]
        return {"train": train.sizes() if train else [], "test": test.sizes() if test else []}

    # -- work

    def execute(self, work: Work) -> Outcome:
        """Do a piece of work. Raises EdgesplitError, and whatever the user's own code raises."""
        if isinstance(work, Run):
            return self._run(work)
        if isinstance(work, Reckon):
            return self._reckon(work)
        if isinstance(work, Settle):
            return self._settle(work)
        if isinstance(work, Keep):
            return self._keep(Point(self._point.load, work.step), work.term, full=False)
        return self._serve(work.message)

    def _run(self, run: Run) -> Outcome:
        if self.method.synchronous and not run.evaluate and run.step.step not in self._begun:
            self._begin(run.step)
        if run.action.op == "U":
            return self._update(run)
        if run.micro is None:
            raise RunError(f"{run.action} on {self.name!r} has no micro-batch")
        work = self._forward if run.action.op == "F" else self._backward
        if self._limits is None or run.micro.device == self.name:
            return work(run, run.micro)
        self._look_at(run, run.micro)
        try:
            return work(run, run.micro)
        except Exception as error:
            what = " ".join(str(error).split()) or "no message"
            raise Spoiled(
                run.micro.device, run.step.step, f"{run.action} fails on {self.name!r}: {type(error).__name__}: {what}"
            ) from error

    def _look_at(self, run: Run, micro: Micro) -> None:
        """Note what a device may not send. The step is taken back for it, if it can be computed at all."""
        limits, samples = self._limits or {}, micro.stop - micro.start
        wrong: list[str] = []
        for message in (run.act, run.grad):
            if message is not None and message.sender == micro.device:
                if not all(map(_is_finite, unpack(message.arrays).values())):
                    wrong.append(f"its {message.kind} is not finite")
                if message.kind == "act" and not weight_fits(message.weight, samples, limits.get("weight")):
                    wrong.append(f"it says that {samples} samples weigh {message.weight:g}")
        if run.target is not None and any(packed.shape[:1] != (samples,) for packed in run.target.arrays.values()):
            raise Spoiled(
                micro.device, run.step.step, f"its target is not of the {samples} samples that it is to be of"
            )
        if wrong:
            self._offences.setdefault(run.step.step, {}).setdefault(micro.device, wrong[0])

    def _begin(self, step: Step) -> None:
        expected: dict[str, list[int]] = {self._names[layer]: [] for layer in self.layers}
        for micro in step.micros:
            for stage in self.plan.path(micro.device, micro.route):
                if stage.node == self.name:
                    for layer in range(stage.start, stage.stop):
                        expected[self._names[layer]].append(micro.micro)
        self.store.begin(step.step, expected)
        self._begun.append(step.step)

    def _range(self, run: Run, micro: Micro) -> tuple[int, int]:
        stage = self.plan.path(micro.device, micro.route)[run.action.stage]
        return stage.start, stage.stop

    def _runner(self, span: tuple[int, int]) -> SegmentRunner:
        if span not in self._runners:
            self._runners[span] = runner = self.kit.runner(*span)
            runner.same_weights = self.method.policy == "latest"
        self._runners[span].watchful = self._searching
        return self._runners[span]

    def _policy(self, span: tuple[int, int]) -> WeightPolicy:
        if span not in self._policies:
            self._policies[span] = POLICIES[self.method.policy](self.store, self._names[span[0] : span[1]])
        return self._policies[span]

    # -- forwards

    def _forward(self, run: Run, micro: Micro) -> Outcome:
        samples = Samples(self.assignment.seed, run.step.step, ((micro.device, micro.start, micro.stop),))
        x, needs, weight, target = self._inputs(run, micro)
        span = self._range(run, micro)
        runner = self._runner(span)
        if run.evaluate:
            output = runner.evaluate(self.store.params, self.store.buffers, x, target if run.last else None)
            return self._output(run, output, weight, target if run.action.stage == 0 else None, 0)
        version, weights = self._policy(span).weights(micro.micro, "F")
        if run.last:
            output = runner.forward_loss(
                micro.micro, weights, self.store.buffers, x, needs, samples, target, weight, self.loss_scale
            )
        else:
            output = runner.forward(micro.micro, weights, self.store.buffers, x, needs, samples)
        return self._output(run, output, weight, target if run.action.stage == 0 else None, version)

    def _inputs(self, run: Run, micro: Micro) -> tuple[Arrays, frozenset[str], float, Arrays]:
        """Return x, the names that need a gradient, the weight, and the target where this stage has it."""
        if run.act is None:
            epoch, index = run.step.batches[micro.device]
            feed = self._feeds[run.evaluate]
            if feed is None:
                raise RunError(f"{self.name!r} has no {'test' if run.evaluate else 'training'} data for {run.action}")
            x, target = (rows(part, micro.start, micro.stop) for part in feed.batch(epoch, index))
            return x, frozenset(), float(self.kit.weigh(target)), target
        x = unpack(run.act.arrays)
        needs = frozenset(run.act.meta.get("needs") or ())
        if not needs <= set(x):
            raise FrameError(
                f"act of {run.action} wants gradients of {sorted(needs - set(x))}, which it does not carry"
            )
        return x, needs, run.act.weight, unpack(run.target.arrays) if run.target else {}

    def _output(self, run: Run, output: Output, weight: float, target: Arrays | None, version: int) -> Outcome:
        last = run.last
        return Outcome(
            arrays={} if last or run.to is None else pack(output.arrays, self._codec(run.to)),
            needs=frozenset() if last else output.needs_grad,
            target=None if target is None or last else pack(target, "raw"),
            weight=weight,
            loss_sum=output.loss_sum,
            version=version,
            metrics=output.metrics,
        )

    def _codec(self, to: str) -> str:
        return self.assignment.codecs.get(to, "raw")

    # -- backwards and updates

    def _backward(self, run: Run, micro: Micro) -> Outcome:
        span, number = self._range(run, micro), micro.micro
        runner, policy = self._runner(span), self._policy(span)
        version, weights = policy.weights(number, "B")
        given = unpack(run.grad.arrays) if run.grad else {}
        back: Arrays = {}
        grads: Mapping[str, Any] | None = None
        if run.action.op == "I":
            back = runner.backward_input(number, weights, given)
        elif run.action.op == "W":
            grads = runner.backward_weights(number, weights)
        else:
            back, grads = runner.backward(number, weights, given)
        if grads is not None:
            policy.accumulate(number, grads, policy.delay(number), run.weight)
        return Outcome(arrays=pack(back, self._codec(run.to)) if run.to else {}, version=version)

    def _update(self, run: Run) -> Outcome:
        step, stage = run.step, run.action.stage
        if not self.method.synchronous:
            return self._update_at_once(run)
        commit = Commit.of(run.commit.meta) if run.commit else Commit(step.step, True)
        if run.commit is not None and self._shared and self._adopted != step.step:
            self._adopt(step.step, run.commit)
        names = [self._names[layer] for layer in sorted(self._updates[stage])]
        self.store.update(step.step, names, step.lr, commit.clip, self.loss_scale)
        return Outcome(version=self.store.version(names))

    def _update_at_once(self, run: Run) -> Outcome:
        micro = run.micro
        if micro is None:
            raise RunError(f"{run.action} on {self.name!r} has no micro-batch")
        policy = self._policy(self._range(run, micro))
        return Outcome(version=policy.apply(run.step.step, micro.micro, run.step.lr, 1.0, self.loss_scale))

    def _adopt(self, step: int, commit: Message) -> None:
        """Take the replicas' added gradient sums in place of this node's own."""
        weights = {self._names[int(layer)]: float(weight) for layer, weight in commit.meta.get("weights", [])}
        sums = {name.partition("/")[2]: array for name, array in unpack(commit.arrays).items()}
        self.store.set_sums(step, sums, weights)
        self._adopted = step

    # -- the step's end

    def _reckon(self, work: Reckon) -> Outcome:
        step = work.step.step
        if work.evaluate:
            return Outcome(report=Report(step))
        if self.journal is not None:
            self.journal.flush()  # whoever hears of this step may count on the state after the one before
        if not self.method.synchronous:
            return Outcome(report=self._skips(step))
        if step not in self._begun:
            self._begin(work.step)
        told = self.store.report(step, self.loss_scale)
        index = {name: i for i, name in enumerate(self._names)}
        layers = {index[name]: pair for name, pair in told.layers.items()}
        culprit = told.nonfinite[0] if told.nonfinite else None
        report = Report(
            step,
            told.finite,
            layers,
            culprit=culprit,
            source=self._source(),
            offences=self._offences.pop(step, {}),
        )
        problem = self.journal.problem if self.journal else None
        return Outcome(report=report, arrays=self._sums(step, index), meta={"keeping": problem} if problem else {})

    def _source(self) -> str | None:
        """The first layer whose forwards made something not finite, where they looked; forget it."""
        found = [runner.first_bad for _, runner in sorted(self._runners.items()) if runner.first_bad is not None]
        for runner in self._runners.values():
            runner.first_bad = None
        return found[0] if found else None

    def _skips(self, step: int) -> Report:
        """Report the updates that were left out since the last report, and the first layer that one was of."""
        news = {
            span: count
            for span, policy in sorted(self._policies.items())
            if (count := policy.skipped - self._skipped.get(span, 0))
        }
        self._skipped = {span: policy.skipped for span, policy in self._policies.items()}
        culprit = self._names[min(news)[0]] if news else None
        return Report(step, skipped=sum(news.values()), culprit=culprit)

    def _sums(self, step: int, index: Mapping[str, int]) -> dict[str, Packed]:
        """Gradient sums of the replicated layers, named ``layer index/parameter``."""
        sums: dict[str, Packed] = {}
        for layer in self._shared:
            arrays, _ = self.store.sums(step, [self._names[layer]])
            sums |= pack({f"{layer}/{name}": array for name, array in arrays.items()}, "raw")
        return sums

    def _settle(self, work: Settle) -> Outcome:
        commit = work.commit
        self.loss_scale = commit.loss_scale
        self._searching = not commit.apply
        if commit.apply:
            self.store.confirm(commit.step)
            self._begun = [step for step in self._begun if step > commit.step]
            self._point = Point(self._point.load, commit.step)
            return Outcome()
        if self.journal is not None:
            self.journal.forget_after(Point(self._point.load, commit.step - 1))
        for step in reversed([step for step in self._begun if step >= commit.step]):
            self.store.rollback(step)
            self._offences.pop(step, None)
        self._begun = [step for step in self._begun if step < commit.step]
        for runner in self._runners.values():
            runner.drop()
            runner.first_bad = None  # a forward that ran ahead saw weights that were not finite
        for policy in self._policies.values():
            policy.drop()
        return Outcome()

    # -- state in and out

    def _serve(self, message: Message) -> Outcome:
        if self.journal is not None:
            self.journal.flush()
        if message.kind == "halt":
            return Outcome(meta=self.kept())
        if message.kind == "return":
            return self._return(message)
        if message.kind == "fetch":
            return self._fetch(message)
        if message.kind == "load":
            return self._load(message)
        if message.kind == "insert":
            return self._insert(message)
        raise RunError(f"{self.name!r} does not know what {message.kind!r} asks")

    def _fetch(self, message: Message) -> Outcome:
        asked = message.meta.get("layers")
        layers = [self._names[i] for i in self.layers if not isinstance(asked, list) or i in asked]
        held = self.store.export(layers)
        parts = {"param": held.params, "buffer": held.buffers}
        if message.meta.get("optimizer"):
            parts["optimizer"] = held.optimizer
        arrays = {f"{kind}/{name}": array for kind, named in parts.items() for name, array in named.items()}
        weights = [[self._names.index(name), weight] for name, weight in self.store.round_weights().items()]
        return Outcome(arrays=pack(arrays, "raw"), meta={"weights": weights})

    def _load(self, message: Message) -> Outcome:
        parts: dict[str, dict[str, np.ndarray[Any, Any]]] = {"param": {}, "buffer": {}, "optimizer": {}}
        for name, array in unpack(message.arrays).items():
            kind, _, rest = name.partition("/")
            if kind not in parts:
                raise FrameError(f"a load message carries {name!r}")
            parts[kind][rest] = array
        self._forget_optimizer(message.meta.get("reset_optimizer") or ())
        self.loss_scale = float(message.meta.get("loss_scale", self.loss_scale))
        self.store.load(parts["param"], parts["buffer"], parts["optimizer"])
        if message.meta.get("reset_round"):
            self.store.reset_round()
        if "point" in message.meta:
            self._point = point_of(message.meta["point"])
            if self.journal is not None:  # what was kept of it before was taken back
                self.journal.forget_after(Point(self._point.load, self._point.step - 1))
            self._keep(self._point, message.term, full=True)
            if self.journal is not None:
                self.journal.flush()
        return Outcome()

    # -- what is kept, to come back to

    def kept(self) -> dict[str, Any]:
        """Say what this node has kept, for the coordinator."""
        return {"kept": [kept.to_json() for kept in self.journal.kept()] if self.journal else []}

    def _keep(self, point: Point, term: int, *, full: bool) -> Outcome:
        if self.journal is not None:
            (params, buffers, optimizer), weights = self.store.snapshot(frozen=full)
            parts = {"param": params, "buffer": buffers, "optimizer": optimizer}
            arrays = {f"{kind}/{name}": array for kind, named in parts.items() for name, array in named.items()}
            arrays["round"] = np.array([weights[layer] for layer in self.store.layers], np.float64)
            self.journal.keep(point, term, arrays, committed=self._point, full=full)
        return Outcome()

    def _return(self, message: Message) -> Outcome:
        """Go back to a point that was kept, whatever is going on."""
        point, kept = point_of(message.meta.get("point")), one_kept(message.meta.get("kept"))
        held = self.journal.read(kept) if self.journal else None
        if held is None or self.journal is None:
            raise RunError(f"{self.name!r} cannot go back to step {point.step}: what it had kept is gone")
        weights = held.pop("round").tolist()
        parts: dict[str, dict[str, np.ndarray[Any, Any]]] = {"param": {}, "buffer": {}, "optimizer": {}}
        for name, array in held.items():
            kind, _, rest = name.partition("/")
            parts[kind][rest] = array
        arrays = Exported(parts["param"], parts["buffer"], parts["optimizer"])
        self.store.restore(Snapshot(arrays, dict(zip(self.store.layers, weights, strict=True))))
        self.journal.forget_after(kept.point)
        self.loss_scale = float(message.meta.get("loss_scale", self.loss_scale))
        self._point, self._begun, self._adopted, self._searching = point, [], None, False
        self._runners.clear()
        self._policies.clear()
        self._skipped.clear()
        self._offences.clear()
        return Outcome()

    def _forget_optimizer(self, layers: Sequence[int]) -> None:
        """Forget the optimizer's state of these layers; the others' lives on."""
        gone = {name for layer in layers for name in self.kit.params[layer]}
        kept = {name: slots for name, slots in self.store.state.items() if name not in gone}
        self.store.reset_optimizer()
        self.store.state = kept

    def _insert(self, message: Message) -> Outcome:
        """Take a batch given by hand; the sheet names it by epoch :data:`GIVEN_EPOCH` and its index."""
        feed, index = self._feeds[False], message.meta.get("index")
        if feed is None or not isinstance(index, int):
            raise RunError(f"{self.name!r} takes no batches: it is no device")
        arrays = unpack(message.arrays)
        x, target = ({n[len(p) :]: a for n, a in arrays.items() if n.startswith(p)} for p in ("x/", "target/"))
        feed.insert(index, (x, target))
        return Outcome()


def _is_finite(array: np.ndarray[Any, Any]) -> bool:
    return not np.issubdtype(array.dtype, np.inexact) or bool(np.isfinite(array).all())
