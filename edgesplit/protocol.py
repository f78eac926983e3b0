"""What the coordinator and the nodes tell each other, as data: checked when it comes from the network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from edgesplit.errors import FrameError
from edgesplit.schedule import Micro, Step
from edgesplit.task import COORDINATOR
from edgesplit.transport.base import Message

MOST_REASON = 200
"""Characters of a reason that a node gives."""

MAX_STEPS = 1_000_000
"""Steps or micro-batches that one sheet may hold: more is not a sheet of ours."""


def _need(ok: bool, kind: str, what: str) -> None:
    if not ok:
        raise FrameError(f"a {kind} message is malformed: {what}")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any) -> bool:
    """Whether it is a number that a float can hold: JSON has whole numbers of any size."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 1 << 1023
    return isinstance(value, float)


def _finite(value: Any) -> bool:
    return _number(value) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class Sheet:
    """The steps ahead.

    Attributes:
        steps: in order.
        evaluate: forwards only, over the devices' test sets, no update.
        everyone: commits come to nodes that a step passes by, too, and those wait for them: the loss scale may change.
    """

    steps: tuple[Step, ...]
    evaluate: bool = False
    everyone: bool = False

    def meta(self) -> dict[str, Any]:
        """As plain JSON values."""
        steps = [
            {
                "step": step.step,
                "lr": step.lr,
                "batches": {device: list(where) for device, where in step.batches.items()},
                "micros": [list(micro if micro.route else micro[:4]) for micro in step.micros],
            }
            for step in self.steps
        ]
        return {"steps": steps, "evaluate": self.evaluate, "everyone": self.everyone}

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Sheet:
        """Read a sheet. Raises FrameError where it is malformed."""
        steps = meta.get("steps")
        _need(isinstance(steps, list) and len(steps) <= MAX_STEPS, "sheet", "no list of steps")
        flags = (bool(meta.get(key)) for key in ("evaluate", "everyone"))
        return cls(tuple(_step(entry) for entry in steps), *flags)  # type: ignore[union-attr]


def _step(entry: Any) -> Step:
    _need(isinstance(entry, dict), "sheet", "a step is not a mapping")
    micros, batches = entry.get("micros"), entry.get("batches")
    _need(isinstance(micros, list) and isinstance(batches, dict), "sheet", "a step without micro-batches")
    _need(_whole(entry.get("step")) and _finite(entry.get("lr")), "sheet", "a step without number or rate")
    for micro in micros:
        ok = isinstance(micro, list) and len(micro) in (4, 5) and isinstance(micro[1], str) and micro[1] in batches
        ok = ok and all(_whole(value) for value in (micro[0], *micro[2:])) and micro[2] <= micro[3]
        _need(ok, "sheet", f"micro {micro!r}")
    for where in batches.values():
        _need(
            isinstance(where, list) and len(where) == 2 and type(where[0]) is int and _whole(where[1]),
            "sheet",
            "a batch",
        )
    return Step(
        entry["step"],
        tuple(Micro(*micro) for micro in micros),
        {device: (where[0], where[1]) for device, where in batches.items()},
        float(entry["lr"]),
    )


@dataclass(frozen=True, slots=True)
class Commit:
    """The coordinator's word on a step.

    Attributes:
        step: the global number.
        apply: False: every node puts back what it had before the step and drops all later ones.
        clip: the factor on every mean gradient.
        loss_scale: what the last stage multiplies the loss by from the next step on.
    """

    step: int
    apply: bool
    clip: float = 1.0
    loss_scale: float = 1.0

    def meta(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"step": self.step, "apply": self.apply, "clip": self.clip, "loss_scale": self.loss_scale}

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Commit:
        """Read a commit. Raises FrameError where it is malformed."""
        step, apply, clip, scale = (meta.get(key) for key in ("step", "apply", "clip", "loss_scale"))
        _need(_whole(step) and isinstance(apply, bool), "commit", "no step or no verdict")
        _need(_finite(clip) and _finite(scale) and scale > 0, "commit", "clip or loss scale")  # type: ignore[operator]
        return cls(step, apply, float(clip), float(scale))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Report:
    """What a node says of a step after its last backward.

    Attributes:
        step: the global number.
        finite: all gradient sums are.
        layers: layer index -> (weight that passed it, sum of squares of its mean unscaled gradient).
        losses: micro -> (loss sum, weight), from the node of the last layers.
        culprit: the first layer with a non-finite gradient, by name.
        source: what made something not finite of what was finite, ``"layer 'conv1'"`` or ``"the loss"``; looked for
            after a step that was not finite.
        skipped: asynchronous methods: updates that were left out because they were not finite.
        metrics: in evaluation, device -> metric -> (sum, count).
        offences: device -> what was wrong with its messages of the step.
    """

    step: int
    finite: bool = True
    layers: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    losses: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    culprit: str | None = None
    skipped: int = 0
    metrics: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    source: str | None = None
    offences: Mapping[str, str] = field(default_factory=dict)

    def meta(self) -> dict[str, Any]:
        """As plain JSON values (non-finite numbers as null: JSON has none)."""
        return {
            "step": self.step,
            "finite": self.finite,
            "layers": [[layer, *map(_json, pair)] for layer, pair in self.layers.items()],
            "losses": [[micro, *map(_json, pair)] for micro, pair in self.losses.items()],
            "culprit": self.culprit,
            "source": self.source,
            "skipped": self.skipped,
            "metrics": {
                device: {name: [_json(v) for v in pair] for name, pair in values.items()}
                for device, values in self.metrics.items()
            },
            **({"offences": dict(self.offences)} if self.offences else {}),
        }

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Report:
        """Read a report. Raises FrameError where it is malformed."""
        step, finite, skipped = meta.get("step"), meta.get("finite"), meta.get("skipped")
        _need(_whole(step) and isinstance(finite, bool) and _whole(skipped), "report", "no step or no verdict")
        culprit, source, metrics = meta.get("culprit"), meta.get("source"), meta.get("metrics")
        _need(all(name is None or isinstance(name, str) for name in (culprit, source)), "report", "culprit or source")
        _need(isinstance(metrics, dict) and all(isinstance(v, dict) for v in metrics.values()), "report", "metrics")
        offences = meta.get("offences", {})
        told = isinstance(offences, dict) and all(isinstance(what, str) for what in offences.values())
        _need(told, "report", "offences")
        return cls(
            step,  # type: ignore[arg-type]
            finite,  # type: ignore[arg-type]
            _triples(meta.get("layers")),
            _triples(meta.get("losses")),
            culprit,
            skipped,  # type: ignore[arg-type]
            {d: {name: _pair(pair) for name, pair in v.items()} for d, v in metrics.items()},  # type: ignore[union-attr]
            source,
            {device: what[:MOST_REASON] for device, what in offences.items()},
        )


