"""The checks: what holds for a combination of options, and whether it does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgesplit.assembly import Model, build_model, clip_norm
from edgesplit.codecs import CODECS
from edgesplit.errors import TaskError
from edgesplit.experiment import CodecOptions, EvaluateOptions, Experiment
from edgesplit.methods import method_of
from edgesplit.optimizers import OptimizerSpec
from edgesplit.plan import Plan
from edgesplit.splitting import batch_norm_layers
from edgesplit.task import Task
from edgesplit.verify.fleet import Trained, distance, first_batches, run_fleet, same_batch
from edgesplit.verify.reference import Batches, Reference

STEPS = 2

BOUNDS = {"float64": 1e-12, "float32": 1e-4}
"""Largest difference between two correct evaluations that we let pass, relative to the norm of all weights."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what.
        holds: whether it is as it should be.
        value, bound: the difference found and the largest allowed; None where nothing is measured.
        note: for the user.
    """

    name: str
    holds: bool
    value: float | None
    bound: float | None
    note: str


def verify(plan: Plan, task: Task, experiment: Experiment) -> list[Check]:
    """Run two steps of an experiment, as threads over memory in float64, and compare with one process.

    Says which statement applies to the combination: equality with one process, or (federated averaging) with its
    rule; and whether a second run is the same bit for bit.

    Raises:
        EdgesplitError: the combination cannot be run at all.
    """
    exact = exactly(task, experiment, plan)
    model = build_model(task, exact)
    batches = first_batches(plan, model, exact, STEPS)
    checks = [_data(plan, model, exact, batches[0])]
    first = run_fleet(plan, task, exact, batches)
    if method_of(experiment.pipeline.method).synchronous:
        checks += compare(plan, task, exact, batches, first)
    else:
        checks.append(_asynchronous(exact, first))
    checks.append(_again(plan, task, exact, batches, first))
    if experiment.codec != exact.codec:
        checks.append(_codecs(plan, task, experiment, exact, batches, first))
    return checks


def _data(plan: Plan, model: Model, experiment: Experiment, before: Batches) -> Check:
    again = first_batches(plan, model, experiment, 1)[0]
    moved = [device for device, batch in before.items() if not same_batch(batch, again[device])]
    if not moved:
        return Check("data", True, None, None, "the data is the same on every pass, so that a run can be repeated")
    note = f"{moved[0]!r} gives other values on a second pass: a run cannot be repeated; draw from set_epoch(epoch)"
    return Check("data", False, None, None, note)


def exactly(task: Task, experiment: Experiment, plan: Plan) -> Experiment:
    """The experiment without what blurs a comparison: in float64 if the model can, raw codecs, plain averaging."""
    federation = experiment.federation.model_copy(update={"strategy": "fedavg", "strategy_args": {}, "tiers": None})
    clear = experiment.model_copy(
        update={
            "dtype": "float64",
            "codec": CodecOptions(),
            "federation": federation,
            "evaluate": EvaluateOptions(every=0),
            "emulate": False,
        }
    )
    model = build_model(task, clear)
    batch = first_batches(plan, model, clear, 1)[0]
    try:
        Reference(plan, model, clear, together=True).step(0, batch, 1.0)
    except RuntimeError as error:
        if "dtype" not in str(error) and "Float" not in str(error):
            raise TaskError(f"one step in one process fails: {error}") from error
        return clear.model_copy(update={"dtype": "float32"})  # the model insists on float32
    return clear


# -- against one process


def compare(
    plan: Plan, task: Task, experiment: Experiment, batches: Sequence[Batches], fleet: Trained
) -> Iterator[Check]:
    """Compare losses and parameters with one process, or with federated averaging's rule where that is what it is."""
    bad = [index for index, loss in enumerate(fleet.losses) if not math.isfinite(loss)]
    if bad:
        note = f"the loss of step {bad[0]} is {fleet.losses[bad[0]]}: look at the first samples and the task's weight"
        yield Check("finite", False, None, None, note)
        return
    model = build_model(task, experiment)
    together, name, note = _statement(plan, model, experiment)
    reference = Reference(plan, model, experiment, together=together)
    losses = [reference.step(index, step, fleet.rates[index]) for index, step in enumerate(batches)]
    bound = BOUNDS[experiment.dtype]
    apart = max(abs(a - b) / max(abs(b), 1e-300) for a, b in zip(fleet.losses, losses, strict=True))
    apart = apart if math.isfinite(apart) else math.inf
    weights = distance(fleet.weights, reference.weights())
    for what, value in (("losses", apart), ("weights", weights)):
        steps = f"{len(batches)} step{'s' if len(batches) > 1 else ''}"
        found = f"{what} of {steps} in {experiment.dtype} are {value:.1e} apart (bound {bound:g})"
        yield Check(f"{name}: {what}", value <= bound, value, bound, f"{found}; {note}")


