"""What brokers do to messages, inflicted on a run: each proves that it has bitten before it ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.system.command import wait_until
from tests.system.stage import FAULTS, Fault, Stage

WIDE = 8_192
"""So many numbers of a sample that go from a device to the edge, and back: 256 KiB a micro-batch."""

BITE_S = 60.0
"""Until a fault must have bitten."""

SLOW = 100_000
FULL_RATE = 500_000
REFUSED_S = 3.0
LIMIT = 100_000
"""Bytes of a packet, or its payload, of a broker that takes less than the transport would send."""

UNTOLD = "no progress in step 3 for 10 s"
"""The end of a run whose broker takes shorter packets and has no way to say so, as with MQTT 3.1.1."""

WIDTH_300MB = 8_660
PACKET_300MB = 256 << 10

_DENIED = "topic deny edgesplit/r/edge/in"
_ALLOWED = "topic readwrite #"


def _wide(numbers: int) -> tuple[str, ...]:
    return (f"task_args.wide={numbers}",)


def _said(stage: Stage, text: str) -> int:
    return stage.entry.log.read_text(errors="replace").count(text)


def _slow(stage: Stage) -> None:
    """The one that suffers reads slowly, until a step has ended of which it has not got anything yet."""
    told, began = stage.last_step(), time.monotonic()
    stage.relay.slow(SLOW)
    stage.release()
    wait_until("a step over the slow network", lambda: stage.went_on(told + 1))
    stage.relay.mend()
    assert time.monotonic() - began > 2.0, "that was not slow"


def _full_queue(stage: Stage) -> None:
    """It reads too slowly for the queue that the broker has for it, until the broker has dropped messages."""
    before = stage.entry.dropped()
    stage.relay.slow(FULL_RATE)
    stage.release()
    wait_until("the broker drops messages", lambda: stage.check() or stage.entry.dropped() > before, BITE_S)
    stage.relay.mend()
    stage.note = f"{stage.entry.dropped() - before} messages dropped"


def _refused(seconds: float) -> Callable[[Stage], None]:
    """Nobody may write to the edge, which is not told: a rule of the broker's swallows it."""

    def inflict(stage: Stage) -> None:
        before = _said(stage, "Denied PUBLISH")
        _rules(stage, _DENIED, _ALLOWED)
        stage.release()
        wait_until("the broker refuses", lambda: _said(stage, "Denied PUBLISH") > before, BITE_S)
        if seconds:
            time.sleep(seconds)
            _rules(stage, _ALLOWED)

    return inflict


def _rules(stage: Stage, *lines: str) -> None:
    (stage.place.cwd / "rules").write_text("\n".join([*lines, ""]))
    os.kill(stage.broker.pid, signal.SIGHUP)


def _restart(stage: Stage, limits: Sequence[str] | None = None) -> None:
    stage.broker.stop(signal.SIGKILL)
    if limits is not None:
        stage.entry.limit(limits)
    stage.release()
    time.sleep(1.0)
    stage.broker.start()


def _over_long(stage: Stage) -> None:
    """The broker, which has swallowed what was too long for it at the start, is killed and comes back."""
    assert _said(stage, "Dropped too large PUBLISH"), "nothing was too long"
    _restart(stage)


def _told(stage: Stage) -> None:
    _restart(stage)


def _shrunk(line: str) -> Callable[[Stage], None]:
    """The broker comes back and takes shorter packets than before."""
    return lambda stage: _restart(stage, [line])


def _peak(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024


def _big(stage: Stage) -> None:
    """Nothing goes wrong but that the weights are a thousand times what the broker takes at once."""
    told = stage.last_step()
    stage.release()
    wait_until("the next round", lambda: stage.went_on(told), stage.fault.longest_s)
    peaks = {"coordinator": stage.run.pid, **{name: node.pid for name, node in stage.nodes.items()}}
    peaks["broker"] = stage.broker.pid
    stage.note = ", ".join(f"{name} {_peak(pid)} MB" for name, pid in peaks.items())


def _weights(limit: str, how: str = "") -> Fault:
    """300 MB of them, through packets that mosquitto's option ``limit`` keeps short."""
    return Fault(
        f"300 MB of weights, packets of 256 KiB{how}",
        _big,
        options=(f"task_args.width={WIDTH_300MB}",),
        steps=2,
        longest_s=600.0,
        limits=(f"{limit} {PACKET_300MB}",),
    )


BROKER_FAULTS = {
    "kill": FAULTS["kill-hand"],
    "kill-embedded": FAULTS["kill-embedded"],
    "cut-1": FAULTS["cut-1"],
    "reset-1": FAULTS["reset-1"],
    "slow": Fault("reads 100 kB/s for a step", _slow, options=_wide(WIDE)),
    "full-queue": Fault(
        "a queue of 2 messages: the broker drops what comes then",
        _full_queue,
        options=_wide(8 * WIDE),
        limits=("max_queued_messages 2", "max_inflight_messages 1"),
    ),
    "refused": Fault(
        "a rule refuses what is for the edge, for 3 s", _refused(REFUSED_S), limits=("acl_file {folder}/rules",)
    ),
    "over-long": Fault(
        f"payloads over {LIMIT} bytes are swallowed; `kill -9`",
        _over_long,
        options=_wide(WIDE),
        limits=(f"message_size_limit {LIMIT}",),
    ),
    "over-long-told": Fault(
        f"packets over {LIMIT} bytes end the connection; `kill -9`",
        _told,
        options=_wide(WIDE),
        limits=(f"max_packet_size {LIMIT}",),
    ),
    "shrunk": Fault(
        "comes back and swallows payloads over 30,000 bytes: the run ends with a line",
        _shrunk("message_size_limit 30000"),
        options=(*_wide(WIDE), "timeouts.step_s=10"),
        ends=UNTOLD,
    ),
    "shrunk-told": Fault(
        "comes back and ends the connection at packets over 30,000 bytes: the run ends with a line",
        _shrunk("max_packet_size 30000"),
        options=(*_wide(WIDE), "timeouts.step_s=10"),
        ends="takes packets of 30000 bytes now",
    ),
    "300MB": _weights("message_size_limit"),
    "300MB-told": _weights("max_packet_size", ", which MQTT 5 says"),
}
