"""A run on which faults are inflicted, each where a node waits for it: see ``matrix.py``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from edgesplit.observe.recorder import read_events
from tests.system.command import LONGEST_S, Command, Shell, wait_until
from tests.system.relay import Relay
from tests.system.way import MOSQUITTO, Way

STEPS, ROUNDS = 6, 9
SETTLE_S = 0.3
"""Until all others have come as far as they can."""

PATIENCE_S = 100
OPTIONS = (
    "task=gated.py:points",
    "topology=pair.yaml",
    "evaluate.where=[coordinator,device]",
    f"on_node_lost=wait={PATIENCE_S}s",
)
"""Two devices, so that there is something to aggregate, an edge and a cloud."""

NODES = ("pi-1", "pi-2", "edge", "cloud")
VICTIMS = {"device": "pi-1", "edge": "edge", "cloud": "cloud"}
"""Role -> the node that waits and suffers; where the fault is no node's, the edge waits."""

PHASES = {
    "join": ("join", 0.0),
    "forward": ("F", 0.5),
    "backward": ("B", 0.5),
    "update": ("U", 0.5),
    "commit": ("Settle", 0.5),
    "fetch": ("fetch", 1.0),
    "load": ("load", 1.0),
    "evaluate": ("E", 1.0),
}
"""Phase -> what the node is about to do, and how far through the round."""

SHIM = Path(__file__).parent / "shim"


