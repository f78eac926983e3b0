"""Where a run's nodes live: threads of this process, processes of this machine, or elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from edgesplit.errors import RunError
from edgesplit.kit import Kit
from edgesplit.protocol import Assignment
from edgesplit.transport.access import Access
from edgesplit.transport.base import Transport
from edgesplit.worker import Worker

RESTARTS_S = 60.0
"""Within this time a process that is killed again and again is given up."""

LOGS_S, MOST_LOG = 5.0, 16 << 20
"""Between two looks at the length of the logs, and how many bytes one may have."""

HANG_S = 5.0
"""How long a process of this machine that is lost to the network may take to be heard again."""


class Fleet(Protocol):
    """The nodes of a run, started and ended together.

    Attributes:
        starts: it really starts them; else somebody else does, some time.
    """

    starts: bool

    def start(self, nodes: Sequence[str]) -> None:
        """Start the nodes; they join by themselves."""
        ...

    def watch(self) -> None:
        """Start again what was killed; raise RunError where a node ended that should be there."""
        ...

    def changed(self, node: str, state: str) -> None:
        """Learn what has become of a node, see :class:`NodeChanged`."""
        ...

    def stop(self, timeout: float) -> None:
        """End the nodes, by force where they do not end by themselves within ``timeout`` seconds."""
        ...


class Elsewhere:
    """Nodes that somebody else starts: ``edgesplit node NAME --broker URL``."""

    starts = False

    def start(self, nodes: Sequence[str]) -> None:
        """Nothing to start."""

    def watch(self) -> None:
        """Nothing to watch: the transport tells."""

    def changed(self, node: str, state: str) -> None:
        """Nothing to do: somebody else starts it again."""

    def stop(self, timeout: float) -> None:
        """Nothing to stop: the coordinator has told them."""


class Threads:
    """Nodes as threads of this process.

    Args:
        transport: node -> its transport (one for all, or one each).
        kit: an assignment's Task made ready.
        patience: see :class:`Worker`.
    """

    starts = True

    def __init__(
        self,
        transport: Callable[[str], Transport],
        kit: Callable[[Assignment], Kit],
        *,
        patience: float = 300.0,
    ) -> None:
        self._transport, self._kit, self._patience = transport, kit, patience
        self._threads: list[threading.Thread] = []
        self._transports: list[Transport] = []

    def start(self, nodes: Sequence[str]) -> None:
        """Start a thread for each node."""
        for node in nodes:
            facts = {"pid": os.getpid()}
            self._transports.append(self._transport(node))
            worker = Worker(node, self._transports[-1], self._kit, patience=self._patience, facts=facts)
            thread = threading.Thread(target=_run_quietly, args=(worker,), name=f"edgesplit-{node}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def watch(self) -> None:
        """A worker that fails tells the coordinator itself."""

    def changed(self, node: str, state: str) -> None:
        """Nothing to do: a thread does not get lost."""

    def stop(self, timeout: float) -> None:
        """Wait for the threads to end."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for transport in self._transports:
            transport.close()


def _run_quietly(worker: Worker) -> None:
    try:
        worker.run()
    except Exception:  # noqa: BLE001 - the coordinator has been told, and raises it
        return


