"""``edgesplit.__all__`` is what can be got, and importing it needs neither torch nor flwr."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import edgesplit

NAMES = sorted(edgesplit.__all__)


def test_all_lists_exactly_what_dir_shows() -> None:
    assert len(NAMES) == len(set(NAMES))
    assert dir(edgesplit) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_name_can_be_got(name: str) -> None:
    assert not inspect.ismodule(getattr(edgesplit, name))


def test_the_type_checker_sees_the_same_names_in_the_same_homes() -> None:
    tree = ast.parse(Path(edgesplit.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == edgesplit._HOME
    assert {*seen, "__version__"} == set(NAMES)


def test_every_error_is_exported() -> None:
    from edgesplit import errors

    ours = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert ours <= set(NAMES)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        edgesplit.nothing  # noqa: B018


def test_a_module_never_hides_the_function_of_its_name() -> None:
    code = (
        "import edgesplit.plan, edgesplit.simulate, edgesplit, sys\n"
        "assert 'torch' not in sys.modules and 'flwr' not in sys.modules\n"
        "from edgesplit import plan, simulate\n"
        "assert callable(plan) and callable(simulate)\n"
        "for name in ('plan', 'simulate'):\n"
        "    assert getattr(edgesplit, name).__module__ == edgesplit._HOME[name]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
