"""``edgesplit bench transport``: our transport against raw paho, in turn, each end in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from edgesplit.bench.broker import own_mosquitto
from edgesplit.bench.figures import Figure, machine, median_figure, report, spread
from edgesplit.errors import RunError
from edgesplit.launch import KEEP_MEMORY
from edgesplit.transport.broker import EmbeddedBroker

KIB, MIB = 1 << 10, 1 << 20
STARTS = 3
"""Times that both sides are started: where a process lies in memory and which core it gets changes its speed."""

PAIRS, MANY_PAIRS = 5, 15
"""Blocks of each side in a start, taken in turn, after one of each that is not judged: of long ones, of short ones.

A stream of small arrays has short blocks: in a longer one ours, whose senders never wait, would fill its memory."""

TRIPS = "trips"
STREAM = "stream"


@dataclass(frozen=True, slots=True)
class Case:
    """What a block is.

    Attributes:
        name: as in the figures' names.
        what: :data:`STREAM` one way, or :data:`TRIPS` there and back.
        size: bytes of an array.
        count: arrays of a block.
        bound: of the ratio: the least of a stream's, the most of a round trip's; None: it has none.
        pairs: of blocks in a start.
    """

    name: str
    what: str
    size: int
    count: int
    bound: float | None
    pairs: int = PAIRS


MOSQUITTO = (
    Case("64KiB", STREAM, 64 * KIB, 512, 0.75, MANY_PAIRS),
    Case("1MiB", STREAM, MIB, 48, 0.85),
    Case("16MiB", STREAM, 16 * MIB, 4, 0.85),
    Case("1KiB", TRIPS, KIB, 60, 1.5, MANY_PAIRS),
)
EMBEDDED = (Case("1KiB", TRIPS, KIB, 60, None, MANY_PAIRS),)
MOST_TRIP_MS = 1.0

Block = tuple[float, float]
"""Seconds of a block of ours and of raw paho's: of a round trip (the median) or of the whole stream."""


class Side:
    """Both ends of one side, as processes that end with this one.

    Args:
        side: ``ours``, ``raw`` or ``raw-quick-ack``.
        chunk: bytes of a packet's payload; 0: the transport finds it out.
    """

    def __init__(self, side: str, url: str, folder: Path, chunk: int = 0) -> None:
        self._side, self._folder = side, folder
        self._ends: dict[str, subprocess.Popen[str]] = {}
        run = f"bench-{secrets.token_hex(4)}"
        try:
            for node, peer in ("ba", "ab"):
                self._ends[node] = self._start(node, peer, url, run, chunk)
                self.chunk = int(self._answer(node)["chunk"])
        except BaseException:
            self.close()
            raise

    def block(self, case: Case) -> float:
        """Return a block's seconds."""
        taken = self._asked([case.what, case.size, case.count])
        return spread(taken)[1] if case.what == TRIPS else float(taken)

    def close(self) -> None:
        """End both ends."""
        for process in self._ends.values():
            process.kill()
            process.communicate()

    def _start(self, node: str, peer: str, url: str, run: str, chunk: int) -> subprocess.Popen[str]:
        with self._log(node).open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "edgesplit.bench.ends", self._side, node, peer, url, run, str(chunk)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **KEEP_MEMORY},  # as nodes are started
                start_new_session=True,  # Ctrl-C goes to this process, which ends them
            )

    def _asked(self, question: Any) -> Any:
        stdin = _pipe(self._ends["a"].stdin)
        try:
            stdin.write(json.dumps(question) + "\n")
            stdin.flush()
        except OSError:
            raise self._lost("a") from None
        return self._answer("a")

    def _answer(self, node: str) -> Any:
        line = _pipe(self._ends[node].stdout).readline()
        if not line:
            raise self._lost(node)
        return json.loads(line)

    def _log(self, node: str) -> Path:
        return self._folder / f"{self._side}-{node}.log"

    def _lost(self, node: str) -> RunError:
        lines = [line for n in "ab" if self._log(n).exists() for line in self._log(n).read_text().strip().splitlines()]
        return RunError(f"end {node} of {self._side} ended: {lines[-1] if lines else 'no reason given'}")


