"""What comes from the network is checked: whatever it is, it is read, or refused with a FrameError."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgesplit.errors import FrameError
from edgesplit.protocol import Assignment, Commit, Report, Sheet, from_coordinator
from edgesplit.schedule import Micro, Step
from edgesplit.transport.base import Message

SHEET: dict[str, Any] = {
    "steps": [{"step": 3, "lr": 0.5, "batches": {"d": [1, 2]}, "micros": [[7, "d", 0, 2], [8, "d", 2, 3]]}],
    "evaluate": False,
}
COMMIT: dict[str, Any] = {"step": 3, "apply": True, "clip": 0.5, "loss_scale": 2.0}
REPORT: dict[str, Any] = {
    "step": 3, "finite": True, "layers": [[0, 4.0, 0.25]], "losses": [[7, 1.5, 2.0]], "culprit": None, "source": None,
    "skipped": 0, "metrics": {"d": {"accuracy": [3.0, 4.0]}},
}  # fmt: skip
ASSIGN: dict[str, Any] = {
    "plan": {}, "method": "1f1b", "window": 1, "split_backward": False, "add_replicas": False, "barrier": True,
    "seed": 0, "codecs": {"c": "fp16"}, "optimizer": None, "batch_size": 4, "loss_scale": 1.0, "shard": None,
    "evaluate": False, "task": {}, "fingerprint": "f", "emulate": None, "run": "r", "again": False,
}  # fmt: skip
KINDS = [(Sheet, SHEET), (Commit, COMMIT), (Report, REPORT), (Assignment, ASSIGN)]

atoms = (
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.sampled_from([10**400, -(10**400), 2**63])
    | st.floats()
    | st.text(max_size=3)
)
values = st.recursive(
    atoms, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something can be put in a message's place."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, part in inner for path in paths(part, (*at, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def test_round_trips() -> None:
    step = Step(3, (Micro(7, "d", 0, 2), Micro(8, "e", 0, 3)), {"d": (0, 1), "e": (-1, 0)}, 0.25)
    report = Report(3, False, {0: (4.0, 0.25)}, {7: (1.5, 2.0)}, "l1", 2, {"d": {"m": (3.0, 4.0)}})
    for message in (Sheet((step,), evaluate=True), Sheet(()), Commit(3, False, 0.5, 2.0), report):
        assert type(message).of(json.loads(json.dumps(message.meta()))) == message
    assignment = Assignment.of(ASSIGN)
    assert Assignment.of(json.loads(json.dumps(assignment.meta()))) == assignment


def test_what_is_not_finite_travels_as_null() -> None:
    report = Report(3, losses={7: (math.nan, 2.0), 8: (math.inf, 1.0)}, metrics={"d": {"m": (math.nan, 1.0)}})
    text = json.dumps(report.meta(), allow_nan=False)
    back = Report.of(json.loads(text))
    assert [math.isnan(total) for total, _ in back.losses.values()] == [True, True]
    assert math.isnan(back.metrics["d"]["m"][0])


@pytest.mark.parametrize(("kind", "good"), KINDS, ids=lambda value: getattr(value, "__name__", ""))
@given(data=st.data())
@settings(max_examples=150)
def test_a_message_with_anything_in_any_place_is_read_or_refused(kind: Any, good: Any, data: Any) -> None:
    path = data.draw(st.sampled_from(paths(good)[1:]))
    meta = replaced(good, path, data.draw(values))
    try:
        kind.of(meta)
    except FrameError:
        return


@pytest.mark.parametrize(("kind", "good"), KINDS, ids=lambda value: getattr(value, "__name__", ""))
@given(meta=st.dictionaries(st.sampled_from(sorted({*SHEET, *COMMIT, *REPORT, *ASSIGN})), values, max_size=6))
@settings(max_examples=60)
def test_any_mapping_is_read_or_refused(kind: Any, good: Any, meta: Any) -> None:
    try:
        kind.of(meta)
    except FrameError:
        return


@pytest.mark.parametrize(("kind", "good"), KINDS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_missing_key_is_refused(kind: Any, good: dict[str, Any]) -> None:
    optional = {"evaluate"} if kind is Sheet else {"culprit", "source", "optimizer", "shard", "emulate"}
    for key in sorted(set(good) - optional):
        with pytest.raises(FrameError, match=r"message is malformed"):
            kind.of({name: value for name, value in good.items() if name != key})


MALFORMED = [
    (Sheet, ("steps",), {"0": {}}),
    (Sheet, ("steps", 0), []),
    (Sheet, ("steps", 0, "step"), -1),
    (Sheet, ("steps", 0, "step"), True),
    (Sheet, ("steps", 0, "step"), 3.0),
    (Sheet, ("steps", 0, "lr"), None),
    (Sheet, ("steps", 0, "lr"), 10**400),
    (Sheet, ("steps", 0, "lr"), math.nan),
    (Sheet, ("steps", 0, "batches"), []),
    (Sheet, ("steps", 0, "batches", "d"), [0]),
    (Sheet, ("steps", 0, "batches", "d"), [0, 1.5]),
    (Sheet, ("steps", 0, "batches", "d"), [True, 0]),
    (Sheet, ("steps", 0, "batches", "d"), [0, -1]),
    (Sheet, ("steps", 0, "batches"), {}),  # a micro-batch of a device without a batch
    (Sheet, ("steps", 0, "micros", 0), [7, "d", 0]),
    (Sheet, ("steps", 0, "micros", 0), [7, "d", 3, 2]),
    (Sheet, ("steps", 0, "micros", 0), [7, 0, 0, 2]),
    (Sheet, ("steps", 0, "micros", 0), [-7, "d", 0, 2]),
    (Commit, ("apply",), 1),
    (Commit, ("clip",), math.inf),
    (Commit, ("clip",), 10**400),
    (Commit, ("loss_scale",), 0),
    (Commit, ("loss_scale",), math.nan),
    (Commit, ("loss_scale",), math.inf),
    (Report, ("finite",), None),
    (Report, ("skipped",), -1),
    (Report, ("culprit",), 3),
    (Report, ("source",), 3),
    (Report, ("layers", 0), [0, 1.0]),
    (Report, ("layers", 0), ["0", 1.0, 1.0]),
    (Report, ("layers", 0), [0, 10**400, 1.0]),
    (Report, ("losses",), {}),
    (Report, ("metrics",), []),
    (Report, ("metrics", "d"), [1, 2]),
    (Report, ("metrics", "d", "accuracy"), [1]),
    (Report, ("metrics", "d", "accuracy"), ["1", 2]),
    (Assignment, ("method",), None),
    (Assignment, ("plan",), []),
    (Assignment, ("window",), 0),
    (Assignment, ("window",), True),
    (Assignment, ("batch_size",), 0),
    (Assignment, ("codecs", "c"), 3),
    (Assignment, ("loss_scale",), 0),
    (Assignment, ("loss_scale",), math.inf),
    (Assignment, ("barrier",), 1),
    (Assignment, ("shard",), []),
    (Assignment, ("shard",), {"index": 0}),
]


@pytest.mark.parametrize(("kind", "path", "new"), MALFORMED)
def test_malformed(kind: Any, path: tuple[Any, ...], new: Any) -> None:
    good = dict(KINDS)[kind]
    kind.of(good)
    with pytest.raises(FrameError, match=r"message is malformed: "):
        kind.of(replaced(good, path, new))


def test_who_may_send_control_messages() -> None:
    assert from_coordinator(Message(kind="sheet", sender="coordinator"))
    assert not from_coordinator(Message(kind="sheet", sender="edge-1"))
