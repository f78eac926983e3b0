"""The command line as a user types it, in a copy of ``project/``: what it says, how it ends, what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

from edgesplit import checkpoint

PROJECT = Path(__file__).parent / "project"
LONGEST_S = 180.0
"""What any command may take on a busy machine before it counts as hanging."""

SMALL = ("topology=small.yaml", "local.processes=1")
"""One device, one edge and one cloud, in one process beside the coordinator's."""

ENDLESS = ("rounds=1000", "steps_per_round=20", "checkpoint.every=1")
"""A run that is still at work when something happens to it."""


def copy_project(to: Path) -> Path:
    """Return a new copy of the project in a folder of its own."""
    return Path(shutil.copytree(PROJECT, to / f"project-{secrets.token_hex(4)}"))


def wait_until(what: str, condition: Callable[[], Any], timeout: float = LONGEST_S) -> Any:
    """Return the first true value of ``condition``."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout:g} s"
        time.sleep(0.02)
    return found


def kept(port: int, topic: str = "#") -> dict[str, bytes]:
    """Return the messages that a broker keeps."""
    found: dict[str, bytes] = {}
    client = paho.Client(CallbackAPIVersion.VERSION2)
    client.on_message = lambda _client, _data, message: found.update({message.topic: message.payload})
    client.connect("127.0.0.1", port)
    client.subscribe([(topic, 1), ("end", 1)])
    client.publish("end", b"", qos=1)  # comes back after all that is kept
    wait_until("the messages kept", lambda: client.loop(0.1) == paho.MQTT_ERR_SUCCESS and "end" in found)
    client.disconnect()
    client.loop(0.1)
    return found


@dataclass
class Command:
    """A command line and all processes that it starts, which a mark in their environment tells apart.

    Args:
        arguments: what follows ``edgesplit``.
        cwd: the project.
        env: additions to the environment.
        launcher: what starts it, in place of the interpreter; for limits on resources.
    """

    arguments: tuple[str, ...]
    cwd: Path
    env: Mapping[str, str] = field(default_factory=dict)
    launcher: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._mark = f"EDGESPLIT_TEST_MARK={secrets.token_hex(8)}"
        name, _, value = self._mark.partition("=")
        self._out, self._err = (self.cwd / f".{value}.{part}" for part in ("out", "err"))
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                [*self.launcher, sys.executable, "-m", "edgesplit", *self.arguments],
                cwd=self.cwd,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.env, name: value},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit status; None: it is at work."""
        return self._process.poll()

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    def processes(self) -> dict[int, str]:
        """Living processes of this command, itself included: pid -> command line."""
        found = {}
        for folder in Path("/proc").iterdir():
            # One that has just ended has no environment any more.
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def group(self) -> list[int]:
        """Living processes of the command's process group."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
                if int(group) == self.pid and state not in "ZX":
                    found.append(int(stat.parent.name))
        return found

    def node_pid(self, node: str) -> int:
        """Process id of the local process that runs a node, and only that one."""
        (pid,) = (pid for pid, line in self.processes().items() if " node " in line and line.split()[-1] == node)
        return pid

    def wait_for(self, text: str, count: int = 1) -> Self:
        """Wait until ``text`` stands in stderr."""
        wait_until(f"{text!r} in {self.arguments}", lambda: self.stderr.count(text) >= count or self._ended_early(text))
        return self

    def _ended_early(self, text: str) -> bool:
        ended = self._process.poll() is not None and self.stderr.count(text) == 0
        assert not ended, f"{self.arguments} ended with {self._process.returncode}, without {text!r}:\n{self.stderr}"
        return False

    def wait_step(self, step: int = 25) -> Self:
        """Wait until a step has been done, in a run with ``--log-format json``; by default one of the second round."""
        return self.wait_for(f'"event": "step", "step": {step},')

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def send_group(self, number: signal.Signals) -> None:
        """Send a signal to the process group, as a terminal does at Ctrl-C."""
        os.killpg(self.pid, number)

    def end(self, timeout: float = LONGEST_S) -> Ended:
        """Wait for the end, and for that of everything it started."""
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.arguments} still runs after {timeout:g} s:\n{self.stderr}") from None
        return Ended(self.arguments, status, self.stdout, self.stderr)

    def gone(self, timeout: float = 10.0) -> None:
        """All processes are gone; those that outlive the command must end by themselves."""
        wait_until(f"all of {self.arguments} gone", lambda: not self.processes() and not self.group(), timeout)

    def kill(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    arguments: tuple[str, ...]
    status: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object that stdout is."""
        assert self.status == 0, self.stderr
        found = json.loads(self.stdout)
        assert isinstance(found, dict)
        return found

    @property
    def error(self) -> str:
        """The one line of the error, which is the last."""
        lines = self.stderr.splitlines()
        assert [line for line in lines if line.startswith("error: ")] == lines[-1:], self.stderr
        assert "Traceback" not in self.stderr
        assert self.stdout == ""
        return lines[-1]


class Shell:
    """Starts commands in one folder, and ends what a failed test has left."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self._started: list[Command] = []

    def start(self, *arguments: str, env: Mapping[str, str] | None = None, launcher: tuple[str, ...] = ()) -> Command:
        self._started.append(Command(arguments, self.cwd, env or {}, launcher))
        return self._started[-1]

    def run(self, *arguments: str, env: Mapping[str, str] | None = None, launcher: tuple[str, ...] = ()) -> Ended:
        """Start a command and wait for its end; nothing of it is left."""
        command = self.start(*arguments, env=env, launcher=launcher)
        ended = command.end()
        command.gone(0.5)
        return ended

    def begin(self, name: str, *arguments: str, **how: Any) -> Command:
        """Start a long run of three nodes that says each step; its folder is ``runs/NAME``."""
        options = [*ENDLESS, *arguments] if arguments else [*ENDLESS, *SMALL]
        return self.start("run", "experiment.yaml", *options, "--name", name, "--log-format", "json", **how)

    def last_checkpoint(self, name: str) -> checkpoint.Checkpoint:
        """Load the newest checkpoint of a run: all its files are as they were written."""
        found = checkpoint.latest(self.cwd / "runs" / name / "checkpoints")
        assert found is not None
        return checkpoint.load(found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for command in self._started:
            command.kill()


@contextlib.contextmanager
def shell(to: Path) -> Iterator[Shell]:
    """A shell in a new copy of the project."""
    with Shell(copy_project(to)) as found:
        yield found
