"""Who is there, on a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgesplit.errors import FrameError
from edgesplit.transport.presence import CLOSED, Presence, Status

WALL = 1_764_536_400.0


def told(messages: object) -> list[tuple[str, str]]:
    return [(m.meta["state"], m.meta["reason"]) for m in messages]  # type: ignore[attr-defined]


def online(boot: int, age: float = 0.0) -> Status:
    return Status("online", boot, WALL - age)


def offline(boot: int, reason: str = "") -> Status:
    return Status("offline", boot, WALL, reason)


@pytest.fixture
def presence() -> Presence:
    return Presence(grace=2.0, silence=30.0)


def test_coming_and_leaving(presence: Presence) -> None:
    assert told(presence.heard("b", online(1), False, 0.0, WALL)) == [("online", "")]
    assert told(presence.heard("b", online(1), False, 2.0, WALL)) == []  # a heartbeat
    assert presence.last_seen("b") == 2.0
    assert told(presence.heard("b", offline(1, CLOSED), False, 3.0, WALL)) == [("offline", CLOSED)]
    assert presence.left("b")


def test_a_broken_connection_is_reported_unless_it_comes_back(presence: Presence) -> None:
    list(presence.heard("b", online(1), False, 0.0, WALL))
    assert told(presence.heard("b", offline(1), False, 1.0, WALL)) == []
    assert told(presence.heard("b", online(1), False, 2.0, WALL)) == []
    assert told(presence.tick(10.0)) == []
    list(presence.heard("b", offline(1), False, 11.0, WALL))
    assert told(presence.tick(12.9)) == []
    assert told(presence.tick(13.0)) == [("offline", "its connection broke")]
    assert not presence.left("b")
    assert told(presence.tick(99.0)) == []


def test_another_life_means_that_the_first_has_ended(presence: Presence) -> None:
    list(presence.heard("b", online(1), False, 0.0, WALL))
    messages = told(presence.heard("b", online(2), False, 1.0, WALL))
    assert messages == [("offline", "it was started again"), ("online", "")]
    assert told(presence.heard("b", offline(1), False, 1.5, WALL)) == []  # the late will of the first
    assert told(presence.tick(9.0)) == []


def test_what_lay_at_the_broker_is_looked_at_twice(presence: Presence) -> None:
    assert told(presence.heard("b", offline(7), True, 0.0, WALL)) == []
    assert told(presence.heard("b", online(1, age=60), True, 0.0, WALL)) == []
    assert told(presence.heard("b", online(1, age=60), False, 1.0, WALL)) == [("online", "")]
    assert told(presence.heard("c", online(1, age=3), True, 0.0, WALL)) == [("online", "")]


def test_silence(presence: Presence) -> None:
    list(presence.heard("b", online(1), False, 0.0, WALL))
    presence.seen("b", 20.0)
    assert told(presence.tick(49.0)) == []
    presence.reconnected(49.5)
    assert told(presence.tick(70.0)) == []
    assert told(presence.tick(80.0)) == [("offline", "nothing was heard of it for 30 s")]
    assert told(presence.heard("b", online(1), False, 81.0, WALL)) == [("online", "")]


@given(st.binary(max_size=200))
def test_only_a_status_is_read_as_one(data: bytes) -> None:
    try:
        status = Status.of_json(data)
    except FrameError:
        return
    assert Status.of_json(status.to_json()) == status


def test_a_status_survives_the_wire() -> None:
    for status in (online(2**64 - 1), offline(1, "closed")):
        assert Status.of_json(status.to_json()) == status
    for wrong in (b"{}", b"[]", b'{"state":"online","boot":"0","time":0}', b'{"state":"online","boot":5,"time":0}'):
        with pytest.raises(FrameError):
            Status.of_json(wrong)
