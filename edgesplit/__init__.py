"""Train one PyTorch model across devices, edge servers and cloud, exactly.

    import edgesplit as es

    result = es.fit(task, topology="home.yaml", rounds=5, optimizer={"name": "sgd", "lr": 0.1})

Names are loaded when they are first used (PEP 562), so that ``import edgesplit`` needs no torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgesplit.callbacks import Callback
    from edgesplit.errors import (
        CodecError,
        CoordinatorGone,
        EdgesplitError,
        ExperimentError,
        FrameError,
        NodeLost,
        PlanError,
        RunError,
        ScheduleError,
        Spoiled,
        TaskError,
        TopologyError,
        TransportError,
        TransportTimeout,
        Unreachable,
    )
    from edgesplit.experiment import Experiment
    from edgesplit.methods import METHODS, simulate
    from edgesplit.placement import plan
    from edgesplit.plan import Plan
    from edgesplit.session import Session, fit
    from edgesplit.task import Shard, Task
    from edgesplit.topology import Topology

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Callback",
    "CodecError",
    "CoordinatorGone",
    "EdgesplitError",
    "Experiment",
    "ExperimentError",
    "FrameError",
    "NodeLost",
    "Plan",
    "PlanError",
    "RunError",
    "ScheduleError",
    "Session",
    "Shard",
    "Spoiled",
    "Task",
    "TaskError",
    "Topology",
    "TopologyError",
    "TransportError",
    "TransportTimeout",
    "Unreachable",
    "__version__",
    "fit",
    "plan",
    "simulate",
]

_HOMES = {
    "edgesplit.errors": (
        "CodecError",
        "CoordinatorGone",
        "EdgesplitError",
        "ExperimentError",
        "FrameError",
        "NodeLost",
        "PlanError",
        "RunError",
        "ScheduleError",
        "Spoiled",
        "TaskError",
        "TopologyError",
        "TransportError",
        "TransportTimeout",
        "Unreachable",
    ),
    "edgesplit.experiment": ("Experiment",),
    "edgesplit.callbacks": ("Callback",),
    "edgesplit.methods": ("METHODS", "simulate"),
    "edgesplit.plan": ("Plan",),
    "edgesplit.placement": ("plan",),
    "edgesplit.session": ("Session", "fit"),
    "edgesplit.task": ("Shard", "Task"),
    "edgesplit.topology": ("Topology",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


class _Package(ModuleType):
    """Keeps ``es.plan`` and ``es.simulate`` the functions: importing the modules of that name would bind those here."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
