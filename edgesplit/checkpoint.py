"""Checkpoints: a directory a round that is either whole or not there, and model files.

::

    checkpoints/round-0007/
        model.safetensors          the gathered weights, under the original model's names
        strategy.safetensors       what the strategy remembers (where it does)
        nodes/<name>.safetensors   one node's parameters, buffers, optimizer and codec state
        state.json                 where the run stands; names every file with its size and sha256

A checkpoint is written beside its place, flushed to the disk and renamed, so that a crash at any point, or a full
disk, leaves the last one as it was.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from edgesplit.errors import RunError

FORMAT = 1
"""Version of the layout above; another one is refused."""

Arrays = Mapping[str, np.ndarray[Any, Any]]

_NAME = re.compile(r"round-(\d{4,})(\.old)?")
_UNFINISHED = ".unfinished-"
_MODEL, _STRATEGY, _STATE = "model.safetensors", "strategy.safetensors", "state.json"


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands between two rounds. Plain JSON values throughout.

    Attributes:
        round: rounds completed.
        step: the next global step.
        micro: the next micro-batch number.
        term: of the membership.
        seed: the run's.
        participation: device -> rounds it took part in.
        positions: device -> where it is in its data, for example ``[epoch, batch]``.
        loss_scale: state of the dynamic loss scale, None without one.
        best: the best metric so far, for example ``{"name": "accuracy", "value": 0.9, "round": 3}``.
        experiment: the resolved experiment.
        plan: the plan.
        extra: anything else the session wants back.
    """

    round: int
    step: int
    micro: int
    term: int
    seed: int
    participation: Mapping[str, int] = field(default_factory=dict)
    positions: Mapping[str, Any] = field(default_factory=dict)
    loss_scale: Mapping[str, Any] | None = None
    best: Mapping[str, Any] | None = None
    experiment: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """All that a run needs to go on.

    Attributes:
        position: where it stands.
        model: gathered parameters and buffers by the original model's names.
        nodes: node -> its arrays, flat, under names of the node's own making.
        strategy: what the federated strategy remembers; empty for one without state.
    """

    position: Position
    model: Arrays
    nodes: Mapping[str, Arrays] = field(default_factory=dict)
    strategy: Arrays = field(default_factory=dict)


def save(directory: str | Path, checkpoint: Checkpoint, keep: int | None = None) -> Path:
    """Write ``directory/round-NNNN`` at once or not at all, then remove all but the newest ``keep``.

    Raises:
        RunError: it cannot be written (no space left, no permission, values that are not plain JSON); what was there
            before is as it was.
    """
    directory = Path(directory)
    target = directory / f"round-{checkpoint.position.round:04d}"
    partial = directory / f"{_UNFINISHED}{target.name}"
    if keep is not None and keep < 1:
        raise RunError(f"checkpoint.keep is {keep}: keep at least 1, or leave it out to keep all")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for left in directory.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(left)  # of a run that was killed while it wrote
        partial.mkdir()
        _write(partial, checkpoint)
        _publish(partial, target)
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise RunError(f"cannot write checkpoint {str(target)!r}: {_reason(error)}") from error
    if keep is not None:
        _prune(directory, keep)
    return target


def latest(directory: str | Path) -> Path | None:
    """Return the newest whole checkpoint, or None. Half-written and damaged ones are passed over."""
    found = _whole(Path(directory))
    return found[-1] if found else None


def load(path: str | Path) -> Checkpoint:
    """Read a checkpoint, checking every file against the size and sha256 that it was written with.

    Raises:
        RunError: it is not there, not of this format, or damaged.
    """
    path = Path(path)
    state = _read_state(path)
    try:
        for name, entry in state["files"].items():
            size, digest = _measure(path / _inside(name))
            if (size, digest) != (entry["bytes"], entry["sha256"]):
                raise RunError(
                    f"checkpoint {str(path)!r} is damaged: {name!r} is not as it was written; use an earlier one"
                )
        position = state["position"]
        return Checkpoint(
            position=Position(**{part.name: position[part.name] for part in fields(Position)}),
            model=load_file(path / _MODEL),
            nodes={name: load_file(path / _node_file(name)) for name in state["nodes"]},
            strategy=load_file(path / _STRATEGY) if _STRATEGY in state["files"] else {},
        )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"cannot read checkpoint {str(path)!r}: {_reason(error)}; use an earlier one") from error


