"""Imports go one way, and each heavy library has one home: read from the source of every module.

A new module belongs into ``LAYERS``; the test fails until it is there.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

import edgesplit

ROOT = Path(edgesplit.__file__).parent

LAYERS = [
    {"errors"},
    {
        "task", "loading", "attendance", "topology", "schedule", "codecs", "lr", "profile", "observe.recorder",
        "observe.audit", "dispatch",
    },
    {
        "plan", "simulate", "experiment", "optimizers", "costs", "topology_file", "sheets", "roster",
        "transport.base", "transport.frames", "transport.address", "transport.access",
        "transport.key", "segments.base", "segments.random", "operations",
    },
    {
        "recovery", "planner", "methods", "orders", "weights", "splitting", "profiling", "protocol", "data",
        "replanning", "emulation", "mailbox", "offences", "member", "transport", "segments.masks", "sharing",
        "effects", "verdict", "holding", "questions", "steps", "returning", "records",
    },
    {"admission", "journal", "logbook", "kit", "node", "engine", "coordinator", "worker", "segments"},
    {"federated", "observe", "checkpoint", "conductor", "fleet", "hosting", "rundir"},
    {
        "assembly", "placement", "options", "evaluation", "training", "resuming", "callbacks", "observe.progress",
        "bringup", "keeping", "replicas",
        "session", "launch", "verify", "checking", "doctor",
    },
    {"cli", "bench", "__main__"},
]  # fmt: skip
"""From the lowest layer up. A package's name stands for those of its modules that have no line of their own."""

LAZY = {("topology", "topology_file")}
"""Imports within a function that go up on purpose: ``Topology.load`` fetches pydantic and YAML when it is called."""

HOMES = {
    "torch": {
        "splitting",
        "dispatch",
        "operations",
        "profiling",
        "segments.masks",
        "segments.torch*",
        "assembly",
        "evaluation",
        "hosting",
        "verify",
        "checking",
        "bench",
    },
    "paho": {
        "transport.client",
        "transport.quick",
        "transport.mqtt",
        "transport.lobby",
        "transport.caller",
        "bench.raw",
    },
    "iotcore": {"transport.broker"},
    "flwr": {"federated"},
    "pydantic": {"experiment", "topology_file"},
    "typer": {"cli"},
    "rich": {"cli", "observe"},
    "onnx": {"segments.onnx"},
    "onnxscript": {"segments.onnx"},
    "onnxruntime": {"segments.onnx"},
}
"""Library -> the modules and packages (``*``: all that begin so) that may import it."""


def module_name(path: Path) -> str:
    """``edgesplit/transport/mqtt.py`` is ``transport.mqtt``; a package's own file has the package's name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name: path for path in sorted(ROOT.rglob("*.py")) if (name := module_name(path))}


def layer(module: str) -> int | None:
    """The layer of the module, or of the nearest package above that has one."""
    while module:
        for level, names in enumerate(LAYERS):
            if module in names:
                return level
        module = module.rpartition(".")[0]
    return None


def inside(module: str, homes: set[str]) -> bool:
    return any(fnmatch(module, home) or module.startswith(f"{home}.") for home in homes)


def for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def running(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below, without what stands under ``if TYPE_CHECKING``; imports within functions count."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and for_types_only(child):
            for other in child.orelse:
                yield from (other, *running(other))
        else:
            yield child
            yield from running(child)


@cache
def imported(module: str) -> frozenset[str]:
    """The dotted names that the module imports; ``from a import b`` is ``a.b`` where that is a module of ours."""
    names = set()
    for node in running(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: import by the full name"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.add(full if full.removeprefix("edgesplit.") in MODULES else str(node.module))
    return frozenset(names)


def ours(module: str) -> set[str]:
    """The modules of edgesplit that the module imports."""
    names = {name.removeprefix("edgesplit.") for name in imported(module) if name.startswith("edgesplit.")}
    return {name for name in names if name != module and (module, name) not in LAZY}


def test_every_module_has_a_layer() -> None:
    homeless = [name for name in MODULES if layer(name) is None and not is_empty(name)]
    assert not homeless, f"give {homeless} a place in LAYERS"


def is_empty(module: str) -> bool:
    """A package's file that only says what the package is."""
    body = ast.parse(MODULES[module].read_text(encoding="utf-8")).body
    return all(
        isinstance(node, ast.Expr) or (isinstance(node, ast.ImportFrom) and node.module == "__future__")
        for node in body
    )


@pytest.mark.parametrize("module", [name for name in MODULES if layer(name) is not None])
def test_a_module_imports_nothing_from_above(module: str) -> None:
    mine = layer(module)
    above = {name for name in ours(module) if (level := layer(name)) is not None and mine is not None and level > mine}
    assert not above, f"{module} (layer {mine}) imports {above}"


@pytest.mark.parametrize("module", list(MODULES))
def test_no_module_imports_the_package_itself(module: str) -> None:
    assert "edgesplit" not in imported(module) or module == "cli", "import from the module, not from edgesplit"


def test_no_modules_import_each_other_in_a_circle() -> None:
    graphlib.TopologicalSorter({name: ours(name) for name in MODULES}).prepare()


@pytest.mark.parametrize(("library", "homes"), list(HOMES.items()))
def test_a_heavy_library_has_one_home(library: str, homes: set[str]) -> None:
    guests = {
        module
        for module in MODULES
        if library in {name.partition(".")[0] for name in imported(module)} and not inside(module, homes)
    }
    assert not guests, f"{library} belongs to {homes}, but {guests} import it"
