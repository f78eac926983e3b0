"""``python -m tests.fuzz --frames 100000``: hostile frames against all that takes frames; names seeds that fail."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tests.fuzz.trials import TRIALS

BLOCK = 1250
"""Frames of one seed."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=10_000, help="how many, of all kinds together")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--only", choices=sorted(TRIALS), action="append", help="a kind; may be repeated")
    options = parser.parse_args(arguments)
    began, failed, done = time.monotonic(), 0, 0
    kinds = options.only or list(TRIALS)
    seed = options.start
    while done < options.frames:
        for kind in kinds:
            try:
                done += TRIALS[kind](seed, min(BLOCK, max(options.frames // len(kinds), 1)))
            except Exception as error:  # noqa: BLE001 - whatever it was, the next seed must run
                failed += 1
                print(f"\n{kind}: seed {seed} failed: {type(error).__name__}: {error}", flush=True)
        seed += 1
        print(f"\r{done:,} frames", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(f"{done:,} frames of {len(kinds)} kinds in {time.monotonic() - began:.0f} s: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
