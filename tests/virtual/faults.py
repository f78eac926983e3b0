"""What a network and a broker do to a run, drawn from a seed; all of it ends at some time, so that a run can end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from edgesplit.task import COORDINATOR

STRIKES = ("reset", "cut", "long cut", "broker", "broker", "broker power")


@dataclass(slots=True)
class Faults:
    """Chances by packet, and strikes by the number of the packet after which they come: so that they meet every phase.

    Attributes:
        loss, repeat, reorder, spike, garble: chances of a packet; a spike is a delay of up to ``far`` seconds.
        strikes: packet number -> what happens then.
        crashes: packet number -> the process that crashes (it loses all but its disk).
        aims: (kind, n) -> the process that crashes when the n-th message of this kind is about to be sent; None: its
            sender.
        wipe: chance that a crash takes a node's disk along.
        down: a crashed process is back after 10 to the power of something between these, in seconds.
        calm: seconds after which all is well again.
    """

    loss: float = 0.0
    repeat: float = 0.0
    reorder: float = 0.0
    spike: float = 0.0
    garble: float = 0.0
    far: float = 0.3
    strikes: dict[int, str] = field(default_factory=dict)
    crashes: dict[int, str] = field(default_factory=dict)
    aims: dict[tuple[str, int], str | None] = field(default_factory=dict)
    wipe: float = 0.0
    down: tuple[float, float] = (-2.0, 1.0)
    calm: float = 10.0

    @property
    def any(self) -> float:
        return self.loss + self.repeat + self.reorder + self.spike + self.garble


def draw_faults(rng: Random, crashing: Sequence[str] = ()) -> Faults:
    """From a quiet network to one where every third packet meets with something; ``crashing``: who may crash."""
    chances = [0.0, 0.0, 0.0, 0.01, 0.03, 0.1]
    return Faults(
        loss=rng.choice(chances),
        repeat=rng.choice(chances),
        reorder=rng.choice(chances),
        spike=rng.choice(chances),
        garble=rng.choice(chances),
        far=rng.choice([0.1, 1.0, 4.0]),
        strikes={rng.randint(1, 300): rng.choice(STRIKES) for _ in range(rng.choice([0, 0, 1, 1, 2, 3]))},
        crashes={
            rng.randint(1, 300): rng.choice(crashing) for _ in range(rng.choice([0, 1, 1, 2, 3]) if crashing else 0)
        },
        calm=rng.choice([2.0, 5.0, 10.0, 20.0]),
    )


AIMED = ("assign", "assigned", "halt", "halted", "return", "returned", "load", "loaded", "sheet", "report", "commit")
AIMED += ("fetch", "fetched", "act", "grad")


def draw_crashes(rng: Random, nodes: Sequence[str]) -> Faults:
    """A quiet network or a faulty one, and processes that crash: at any time, one soon after another, in recovery."""
    faults = draw_faults(rng) if rng.random() < 0.5 else Faults(calm=rng.choice([5.0, 10.0, 20.0]))
    everybody = [*nodes, COORDINATOR, COORDINATOR]
    last = rng.choice([60, 200, 600])
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        at = rng.randint(1, last)
        faults.crashes[at] = rng.choice(everybody)
        while rng.random() < 0.4:
            at += rng.randint(1, 60)
            faults.crashes[at] = rng.choice(everybody)
    for _ in range(rng.choice([0, 0, 1, 2, 3])):
        who = rng.choice([None, None, COORDINATOR, *nodes])
        faults.aims[rng.choice(AIMED), rng.choice([1, 1, 2, 2, 3, 4, 6, 9])] = who
    if rng.random() < 0.2:
        faults.strikes[rng.randint(1, last)] = "power cut"
    faults.wipe = rng.choice([0.0, 0.0, 0.1, 0.3])
    return faults
