"""A Task by name; and what a name that came over the network may make a node do."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgesplit.errors import RunError, TaskError
from edgesplit.hosting import _local_reference, kit_source
from edgesplit.loading import load_task
from edgesplit.task import Task

TASK = """
from __future__ import annotations
import typing
import edgesplit as es
from edgesplit.task import Task

def nothing(*args):
    raise NotImplementedError

def make(width: int = 4, *, deep: bool = False) -> es.Task:
    made = Task(model=nothing, loss=nothing, train=nothing, clip_norm=float(width))
    return made

def also() -> Task: return make(5)
def quoted() -> "Task": return make(6)
def undeclared(): return make(7)
def wrong() -> str: return make(8)
def needs(width) -> Task: return make(width)
def three() -> Task: return 3
def broken() -> Task: raise RuntimeError("no\\nsuch   camera")

class Maker:
    def __new__(cls): return make(9)

task = make(10)
number = 7
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a task; what is imported from it is forgotten afterwards."""
    (tmp_path / "task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    importlib.invalidate_caches()


def refused(reference: str, args: Any = None, **options: Any) -> str:
    with pytest.raises(TaskError) as caught:
        load_task(reference, args, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert text[0].islower()
    return text


# --- what is found --------------------------------------------------------------------------------------------------


def test_a_file_relative_to_a_base(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    loaded = load_task("task.py:make", {"width": 12}, folder)
    assert loaded.task.clip_norm == 12.0
    assert loaded.reference == f"{folder / 'task.py'}:make"
    assert loaded.args == {"width": 12}
    assert loaded.source == TASK
    again = load_task(loaded.reference, loaded.args)
    assert again.task.clip_norm == 12.0


def test_a_task_itself_and_a_module(folder: Path) -> None:
    assert load_task("task.py:task").task.clip_norm == 10.0
    sys.path.insert(0, str(folder))
    loaded = load_task("task:task")
    assert loaded.reference == "task:task"
    assert loaded.source == TASK
    assert load_task("task.py:Maker").task.clip_norm == 9.0


def test_a_task_may_import_what_lies_beside_it(folder: Path) -> None:
    (folder / "beside_the_task.py").write_text("width = 33.0\n")
    (folder / "other.py").write_text(
        "from beside_the_task import width\n" + TASK.replace("from __future__ import annotations", "")
    )
    assert load_task("other.py:task").task.clip_norm == 10.0


def test_two_files_of_one_name_are_two_modules(folder: Path) -> None:
    (folder / "b").mkdir()
    (folder / "b" / "task.py").write_text(TASK.replace("make(10)", "make(20)"))
    assert [load_task(f"{at}task.py:task").task.clip_norm for at in ("", "b/", "")] == [10.0, 20.0, 10.0]


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reference", ["", "task.py", ":task", "task.py:", ":", "task"])
def test_what_is_no_reference(folder: Path, reference: str) -> None:
    assert refused(reference) == f"task {reference!r} is not FILE.py:NAME or MODULE:NAME"


@pytest.mark.parametrize(
    ("reference", "args", "text"),
    [
        ("absent.py:task", {}, "absent.py does not exist"),
        ("nomodule.at.all:task", {}, "ModuleNotFoundError: No module named 'nomodule'"),
        ("task.py:tusk", {}, "there is no 'tusk' in it (did you mean 'task'?)"),
        ("task.py:number", {}, "is a int, not a Task or a function that returns one"),
        ("task.py:three", {}, "returned a int, not a Task"),
        ("task.py:broken", {}, "failed: RuntimeError: no such camera"),
        ("task.py:task", {"width": 3}, "is a Task, not a function: task_args ['width'] have no effect"),
        ("task.py:make", {"wide": 3}, "does not take task_args ['wide']"),
        ("task.py:needs", {}, "does not take task_args []: missing a required argument: 'width'"),
        ("task.py:make", [1], "task_args [1], must be a mapping"),
        ("json:dumps", {}, "does not take task_args"),
        ("..:task", {}, "cannot be imported"),
        ("a b:task", {}, "cannot be imported"),
        ("edgesplit.errors:__doc__", {}, "is a str, not a Task"),
    ],
)
def test_wrong_references(folder: Path, reference: str, args: Any, text: str) -> None:
    assert text in refused(reference, args)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("import nosuchmodule", "cannot be imported: ModuleNotFoundError: No module named 'nosuchmodule'"),
        ("def broken(:", "cannot be imported: SyntaxError"),
        ("1 / 0", "cannot be imported: ZeroDivisionError"),
        ("x = '\x00'", "cannot be imported: "),
        ("import os; os.environ['no such variable']", "cannot be imported: KeyError"),
    ],
)
def test_files_that_do_not_import(folder: Path, code: str, text: str) -> None:
    (folder / "bad.py").write_text(code)
    assert text in refused("bad.py:task")
    (folder / "bad.py").write_text(TASK)
    assert load_task("bad.py:task").task.clip_norm == 10.0, "a failed import leaves nothing behind"


def test_a_directory_is_no_file(folder: Path) -> None:
    (folder / "folder.py").mkdir()
    assert "does not exist" in refused("folder.py:task")


# --- names that come over the network -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["make", "also", "quoted", "task"])
def test_declared_functions_may_be_called_by_a_stranger(folder: Path, name: str) -> None:
    assert isinstance(load_task(f"task.py:{name}", declared=True).task, Task)


@pytest.mark.parametrize("name", ["undeclared", "wrong", "Maker", "nothing", "typing", "number", "es"])
def test_whatever_else_may_not(folder: Path, name: str) -> None:
    refused(f"task.py:{name}", declared=True)


@pytest.mark.parametrize(
    "reference",
    [
        "/etc/passwd.py:task",
        "../task.py:task",
        "../../../../etc/shadow.py:task",
        "/home/someone/elsewhere/task.py:make",
        "C:\\Users\\x\\task.py:make",
        "\\\\host\\share\\task.py:make",
        "file:///tmp/task.py:make",
        "task.py:make",
    ],
)
def test_of_a_path_only_the_name_counts(folder: Path, reference: str) -> None:
    """The file of that name in the current directory, and no other; here there is one only if it is called task.py."""
    if "task.py" in reference:
        assert _local_reference({"reference": reference}) == f"task.py:{reference.rpartition(':')[2]}"
    else:
        with pytest.raises(TaskError, match="start the node with --task"):
            _local_reference({"reference": reference})


@pytest.mark.parametrize(
    "reference",
    [
        None, "", ":", "task", 7, ["task.py:make"], {}, "..py:x", ".py:x", "/.py:x", "a/.py:x", "ta sk.py:x",
        "task.py\0.py:x", "\0task.py:x", "~/x.py:x", "$HOME.py:x", "task.py/..:x", "task.py/:x", "-c.py:x", "no.py:x",
        "a-b:task", "a/b:task", "task :make", "task:make()", "task:a.b", "task:", ":make", "1task:make", "task\n:make",
        "__import__('os').system('id'):x", "os;x:y", "../task:make",
    ],
)  # fmt: skip
def test_odd_references_are_refused(folder: Path, reference: Any) -> None:
    with pytest.raises(TaskError, match="start the node with --task"):
        _local_reference({"reference": reference})


def test_a_file_that_has_nothing_to_do_with_edgesplit_is_not_run(folder: Path) -> None:
    (folder / "setup.py").write_text("raise AssertionError('it was run')\n")
    with pytest.raises(TaskError, match="is no module here that uses edgesplit"):
        _local_reference({"reference": "/somewhere/setup.py:task"})


@pytest.mark.parametrize(
    "reference",
    [
        "os:system",
        "subprocess:Popen",
        "shutil:rmtree",
        "builtins:exec",
        "sys:exit",
        "this:s",
        "antigravity:x",
        "no.such.module:x",
    ],
)
def test_a_module_that_has_nothing_to_do_with_edgesplit_is_not_imported(reference: str) -> None:
    with pytest.raises(TaskError, match="is no module here that uses edgesplit"):
        _local_reference({"reference": reference})


@pytest.mark.parametrize(
    ("reference", "args"),
    [
        ("os:system", {"command": "echo > {}"}),
        ("subprocess:run", {"args": ["touch", "{}"]}),
        ("edgesplit.hosting:subprocess", {}),
        ("edgesplit.hosting:os", {}),
        ("edgesplit.fleet:subprocess", {}),
        ("edgesplit.loading:importlib", {}),
        ("edgesplit.rundir:RunDirectory", {"path": "{}", "name": "x"}),
        ("edgesplit.checkpoint:load", {"path": "{}"}),
        ("edgesplit.loading:load_task", {"reference": "os:system", "args": {"command": "echo > {}"}}),
    ],
)
def test_an_assignment_cannot_call_what_it_likes(tmp_path: Path, reference: str, args: dict[str, Any]) -> None:
    target = tmp_path / "made"
    args = {name: value.replace("{}", str(target)) if isinstance(value, str) else value for name, value in args.items()}
    told = SimpleNamespace(task={"reference": reference, "args": args, "dtype": "float32"})
    with pytest.raises(TaskError):
        kit_source(None)(told)  # type: ignore[arg-type]
    assert not target.exists()


def test_the_dtype_of_a_stranger(folder: Path) -> None:
    for dtype in ("float16", None, "int8", "nn.Module"):
        told = SimpleNamespace(task={"reference": "task.py:make", "args": {}, "dtype": dtype})
        with pytest.raises(RunError, match="this node in float32 or float64"):
            kit_source(None)(told)  # type: ignore[arg-type]


def test_loading_needs_no_torch(folder: Path) -> None:
    code = (
        "import sys; from edgesplit.loading import load_task; load_task('task.py:task'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
