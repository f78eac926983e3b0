"""When a device takes part: within its hours, and within its budget of traffic. No I/O; the clock is given."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from edgesplit.errors import TopologyError

_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)\Z")


def hours_of(text: str) -> tuple[int, int]:
    """Read ``01:00-05:00``: minutes of the day at which it begins and ends; over midnight if the end is first.

    Raises:
        TopologyError: it is none, or never.
    """
    match = _HOURS.match(text)
    if match is None or match[1] + match[2] == match[3] + match[4]:
        raise TopologyError(f"hours {text!r} must be like '01:00-05:00'")
    first, last = int(match[1]) * 60 + int(match[2]), int(match[3]) * 60 + int(match[4])
    return first, last


@dataclass(frozen=True)
class Rule:
    """When one device may take part.

    Attributes:
        hours: of the day, on the coordinator's clock; None: always.
        mb: 10^6 bytes that it may send and get in a round, on average; None: any.
    """

    hours: str | None = None
    mb: float | None = None


class Attendance:
    """Keeps the devices' rules.

    Args:
        rules: device -> its rule.
        clock: seconds since the epoch.
    """

    def __init__(self, rules: Mapping[str, Rule], clock: Callable[[], float] = time.time) -> None:
        self._rules = {device: rule for device, rule in rules.items() if rule.hours or rule.mb is not None}
        self._clock = clock
        self._seen: dict[str, float] = {}  # bytes so far
        self._debt: dict[str, float] = {}  # bytes beyond what the rounds so far allow
        self._told: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._rules)

    def spent(self, total: Mapping[str, float]) -> None:
        """A round has ended; ``total``: bytes that each device has sent and got so far."""
        for device, rule in self._rules.items():
            if rule.mb is not None:
                now, before = total.get(device, 0.0), self._seen.get(device, 0.0)
                used = now - before if now >= before else now  # it was started again and counts anew
                self._seen[device] = now
                self._debt[device] = max(self._debt.get(device, 0.0) + used - rule.mb * 1e6, 0.0)

    def out(self, devices: Iterable[str]) -> dict[str, str]:
        """Return which of these devices take no part now, and why."""
        found = {}
        local = time.localtime(self._clock())
        minute = local.tm_hour * 60 + local.tm_min
        for device in devices:
            rule = self._rules.get(device, Rule())
            if rule.hours is not None and not _within(minute, *hours_of(rule.hours)):
                found[device] = f"outside its hours {rule.hours}"
            elif self._debt.get(device):
                found[device] = f"{self._debt[device] / 1e6:.3g} MB beyond its {rule.mb:g} MB a round"
        return found

    def news(self, number: int, out: Mapping[str, str]) -> list[str]:
        """Return a line for each device that takes no part from round ``number`` on, or does so again."""
        lines = [
            f"{device} takes no part from round {number} on: {why}"
            for device, why in out.items()
            if device not in self._told
        ]
        lines += [f"{device} takes part again from round {number} on" for device in self._told if device not in out]
        self._told = dict(out)
        return lines


def _within(minute: int, first: int, last: int) -> bool:
    return first <= minute < last if first < last else minute >= first or minute < last
