"""What the coordinator publishes: which samples of whose data each step takes, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from edgesplit.errors import ExperimentError
from edgesplit.schedule import Micro, Step


@dataclass(frozen=True, slots=True)
class Share:
    """A device's part of a step: a batch of ``samples`` samples, the ``index``-th of its ``epoch``."""

    epoch: int
    index: int
    samples: int


@dataclass(frozen=True, slots=True)
class Draft:
    """A step before its micro-batches have numbers, so that it can be issued again under new ones."""

    step: int
    shares: Mapping[str, Share]
    lr: float = 1.0


@dataclass(frozen=True, slots=True)
class Cutting:
    """How a device's batch is cut: into ``micros`` near-equal parts, or into parts of ``micro_batch_size``."""

    micros: int | None = 1
    micro_batch_size: int | None = None

    def bounds(self, samples: int) -> list[tuple[int, int]]:
        """Return (start, stop) of each micro-batch; none is empty, the larger ones come first.

        >>> Cutting(micros=3).bounds(8)
        [(0, 3), (3, 6), (6, 8)]
        """
        if self.micro_batch_size is not None:
            size = self.micro_batch_size
            return [(start, min(start + size, samples)) for start in range(0, samples, size)]
        count = min(self.micros or 1, samples)
        cuts = [0]
        for i in range(count):
            cuts.append(cuts[-1] + samples // count + (i < samples % count))
        return list(pairwise(cuts))


def number(
    draft: Draft,
    cutting: Cutting,
    first: int,
    devices: Sequence[str],
    routes: Callable[[Sequence[Micro]], Sequence[int]] | None = None,
) -> Step:
    """Give a draft's micro-batches numbers from ``first`` on, dealt so that devices alternate by their shares.

    Args:
        routes: which way each of them takes; None: the plan's own.
    """
    bounds = {d: b for d in devices if d in draft.shares and (b := cutting.bounds(draft.shares[d].samples))}
    place = {device: index for index, device in enumerate(bounds)}
    deal = sorted(
        ((turn + 0.5) / len(parts), place[device], device, part)
        for device, parts in bounds.items()
        for turn, part in enumerate(parts)
    )
    micros = tuple(Micro(first + i, device, *part) for i, (_, _, device, part) in enumerate(deal))
    if routes is not None:
        micros = tuple(micro._replace(route=way) for micro, way in zip(micros, routes(micros), strict=True))
    batches = {device: (draft.shares[device].epoch, draft.shares[device].index) for device in bounds}
    return Step(draft.step, micros, batches, draft.lr)


@dataclass
class Agenda:
    """Hands out the devices' batches, step by step, in an order that depends on nothing but what was handed out.

    Attributes:
        sizes: device -> samples in each batch of one epoch (one list for all epochs).
        lr: global step -> factor.
        done: device -> batches handed out so far.
        step: the next global step.
    """

    sizes: dict[str, Sequence[int]]
    lr: Callable[[int], float] = lambda step: 1.0
    done: dict[str, int] = field(default_factory=dict)
    step: int = 0

    def __post_init__(self) -> None:
        if not any(map(any, self.sizes.values())):
            raise ExperimentError(f"no device has any samples ({', '.join(self.sizes)}): nothing can be trained")

    def round(self, devices: Sequence[str], *, steps: int | None = None, epochs: int | None = None) -> list[Draft]:
        """Draw up a round: ``steps`` steps in which every device takes part, or ``epochs`` passes of each device."""
        devices = [device for device in devices if self.sizes[device]]
        if steps is not None:
            return [self._draft(devices) for _ in range(steps if devices else 0)]
        ends = {d: self.done.get(d, 0) + (epochs or 1) * len(self.sizes[d]) for d in devices}
        drafts = []
        while active := [device for device in devices if self.done.get(device, 0) < ends[device]]:
            drafts.append(self._draft(active))
        return drafts

    def _draft(self, devices: Sequence[str]) -> Draft:
        shares = {}
        for device in devices:
            turn = self.done.get(device, 0)
            epoch, index = divmod(turn, len(self.sizes[device]))
            shares[device] = Share(epoch, index, self.sizes[device][index])
            self.done[device] = turn + 1
        draft = Draft(self.step, shares, self.lr(self.step))
        self.step += 1
        return draft


def evaluation(sizes: Mapping[str, Sequence[int]], step: int) -> Iterator[Draft]:
    """Draw up one pass over the devices' test sets (epoch -1 names the test set)."""
    for index in range(max(map(len, sizes.values()), default=0)):
        shares = {d: Share(-1, index, s[index]) for d, s in sizes.items() if index < len(s)}
        yield Draft(step + index, shares)