class Processes:
    """Nodes as processes of this machine, each with its log file. None outlives this process: they watch their stdin.

    Args:
        command: what runs nodes, without their names: ``python -m edgesplit node --broker ...``.
        logs: directory of the log files.
        count: processes to spread the nodes over; None: one a node.
        env: additions to the environment.
        restarts: how often, in :data:`RESTARTS_S` seconds, a process that was killed is started again.
    """

    starts = True

    def __init__(
        self,
        command: Sequence[str],
        logs: Path,
        *,
        count: int | None = None,
        env: Mapping[str, str] | None = None,
        restarts: int = 0,
    ) -> None:
        self._command, self._logs, self._count, self._env = list(command), logs, count, dict(env or {})
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._restarts = restarts
        self._logs_at = 0.0
        self._started_again: dict[str, list[float]] = {}
        self._hanging: dict[str, float] = {}  # since when nothing was heard of a process that is there
        self._starting: set[str] = set()  # started again, and not heard of yet: that is slow, and does not hang

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by the names of the nodes they run."""
        return {node: process.pid for names, process in self._processes.items() for node in names.split(",")}

    def start(self, nodes: Sequence[str]) -> None:
        """Start the processes."""
        self._logs.mkdir(parents=True, exist_ok=True)
        count = min(self._count or len(nodes), len(nodes))
        for names in (nodes[i::count] for i in range(count)):
            self._start(",".join(names))

    def _start(self, names: str) -> None:
        first = names.split(",", maxsplit=1)[0]
        with (self._logs / f"{first}.log").open("ab") as log:
            self._processes[names] = subprocess.Popen(
                [*self._command, *names.split(",")],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._env},
                start_new_session=True,  # Ctrl-C goes to this process, which ends them in order
            )

    def watch(self) -> None:
        """Start again what was killed, and kill what hangs; raise RunError where a process ended otherwise."""
        self._shorten_logs()
        for names, since in list(self._hanging.items()):
            if time.monotonic() - since > HANG_S:
                del self._hanging[names]
                self._processes[names].kill()
        for names, process in list(self._processes.items()):
            if process.poll() is None:
                continue
            if process.returncode >= 0 or not self._may_restart(names):
                raise RunError(f"the process of {names} {self._ending(names)}{self._last_line(names)}")
            if process.stdin is not None:
                process.stdin.close()
            self._hanging.pop(names, None)
            self._starting.add(names)
            self._start(names)

    def _shorten_logs(self) -> None:
        """A log that has grown too long becomes ``NAME.log.1``. Processes append, so they go on at its new end."""
        if time.monotonic() < self._logs_at:
            return
        self._logs_at = time.monotonic() + LOGS_S
        for path in self._logs.glob("*.log"):
            with suppress(OSError):  # a full disk, most likely: what is there stays
                if path.stat().st_size > MOST_LOG:
                    shutil.copyfile(path, path.with_name(f"{path.name}.1"))
                    os.truncate(path, 0)

    def _may_restart(self, names: str) -> bool:
        now = time.monotonic()
        recent = [at for at in self._started_again.get(names, []) if now - at < RESTARTS_S]
        self._started_again[names] = [*recent, now]
        return len(recent) < self._restarts

    def _ending(self, names: str) -> str:
        code = self._processes[names].returncode
        if code >= 0:
            return f"ended with exit status {code}"
        often = f", as {self._restarts} times before within {RESTARTS_S:g} s" if self._restarts else ""
        return f"was killed by signal {-code}{often}"

    def changed(self, node: str, state: str) -> None:
        """A process that is there and is not heard of may hang: it is given some time.

        The network tells of a process that was killed when the next has been started, which it does not mean.
        """
        names = next((names for names in self._processes if node in names.split(",")), None)
        if names is None:
            return
        if state in {"back", "returned", "recovered"}:
            self._hanging.pop(names, None)
            self._starting.discard(names)
        elif state == "lost" and self._restarts and names not in self._starting:
            self._hanging.setdefault(names, time.monotonic())

    def _last_line(self, names: str) -> str:
        path = self._logs / f"{names.split(',', maxsplit=1)[0]}.log"
        try:
            lines = path.read_text(errors="replace").strip().splitlines()
        except OSError:
            return f" (log: {path})"
        return f": {lines[-1].removeprefix('error: ')}" if lines else f" (log: {path})"

    def stop(self, timeout: float) -> None:
        """Close their stdin, wait, then kill what is left."""
        for process in self._processes.values():
            if process.stdin is not None and not process.stdin.closed:
                try:
                    process.stdin.close()
                except OSError:
                    continue  # it has ended already
        deadline = time.monotonic() + timeout
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def node_command(
    broker: str | Access, run: str, task: str | None = None, key_file: Path | None = None, *, state: Path | None
) -> list[str]:
    """Return the command line of node processes of this machine; node names follow. No secret is in it.

    Args:
        state: where they keep theirs, each in a folder of its own; None: they keep nothing.
    """
    access = broker if isinstance(broker, Access) else Access(broker)
    command = [sys.executable, "-m", "edgesplit", "node", "--broker", access.url, "--run", run, "--local"]
    command += access.options()
    command += ["--no-state"] if state is None else ["--state", str(state)]
    if key_file is not None:
        command += ["--key-file", str(key_file)]
    return [*command, "--task", task] if task else command