class Hit(NamedTuple):
    """What a fault cost.

    Attributes:
        again: steps that had ended and were done again.
        down: seconds from the fault to the end of the first new step.
        lost: the same from when the fault was over: the process there again, the network mended.
        note: what else there is to say of it.
    """

    again: int
    down: float
    lost: float
    note: str = ""

    def __str__(self) -> str:
        times = f"{self.down:.1f} s in all, {self.lost:.1f} s after the fault was over"
        return f"{self.again} steps again, {times}{'; ' * bool(self.note)}{self.note}"


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        title: for people.
        inflict: does it, and returns when it is over.
        where: ``local`` (processes of the coordinator over a broker), ``hand`` (started by somebody else), or
            ``embedded``: the coordinator's own processes over its own broker.
        options: of the run.
        limits: of mosquitto, from the start.
        launcher: of the node that suffers.
        ends: part of the line with which the run ends; None: it goes on.
        steps: of a round.
        longest_s: until anything of the run counts as hanging.
    """

    title: str
    inflict: Callable[[Stage], None]
    where: str = "hand"
    options: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    ends: str | None = None
    steps: int = STEPS
    longest_s: float = LONGEST_S


class Stage:
    """A run, its broker, and its nodes where they are started by hand.

    Args:
        place: the project.
        role, fault: of the cells.
        way: to the broker.
        rounds: of the run; one more than faults.
    """

    def __init__(self, place: Shell, role: str, fault: Fault, way: Way = MOSQUITTO, rounds: int = ROUNDS) -> None:
        self.place, self.role, self.fault, self.rounds = place, role, fault, rounds
        self.victim = VICTIMS.get(role, "edge")
        self.clock = place.cwd / "clock"
        self._stack = contextlib.ExitStack()
        self._earlier = ""  # what coordinators before this one have said
        self.note = ""
        self.entry = self._stack.enter_context(way.open(place.cwd, fault.limits))
        self.broker = self.entry.broker
        self.relay = Relay(self.entry.port)
        self._stack.callback(self.relay.close)
        self.options = [*OPTIONS, f"rounds={rounds}", f"steps_per_round={fault.steps}", *fault.options]
        self.nodes: dict[str, Command] = {}
        self._hold, self._held = place.cwd / "hold", place.cwd / "held"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for command in [*self.nodes.values(), *([self.run] if hasattr(self, "run") else [])]:
            command.kill()
        self._stack.close()

    # -- processes

    def start_run(self, *options: str) -> None:
        where = [] if self.fault.where == "embedded" else self._way_in("coordinator")
        if self.fault.where == "local":
            where.append(f"local.processes={len(NODES)}")
        arguments = ["experiment.yaml", *self.options, *where, "--name", "r", "--log-format", "json", "--json"]
        self.run = self.place.start("run", *arguments, *options)

    def start_nodes(self) -> None:
        """Start the nodes by hand: the victim alone, the others in one process."""
        self.start_node(self.victim)
        self.start_node(" ".join(node for node in NODES if node != self.victim))

    def start_node(self, names: str) -> None:
        env: dict[str, str] = {}
        launcher: tuple[str, ...] = ()
        if names == self.victim and self.fault.inflict in (_clock, _clock_kill):
            path = os.pathsep.join(filter(None, (str(SHIM), os.environ.get("PYTHONPATH"))))
            env = {"EDGESPLIT_TEST_CLOCK": str(self.clock), "PYTHONPATH": path}
        if names == self.victim:
            launcher = self.fault.launcher
        options = (*self._way_in(names), "--run", "r", "--task", "gated.py:points", "--state", "kept")
        options = (*options, "--key-file", "runs/r/key", "--coordinator-s", "100")
        self.nodes[names] = self.place.start("node", *names.split(), *options, env=env, launcher=launcher)

    def _way_in(self, who: str) -> list[str]:
        """The one that suffers comes through a network of its own."""
        hit = who == (self.role if self.role == "coordinator" else self.victim)
        return self.entry.options(who.replace(" ", "-"), self.relay.port if hit else self.entry.port)

    @property
    def at_hand(self) -> Command:
        """The process that suffers."""
        return self.run if self.role == "coordinator" else self.nodes[self.victim]

    def resume(self) -> None:
        """Start the coordinator again, as a user does."""
        self._earlier += self.run.stderr
        self.start_run("--resume")
        self.run.wait_for("nodes have joined")

    # -- what was said

    @property
    def said(self) -> list[Mapping[str, Any]]:
        """The events that the run has told of, over all its lives."""
        lines = (self._earlier + self.run.stderr).splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def last_step(self) -> int:
        return max((event["step"] for event in self.said if event["event"] == "step"), default=-1)

    def came_back(self) -> int:
        return sum(event["event"] == "node" and event["state"] == "returned" for event in self.said)

    def _cuts(self) -> dict[int, int]:
        """Term -> step after which what had been done was taken back."""
        found = {}
        for path in (self.place.cwd / "runs" / "r" / "state").glob("progress-*.jsonl"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    record = json.loads(line)
                    if "cut" in record:
                        found[record["term"]] = record["cut"][1]
        return found

    # -- a fault

    def strike(self, index: int, phase: str) -> Hit:
        """Have a fault find the run in a phase of its round ``index``, and wait until a new step has ended."""
        what, part = PHASES[phase]
        first = not hasattr(self, "run")
        step = int((index + part) * self.fault.steps) if what != "join" else 0
        self.hold(f"{self.victim} {what} {step}")
        if first:
            self.start_run()
            if self.fault.where == "hand":
                wait_until("the run's key", (self.place.cwd / "runs" / "r" / "key").exists)
                self.start_nodes()
        wait_until(f"{phase} of {self.victim}", self.is_held, self.fault.longest_s)
        time.sleep(SETTLE_S)
        told, cuts, began = self.last_step(), self._cuts(), time.monotonic()
        self.fault.inflict(self)
        over = time.monotonic()
        if self.fault.ends is not None:
            self._fails(self.fault.ends)
        else:
            wait_until("a new step", lambda: self.went_on(told), self.fault.longest_s)
        now = time.monotonic()
        new = [cut for term, cut in self._cuts().items() if term not in cuts]
        return Hit(max([told - cut for cut in new], default=0), now - began, now - over, self.note)

    def hold(self, where: str) -> None:
        self._held.unlink(missing_ok=True)
        partial = self._hold.with_name("hold-next")
        partial.write_text(where)
        partial.replace(self._hold)

    def release(self) -> None:
        self._hold.unlink(missing_ok=True)

    def is_held(self) -> bool:
        self.check()
        return self._held.exists()

    def went_on(self, told: int) -> bool:
        self.check()
        return self.last_step() > told

    def check(self) -> None:
        """The run has not ended, and no node that was started by hand."""
        for command in [self.run, *self.nodes.values()]:
            status = command.poll()
            if status not in (None, 0):
                raise AssertionError(f"{command.arguments} ended with {status}:\n{command.stderr[-3000:]}")

    def _fails(self, how: str) -> None:
        """Wait for the end of all, each in one line."""
        ended = self.run.end()
        assert how in ended.error, ended.error
        self.note = ended.error
        for command in self.nodes.values():
            assert "Traceback" not in command.end().stderr

    def end(self) -> Mapping[str, Any]:
        """Wait for the end; nothing is left running or kept, and each step was told of once."""
        found = self.run.end(self.fault.longest_s).json
        assert found["rounds"] == self.rounds
        told = [event["step"] for event in self.said if event["event"] == "step"]
        assert told == sorted(set(told)), f"steps were told of as {told}"
        events = read_events(self.place.cwd / "runs" / "r" / "events.jsonl")
        assert {event.step for event in events} >= set(range(self.fault.steps * self.rounds))
        for command in self.nodes.values():
            ended = command.end()
            assert ended.status == 0, ended.stderr
        self.run.gone(2.0)
        left = [*(self.place.cwd / "kept").glob("*/*"), *(self.place.cwd / "runs" / "r" / "state").glob("node-*")]
        assert not left, f"left behind: {left}"
        return found


# What goes wrong


def _pid(stage: Stage) -> int:
    if stage.role == "coordinator":
        return stage.run.pid
    return stage.run.node_pid(stage.victim) if stage.fault.where != "hand" else stage.nodes[stage.victim].pid


def _kill(stage: Stage) -> None:
    {"broker": _kill_broker, "coordinator": _kill_coordinator, "all": _kill_all}.get(stage.role, _kill_node)(stage)


def _kill_node(stage: Stage) -> None:
    before = stage.came_back()
    os.kill(_pid(stage), signal.SIGKILL)
    stage.release()
    if stage.fault.where == "hand":
        stage.nodes[stage.victim].kill()
        stage.start_node(stage.victim)
    wait_until("the node's return", lambda: stage.came_back() > before)


def _kill_twice(stage: Stage) -> None:
    """The process that is started in the place of a killed one is killed as soon as it is there."""
    before, first = stage.came_back(), _pid(stage)
    os.kill(first, signal.SIGKILL)
    stage.release()

    def next_one() -> int | None:
        with contextlib.suppress(ValueError):  # there is none
            return pid if (pid := _pid(stage)) != first else None
        return None

    os.kill(wait_until("the next process", next_one), signal.SIGKILL)
    wait_until("the node's return", lambda: stage.came_back() > before)


def _other(stage: Stage) -> str:
    return "edge" if stage.victim == "cloud" else "cloud"


def _kill_two(stage: Stage) -> None:
    """Another node goes at the same time."""
    before, pids = stage.came_back(), [_pid(stage), stage.run.node_pid(_other(stage))]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    stage.release()
    wait_until("their return", lambda: stage.came_back() >= before + 2)


def _kill_in_recovery(stage: Stage) -> None:
    """Another node goes when it is about to go back to the point that all have kept."""
    before, other = stage.came_back(), _other(stage)
    os.kill(_pid(stage), signal.SIGKILL)
    stage.hold(f"{other} return 0")
    wait_until(f"the return of {other}", stage.is_held)
    os.kill(stage.run.node_pid(other), signal.SIGKILL)
    stage.release()
    wait_until("their return", lambda: stage.came_back() >= before + 2)


def _kill_with_broker(stage: Stage) -> None:
    """The node is started again while there is no broker."""
    before = stage.came_back()
    stage.broker.stop(signal.SIGKILL)
    os.kill(_pid(stage), signal.SIGKILL)
    stage.release()
    time.sleep(12.0)
    stage.broker.start()
    wait_until("the node's return", lambda: stage.came_back() > before)


def _down(seconds: float) -> Callable[[Stage], None]:
    def inflict(stage: Stage) -> None:
        stage.broker.stop(signal.SIGKILL)
        stage.release()
        time.sleep(seconds)
        stage.broker.start()

    return inflict


def _kill_broker(stage: Stage) -> None:
    if stage.fault.where == "embedded":
        (pid,) = (pid for pid, line in stage.run.processes().items() if "edgesplit-broker-" in line)
        os.kill(pid, signal.SIGKILL)
        stage.release()
        return
    stage.broker.stop(signal.SIGKILL)
    stage.release()
    time.sleep(1.0)
    stage.broker.start()


def _kill_coordinator(stage: Stage) -> None:
    os.kill(stage.run.pid, signal.SIGKILL)
    stage.release()
    stage.resume()


def _kill_all(stage: Stage) -> None:
    """The power goes, and comes back."""
    stage.broker.stop(signal.SIGKILL)
    for command in (stage.run, *stage.nodes.values()):
        command.kill()
    stage.release()
    stage.broker.start()
    for names in stage.nodes:
        stage.start_node(names)
    stage.resume()


def _hang(stage: Stage) -> None:
    before = stage.came_back()
    os.kill(_pid(stage), signal.SIGSTOP)
    stage.release()
    wait_until("the node's return", lambda: stage.came_back() > before)


def _pause(seconds: float) -> Callable[[Stage], None]:
    def inflict(stage: Stage) -> None:
        pid = stage.broker.pid if stage.role == "broker" else _pid(stage)
        os.kill(pid, signal.SIGSTOP)
        stage.release()
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    return inflict


def _cut(seconds: float) -> Callable[[Stage], None]:
    def inflict(stage: Stage) -> None:
        stage.relay.cut()
        stage.release()
        time.sleep(seconds)
        stage.relay.mend()

    return inflict


def _reset(seconds: float) -> Callable[[Stage], None]:
    def inflict(stage: Stage) -> None:
        stage.relay.reset()
        stage.release()
        time.sleep(seconds)
        stage.relay.mend()

    return inflict


def _clock(stage: Stage) -> None:
    """The clock is set to 1970, or right again."""
    if stage.clock.exists():
        stage.clock.unlink()
    else:
        stage.clock.touch()
    stage.release()


def _clock_kill(stage: Stage) -> None:
    stage.clock.touch()
    _kill_node(stage)


FAULTS: dict[str, Fault] = {
    "kill": Fault("`kill -9` (local processes)", _kill, "local"),
    "kill-hand": Fault("`kill -9` (nodes started by hand)", _kill),
    "kill-embedded": Fault("`kill -9`, the embedded broker", _kill, "embedded"),
    "kill-twice": Fault("`kill -9` twice in a row (local processes)", _kill_twice, "local"),
    "kill-two": Fault("`kill -9` of two nodes at once (local processes)", _kill_two, "local"),
    "kill-again": Fault("`kill -9`, and of another in the recovery (local processes)", _kill_in_recovery, "local"),
    "with-broker": Fault(
        "`kill -9` of a local process and of the broker, which is back after 12 s", _kill_with_broker, "local"
    ),
    "down-45": Fault("`kill -9`, back after 45 s", _down(45.0), "local"),
    "hang": Fault("stopped for ever, SIGSTOP (local processes)", _hang, "local"),
    "pause-3": Fault("stopped for 3 s", _pause(3.0)),
    "pause-25": Fault("stopped for 25 s", _pause(25.0)),
    "cut-1": Fault("no network for 1 s", _cut(1.0)),
    "cut-10": Fault("no network for 10 s", _cut(10.0)),
    "cut-60": Fault("no network for 60 s", _cut(60.0)),
    "reset-1": Fault("connection refused for 1 s", _reset(1.0)),
    "reset-10": Fault("connection refused for 10 s", _reset(10.0)),
    "disk": Fault(
        "full disk and `kill -9` (nodes started by hand)", _kill, launcher=("sh", "-c", 'ulimit -f 2; exec "$@"', "sh")
    ),
    "clock": Fault("clock set to 1970", _clock),
    "clock-kill": Fault("clock set to 1970 and `kill -9` (nodes started by hand)", _clock_kill),
}