def _statement(plan: Plan, model: Model, experiment: Experiment) -> tuple[bool, str, str]:
    """Return whether one optimizer for all is the yardstick, the check's name, and why."""
    norms = batch_norm_layers(model.chain, model.task.train_mode)
    also = "; BatchNorm normalises each micro-batch by itself, there too" if norms else ""
    if all(len(nodes) == 1 for nodes in plan.replicas().values()):
        return True, "equals one process", f"no layer has replicas{also}"
    if experiment.federation.every == "step":
        return True, "equals one process", f"the replicas' gradient sums are added (every: step){also}"
    if _is_linear(model.optimizer, experiment) and clip_norm(model.task, experiment) is None:
        note = "with this optimizer averaging after one step is one process's step; with more steps a round it is not"
        return True, "one step a round equals one process", note + also
    note = "equality with one process is not expected, so it was compared with the rule: an optimizer a replica, then "
    return False, "federated averaging", f"{note}the weighted mean{also}"


def _is_linear(spec: OptimizerSpec | None, experiment: Experiment) -> bool:
    """Whether the mean of the replicas' updates is the update by the mean gradient."""
    if spec is None or any(rule.name != "sgd" for rule in spec.rules):
        return False
    return experiment.federation.optimizer_state == "average" or not any(rule.momentum for rule in spec.rules)


# -- what is not about one process


def _asynchronous(experiment: Experiment, fleet: Trained) -> Check:
    finite = all(math.isfinite(loss) for loss in fleet.losses)
    note = f"{experiment.pipeline.method} updates after every micro-batch: equality with one process is not expected"
    return Check("asynchronous", finite, None, None, note if finite else f"the loss is not finite; {note}")


def _again(plan: Plan, task: Task, experiment: Experiment, batches: Sequence[Batches], first: Trained) -> Check:
    second = run_fleet(plan, task, experiment, batches)
    same = first.losses == second.losses and all(
        first.weights[name].tobytes() == second.weights[name].tobytes() for name in first.weights
    )
    name = "a second run is the same bit for bit"
    if same:
        return Check(name, True, 0.0, 0.0, f"{len(batches)} steps, losses and weights")
    value = distance(second.weights, first.weights)
    free = not method_of(experiment.pipeline.method).synchronous
    if free and (experiment.pipeline.window or 1) > 1:
        return Check(
            name, True, value, None, f"{value:.1e} apart: the order of updates depends on arrival (window > 1)"
        )
    return Check(
        name, False, value, 0.0, f"{value:.1e} apart: does the model keep state, or use random numbers unseen?"
    )


def _codecs(
    plan: Plan, task: Task, experiment: Experiment, exact: Experiment, batches: Sequence[Batches], first: Trained
) -> Check:
    coded = run_fleet(plan, task, exact.model_copy(update={"codec": experiment.codec}), batches)
    moved, apart = distance(first.weights, first.start), distance(coded.weights, first.weights)
    value = apart / moved if moved else apart
    names = sorted({experiment.codec.up, experiment.codec.down} - {"raw"})
    each = ", ".join(f"{name} {CODECS[name].error:.1g}" for name in names)
    note = f"{', '.join(names)} on links change these steps by {value:.1%} of their length (error of a number: {each})"
    return Check("codecs", value < 1.0, value, 1.0, note)