def _json(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _pair(pair: Any) -> tuple[float, float]:
    ok = isinstance(pair, list) and len(pair) == 2 and all(v is None or _number(v) for v in pair)
    _need(ok, "report", "a pair of numbers")
    return tuple(math.nan if v is None else float(v) for v in pair)  # type: ignore[return-value]


def _triples(rows: Any) -> dict[int, tuple[float, float]]:
    _need(isinstance(rows, list) and len(rows) <= MAX_STEPS, "report", "no list")
    for row in rows:
        _need(isinstance(row, list) and len(row) == 3 and _whole(row[0]), "report", f"row {row!r}")
    return {row[0]: _pair(row[1:]) for row in rows}


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What a node needs to know before it can take part; its weights come with a ``load``.

    Attributes:
        plan: ``Plan.to_json()`` without topology and profile.
        method, window, split_backward: how it orders its actions.
        add_replicas: gradient sums of replicated layers are added before the update.
        barrier: updates wait for the commit.
        seed: the run's.
        codecs: receiver -> codec of activations and gradients sent to it.
        optimizer: ``OptimizerSpec.to_json()``, or None: the Task's own torch optimizer.
        batch_size: samples of a device in a step.
        loss_scale: the first step's.
        shard: ``{"index", "count", "config", "data"}`` of a device, else None.
        evaluate: the device's test set is wanted.
        task: ``{"reference", "args", "dtype"}``, for nodes that import the Task.
        fingerprint: of the coordinator's chain.
        emulate: how the node plays a slower one, see ``emulation.py``; None: it does not.
        run: identifies the run, also after its coordinator was started again.
        again: the node has been told its part before, in another life.
        limits: what devices may send: ``{"weight": most of a sample, or None}``; None: nothing is looked at.
    """

    plan: Mapping[str, Any]
    method: str
    window: int
    split_backward: bool
    add_replicas: bool
    barrier: bool
    seed: int
    codecs: Mapping[str, str]
    optimizer: Mapping[str, Any] | None
    batch_size: int
    loss_scale: float
    shard: Mapping[str, Any] | None
    evaluate: bool
    task: Mapping[str, Any]
    fingerprint: str
    emulate: Mapping[str, Any] | None = None
    run: str = ""
    again: bool = False
    limits: Mapping[str, Any] | None = None

    def meta(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Assignment:
        """Read an assignment. Raises FrameError where it is malformed."""
        values = {f.name: meta.get(f.name) for f in fields(cls)}
        for name in ("method", "fingerprint", "run"):
            _need(isinstance(values[name], str), "assign", name)
        for name in ("plan", "codecs", "task"):
            _need(isinstance(values[name], dict), "assign", name)
        for name in ("shard", "optimizer", "emulate", "limits"):
            _need(values[name] is None or isinstance(values[name], dict), "assign", name)
        for name in ("split_backward", "add_replicas", "barrier", "evaluate", "again"):
            _need(isinstance(values[name], bool), "assign", name)
        for name, least in (("window", 1), ("seed", 0), ("batch_size", 1)):
            _need(_whole(values[name]) and values[name] >= least, "assign", name)  # type: ignore[operator]
        _need(_finite(values["loss_scale"]) and values["loss_scale"] > 0, "assign", "loss_scale")  # type: ignore[operator]
        _need(all(isinstance(codec, str) for codec in values["codecs"].values()), "assign", "codecs")  # type: ignore[union-attr]
        weight = (values["limits"] or {}).get("weight")
        _need(weight is None or _finite(weight), "assign", "limits")
        _need(values["shard"] is None or _shard(values["shard"]), "assign", "shard")
        return cls(**values)  # type: ignore[arg-type]


def _shard(shard: Mapping[str, Any]) -> bool:
    numbers = all(_whole(shard.get(key)) for key in ("index", "count"))
    return numbers and all(isinstance(shard.get(key), dict) for key in ("config", "data"))


@dataclass(frozen=True, slots=True)
class Send:
    """Effect of a state machine: send ``message`` to ``to``."""

    to: str
    message: Message


def from_coordinator(message: Message) -> bool:
    """Whether a control message comes from the one node that may send it."""
    return message.sender == COORDINATOR
