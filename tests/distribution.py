"""How the suite spreads over processes: see ``scripts/test``. A file stays in one process, with what its tests share.

The processes take files in the order in which they come, so the order decides who waits at the end, and what meets.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

MOST = 4
"""Processes: the longest file takes longer than a fifth of the others."""

WORTH_IT = 4
"""Files from which on several processes are quicker than one: each imports torch."""

LONGEST = "tests/system/test_faults.py"


@pytest.hookimpl(optionalhook=True)  # for whoever has no pytest-xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Say how many processes ``-n auto`` is; 0: this one."""
    chosen = {Path(config.invocation_params.dir, argument.partition("::")[0]) for argument in config.args}
    if len(chosen) < WORTH_IT and not any(path.is_dir() for path in chosen):
        return 0
    cores = len(os.sched_getaffinity(0))
    return min(cores, MOST) if cores > 1 else 0


def in_order(items: list[pytest.Item]) -> None:
    """Have the longest file come first and others that start processes last, so that two of them seldom meet."""

    def turn(item: pytest.Item) -> int:
        if item.nodeid.startswith(LONGEST):
            return 0
        return 2 if item.get_closest_marker("system") else 1

    items.sort(key=turn)
