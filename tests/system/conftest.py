"""For tests of whole processes."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
GUARD_S = 600
"""Ends a test that hangs: later than each of its commands is given up (``command.LONGEST_S``), which says more."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(GUARD_S))
