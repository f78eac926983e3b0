"""Hostile frames change nothing and cost little. ``python -m tests.fuzz`` does this for longer."""

from __future__ import annotations

import pytest

from edgesplit.errors import FrameError
from edgesplit.mailbox import Mailbox
from edgesplit.transport import guard, inbound
from edgesplit.transport.endpoint import Endpoint
from edgesplit.transport.frames import Frame
from tests.fuzz.trials import TRIALS

pytestmark = pytest.mark.usefixtures("one_thread")
COUNTS = {"allocations": 500, "a run": 1000}


@pytest.mark.parametrize("kind", list(TRIALS))
def test_nothing_comes_of_hostile_frames(kind: str) -> None:
    for seed in range(100, 102 if kind != "a run" else 101):
        TRIALS[kind](seed, COUNTS.get(kind, 600))


# --- each defence is needed: without it the same frames do harm ---


def failing(kind: str, seeds: range, count: int = 600) -> int:
    """How many seeds fail."""
    found = 0
    for seed in seeds:
        try:
            TRIALS[kind](seed, count)
        except Exception:  # noqa: BLE001 - of whatever kind
            found += 1
    return found


def test_without_a_look_at_the_signature_they_do_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard.Guard, "admits", lambda self, frame: True)
    monkeypatch.setattr(guard.Guard, "believes", lambda self, message, *, whole: True)
    assert failing("endpoint, signed", range(10), 3000)


def test_without_the_order_of_a_stream_replays_do_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbound.Inbound, "repeated", lambda self, frame: False)
    assert failing("endpoint, signed", range(5))


def test_without_a_check_of_what_is_awaited_a_node_could_be_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    def hold(self: Mailbox, message: object) -> None:
        self._held[message.kind, message.stage, message.micro, message.slice] = message  # type: ignore[attr-defined]

    monkeypatch.setattr(Mailbox, "put", hold)
    assert failing("node, members", range(5))


def test_an_error_that_is_none_of_ours_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Endpoint.received

    def received(self: Endpoint, frame: Frame, now: float) -> object:
        if frame.seq > 1 << 40:
            raise ValueError("a bug")
        return taken(self, frame, now)

    monkeypatch.setattr(Endpoint, "received", received)
    assert failing("endpoint, strangers", range(3))


def test_trials_repeat_themselves() -> None:
    with pytest.raises(FrameError):
        Endpoint("run", "a", 1).parse(b"")
    assert TRIALS["endpoint, neighbours"](7, 50) == TRIALS["endpoint, neighbours"](7, 50)
