"""Finds a Task by name: ``path/task.py:name`` or ``package.module:name``. Code comes by import, never by message."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from edgesplit.errors import TaskError, did_you_mean
from edgesplit.task import Task


class Loaded(NamedTuple):
    """A Task and what it was loaded from.

    Attributes:
        task: the Task.
        reference: with which another process finds it (an absolute path where it was a path).
        args: what its function was called with.
        source: text of the file that defines it, for the fingerprint.
    """

    task: Task
    reference: str
    args: Mapping[str, Any]
    source: str


def load_task(
    reference: str, args: Mapping[str, Any] | None = None, base: Path | None = None, *, declared: bool = False
) -> Loaded:
    """Import a Task, or call the function that returns one.

    Args:
        reference: ``module:name`` or ``file.py:name``.
        args: arguments of the function.
        base: the directory that a relative path starts from.
        declared: call a function only where it says that it returns a Task: for a name and arguments that came over
            the network, which must not be able to call whatever they like.

    Raises:
        TaskError: no such file, module or name, or what is there is no Task; the cause is in the message.
    """
    if not isinstance(args, Mapping | None):
        raise TaskError(f"task {reference!r} has task_args {args!r}, must be a mapping")
    args = dict(args or {})
    place, colon, name = reference.rpartition(":")
    if not colon or not place or not name:
        raise TaskError(f"task {reference!r} is not FILE.py:NAME or MODULE:NAME")
    module, reference = _import(place, name, base)
    if not hasattr(module, name):
        near = did_you_mean(name, [n for n in vars(module) if not n.startswith("_")])
        raise TaskError(f"task {reference!r}: there is no {name!r} in it{near}")
    found = getattr(module, name)
    if isinstance(found, Task):
        if args:
            raise TaskError(f"task {reference!r} is a Task, not a function: task_args {sorted(args)} have no effect")
        task = found
    elif declared and not _declares_task(found):
        raise TaskError(f"task {reference!r} is not declared to be one: write `def {name}(...) -> Task:`")
    elif callable(found):
        task = _call(found, args, reference)
    else:
        raise TaskError(f"task {reference!r} is a {type(found).__name__}, not a Task or a function that returns one")
    return Loaded(task, reference, args, _source(module))


def _import(place: str, name: str, base: Path | None) -> tuple[ModuleType, str]:
    if place.endswith(".py"):
        path = ((base or Path.cwd()) / place).resolve()
        if not path.is_file():
            raise TaskError(f"task file {path} does not exist")
        return _import_file(path), f"{path}:{name}"
    try:
        return importlib.import_module(place), f"{place}:{name}"
    except Exception as error:
        raise TaskError(f"task {place}:{name} cannot be imported: {_short(error)}") from error


def _import_file(path: Path) -> ModuleType:
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # so that the task can import the files beside it
    key = f"edgesplit_task_{path.stem}_{abs(hash(str(path)))}"
    spec = importlib.util.spec_from_file_location(key, path)
    if spec is None or spec.loader is None:
        raise TaskError(f"task file {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[key]
        raise TaskError(f"task file {path} cannot be imported: {_short(error)}") from error
    return module


def _declares_task(found: Any) -> bool:
    """Whether it is a function whose return annotation is :class:`Task`, or its name as its module knows it."""
    if not inspect.isfunction(found):
        return False
    written = found.__annotations__.get("return")
    if isinstance(written, str):
        first, *rest = written.strip("'\"").split(".")
        written = found.__globals__.get(first)
        for name in rest:
            written = getattr(written, name, None)
    return written is Task


def _call(function: Any, args: Mapping[str, Any], reference: str) -> Task:
    try:
        inspect.signature(function).bind(**args)
    except TypeError as error:
        raise TaskError(f"task {reference!r} does not take task_args {sorted(args)}: {error}") from None
    try:
        task = function(**args)
    except Exception as error:
        raise TaskError(f"task {reference!r} failed: {_short(error)}") from error
    if not isinstance(task, Task):
        raise TaskError(f"task {reference!r} returned a {type(task).__name__}, not a Task")
    return task


def _source(module: ModuleType) -> str:
    try:
        return inspect.getsource(module)
    except OSError:
        return ""  # a module without a file: the structure alone must do for the fingerprint


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
