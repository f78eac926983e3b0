"""The whole stack on a virtual clock: coordinator, nodes and transport over a broker and links that fail.

Hundreds of seeds here; ``python -m tests.virtual --seeds 100000`` runs as many as wanted.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from edgesplit.protocol import Send
from edgesplit.transport.base import Message
from edgesplit.transport.inbound import Inbound
from edgesplit.transport.outbound import Outbound
from edgesplit.transport.reliable import Reliable, Settings
from tests.virtual.__main__ import main
from tests.virtual.draw import METHODS_DRAWN, SHAPES, draw_tiny
from tests.virtual.faults import STRIKES, Faults
from tests.virtual.ledger import ledgers
from tests.virtual.process import Process
from tests.virtual.trial import Trial, trial
from tests.virtual.world import BROKER_PATIENCE, Client, World

FAULTS = {"loss", "repeat", "reorder", "spike", "garble", *STRIKES}


# --- many seeds -----------------------------------------------------------------------------------------------------


def test_whatever_the_network_does_a_run_computes_what_one_process_does() -> None:
    met: Counter[str] = Counter()
    methods: set[str] = set()
    for seed in range(200):
        run = trial(seed)
        met += run.world.met
        methods.add(run.case.method)
    assert set(met) == FAULTS, "every fault has been met"
    assert methods == set(METHODS_DRAWN)


def test_whoever_crashes_every_message_comes_once_and_in_order_to_each_life() -> None:
    met: Counter[str] = Counter()
    for seed in range(100):
        met += ledgers(seed).met
    assert set(met) == FAULTS | {"crash"}
    assert met["crash"] > 40


def test_all_shapes_are_drawn_and_stay_tiny() -> None:
    drawn = [draw_tiny(Random(seed)) for seed in range(200)]
    assert {tiny.shape for tiny in drawn} == set(SHAPES)
    assert all(2 <= len(tiny.case.plan.nodes()) <= 4 for tiny in drawn)
    assert {sum(len(drafts) for sheets in tiny.rounds for drafts in sheets) for tiny in drawn} == {2, 3}


# --- a seed is a run ------------------------------------------------------------------------------------------------


def digest(seeds: range) -> str:
    worlds = [trial(seed).world for seed in seeds]
    return repr([(w.packets, w.events, w.now, sorted(w.met.items())) for w in worlds])


def test_a_seed_replays_exactly_in_another_process() -> None:
    code = "from tests.test_world import digest; print(digest(range(5)))"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    root = Path(__file__).parent.parent
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.strip() == digest(range(5)) == digest(range(5))


def test_the_command_names_each_failing_seed(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    assert main(["--seeds", "3", "--start", "20"]) == 0
    assert "0 failed" in capsys.readouterr().out
    monkeypatch.setattr(Outbound, "timed_out", never)
    monkeypatch.setattr(Outbound, "again", never)
    assert main(["--seeds", "2"]) == 1
    assert "seed 0 failed: Stuck" in capsys.readouterr().out


# --- without one of its parts the transport fails -------------------------------------------------------------------


def never(self: Outbound, *args: Any) -> Iterator[int]:
    """Publish nothing, and do not ask again."""
    self.due = math.inf
    return iter(())


def never_repeated(self: Inbound, frame: Any) -> bool:
    return False


def without_hole(plain: Callable[..., Iterator[int]]) -> Callable[..., Iterator[int]]:
    return lambda self, mark, gap, now: plain(self, mark, 0, now)


def any_life(self: Reliable, frame: Any) -> Inbound:
    if frame.sender not in self._ins or self._ins[frame.sender].boot != frame.boot:
        self._ins[frame.sender] = Inbound(frame.boot, (1 << 20, 1000), self._bodies)
    return self._ins[frame.sender]


MUTATIONS: dict[str, tuple[Callable[[int], object], list[tuple[type, str, Any]]]] = {
    "de-duplication": (trial, [(Inbound, "repeated", never_repeated)]),
    "acknowledgements": (trial, [(Outbound, "acknowledged", never)]),
    "sending again": (
        trial,
        [
            (Outbound, "timed_out", never),
            (Outbound, "again", never),
            (Outbound, "acknowledged", without_hole(Outbound.acknowledged)),
        ],
    ),
    "the order of lives": (ledgers, [(Reliable, "_stream", any_life)]),
}


@pytest.mark.parametrize("without", MUTATIONS)
def test_some_seed_fails_without(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, patches = MUTATIONS[without]
    for owner, name, made in patches:
        monkeypatch.setattr(owner, name, made)
    assert first_failing(run, range(1000)) is not None


def first_failing(run: Callable[[int], object], seeds: range) -> int | None:
    for seed in seeds:
        try:
            run(seed)
        except AssertionError:  # Stuck is one too
            return seed
    return None


# --- the world itself -----------------------------------------------------------------------------------------------


class Idle:
    """Sends what it is told to, and notes what comes."""

    def __init__(self, disk: dict[str, Any]) -> None:
        self.heard: list[tuple[float, str]] = []
        self.disk = disk
        self.disk["lives"] = self.disk.get("lives", 0) + 1

    def on_start(self, now: float) -> Sequence[Send]:
        return ()

    def on_message(self, message: Message, now: float) -> Sequence[Send]:
        self.heard.append((now, message.meta.get("state", str(message.micro))))
        return ()

    def next_deadline(self) -> float:
        return math.inf

    def on_tick(self, now: float) -> Sequence[Send]:
        return ()

    def waits_for(self) -> object:
        return None

    def since(self, time: float) -> list[str]:
        return [what for when, what in self.heard if when >= time]


class Pair:
    """Two idle processes in a world without faults but those that a test makes."""

    def __init__(self) -> None:
        self.world = World(1, Faults(calm=1000.0))
        for name in ("a", "b"):
            self.world.add(name, self.maker(name))
        self.run(3.0)  # a clock that is far off is believed after a heartbeat

    def maker(self, name: str) -> Callable[[Client, dict[str, Any]], Process]:
        return lambda client, disk: Process(self.world, name, client, Idle(disk), 4096, Settings())

    def run(self, seconds: float) -> None:
        end = self.world.now + seconds
        self.world.run(lambda: self.world.now >= end, math.inf)

    def program(self, name: str) -> Idle:
        program = self.world.processes[name].program
        assert isinstance(program, Idle)
        return program

    def send(self, number: int) -> None:
        self.world.processes["a"]._send([Send("b", Message(kind="x", sender="a", micro=number))])

    def client(self, name: str) -> Client:
        return self.world.processes[name].client


def test_each_hears_that_the_other_is_there() -> None:
    pair = Pair()
    assert [what for _, what in pair.program("a").heard] == ["online"]
    assert [what for _, what in pair.program("b").heard] == ["online"]


@pytest.mark.parametrize(("power", "after"), [(False, 2.0), (True, BROKER_PATIENCE + 2.0)])
def test_a_crash_fires_the_will_and_a_new_life_has_the_disk_and_nothing_else(power: bool, after: float) -> None:
    pair = Pair()
    crashed, died = pair.world.now, pair.program("b")
    pair.world.crash("b", down=40.0, power=power)
    pair.run(39.0)
    ((when, state),) = [(when, what) for when, what in pair.program("a").heard if when > crashed]
    assert state == "offline"
    assert after <= when - crashed <= after + 1.0
    pair.run(5.0)
    assert pair.program("b") is not died
    assert pair.program("b").disk["lives"] == 2
    assert pair.program("a").since(crashed) == ["offline", "online"]


def test_what_was_sent_to_a_dead_process_reaches_its_next_life() -> None:
    pair = Pair()
    pair.world.crash("b", down=5.0)
    pair.send(1)
    pair.run(20.0)
    assert sorted(what for _, what in pair.program("b").heard) == ["1", "online"]


def test_a_short_cut_delays_and_a_long_one_ends_the_connection() -> None:
    pair = Pair()
    began, conn = pair.world.now, pair.client("a").conn
    pair.world._cut(pair.client("a"), 5.0)
    pair.send(1)
    pair.run(4.9)
    assert pair.program("b").since(began) == []
    pair.run(2.0)
    assert pair.program("b").since(began) == ["1"]
    assert pair.client("a").conn == conn
    began = pair.world.now
    pair.world._cut(pair.client("a"), 18.0)
    pair.send(2)
    pair.run(25.0)
    assert pair.program("b").since(began) == ["offline", "online", "2"]
    assert pair.client("a").conn != conn


@pytest.mark.parametrize("power", [False, True])
def test_a_restarted_broker_has_forgotten_all_and_everybody_comes_back(power: bool) -> None:
    pair = Pair()
    began = pair.world.now
    pair.world.crash_broker(3.0, forget=True, power=power)
    pair.send(1)
    assert pair.world._retained == {}
    pair.run(10.0)
    assert set(pair.world._retained) == {"a", "b"}
    assert pair.program("b").since(began) == ["1"]
    assert pair.program("a").since(began) == []


def test_a_network_that_is_worse_than_drawn_still_passes_all() -> None:
    worst = Faults(loss=0.2, repeat=0.1, reorder=0.1, spike=0.1, garble=0.1, far=2.0, calm=60.0)
    for seed in range(3):
        Trial(seed, worst).run()
