"""Points of four classes: small enough for a run of seconds, and able to go wrong where a test wants it to.

A file beside this one that is named after a fault (``raise``, ``sleep``, ``nan``) makes it happen from then on.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgesplit as es

HERE = Path(__file__).resolve().parent
FEATURES, CLASSES, SAMPLES, HELD_OUT = 8, 4, 128, 400


def points(
    width: int = 16, spoiled: str | None = None, infinite: str | None = None, wide: int | None = None
) -> es.Task:
    """Build the task.

    Args:
        width: of the hidden layers.
        spoiled: a device whose data cannot be read.
        infinite: a device whose data is not finite.
        wide: of what the first layer sends on, where that is not ``width``.
    """
    wide = wide or width

    def model() -> nn.Module:
        layers = [
            ("fc1", nn.Linear(FEATURES, wide)),
            ("act1", nn.Tanh()),
            ("fc2", nn.Linear(wide, width)),
            ("fuse", Fuse()),
            ("drop", nn.Dropout(0.1)),
            ("act2", nn.ReLU()),
            ("out", nn.Linear(width, CLASSES)),
        ]
        return nn.Sequential(OrderedDict(layers))

    return es.Task(
        model=model,
        loss=F.cross_entropy,
        train=lambda shard: Points(shard, spoiled, infinite),
        test=lambda shard: Points(shard, None, None),
        metrics={"accuracy": correct},
    )


def skips_a_layer() -> es.Task:
    """Return a task whose forward is not its layers in a row."""
    return es.Task(
        model=Skipping,
        layers=["fc1", "act1", "fc2", "fuse", "drop", "act2", "out"],
        loss=F.cross_entropy,
        train=lambda shard: Points(shard, None, None),
    )


def tied() -> es.Task:
    """Return a task whose first and last layers share their weights."""

    def model() -> nn.Module:
        chain = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))
        chain[2].weight = chain[0].weight
        return chain

    return es.Task(model=model, loss=F.cross_entropy, train=lambda shard: Points(shard, None, None))


def correct(output: Tensor, target: Tensor) -> tuple[int, int]:
    """Count the right answers: ``(right, all)``."""
    return int((output.argmax(1) == target).sum()), len(target)


class Fuse(nn.Module):
    """Passes its input on, as long as nothing is to go wrong."""

    def forward(self, x: Tensor) -> Tensor:
        if (HERE / "sleep").exists():
            time.sleep(0.05)
        if (HERE / "raise").exists():
            raise ZeroDivisionError("the fuse has blown")
        return x * float("nan") if (HERE / "nan").exists() else x


class Skipping(nn.Module):
    """Does something between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act1, self.fc2 = nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16)
        self.fuse, self.drop, self.act2, self.out = nn.Identity(), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.fc1(x)) * 2
        return self.out(self.act2(self.drop(self.fuse(self.fc2(x)))))


class Points:
    """One shard's points; the classes are those of a fixed linear map."""

    def __init__(self, shard: es.Shard, spoiled: str | None, infinite: str | None) -> None:
        held_out = shard.index < 0
        generator = np.random.default_rng((shard.seed, shard.index + 1))
        x = generator.normal(size=(HELD_OUT if held_out else SAMPLES, FEATURES)).astype(np.float32)
        self.labels = (x @ np.random.default_rng(7).normal(size=(FEATURES, CLASSES))).argmax(1)
        self.points = x * np.inf if shard.name == infinite else x
        self.broken = shard.name == spoiled

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.broken:
            raise OSError(f"sample {index} cannot be read")
        return torch.from_numpy(self.points[index]), int(self.labels[index])
