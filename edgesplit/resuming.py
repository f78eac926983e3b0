"""What a run writes down between two rounds, and how another takes it up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgesplit import checkpoint
from edgesplit.coordinator import Coordinator
from edgesplit.errors import RunError
from edgesplit.experiment import Experiment
from edgesplit.federated import Federation
from edgesplit.holding import spread
from edgesplit.logbook import Logbook
from edgesplit.recovery import Standing
from edgesplit.training import Training


def snapshot(
    number: int,
    experiment: Experiment,
    coordinator: Coordinator,
    training: Training,
    federation: Federation | None,
    best: Mapping[str, Any] | None = None,
) -> checkpoint.Checkpoint:
    """Return all that a run needs to go on after round ``number``, whose state the training holds."""
    agenda, plan = training.drawn, training.plan
    position = checkpoint.Position(
        round=number,
        step=agenda.step,
        micro=coordinator.steps.next_micro,
        term=coordinator.term,
        seed=experiment.seed,
        participation=training.participation,
        positions=dict(agenda.done),
        loss_scale={"value": coordinator.loss_scale.value, "good": coordinator.loss_scale.good},
        best=best,
        experiment=experiment.to_dict(),
        plan=plan.bare().to_json(),
        extra={"load": coordinator.line.base.load, "barred": dict(coordinator.offences.barred)},
    )
    return checkpoint.Checkpoint(
        position=position,
        model={**training.params, **training.buffers},
        nodes={node: held.arrays for node, held in training.held.items()},
        strategy=federation.state() if federation else {},
    )


def take_up_beginning(logbook: Logbook, training: Training) -> None:
    """Put a fleet that has joined where a run was in its first round."""
    standing = Standing(training.conductor.coordinator.loss_scale.value, 0, 0, 0)
    training.take_up(1, None, logbook.read(1), standing, last=logbook.last())


def take_up(
    path: Path, experiment: Experiment, training: Training, federation: Federation | None, logbook: Logbook
) -> tuple[checkpoint.Position, list[str]]:
    """Put a fleet that has joined where the checkpoint's was, or where it had come to since; the plan may be another.

    Returns:
        Where the checkpoint is, and which options have changed since, in a line each.

    Raises:
        RunError: the checkpoint is damaged, or of another model or seed.
    """
    found = checkpoint.load(path)
    position = found.position
    for key in ("batch_size", "dtype"):
        before, now = position.experiment.get(key), experiment.to_dict()[key]
        if before != now:
            raise RunError(f"checkpoint {path} has {key} {before}, the experiment {now}: its place in the data is lost")
    if position.seed != experiment.seed:
        raise RunError(f"checkpoint {path} has seed {position.seed}, the experiment {experiment.seed}: set it to that")
    for name, array in {**training.params, **training.buffers}.items():
        if name not in found.model or found.model[name].shape != array.shape:
            raise RunError(f"checkpoint {path} has no {name!r} of shape {array.shape}: it is of another model")
    training.params = {name: found.model[name] for name in training.params}
    training.buffers = {name: found.model[name] for name in training.buffers}
    training.drawn.step = position.step
    training.drawn.done = {device: int(count) for device, count in position.positions.items()}
    training.participation = dict(position.participation)
    coordinator = training.conductor.coordinator
    coordinator.steps.next_micro, coordinator.term = position.micro, position.term
    coordinator.offences.barred.update({str(d): str(why) for d, why in position.extra.get("barred", {}).items()})
    scale = position.loss_scale or {"value": coordinator.loss_scale.value, "good": 0}
    standing = Standing(float(scale["value"]), int(scale["good"]), 0, 0)
    if federation is not None:
        federation.load_state(dict(found.strategy))
    changed = changes(position, experiment)
    load = int(position.extra.get("load", 1))
    progress = logbook.read(load) if not changed else None  # the round began with other options
    held = spread(found.nodes, training.plan, training.names)
    training.take_up(load, held, progress, standing, position.round + 1, logbook.last())
    return position, changed


def changes(position: checkpoint.Position, experiment: Experiment) -> list[str]:
    """Say in a line each which options a resumed run has that the checkpoint's had not."""
    before, now = _flat(position.experiment), _flat(experiment.to_dict())
    keys = [key for key in now if before.get(key) != now[key] and key.partition(".")[0] not in _FREE]
    return [f"{key} was {before.get(key)!r} and is now {now[key]!r}" for key in keys]


_FREE = {"rounds", "broker", "timeouts", "local", "log", "topology"}
"""Options that may change without a word."""


def _flat(values: Mapping[str, Any], under: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{under}{key}.") if isinstance(value, Mapping) else {f"{under}{key}": value}
    return flat
