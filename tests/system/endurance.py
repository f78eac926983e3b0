"""Many rounds with a fault every few of them: ``python -m tests.system.endurance --rounds 2000 --every 20``.

Prints memory, descriptors and threads of the processes that live throughout, in the first and in the last quarter, and
whether the final weights are those of the undisturbed run. Exits with 1 where they are not, or where something grows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).parent / "project"
VICTIMS = ("pi-1", "edge-1", "pi-2", "edge-2")
"""Killed in turn, and then the embedded broker; the others live throughout, as the coordinator does.

So many that none is killed more than five times a minute, where 20 rounds take five seconds: the run would end.
"""

MOST_GROWTH = 1.03
"""Of the memory of a process, between the second quarter (all has been allocated by then) and the last."""


class Sample(NamedTuple):
    """What a process holds: resident memory in kB, open descriptors, threads."""

    memory: int
    files: int
    threads: int


def sample(pid: int) -> Sample | None:
    """Look at a process; None: it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        files = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - only their number counts
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if "VmRSS" not in fields:
        return None
    return Sample(int(fields["VmRSS"].split()[0]), files, int(fields["Threads"]))


def children(pid: int) -> dict[str, int]:
    """The processes below one: nodes by name, the broker as ``broker``."""
    found = {}
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == pid:
            names = [word for word in words if word == "cloud" or word.startswith(("pi-", "edge-"))]
            found[names[0] if "node" in words and names else "broker"] = int(path.name)
    return found


def start(folder: Path, name: str, rounds: int) -> subprocess.Popen[bytes]:
    """Begin a run of tiny rounds."""
    command = [sys.executable, "-m", "edgesplit", "run", "experiment.yaml", "--name", name, "--json"]
    options = [f"rounds={rounds}", "steps_per_round=2", "evaluate.every=0", "checkpoint={every: 20, keep: 2}"]
    with (folder / f"{name}.log").open("wb") as log, (folder / f"{name}.json").open("wb") as out:
        return subprocess.Popen([*command, *options], cwd=folder, stdout=out, stderr=log)


def weights(folder: Path, name: str, run: subprocess.Popen[bytes]) -> str | None:
    """Wait for the end of a run and return the hash of its weights; None: it failed, and its last words are said."""
    if run.wait():
        sys.stderr.write((folder / f"{name}.log").read_text()[-4000:])
        return None
    return str(json.loads((folder / f"{name}.json").read_text())["weights"])


def rounds_done(folder: Path, name: str) -> int:
    """How many times weights were given out, from the name of the newest progress file."""
    found = [int(path.stem.partition("-")[2]) for path in (folder / "runs" / name / "state").glob("progress-*.jsonl")]
    return max(found, default=1) - 1


def disturb(folder: Path, name: str, run: subprocess.Popen[bytes], every: int) -> tuple[dict[str, list[Sample]], int]:
    """Kill something every few rounds, and look at everybody, until the run ends."""
    seen: dict[str, list[Sample]] = {}
    faults, due = 0, every
    while run.poll() is None:
        time.sleep(0.5)
        if (now := rounds_done(folder, name)) < due:
            continue
        below = children(run.pid)
        for who, pid in {"coordinator": run.pid, **below}.items():
            if (looked := sample(pid)) is not None:
                seen.setdefault(who, []).append(looked)
        turns = [*VICTIMS, "broker"]
        victim = turns[faults % len(turns)]
        if victim in below:
            os.kill(below[victim], signal.SIGKILL)
            faults += 1
        due = now + every
    return seen, faults


def quarters(samples: list[Sample]) -> str:
    """Medians of each quarter of the run, for people."""
    ends = [round(i * len(samples) / 4) for i in range(5)]
    parts = [samples[start:stop] or samples for start, stop in itertools.pairwise(ends)]
    return ", ".join(str(tuple(round(statistics.median(field)) for field in zip(*part, strict=True))) for part in parts)


def grown(samples: list[Sample]) -> list[str]:
    """Say what has grown between the second quarter and the last."""
    quarter = max(len(samples) // 4, 1)
    before, after = samples[quarter : 2 * quarter] or samples, samples[-quarter:]
    found = []
    for field, bound in (("memory", MOST_GROWTH), ("files", 1.0), ("threads", 1.0)):
        first, last = (statistics.median(getattr(s, field) for s in part) for part in (before, after))
        if last > first * bound + (2 if field != "memory" else 2000):
            found.append(f"{field} from {first:g} to {last:g}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--every", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="endurance-") as place:
        folder = Path(place) / "project"
        shutil.copytree(PROJECT, folder)
        want = weights(folder, "calm", start(folder, "calm", options.rounds))
        run = start(folder, "disturbed", options.rounds)
        seen, faults = disturb(folder, "disturbed", run, options.every)
        found = weights(folder, "disturbed", run)
    if want is None or found is None:
        return 1
    equal = found == want
    bad = [] if equal else ["the weights are not those of the undisturbed run"]
    for who, samples in sorted(seen.items()):
        print(f"{who}: {len(samples)} looks, medians of each quarter (kB, descriptors, threads): {quarters(samples)}")
        if who not in VICTIMS and who != "broker":
            bad += [f"{who}: {what}" for what in grown(samples)]
    print(f"{options.rounds} rounds, {faults} faults, weights {'equal' if equal else 'DIFFERENT'}")
    for line in bad:
        print(f"error: {line}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