def save_model(path: str | Path, arrays: Arrays, metadata: Mapping[str, str] | None = None) -> Path:
    """Write a model as one safetensors file, at once or not at all.

    Args:
        path: of the file; an older one is replaced.
        arrays: by the original model's names.
        metadata: text kept in the file's header.

    Raises:
        RunError: it cannot be written; an older file is as it was.
    """
    path = Path(path)
    partial = path.with_name(f"{_UNFINISHED}{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_arrays(partial, arrays, metadata)
        partial.replace(path)
        _flush(path.parent)
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        with suppress(OSError):
            partial.unlink()
        raise RunError(f"cannot write model {str(path)!r}: {_reason(error)}") from error
    return path


def weights_hash(arrays: Arrays) -> str:
    """Return a sha256 over the sorted names with their dtypes, shapes and bytes: equal for equal weights only."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = _plain(arrays[name])
        digest.update(json.dumps([name, array.dtype.str, array.shape]).encode() + b"\n")
        digest.update(array.tobytes())
    return digest.hexdigest()


def experiment_hash(experiment: Mapping[str, Any]) -> str:
    """Return a sha256 over a resolved experiment, whatever the order of its keys."""
    return _hash(experiment)


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    """Fill a new folder; ``state.json``, which names the other files, comes last."""
    contents = {_MODEL: checkpoint.model, **{_node_file(name): arrays for name, arrays in checkpoint.nodes.items()}}
    if checkpoint.strategy:
        contents[_STRATEGY] = checkpoint.strategy
    (folder / "nodes").mkdir()
    files = {}
    for name, arrays in contents.items():
        size, digest = _write_arrays(folder / name, arrays)
        files[name] = {"bytes": size, "sha256": digest}
    _flush(folder / "nodes")
    state: dict[str, Any] = {
        "format": FORMAT,
        "position": asdict(checkpoint.position),
        "experiment_hash": _hash(checkpoint.position.experiment),
        "weights_hash": weights_hash(checkpoint.model),
        "nodes": list(checkpoint.nodes),
        "files": files,
    }
    state["state_hash"] = _hash(state)
    (folder / _STATE).write_text(_json(state, indent=1) + "\n", encoding="utf-8")
    _flush(folder / _STATE)
    _flush(folder)


def _write_arrays(path: Path, arrays: Arrays, metadata: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Write a safetensors file to the disk; return its size and sha256."""
    plain = {name: _plain(array) for name, array in arrays.items()}
    save_file(plain, path, metadata=dict(metadata) if metadata else None)
    _flush(path)
    return _measure(path)


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array in C order and little-endian: safetensors copies memory as it lies."""
    array = np.asarray(array)
    return np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")


def _publish(partial: Path, target: Path) -> None:
    """Move a whole checkpoint to its place; one that is already there steps aside, so that one is there throughout."""
    aside = target.with_name(f"{target.name}.old")
    if target.exists():
        if aside.exists():
            shutil.rmtree(aside)
        target.rename(aside)
    partial.rename(target)
    _flush(target.parent)
    if aside.exists():
        shutil.rmtree(aside)


def _prune(directory: Path, keep: int) -> None:
    """Remove what is older than the newest ``keep`` whole checkpoints, damaged ones too."""
    kept = _whole(directory)[-keep:]
    oldest = _order(kept[0])
    for path in directory.iterdir():
        if _NAME.fullmatch(path.name) and path not in kept and _order(path) < oldest:
            shutil.rmtree(path, ignore_errors=True)  # tried again the next time; the new checkpoint stands


def _whole(directory: Path) -> list[Path]:
    """Return the whole checkpoints of a directory, oldest first."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name) and _is_whole(path)]
    return sorted(found, key=_order)


def _is_whole(path: Path) -> bool:
    """Return whether all files are there in full length; a newer format counts, so that loading it says so."""
    try:
        state = json.loads((path / _STATE).read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            return True
        return all((path / _inside(name)).stat().st_size == entry["bytes"] for name, entry in state["files"].items())
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RunError):
        return False


def _order(path: Path) -> tuple[int, bool]:
    """Sort by round; one that stepped aside comes before its successor."""
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), match[2] is None) if match else (-1, False)


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads((path / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read checkpoint {str(path)!r}: {_reason(error)}") from error
    version = state.get("format") if isinstance(state, dict) else None
    if version != FORMAT or not isinstance(state, dict):
        raise RunError(
            f"checkpoint {str(path)!r} has format {version!r}, and this edgesplit reads {FORMAT}: "
            f"resume with the version that wrote it"
        )
    if state.get("state_hash") != _hash({key: value for key, value in state.items() if key != "state_hash"}):
        raise RunError(f"checkpoint {str(path)!r} is damaged: {_STATE!r} is not as it was written; use an earlier one")
    return state


def _node_file(name: str) -> str:
    """Return a node's file; its name may have come over the network, so it is never used as a path."""
    return f"nodes/{quote(name, safe='')}.safetensors"


def _inside(name: str) -> str:
    if name not in (_MODEL, _STRATEGY) and not re.fullmatch(r"nodes/[^/\\]+\.safetensors", name):
        raise RunError(f"a checkpoint's state names the file {name!r}, which is none of a checkpoint's")
    return name


def _measure(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Have the system write a file, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(_json(value).encode()).hexdigest()


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False, indent=indent)


def _reason(error: Exception) -> str:
    """Return in a few words what the system said."""
    number = getattr(error, "errno", None)
    if isinstance(error, SafetensorError) and (match := re.search(r"os error (\d+)", str(error))):
        number = int(match[1])  # safetensors keeps the number in its text only
    if number == errno.ENOSPC:
        return "no space left on the device; free some, or lower checkpoint.keep"
    if number is not None:
        return os.strerror(number).lower()
    return f"no {error} in it" if isinstance(error, KeyError) else str(error)
