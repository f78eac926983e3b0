"""An experiment from keywords, for Python: the same checks as for a file."""

from __future__ import annotations

from typing import Any

from edgesplit.errors import ExperimentError
from edgesplit.experiment import Experiment, FederationOptions, PipelineOptions

_FLAT = {
    **dict.fromkeys(PipelineOptions.model_fields, "pipeline"),
    **{name: "federation" for name in FederationOptions.model_fields if name != "tiers"},
}
"""Keys that may be given without their section."""

_IDLE = {"broker", "local", "threads"}
"""Keys that are for processes and brokers."""


def options(**keywords: Any) -> Experiment:
    """Make an experiment of keywords: the keys of ``experiment.yaml``, those of two sections also flat.

    >>> options(method="gpipe", micros=4, batch_size=48, every="step").pipeline.micros
    4

    Raises:
        ExperimentError: as for a file.
    """
    if idle := sorted(_IDLE & set(keywords)):
        raise ExperimentError(f"{', '.join(idle)}: no effect where nodes are threads of this process; leave it out")
    data: dict[str, Any] = {"task": "here:task", "topology": "here"}
    for key, value in keywords.items():
        if key in _FLAT:
            section = data.setdefault(_FLAT[key], {})
            if not isinstance(section, dict):
                raise ExperimentError(f"{_FLAT[key]} is {section!r}, must be a mapping: give {key} within it")
            section[key] = value
        elif isinstance(value, dict):
            flat = data.get(key)  # what was given of it without its section
            data[key] = {**flat, **value} if isinstance(flat, dict) else dict(value)
        else:
            data[key] = value
    return Experiment.from_dict(data, source="options")
