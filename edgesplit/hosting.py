"""Runs nodes in this process over a broker: what ``edgesplit node`` does."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgesplit.admission import proof_of, read_token
from edgesplit.errors import EdgesplitError, RunError, TaskError, Unreachable
from edgesplit.kit import Kit
from edgesplit.loading import load_task
from edgesplit.protocol import Assignment
from edgesplit.transport.access import Access
from edgesplit.transport.key import Key
from edgesplit.transport.lobby import find_run
from edgesplit.transport.mqtt import MqttTransport
from edgesplit.worker import Worker

IDLE_S = 2.0
"""The pause of a node that stays before it looks for the next run."""

CALL_S = 0.5
"""How often a local node calls a broker that it cannot reach: its coordinator has, so it is coming back."""

LAST_WORDS_S = 1.0
"""How long a node may take to end by itself after its stdin has closed: at a run's end both happen."""


def kit_source(task: str | None) -> Callable[[Assignment], Kit]:
    """Return what makes assignments' Tasks ready; nodes of one process share what they can.

    Args:
        task: the Task of this machine. None: a module that the assignment names, or a file of the name it says in the
            current directory; never a path that came over the network.
    """
    made: dict[str, Kit] = {}
    lock = threading.Lock()

    def kit(assignment: Assignment) -> Kit:
        told = assignment.task
        with lock:
            key = repr(sorted(told.items(), key=str))
            if key not in made:
                made[key] = _make(task or _local_reference(told), told, declared=task is None)
            return made[key]

    return kit


def _local_reference(told: Mapping[str, Any]) -> str:
    """Return what the assignment names, where that is Python code of this machine that has to do with edgesplit."""
    reference = str(told.get("reference") or "")
    place, _, name = reference.rpartition(":")
    if not place.endswith(".py"):
        if not re.fullmatch(r"[A-Za-z_][\w.]*", place) or not name.isidentifier():
            raise TaskError(f"the run names no importable task ({reference!r}): start the node with --task")
        _check_ours(_module_file(place), reference)
        return reference
    file = Path(place.replace("\\", "/")).name
    if not re.fullmatch(r"\w+\.py", file) or not Path(file).is_file():
        raise TaskError(f"the run's task is {file}:{name}, which is not in {Path.cwd()}: start the node with --task")
    _check_ours(Path(file), reference)
    return f"{file}:{name}"


