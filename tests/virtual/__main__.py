"""``python -m tests.virtual --seeds 100000``: run seeds of the virtual world, say how many a minute and which fail."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from tests.virtual.ledger import ledgers
from tests.virtual.recover import go_on, recover
from tests.virtual.trial import trial

KINDS: dict[str, Callable[[int], object]] = {"train": trial, "recover": recover, "continue": go_on, "ledgers": ledgers}
BLOCK = 100


def failures(kind: str, block: range) -> list[tuple[int, str]]:
    """The seeds of a block that fail, and how."""
    gc.disable()  # each world is a knot of references: they go block by block, which is quicker
    found = []
    for seed in block:
        try:
            KINDS[kind](seed)
        except Exception as error:  # noqa: BLE001 whatever it was, the next seed must run
            found.append((seed, f"{type(error).__name__}: {error}"))
    gc.collect()
    return found


def run(kind: str, seeds: range, jobs: int) -> Iterator[tuple[int, str]]:
    """Run all of them and yield each failure; tells on stderr how far it is."""
    blocks = [seeds[i : i + BLOCK] for i in range(0, len(seeds), BLOCK)]
    began = time.monotonic()
    with multiprocessing.Pool(jobs) as pool:
        for number, found in enumerate(pool.imap(partial(failures, kind), blocks), 1):
            yield from found
            done = min(number * BLOCK, len(seeds))
            rate = 60 * done / (time.monotonic() - began)
            print(f"\r{done} of {len(seeds)} seeds, {rate:,.0f} a minute", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.virtual", description=__doc__)
    parser.add_argument("kind", nargs="?", choices=sorted(KINDS), default="train", help="what the processes do")
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--start", type=int, default=0, help="the first")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args(arguments)
    began, failed = time.monotonic(), 0
    for seed, what in run(options.kind, range(options.start, options.start + options.seeds), options.jobs):
        failed += 1
        print(f"\nseed {seed} failed: {what}", flush=True)
    minutes = (time.monotonic() - began) / 60
    print(f"{options.seeds} seeds in {minutes:.1f} minutes, {options.seeds / minutes:,.0f} a minute: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
