"""The suite over several processes: nothing that one of them skips is overlooked, and few files stay in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.distribution import MOST, pytest_xdist_auto_num_workers

ROOT = Path(__file__).parents[1]
SKIPS = "import pytest\n\n\ndef test_skips():\n    pytest.skip('why')\n"
ALLOWED = "import pytest\n\n\n@pytest.mark.gpu\ndef test_allowed():\n    pytest.skip('why')\n"
WHOLE = "import pytest\n\npytest.importorskip('no_such_module')\n"


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_skip_in_any_process_fails_the_run(tmp_path: Path, processes: str) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    for name, text in {"skips": SKIPS, "allowed": ALLOWED, "whole": WHOLE}.items():
        (tmp_path / f"test_{name}.py").write_text(text)

    def status(*files: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-n", processes, "--dist", "loadfile", "-p", "no_skips", *files],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT / ".ci")}, capture_output=True, text=True,
        )  # fmt: skip
        return done.returncode, done.stdout

    assert status("test_allowed.py")[0] == 0
    code, told = status(*(f"test_{name}.py" for name in ("skips", "allowed", "whole")))
    assert code == 1
    _, _, named = told.partition("skipped, which fails this run")
    named = named.partition("\n==")[0]
    assert set(named.split()[1:]) == {"test_skips.py::test_skips", "test_whole.py"}


@pytest.mark.parametrize(
    ("arguments", "several"),
    [
        (["tests"], True),
        (["tests/contracts"], True),
        (["tests/test_plan.py"], False),
        (["tests/test_plan.py::test_a", "tests/test_plan.py::test_b", "tests/test_lr.py", "tests/test_lr.py"], False),
        ([f"tests/test_{name}.py" for name in ("plan", "lr", "data", "node")], True),
    ],
)
def test_several_processes_where_it_is_worth_it(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], several: bool
) -> None:
    config = SimpleNamespace(args=arguments, invocation_params=SimpleNamespace(dir=ROOT))
    for cores in (1, 2, 64):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert pytest_xdist_auto_num_workers(config) == (min(cores, MOST) if several and cores > 1 else 0)
