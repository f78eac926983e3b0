"""What a run keeps on disk between rounds: checkpoints, and the weights of its best round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgesplit import checkpoint
from edgesplit.errors import ExperimentError, did_you_mean
from edgesplit.experiment import Experiment
from edgesplit.federated import Federation
from edgesplit.logbook import Logbook
from edgesplit.plan import Plan
from edgesplit.resuming import snapshot, take_up, take_up_beginning
from edgesplit.training import RoundDone, Training

BEST = "best.safetensors"

NEXT_PLAN = "next-plan.json"
"""A plan that is put into the run's folder under this name is taken up when the next round begins."""


class Keeper:
    """Writes checkpoints and the best model where the experiment says so.

    Args:
        directory: the run's folder; None: nothing is written.
        experiment: its ``checkpoint`` and ``evaluate.best``.
        metrics: names of the Task's metrics.

    Attributes:
        best: ``{"name", "value", "round"}`` of the best round so far.

    Raises:
        ExperimentError: ``evaluate.best`` is no metric.
    """

    def __init__(self, directory: Path | None, experiment: Experiment, metrics: Sequence[str]) -> None:
        self.directory, self._experiment = directory, experiment
        self.logbook = Logbook(directory / "state" if directory is not None else None)
        self.best: Mapping[str, Any] | None = None
        best, known = experiment.evaluate.best, [*metrics, "loss"]
        if best is not None and best not in known:
            near = did_you_mean(best, known)
            raise ExperimentError(f"evaluate.best is {best!r}, the metrics are {', '.join(known)}{near}")

    @property
    def saves(self) -> bool:
        """Whether checkpoints are written at all."""
        return self.directory is not None and self._experiment.checkpoint.every > 0

    def due(self, number: int) -> bool:
        """Whether one is written after round ``number``."""
        return self.saves and number % self._experiment.checkpoint.every == 0

    def note(self, done: RoundDone, training: Training) -> None:
        """Keep the weights of the best round so far: the highest metric, or the lowest loss."""
        name = self._experiment.evaluate.best
        value = done.metrics.get(f"test/{name}")
        if name is None or value is None or math.isnan(value):
            return
        before = self.best["value"] if self.best else None
        if before is None or (value < before if name == "loss" else value > before):
            self.best = {"name": name, "value": value, "round": done.number}
            if self.directory is not None:
                checkpoint.save_model(self.directory / BEST, {**training.params, **training.buffers})

    def save(self, number: int, training: Training, federation: Federation | None) -> Path | None:
        """Write the checkpoint of round ``number``. Raises RunError where the disk does not take it."""
        if self.directory is None:
            return None
        coordinator = training.conductor.coordinator
        found = snapshot(number, self._experiment, coordinator, training, federation, self.best)
        return checkpoint.save(self.directory / "checkpoints", found, self._experiment.checkpoint.keep)

    def next_plan(self) -> Plan | None:
        """Take the plan that somebody has put into the folder for the next round; None: nobody has.

        Raises:
            PlanError: it is none; it is put aside.
        """
        path = self.directory / NEXT_PLAN if self.directory is not None else None
        if path is None or not path.exists():
            return None
        taken = path.with_suffix(".taken.json")
        path.replace(taken)
        return Plan.load(taken)

    def last(self) -> Path | None:
        """Return the newest whole checkpoint; None: there is none yet."""
        return checkpoint.latest(self.directory / "checkpoints") if self.directory is not None else None

    def resume(self, path: Path | None, training: Training, federation: Federation | None) -> tuple[int, list[str]]:
        """Take up a checkpoint, and what came after it; return the round that it was written after, and what changed.

        Args:
            path: of the checkpoint; None: there is none, the first round was not over.
        """
        if path is None:
            take_up_beginning(self.logbook, training)
            return 0, []
        position, changed = take_up(path, self._experiment, training, federation, self.logbook)
        self.best = position.best
        return position.round, changed
