"""A device without torch runs the core: each of its modules is imported in a process that refuses heavy libraries."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

DEVICE = [
    "errors", "task", "loading", "topology", "schedule", "codecs", "lr", "costs", "plan", "protocol", "sheets",
    "data", "methods", "weights", "optimizers", "kit", "emulation", "transport.base", "transport.frames",
    "transport.reliable", "transport.memory", "transport.mqtt", "node", "engine", "worker", "segments.base",
    "segments.random", "observe.recorder", "hosting",
]  # fmt: skip
"""What a device's process may load."""

CORE = [
    *DEVICE, "experiment", "topology_file", "simulate", "planner", "coordinator", "conductor", "checkpoint",
    "transport.broker", "transport.caller", "doctor", "cli",
]  # fmt: skip
"""What `edgesplit doctor`, `simulate` and `schema` load, on a machine with the light core only."""

NOT_IN_CORE = ["torch", "flwr", "onnx", "onnxruntime", "iotcore"]
NOT_ON_DEVICES = [*NOT_IN_CORE, "pydantic", "typer", "rich", "yaml"]

CODE = """
import importlib, json, sys

modules, refused = json.loads(sys.argv[1])

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"{name} is refused here")

sys.meta_path.insert(0, Refuse())
faults = {}
for module in modules:
    try:
        importlib.import_module(f"edgesplit.{module}")
    except ImportError as error:
        faults[module] = str(error)
print(json.dumps(faults))
"""


@pytest.mark.parametrize(
    ("modules", "refused"), [(DEVICE, NOT_ON_DEVICES), (CORE, NOT_IN_CORE)], ids=["device", "core"]
)
def test_imports_without(modules: list[str], refused: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps([modules, refused])], check=True, capture_output=True, text=True
    )
    assert json.loads(done.stdout) == {}
