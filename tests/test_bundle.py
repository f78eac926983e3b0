"""Several messages as one, and what is no such thing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgesplit.codecs import pack
from edgesplit.errors import FrameError
from edgesplit.transport import frames
from edgesplit.transport.base import Message
from edgesplit.transport.bundle import KIND, bundle, unbundle

NAMES = st.text("abc/0.", min_size=1, max_size=5)
WHOLE = st.integers(0, 2**40)
MESSAGES = st.builds(
    Message,
    kind=st.sampled_from(["act", "target", "grad"]),
    sender=st.just("d"),
    stage=st.integers(0, 100),
    micro=WHOLE,
    slice=st.integers(0, 100),
    term=WHOLE,
    weight=st.floats(allow_nan=False),
    version=WHOLE,
    loss_scale=st.floats(1e-9, 1e9),
    sent=st.floats(0, 2e9),
    meta=st.dictionaries(NAMES, st.lists(NAMES)),
    arrays=st.dictionaries(NAMES, st.integers(0, 3)).map(lambda d: pack({n: np.arange(k) for n, k in d.items()})),
)


def travelled(message: Message) -> Message:
    return frames.decode(memoryview(b"".join(frames.encode(message))), message.sender)


def plain(message: Message) -> tuple[object, ...]:
    arrays = {name: (p.codec, p.dtype, p.shape, bytes(p.data)) for name, p in message.arrays.items()}
    kept = ("kind", "sender", "stage", "micro", "slice", "term", "weight", "version", "loss_scale", "sent")
    return (*(getattr(message, name) for name in kept), dict(message.meta), arrays)


@given(st.lists(MESSAGES, min_size=1, max_size=4))
def test_what_travels_together_arrives_as_it_was(messages):
    found = unbundle(travelled(bundle(messages)))
    assert [plain(m) for m in found] == [plain(m) for m in messages]


def test_a_single_message_travels_as_it_is():
    message = Message(kind="act", sender="d")
    assert bundle([message]) is message
    assert unbundle(message) == [message]


ROW = ["act", 0, 0, 0, 0, 1.0, 0, 1.0, 0.0, {}]


@pytest.mark.parametrize(
    "rows",
    [None, [], {}, [1], [ROW[:-1]], [[*ROW[:-1], []]], [["act", "0", *ROW[2:]]], [["act", True, *ROW[2:]]],
     [[7, *ROW[1:]]], [["act", 0.5, *ROW[2:]]], [[KIND, *ROW[1:]]]],
)  # fmt: skip
def test_what_is_no_bundle_is_refused(rows):
    with pytest.raises(FrameError, match="bundle"):
        unbundle(Message(kind=KIND, sender="d", meta={"messages": rows}))


@pytest.mark.parametrize("name", ["x", "1/x", "-1/x", "/x", "²/x", "99999999999999999999/x", ""])
def test_an_array_of_no_message_is_refused(name):
    arrays = pack({name: np.zeros(1)})
    with pytest.raises(FrameError, match="belongs to none of the 1 messages"):
        unbundle(Message(kind=KIND, sender="d", meta={"messages": [ROW]}, arrays=arrays))
