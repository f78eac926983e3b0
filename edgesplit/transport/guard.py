"""Whose chunks are believed: the policy of a node that may or may not hold the run's key. No I/O, no clock."""

from __future__ import annotations

from edgesplit.transport.base import DATA_KINDS, LOCAL_KINDS, Message
from edgesplit.transport.frames import Frame, Proof
from edgesplit.transport.key import Key

MOST = 1024
"""Senders whose refusal is remembered."""

MOST_SIGNED = 16_384
"""Senders that have signed; more are not believed."""

DOUBT_S, DOUBTS = 2.0, 3
"""A sender is told of after so many chunks in so many seconds without one that fits: a stranger's chunk in the name of
a peer must not end a node."""

ANOTHER_KEY = "its frames are signed with another key than this node's: both need the file 'key' of this run's folder"
NO_KEY = "its frames are not signed: start it with --key-file and the file 'key' of this run's folder"
DENIED = "it takes signed frames only: start this node with --key-file and the file 'key' of this run's folder"


class Guard:
    """Decides about frames and messages.

    Args:
        key: the run's; None: this node cannot tell, and believes all.
        required: refuse every frame that is not signed; otherwise those of senders that have signed before.
    """

    def __init__(self, key: Key | None, *, required: bool) -> None:
        self.key = key
        self._required = required
        self._signed: set[str] = set()
        self._doubts: dict[str, tuple[int, float]] = {}
        self._refused: dict[str, str] = {}

    def admits(self, frame: Frame) -> bool:
        """Whether a frame is believed; what follows from a good one is remembered."""
        if self.key is None:
            return True
        if frame.proof in (Proof.HEAD, Proof.WHOLE):
            if len(self._signed) >= MOST_SIGNED and frame.sender not in self._signed:
                return False
            self._signed.add(frame.sender)
            self._doubts.pop(frame.sender, None)
            self._refused.pop(frame.sender, None)
            return True
        return frame.proof == Proof.NONE and not self._required and frame.sender not in self._signed

    def refused(self, frame: Frame, now: float) -> Message | None:
        """Return a message for the inbox about a sender whose frame was not admitted, where that is news."""
        count, since = self._doubts.get(frame.sender, (0, now))
        if frame.sender in self._signed or (not count and len(self._doubts) >= MOST):
            return None  # somebody else in its name
        self._doubts[frame.sender] = count + 1, since
        if count + 1 < DOUBTS or now - since < DOUBT_S:
            return None
        return self.tell(frame.sender, ANOTHER_KEY if frame.proof == Proof.WRONG else NO_KEY)

    def tell(self, sender: str, why: str) -> Message | None:
        """Return the message that ``sender`` and this node do not understand each other; None where it was told."""
        if self._refused.get(sender) == why or len(self._refused) >= MOST:
            return None
        self._refused[sender] = why
        return Message(kind="refused", sender=sender, meta={"reason": why})

    def believes(self, message: Message, *, whole: bool) -> bool:
        """Whether a message is: one that commands needs a signature over all of it, from whoever signs at all."""
        if message.kind in LOCAL_KINDS:
            return False
        return self.key is None or whole or message.kind in DATA_KINDS or message.sender not in self._signed
