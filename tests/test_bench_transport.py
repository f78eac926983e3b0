"""The transport's benchmark: that both sides do the same work; nothing here judges a time."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgesplit.bench import transport as bench
from edgesplit.bench.application import DONE, KINDS, LAST, PING, STREAM, WRONG, Array, answer, stream, trips
from edgesplit.bench.raw import Flying, Raw, Reassembly, acknowledgement, packets
from edgesplit.bench.transport import Case, Side, figures, pairs, sides
from edgesplit.codecs import pack
from edgesplit.errors import RunError, TransportTimeout
from edgesplit.transport import frames
from edgesplit.transport.base import Message
from edgesplit.transport.reliable import Settings
from tests.brokers import Mosquitto

DOCS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
SIZES = [1 << 10, 64 << 10, 1 << 20, 16 << 20, 262_031 - 96 - 128, 262_031]


def numbers(size: int) -> Array:
    return np.arange(size, dtype=np.uint32).astype(np.uint8)


# --- the same packets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [STREAM, PING])
def test_raw_packets_are_as_long_as_the_transports(kind: str, size: int) -> None:
    message = Message(kind=kind, sender="a", arrays=pack({"x": numbers(size)}, "raw"))
    ours = [len(chunk.data) for chunk in frames.split(frames.encode(message), 262_031, "a")]
    assert [len(packet) for packet in packets(kind, numbers(size), 262_031, "a")] == ours


def test_acknowledgements_are_as_long_as_the_transports() -> None:
    assert len(acknowledgement(7, "a")) == len(frames.empty_chunk("a").data)


@pytest.mark.parametrize("size", [1, 1000, 5000, 100_000])
def test_arrays_are_put_together_again(size: int) -> None:
    receiving = Reassembly("b")
    for kind in (STREAM, LAST):
        data, whole = numbers(size), None
        for packet in packets(kind, data, 1200, "a"):
            assert whole is None, "it was whole before its last packet"
            whole = receiving.take(packet)
        assert whole is not None
        assert whole[0] == kind
        np.testing.assert_array_equal(whole[1], data)


def test_as_much_flies_as_the_transports_window_allows() -> None:
    flying = Flying(Settings(window_bytes=1000, window_frames=3))
    for _ in range(3):
        flying.add(300)
    added = threading.Event()

    def fourth() -> None:
        flying.add(300)
        added.set()

    thread = threading.Thread(target=fourth)
    thread.start()
    assert not added.wait(0.1), "three packets are all that may fly"
    flying.acknowledged(1)
    assert added.wait(5.0)
    thread.join()
    flying.acknowledged(4)
    flying.add(5000)  # one always may


def test_acknowledgements_come_every_quarter_of_the_window() -> None:
    settings, receiving = Settings(), Reassembly("b")
    assert [receiving.owes(settings.window_bytes // 4) for _ in range(2)] == [True, True]
    owed = [receiving.owes(100) for _ in range(settings.window_frames // 2)]
    assert [number for number, due in enumerate(owed, 1) if due] == [64, 128]
    assert receiving.taken == 130


# --- the application ------------------------------------------------------------------------------------------------


class There:
    """The other end, where :func:`answer` runs."""

    chunk = 0

    def __init__(self, there: queue.SimpleQueue[tuple[str, Array] | None], back: queue.SimpleQueue[tuple[str, Array]]):
        self._there, self._back = there, back

    def send(self, kind: str, data: Array) -> None:
        self._back.put((kind, data))

    def receive(self, timeout: float) -> tuple[str, Array]:
        if (item := self._there.get()) is None:
            raise EOFError
        return item


class Paired:
    """An end whose other end answers in a thread; what goes there may be spoilt."""

    chunk = 0

    def __init__(self, spoil: Callable[[str, Array], Array] = lambda kind, data: data) -> None:
        self._there: queue.SimpleQueue[tuple[str, Array] | None] = queue.SimpleQueue()
        self._back: queue.SimpleQueue[tuple[str, Array]] = queue.SimpleQueue()
        self._spoil = spoil
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        with contextlib.suppress(EOFError):
            answer(There(self._there, self._back))

    def send(self, kind: str, data: Array) -> None:
        self._there.put((kind, self._spoil(kind, data.copy())))

    def receive(self, timeout: float) -> tuple[str, Array]:
        return self._back.get(timeout=timeout)

    def close(self) -> None:
        self._there.put(None)
        self._thread.join()


def test_a_stream_and_round_trips_take_time() -> None:
    end = Paired()
    assert stream(end, 100, 300) > 0
    assert stream(end, 100, 1) > 0
    assert len(trips(end, 100, 5)) == 5
    end.close()


def test_what_is_lost_on_the_way_is_noticed() -> None:
    end = Paired(lambda kind, data: data if kind == LAST else data * 0 + 7)
    with pytest.raises(RunError, match=f"answers '{WRONG}', not '{DONE}'"):
        stream(end, 100, 3)
    with pytest.raises(RunError, match="round trip 0 brought something else back"):
        trips(end, 100, 1)
    end.close()


# --- figures --------------------------------------------------------------------------------------------------------


def found_by(cases: tuple[Case, ...]) -> dict[str, list[bench.Block]]:
    return {case.name: [(2.0, 1.0), (4.0, 3.0), (1.0, 1.0)] for case in cases}


def test_the_documented_figures_are_those_that_are_measured() -> None:
    made = figures("mosquitto", bench.MOSQUITTO, found_by(bench.MOSQUITTO))
    made += figures("embedded", bench.EMBEDDED, found_by(bench.EMBEDDED))
    bounds = {figure.name: figure.bound for figure in made if figure.bound != "none"}
    assert bounds == {
        "throughput_ratio_64KiB_mosquitto": "at least 0.75",
        "throughput_ratio_1MiB_mosquitto": "at least 0.85",
        "throughput_ratio_16MiB_mosquitto": "at least 0.85",
        "round_trip_1KiB_ms_mosquitto": "at most 1",
        "round_trip_1KiB_ratio_mosquitto": "at most 1.5",
        "round_trip_1KiB_ms_embedded": "at most 1",
    }
    text = DOCS.read_text(encoding="utf-8")
    names = [figure.name for figure in made]
    assert names == [name for name in names if f"`{name}`" in text]
    assert len(names) == len(set(names))


def test_ratios_are_those_of_pairs() -> None:
    made = {f.name: f for f in figures("x", bench.MOSQUITTO, found_by(bench.MOSQUITTO))}
    assert made["throughput_ratio_1MiB_x"].value == 0.75  # raw's seconds over ours: 0.5, 0.75, 1
    assert made["throughput_mb_per_s_1MiB_x_ours"].value == pytest.approx(48 * (1 << 20) / 2e6)
    assert made["round_trip_1KiB_ratio_x"].value == pytest.approx(4 / 3)
    assert made["round_trip_1KiB_ms_x"].value == 2000.0
    assert made["round_trip_1KiB_ms_x_raw"].value == 1000.0


@pytest.mark.parametrize("case", bench.MOSQUITTO, ids=lambda case: case.name)
def test_there_are_nine_pairs_and_neither_side_is_always_first(case: Case) -> None:
    order: list[str] = []

    def block(side: str, seconds: float) -> Callable[[Case], float]:
        return lambda case: order.append(side) or seconds  # type: ignore[func-returns-value]

    found = list(pairs(block("ours", 1.0), block("raw", 2.0), case))
    assert found == [(1.0, 2.0)] * case.pairs
    assert bench.STARTS * case.pairs >= 9
    assert order[:2] == ["ours", "raw"], "a block of each that is not judged"
    turns = [["ours", "raw"], ["raw", "ours"]] * case.pairs
    assert order[2:] == [side for turn in turns[: case.pairs] for side in turn]


# --- processes ------------------------------------------------------------------------------------------------------


@pytest.mark.system
def test_both_sides_of_a_block(mosquitto: Mosquitto) -> None:
    with sides(mosquitto.url, "raw-quick-ack") as (ours, theirs):
        assert ours.chunk == theirs.chunk > 200_000
        for side in (ours, theirs):
            assert side.block(Case("x", bench.STREAM, 600_000, 30, None)) > 0
            assert side.block(Case("x", bench.TRIPS, 1000, 5, None)) > 0


@pytest.mark.system
def test_an_end_that_ends_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"end b of ours ended: .*cannot reach the broker"):
        Side("ours", "mqtt://127.0.0.1:1", tmp_path)


def test_raw_paho_waits_for_what_does_not_come(mosquitto: Mosquitto) -> None:
    end = Raw("b", "a", mosquitto.url, "alone", chunk=1000)
    with pytest.raises(TransportTimeout, match=r"waited 0\.1 s for the other end"):
        end.receive(0.1)
    end._client.disconnect()
    end._client.loop_stop()
    assert set(KINDS) >= {STREAM, LAST, PING}
