"""A wrong clock for one process: where the file that EDGESPLIT_TEST_CLOCK names exists, it is 1970."""

import os
import time
from pathlib import Path

_right, _file = time.time, os.environ.get("EDGESPLIT_TEST_CLOCK")
_offset = _right()


def _wrong() -> float:
    return _right() - _offset if _file and Path(_file).exists() else _right()


if _file:
    time.time = _wrong
