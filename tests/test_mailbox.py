"""What a node keeps of what its neighbours send: what it waits for, from whom it waits for it, up to a limit."""

from __future__ import annotations

import pytest

from edgesplit import mailbox
from edgesplit.codecs import Packed
from edgesplit.mailbox import Key, Mailbox
from edgesplit.transport.base import Message


def message(micro: int, sender: str = "d", kind: str = "act", stage: int = 1, term: int = 0, size: int = 8) -> Message:
    arrays = {"x": Packed("raw", "uint8", (size,), bytes(size))}
    return Message(kind=kind, sender=sender, stage=stage, micro=micro, term=term, arrays=arrays)


def act(micro: int) -> Key:
    return "act", 1, micro, 0


def expecting(*micros: int) -> Mailbox:
    box = Mailbox()
    box.expect({act(micro): ("d", "d") for micro in micros}, max(micros) + 1)
    return box


def test_what_is_awaited_is_held_until_it_is_taken() -> None:
    box = expecting(0, 1)
    box.put(message(1))
    assert box.get(act(0)) is None
    held = box.get(act(1))
    assert held is not None
    assert held.micro == 1
    box.take(act(1))
    assert box.get(act(1)) is None
    box.put(message(1))
    assert (box.get(act(1)), box.dropped) == (None, 1), "it is not awaited any more"
    box.take(act(0))
    assert len(box) == 0
    assert box._bytes == {}


@pytest.mark.parametrize(
    "wrong",
    [message(0, "e"), message(0, kind="grad"), message(0, stage=2), message(0, stage=-1)],
    ids=["sender", "kind", "stage", "no stage"],
)
def test_what_nobody_waits_for_is_dropped(wrong: Message) -> None:
    box = expecting(0)
    box.put(wrong)
    assert box.dropped == 1
    assert box.get(act(0)) is None


def test_the_first_counts() -> None:
    box = expecting(0)
    first = message(0)
    box.put(first)
    box.put(message(0, size=9))
    assert box.get(act(0)) is first


def test_what_comes_before_its_sheet_waits_for_it() -> None:
    box = Mailbox()
    for micro in range(4):
        box.put(message(micro))
    assert box.get(act(1)) is None
    box.expect({act(1): ("d", "d")}, 3)  # 0 and 2 are other nodes'
    assert box.get(act(1)) is not None
    assert box.dropped == 2
    box.take(act(1))
    assert len(box) == 1, "3 still waits"


def test_what_comes_early_has_a_limit_for_each_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "MOST_EARLY", 10)
    monkeypatch.setattr(mailbox, "MOST_BYTES", 100)
    box = Mailbox()
    for micro in range(1000):
        box.put(message(micro, size=1))
        box.put(message(micro, "e", size=60))
    assert (len(box), box.dropped) == (11, 2000 - 11)
    box.put(message(5, "f"))
    assert len(box) == 12


def test_what_is_held_of_one_device_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "MOST_BYTES", 100)
    box = expecting(0, 1, 2)
    box.expect({("act", 1, 3, 0): ("e", "other")}, 4)
    for micro in (0, 1, 2):
        box.put(message(micro, size=60))
    box.put(message(3, "e", size=60))
    assert [box.get(act(micro)) is not None for micro in range(4)] == [True, False, False, True]
    box.take(act(0))
    box.put(message(1, size=60))
    assert box.get(act(1)) is not None


def test_a_new_term_and_what_is_forgotten() -> None:
    box = expecting(0, 1)
    box.put(message(0))
    box.put(message(1, term=1))
    box.put(message(9))
    box.put(message(10, term=1))
    box.renew(1)
    assert [box.get(act(0)), box.get(act(1)) is None, len(box)] == [None, False, 4]
    box.forget({0, 1, 7})
    assert len(box) == 1
    box.clear()
    assert len(box) == 0
    box.put(message(0))
    assert len(box) == 1, "numbers may begin anew"