def _pipe(pipe: Any) -> TextIO:
    if pipe is None:
        raise RunError("a process without a pipe")
    return pipe  # type: ignore[no-any-return]


@contextlib.contextmanager
def sides(url: str, raw: str) -> Iterator[tuple[Side, Side]]:
    """Start both sides at a broker."""
    with tempfile.TemporaryDirectory(prefix="edgesplit-bench-") as folder, contextlib.ExitStack() as stack:
        ours = Side("ours", url, Path(folder))
        stack.callback(ours.close)
        theirs = Side(raw, url, Path(folder), ours.chunk)
        stack.callback(theirs.close)
        yield ours, theirs


def compare(url: str, cases: Sequence[Case], raw: str, say: Callable[[str], None]) -> dict[str, list[Block]]:
    """Take blocks of both sides in turn; return the pairs by case."""
    found: dict[str, list[Block]] = {case.name: [] for case in cases}
    for start in range(STARTS):
        with sides(url, raw) as (ours, theirs):
            for case in cases:
                found[case.name] += pairs(ours.block, theirs.block, case)
        shown = [_shown(case, found[case.name][-case.pairs :]) for case in cases]
        say(f"start {start + 1} of {STARTS}: {', '.join(shown)}")
    return found


def pairs(ours: Callable[[Case], float], theirs: Callable[[Case], float], case: Case) -> Iterator[Block]:
    """Take a block of each that is not judged, then pairs, of which every second begins with the other side."""
    ours(case), theirs(case)
    for number in range(case.pairs):
        if number % 2:
            second = theirs(case)
            yield ours(case), second
        else:
            yield ours(case), theirs(case)


def _shown(case: Case, blocks: Sequence[Block]) -> str:
    ours, raw = (spread(side)[1] for side in zip(*blocks, strict=True))
    if case.what == TRIPS:
        return f"{case.name} there and back {1e3 * ours:.3f} ms, raw paho {1e3 * raw:.3f} ms"
    size = case.size * case.count / 1e6
    return f"{case.name} {size / ours:.0f} MB/s, raw paho {size / raw:.0f} MB/s"


def figures(broker: str, cases: Sequence[Case], found: Mapping[str, Sequence[Block]]) -> list[Figure]:
    """The medians of pairs' ratios with their bounds, and what both sides reached."""
    made = []
    for case in cases:
        blocks = found[case.name]
        if case.what == STREAM:
            ratios, size = [raw / ours for ours, raw in blocks], case.size * case.count / 1e6
            made.append(median_figure(f"throughput_ratio_{case.name}_{broker}", ratios, least=case.bound))
            for who, side in zip(("ours", "raw"), zip(*blocks, strict=True), strict=True):
                speeds = [size / seconds for seconds in side]
                made.append(median_figure(f"throughput_mb_per_s_{case.name}_{broker}_{who}", speeds, "MB/s"))
        else:
            ratios = [ours / raw for ours, raw in blocks]
            for most, who, side in zip((MOST_TRIP_MS, None), ("", "_raw"), zip(*blocks, strict=True), strict=True):
                times = [1e3 * seconds for seconds in side]
                made.append(median_figure(f"round_trip_{case.name}_ms_{broker}{who}", times, "ms", most=most))
            made.append(median_figure(f"round_trip_{case.name}_ratio_{broker}", ratios, most=case.bound))
    return made


def measure() -> dict[str, Any]:
    """Measure all figures, in about a minute. What happens is said on stderr; no process is left behind.

    Returns:
        What ``edgesplit bench`` prints.

    Raises:
        TransportError: mosquitto or the embedded broker is not installed, or does not start.
        RunError: an end does not get what was sent.
    """
    where = machine()
    with own_mosquitto() as (name, url):
        _say(name)
        over_mosquitto = compare(url, MOSQUITTO, "raw", _say)
    with EmbeddedBroker() as broker:
        _say("the embedded broker")
        over_embedded = compare(broker.url, EMBEDDED, "raw-quick-ack", _say)
    made = [*figures("mosquitto", MOSQUITTO, over_mosquitto), *figures("embedded", EMBEDDED, over_embedded)]
    details = {"broker": name, "mosquitto_s": over_mosquitto, "embedded_s": over_embedded}
    return report(made, details, where, STARTS * PAIRS)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
