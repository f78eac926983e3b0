"""What the benchmarks train: small convolutional networks on random images that are made before the clock runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgesplit.task import Task

BATCH = 48
"""Samples of a step."""

KEPT = 8
"""Different batches, which steps take in turn."""

LR, MOMENTUM = 0.01, 0.9


class Batches:
    """A shard: an epoch of :data:`KEPT` batches, the same in every epoch.

    Args:
        shape: of an image.
        seed: of what is in them.
    """

    def __init__(self, shape: tuple[int, ...], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._made = [
            (torch.randn(BATCH, *shape, generator=generator), torch.randint(0, 10, (BATCH,), generator=generator))
            for _ in range(KEPT)
        ]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._made)

    def of_step(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the batch that a run's step ``step`` takes."""
        return self._made[step % KEPT]


SMALL_CNN_IMAGE = (3, 32, 32)
SMALL_CNN_CUT = 3
"""The comparison with torch.distributed.pipelining: its images, and the layer with which the second stage begins."""


def small_cnn_layers() -> list[nn.Module]:
    """The layers of the comparison's model."""
    return [
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 8 * 8, 10),
    ]


CHAIN_IMAGE = (3, 28, 28)
CHAIN_CUTS = (1, 2)
"""The emulated chain: its images, and the layers with which the second and the third stage begin."""


def chain_layers() -> list[nn.Module]:
    """The layers of the emulated chain's model: three blocks and a classifier."""
    widths = ((3, 16), (16, 32), (32, 48))
    blocks = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)) for a, b in widths]
    return [*blocks, nn.Sequential(nn.Flatten(), nn.Linear(48 * 3 * 3, 10))]


DEMO_IMAGE = (1, 28, 28)
DEMO_CUTS = (3, 6)
"""The network of ``demos/mnist``: its images, and the layers with which the edge's and the cloud's stage begin."""


def demo_layers(width: int = 8) -> list[nn.Module]:
    """The layers of the demo's model."""
    return [
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(2 * width * 7 * 7, 10),
    ]


SHARED_IMAGE = (3, 16, 16)
SHARED_CUTS = (1,)
"""The emulated edges that share: so little real work that eight nodes fit on a small machine."""


def shared_layers() -> list[nn.Module]:
    """The layers of the model whose second half four edges hold."""
    first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return [first, nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 8 * 8, 10))]


def _task(layers: Callable[[], list[nn.Module]], image: tuple[int, ...]) -> Task:
    return Task(
        model=lambda: nn.Sequential(*layers()),
        loss=F.cross_entropy,
        train=lambda shard: Batches(image, shard.seed),
    )


SMALL_CNN = _task(small_cnn_layers, SMALL_CNN_IMAGE)
CHAIN = _task(chain_layers, CHAIN_IMAGE)
DEMO = _task(demo_layers, DEMO_IMAGE)
SHARED = _task(shared_layers, SHARED_IMAGE)
