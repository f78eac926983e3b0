"""Tells a broker that hangs up at once, again and again, from one that is away: calling it for ever helps nobody.

Two clients with one id throw each other out; under MQTT 5 a broker may say so, under 3.1.1 it only closes the
connection. No I/O, no clock.
"""

from __future__ import annotations

SHORT_S = 2.0
"""A connection that lived less than this does not count as a success."""

SHORT_LIVES = 5
"""So many of them in a row, and another client has this one's id."""

AWAY_S = 5.0
"""A broker that could not be reached for so long was away: it has not hung up at once again and again."""

FIRST_PAUSE_S, MOST_PAUSE_S = 0.05, 1.0


class Lives:
    """The connections of one client.

    Args:
        patience: seconds of nothing but short lives that are borne where it cannot be another client with the same id.
        shared: whether it can be.
    """

    def __init__(self, patience: float, *, shared: bool) -> None:
        self._patience, self._shared = patience, shared
        self._began: float | None = None
        self._ended = 0.0
        self._short = 0
        self._since = 0.0

    def began(self, now: float) -> None:
        """The broker has let this client in."""
        if now - self._ended >= AWAY_S:
            self._short = 0
        self._began = now

    def ended(self, now: float) -> None:
        """The connection is gone."""
        if self._began is None:
            return
        if now - self._began >= SHORT_S:
            self._short = 0
        self._short += now - self._began < SHORT_S
        if self._short == 1:
            self._since = self._began
        self._began, self._ended = None, now

    def hopeless(self, now: float) -> bool:
        """Whether to stop calling."""
        return self._short >= SHORT_LIVES and (self._shared or now - self._since >= self._patience)

    @property
    def pause(self) -> float:
        """Seconds to wait before the next call, after a success."""
        return float(min(FIRST_PAUSE_S * 2 ** max(self._short - SHORT_LIVES, 0), MOST_PAUSE_S))
