"""Handwritten digits: a small CNN on 5,000 real MNIST images, split unevenly over the devices."""

from __future__ import annotations

from collections import OrderedDict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgesplit as es

DATA = Path(__file__).resolve().parents[1] / "data" / "mnist_5k.npz"
HELD_OUT = 1000
HELD_OUT_SEED = 2024  # fixed, whatever the run's seed: every run is judged on the same images
LEAST = 8  # training images that even the poorest device has


def mnist(width: int = 16, dropout: float = 0.25, shift: int = 2, dtype: str = "float32") -> es.Task:
    """Build the task.

    Args:
        width: channels of the first convolution; the second has twice as many.
        dropout: share of the features dropped before the linear layer.
        shift: training images move by up to this many pixels, anew in every epoch.
        dtype: of images and parameters, ``float32`` or ``float64``.
    """

    def model() -> nn.Module:
        layers = [
            ("conv1", nn.Conv2d(1, width, 3, padding=1)),
            ("relu1", nn.ReLU()),
            ("pool1", nn.MaxPool2d(2)),
            ("conv2", nn.Conv2d(width, 2 * width, 3, padding=1)),
            ("relu2", nn.ReLU()),
            ("pool2", nn.MaxPool2d(2)),
            ("flatten", nn.Flatten()),
            ("dropout", nn.Dropout(dropout)),
            ("linear", nn.Linear(2 * width * 7 * 7, 10)),
        ]
        return nn.Sequential(OrderedDict(layers)).to(getattr(torch, dtype))

    return es.Task(
        model=model,
        loss=F.cross_entropy,
        train=lambda shard: Digits("train", shard, shift, dtype),
        test=lambda shard: Digits("test", shard, 0, dtype),
        metrics={"accuracy": correct},
    )


def correct(output: Tensor, target: Tensor) -> tuple[int, int]:
    """Count the right answers: ``(right, all)``."""
    return int((output.argmax(1) == target).sum()), len(target)


class Digits:
    """One shard's images, ``[1, 28, 28]`` each, and their labels; the same for the same seed, device and epoch."""

    def __init__(self, part: str, shard: es.Shard, shift: int, dtype: str) -> None:
        images, labels = load(part)
        mine = np.arange(len(labels)) if shard.index < 0 else partition(labels, shard)[shard.index]
        padded = np.pad(images[mine], ((0, 0), (shift, shift), (shift, shift)))
        self.images = ((padded / 255.0 - 0.1307) / 0.3081).astype(dtype)
        self.labels = labels[mine].astype(np.int64)
        self.shift, self.key = shift, (shard.seed, shard.index + 1)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the shifts of this epoch."""
        generator = np.random.default_rng((*self.key, epoch + 1))  # -1 is the test set's
        self.corners = generator.integers(0, 2 * self.shift + 1, size=(len(self), 2))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        row, column = self.corners[index]
        return self.images[index, None, row : row + 28, column : column + 28], self.labels[index]


@cache
def load(part: str) -> tuple[np.ndarray, np.ndarray]:
    """Read the training or held-out images, ``uint8 [n, 28, 28]``, and labels; every digit has the same share."""
    with np.load(DATA) as data:
        images, labels = data["images"], data["labels"]
    generator = np.random.default_rng(HELD_OUT_SEED)
    by_digit = [generator.permutation(np.flatnonzero(labels == digit)) for digit in range(10)]
    each = HELD_OUT // 10
    chosen = np.concatenate([rows[:each] if part == "test" else rows[each:] for rows in by_digit])
    return images[chosen], labels[chosen]


def partition(labels: np.ndarray, shard: es.Shard) -> list[np.ndarray]:
    """Return each device's rows. Every device computes the same lists, and alike for training and test images."""
    options = {"name": "iid", **shard.data.get("partition", {})}
    generator = np.random.default_rng((shard.seed, shard.count))
    match options:
        case {"name": "dirichlet", "alpha": float() | int() as alpha, **rest} if alpha > 0 and not rest:
            shares = generator.dirichlet([alpha] * shard.count, size=10)
        case {"name": "iid", **rest} if not rest:
            shares = np.full((10, shard.count), 1 / shard.count)
        case _:
            raise es.TaskError(f"partition {options}: give {{name: dirichlet, alpha: 0.5}} or {{name: iid}}")
    parts: list[list[int]] = [[] for _ in range(shard.count)]
    for digit, share in enumerate(shares):
        rows = generator.permutation(np.flatnonzero(labels == digit))
        ends = np.rint(np.cumsum(share[:-1]) * len(rows)).astype(int)
        for part, piece in zip(parts, np.split(rows, ends), strict=True):
            part.extend(piece.tolist())
    for part in parts:
        while len(part) < min(LEAST, len(labels) // shard.count):
            part.append(max(parts, key=len).pop())
    return [np.sort(np.array(part, dtype=np.int64)) for part in parts]