def _module_file(place: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(place)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def _check_ours(file: Path | None, reference: str) -> None:
    """Refuse to import what a stranger's message names and is no task: importing runs code, too."""
    if file is None or file.suffix != ".py" or b"edgesplit" not in file.read_bytes():
        raise TaskError(
            f"the run's task {reference!r} is no module here that uses edgesplit: start the node with --task"
        )


def _make(reference: str, told: Mapping[str, Any], *, declared: bool) -> Kit:
    from edgesplit.segments.torch_kit import torch_kit, typed_chain  # only a torch node needs torch

    loaded = load_task(reference, told.get("args"), declared=declared)
    dtype = str(told.get("dtype"))
    if dtype not in {"float32", "float64"}:
        raise RunError(f"the run computes in {dtype!r}, this node in float32 or float64")
    return torch_kit(loaded.task, typed_chain(loaded.task, dtype), dtype=dtype, source=loaded.source)


def run_nodes(
    names: Sequence[str],
    *,
    broker: str | Access,
    run: str | None = None,
    task: str | None = None,
    key_file: str | None = None,
    local: bool = False,
    threads: int = 1,
    deterministic: bool = False,
    state: Path | None = None,
    keep: bool = True,
    token_file: Path | None = None,
    coordinator_s: float = 60.0,
    broker_s: float = 120.0,
    stay: bool = False,
    on_step: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Run nodes to the end of a run, each in a thread of its own.

    Args:
        names: the nodes.
        broker: its url, or the url and how to get in.
        key_file: of the run's key; None: this node signs nothing and believes all.
        run: None: the one run whose coordinator is, or comes, to this broker.
        local: end when stdin closes: the process that started this one is gone.
        threads: compute threads of torch.
        state: where the nodes keep what they need to come back after a crash, each in a folder of its own; None: in
            the user's folder for that.
        keep: they keep it at all.
        token_file: of a token that lets these nodes in where no file names them.
        stay: take the next run when one has ended, for ever.
        coordinator_s, broker_s: how long, in seconds, they stay when the coordinator or the broker is gone.
        on_step: called with each step that one of the nodes has done its part of.
        say: told, in a line each, that a run is waited for and that a node has come to it.

    Raises:
        EdgesplitError: the first node's that failed.
    """
    if local:  # first of all: what started this process may be gone before torch is loaded
        threading.Thread(target=_end_with_stdin, name="edgesplit-stdin", daemon=True).start()
    access = broker if isinstance(broker, Access) else Access(broker)
    key = Key.read(key_file) if key_file is not None else None
    token = read_token(token_file) if token_file is not None else None
    prepared = False
    while True:
        try:
            if run is None:
                say(f"waiting for a run at {access.url}")
            found = run or find_run(access, names[0])
            if not prepared:
                _prepare_torch(threads, deterministic)
                prepared = True
            _run_once(
                names,
                access,
                found,
                kit_source(task),
                key=key,
                token=token,
                state=state,
                keep=keep,
                coordinator_s=coordinator_s,
                broker_s=broker_s,
                again=local or stay,
                on_step=on_step,
                say=say,
            )
        except EdgesplitError as error:
            if not stay:
                raise
            say(f"{', '.join(names)}: {error}")
        if not stay:
            return
        gc.collect()  # what the run held is free before the next one comes
        say(f"{', '.join(names)}: idle")
        time.sleep(IDLE_S)


def _run_once(
    names: Sequence[str],
    access: Access,
    run: str,
    kit: Callable[[Assignment], Kit],
    *,
    key: Key | None,
    token: str | None,
    state: Path | None,
    keep: bool,
    coordinator_s: float,
    broker_s: float,
    again: bool,
    on_step: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """Run nodes to the end of one run; ``again``: call a broker that cannot be reached again."""
    failures: list[BaseException] = []

    def serve(name: str) -> None:
        try:
            with _connected(access, run, name, key, give_up=broker_s, again=again) as transport:
                say(f"{name}: in run {run} at {access.url}, waiting for the coordinator's word")
                Worker(
                    name,
                    transport,
                    kit,
                    facts={"pid": os.getpid()},
                    on_step=on_step,
                    state=(state or state_directory(run)) / f"node-{name}" if keep else None,
                    coordinator_s=coordinator_s,
                    prove=None if token is None else lambda life: proof_of(token, run, name, life),
                    say=say,
                ).run()
        except BaseException as error:  # noqa: BLE001 - raised below, in the main thread
            failures.append(error)

    workers = [threading.Thread(target=serve, args=(name,), name=f"edgesplit-{name}", daemon=True) for name in names]
    for worker in workers:
        worker.start()
    for worker in workers:
        while worker.is_alive():
            worker.join(0.2)
            if failures:
                break
    if failures:
        error = failures[0]
        if isinstance(error, EdgesplitError | KeyboardInterrupt):
            raise error
        raise RunError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


def _connected(access: Access, run: str, name: str, key: Key | None, *, give_up: float, again: bool) -> MqttTransport:
    """Connect a node; ``again``: for as long as it would wait for the broker later."""
    deadline = time.monotonic() + (give_up if again else 0.0)
    while True:
        try:
            return MqttTransport(access, run=run, node=name, key=key, give_up=give_up)
        except Unreachable:
            if time.monotonic() >= deadline:
                raise
            time.sleep(CALL_S)


def state_directory(run: str) -> Path:
    """Return where nodes of this user keep their state in a run: ``$XDG_STATE_HOME/edgesplit/run-NAME``."""
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return home / "edgesplit" / f"run-{run}"


def _prepare_torch(threads: int, deterministic: bool) -> None:
    try:
        import torch
    except ImportError:
        raise RunError("this node needs torch: pip install 'edgesplit[torch]'") from None
    gc.freeze()  # a full collection would go through all of torch, a tenth of a second in the middle of a step
    torch.set_num_threads(threads)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def _end_with_stdin() -> None:
    while sys.stdin.buffer.read(4096):
        pass
    time.sleep(LAST_WORDS_S)
    os._exit(3)  # nobody is left to tell
