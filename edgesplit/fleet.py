"""Where a run's nodes live: threads of this process, processes of this machine, or elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from edgesplit.errors import RunError
from edgesplit.kit import Kit
from edgesplit.protocol import Assignment
from edgesplit.transport.access import Access
from edgesplit.transport.base import Transport
from edgesplit.worker import Worker


class Fleet(Protocol):
    """The nodes of a run, started and ended together."""

    def start(self, nodes: Sequence[str]) -> None:
        """Start the nodes; they join by themselves."""
        ...

    def watch(self) -> None:
        """Raise RunError where a node ended that should be there."""
        ...

    def stop(self, timeout: float) -> None:
        """End the nodes, by force where they do not end by themselves within ``timeout`` seconds."""
        ...


class Elsewhere:
    """Nodes that somebody else starts: ``edgesplit node NAME --broker URL``."""

    def start(self, nodes: Sequence[str]) -> None:
        """Nothing to start."""

    def watch(self) -> None:
        """Nothing to watch: the transport tells."""

    def stop(self, timeout: float) -> None:
        """Nothing to stop: the coordinator has told them."""


class Threads:
    """Nodes as threads of this process.

    Args:
        transport: node -> its transport (one for all, or one each).
        kit: an assignment's Task made ready.
        patience: see :class:`Worker`.
    """

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
    """

    def __init__(
        self, command: Sequence[str], logs: Path, *, count: int | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self._command, self._logs, self._count, self._env = list(command), logs, count, dict(env or {})
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by the names of the nodes they run."""
        return {node: process.pid for names, process in self._processes.items() for node in names.split(",")}

    def start(self, nodes: Sequence[str]) -> None:
        """Start the processes."""
        self._logs.mkdir(parents=True, exist_ok=True)
        count = min(self._count or len(nodes), len(nodes))
        for names in (nodes[i::count] for i in range(count)):
            with (self._logs / f"{names[0]}.log").open("wb") as log:
                process = subprocess.Popen(
                    [*self._command, *names],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self._env},
                    start_new_session=True,  # Ctrl-C goes to this process, which ends them in order
                )
            self._processes[",".join(names)] = process

    def watch(self) -> None:
        """Raise RunError where a process has ended."""
        for names, process in self._processes.items():
            if process.poll() is not None:
                raise RunError(f"the process of {names} {_ending(process.returncode)}{self._last_line(names)}")

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


def _ending(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"


def node_command(broker: str | Access, run: str, task: str | None = None, key_file: Path | None = None) -> list[str]:
    """Return the command line of node processes of this machine; node names follow. No secret is in it."""
    access = broker if isinstance(broker, Access) else Access(broker)
    command = [sys.executable, "-m", "edgesplit", "node", "--broker", access.url, "--run", run, "--local"]
    command += access.options()
    if key_file is not None:
        command += ["--key-file", str(key_file)]
    return [*command, "--task", task] if task else command
