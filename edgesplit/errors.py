"""The errors of edgesplit: everything that is raised on purpose.

EdgesplitError
├── TaskError            the user's model, data or loss is not what it must be
├── TopologyError        the file that says who is where
├── PlanError            which layers run where
├── ExperimentError      the experiment file, or options that do not go together
├── ScheduleError        an order that cannot run
├── CodecError           an array that cannot be encoded, or bytes that cannot be decoded
├── FrameError           bytes from the network that are not a frame of ours
├── RunError             a run that began and cannot go on
│   ├── CoordinatorGone  a node gives a run up, for nobody leads it
│   └── Spoiled          what a device sent cannot be computed with
└── TransportError       the network below us
    ├── Unreachable      nobody answers at an address
    ├── TransportTimeout something waited for did not come
    └── NodeLost         a node that was there is gone

A message is lower case, says what is wrong with the values, then what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EdgesplitError(Exception):
    """Base of all errors that edgesplit raises on purpose."""


class TaskError(EdgesplitError):
    """The model, data or loss of a Task is not what it must be."""


class TopologyError(EdgesplitError):
    """A topology that describes no fleet."""


class PlanError(EdgesplitError):
    """A placement of layers that cannot be."""


class ExperimentError(EdgesplitError):
    """An experiment file, or a combination of options, that cannot be run."""


class ScheduleError(EdgesplitError):
    """An order of actions that cannot be run: some action waits for one that comes after it."""


class CodecError(EdgesplitError):
    """An array that cannot be encoded, or bytes that cannot be decoded."""


class FrameError(EdgesplitError):
    """Bytes from the network that are not a frame of ours."""


class RunError(EdgesplitError):
    """A run that began and cannot go on."""


class Spoiled(RunError):
    """What a device sent cannot be computed with.

    Attributes:
        device: whose micro-batch it is.
        step: the global step.
    """

    def __init__(self, device: str, step: int, what: str) -> None:
        super().__init__(what)
        self.device, self.step = device, step


class TransportError(EdgesplitError):
    """The network below could not do what was asked."""


class Unreachable(TransportError):
    """No connection to the broker, or it has broken while a node joined: another try may do better."""


class TransportTimeout(TransportError):
    """Something waited for did not come in time; the message names it."""


class NodeLost(TransportError):
    """A node that took part is gone."""


class CoordinatorGone(RunError):
    """The coordinator has not been there for so long that a node gives the run up."""


class Within:
    """Context: an exception of the user's own code gets a note of the place that called it, see :func:`notes`.

    Example:
        >>> with Within("layer 'conv1'"):
        ...     output = module(value)
    """

    def __init__(self, place: str) -> None:
        self._place = place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, EdgesplitError | StopIteration):
            error.add_note(f"in {self._place}")


def notes(error: BaseException) -> str:
    """Return the error's notes, as ``" in layer 'conv1'"``; empty where it has none."""
    return "".join(f" {note}" for note in getattr(error, "__notes__", ()))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the known word nearest to ``word``, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
