"""Without emulation: our step time against that of torch.distributed.pipelining, in turn on the same machine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from edgesplit.assembly import build_model
from edgesplit.bench.figures import Figure, median_figure, spread
from edgesplit.bench.running import processes
from edgesplit.bench.tasks import BATCH, LR, MOMENTUM, SMALL_CNN, SMALL_CNN_CUT
from edgesplit.effects import StepDone
from edgesplit.errors import RunError
from edgesplit.experiment import Experiment
from edgesplit.loading import load_task
from edgesplit.observe.report import step_seconds
from edgesplit.placement import placement
from edgesplit.session import Session
from edgesplit.topology import Node, Topology

METHODS = ("1f1b", "gpipe")
MICROS = 4
WINDOW = 2
"""A node that waits for a gradient runs the next forward meanwhile; in what a step computes that changes nothing."""

STARTS = 3
"""Times that both sides are started: where a process lies in memory and which core it gets changes its speed."""

PAIRS = 9
"""Blocks of each side in a start, taken in turn, after one of each that is not judged."""

STEPS = 25
"""Steps of a block; the first is not judged: nothing was in the pipeline before it."""

MOST = 1.5
TASK = "edgesplit.bench.tasks:SMALL_CNN"
HOME = Topology.of([Node(name="edge", tier="edge"), Node(name="device", tier="device", parent="edge")])
SAME_STEPS, SAME_LOSS = 5, 1e-3
"""How far the losses of the first steps may be apart, relative: the two add up in another order, in float32."""


def options(method: str) -> Experiment:
    """Return the options of our side."""
    values = {
        "task": TASK,
        "topology": "none",
        "plan": {"planner": "manual", "cuts": [SMALL_CNN_CUT]},
        "pipeline": {"method": method, "micros": MICROS, "window": WINDOW},
        "batch_size": BATCH,
        "rounds": PAIRS + 1,
        "steps_per_round": STEPS,
        "optimizer": {"name": "sgd", "lr": LR, "momentum": MOMENTUM},
        "evaluate": {"every": 0},
    }
    return Experiment.from_dict(values, source="bench pipeline")


class Peer:
    """The two ranks of the peer, as processes that end with this one.

    Args:
        method: the schedule.
        folder: for the file through which the ranks meet, and their logs.
    """

    def __init__(self, method: str, folder: Path) -> None:
        self._ranks: list[subprocess.Popen[str]] = []
        self._folder = folder
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        for rank in range(2):
            with (folder / f"{rank}.log").open("w") as log:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "edgesplit.bench.gloo",
                        str(rank),
                        str(folder / "store"),
                        method,
                        str(MICROS),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=env,
                    start_new_session=True,  # Ctrl-C goes to this process, which ends them
                )
            self._ranks.append(process)

    def block(self, steps: int) -> tuple[list[float], list[float]]:
        """Take some steps; return the seconds of each but the first, and the losses."""
        for rank, process in enumerate(self._ranks):
            self._write(rank, process, f"{steps}\n")
        answers = [self._answer(rank, process) for rank, process in enumerate(self._ranks)]
        ends = [max(pair) for pair in zip(*(answer["ends"] for answer in answers), strict=True)]
        return [b - a for a, b in pairwise(ends)], answers[-1]["losses"]

    def _write(self, rank: int, process: subprocess.Popen[str], line: str) -> None:
        try:
            if process.stdin is not None:
                process.stdin.write(line)
                process.stdin.flush()
        except OSError:
            raise self._lost(rank) from None

    def _answer(self, rank: int, process: subprocess.Popen[str]) -> Any:
        line = process.stdout.readline() if process.stdout is not None else ""
        if not line:
            raise self._lost(rank)
        return json.loads(line)

    def _lost(self, rank: int) -> RunError:
        lines = (self._folder / f"{rank}.log").read_text(errors="replace").strip().splitlines()
        return RunError(
            f"rank {rank} of torch.distributed.pipelining ended: {lines[-1] if lines else 'no reason given'}"
        )

    def close(self) -> None:
        """End the ranks."""
        for process in self._ranks:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def _peer(method: str) -> Iterator[Peer]:
    with tempfile.TemporaryDirectory(prefix="edgesplit-bench-") as folder:
        peer = Peer(method, Path(folder))
        try:
            yield peer
        finally:
            peer.close()


def our_block(session: Session, done: list[StepDone]) -> list[float]:
    """Train a round; return the seconds of each step but the first."""
    before = len(done)
    session.fit(rounds=1)
    mine = {step.step for step in done[before:]}
    seconds = step_seconds(event for event in session.recorder.events if event.step in mine)
    return [seconds[step] for step in sorted(seconds)][1:]


def compare(method: str, url: str, say: Callable[[str], None]) -> tuple[Figure, dict[str, Any]]:
    """Take blocks of both sides in turn; return the figure, and the medians of the blocks in seconds."""
    ours, theirs = [], []
    for _ in range(STARTS):
        for mine, peers in _pairs(method, url):
            ours.append(mine)
            theirs.append(peers)
    say(
        f"measured:  {method} ours {1e3 * spread(ours)[1]:.1f} ms a step, "
        f"torch.distributed.pipelining {1e3 * spread(theirs)[1]:.1f} ms"
    )
    return figure(method, ours, theirs), {"ours_s": ours, "torch_s": theirs}


def _pairs(method: str, url: str) -> Iterator[tuple[float, float]]:
    """Start both sides; give the medians of their blocks in seconds, pair by pair."""
    experiment = options(method)
    model = build_model(SMALL_CNN, experiment, source=load_task(TASK).source)
    plan = placement(model, HOME, experiment)
    done: list[StepDone] = []
    with processes(url, plan, model, experiment, done.append) as session, _peer(method) as peer:
        our_block(session, done)
        _, losses = peer.block(STEPS)
        check_same_work([step.loss for step in done], losses)
        for _ in range(PAIRS):
            yield spread(our_block(session, done))[1], spread(peer.block(STEPS)[0])[1]


def figure(method: str, ours: Sequence[float], theirs: Sequence[float]) -> Figure:
    """The median of the pairs' ratios."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return median_figure(f"step_time_over_torch_pipelining_{method}", ratios, most=MOST)


def check_same_work(ours: Sequence[float], theirs: Sequence[float]) -> None:
    """Refuse a comparison of two things that did not do the same.

    Args:
        ours, theirs: losses of steps from the same weights on the same batches.

    Raises:
        RunError: those of the first steps differ.
    """
    for step, (a, b) in enumerate(zip(ours[:SAME_STEPS], theirs, strict=False)):
        if not abs(a - b) <= SAME_LOSS * abs(b):
            raise RunError(f"in step {step} our loss is {a:.6g} and the peer's {b:.6g}: they did not do the same work")


def versus(url: str, say: Callable[[str], None]) -> tuple[list[Figure], Mapping[str, Any]]:
    """Compare each of :data:`METHODS`; return the figures, and the blocks' medians by method."""
    found = {method: compare(method, url, say) for method in METHODS}
    return [made for made, _ in found.values()], {method: blocks for method, (_, blocks) in found.items()}
