"""An experiment from keywords is the experiment that a file with the same keys gives."""

from __future__ import annotations

from typing import Any

import pytest

from edgesplit.errors import ExperimentError
from edgesplit.experiment import Experiment
from edgesplit.options import options


def from_file(**keys: Any) -> Experiment:
    return Experiment.from_dict({"task": "here:task", "topology": "here", **keys}, source="options")


@pytest.mark.parametrize(
    ("keywords", "keys"),
    [
        ({}, {}),
        ({"batch_size": 7, "rounds": 3, "seed": 5}, {"batch_size": 7, "rounds": 3, "seed": 5}),
        ({"method": "gpipe", "micros": 4, "window": 3}, {"pipeline": {"method": "gpipe", "micros": 4, "window": 3}}),
        ({"every": "step"}, {"federation": {"every": "step"}}),
        (
            {"strategy": "fedadam", "strategy_args": {"eta": 0.1}},
            {"federation": {"strategy": "fedadam", "strategy_args": {"eta": 0.1}}},
        ),
        ({"pipeline": {"micros": 4}, "method": "gpipe"}, {"pipeline": {"method": "gpipe", "micros": 4}}),
        ({"method": "gpipe", "pipeline": {"micros": 4}}, {"pipeline": {"method": "gpipe", "micros": 4}}),
        ({"evaluate": {"every": 2}, "every": "step"}, {"evaluate": {"every": 2}, "federation": {"every": "step"}}),
        ({"tiers": ["device", "edge"]}, {"tiers": ["device", "edge"]}),
        ({"federation": {"tiers": ["edge"]}}, {"federation": {"tiers": ["edge"]}}),
        ({"optimizer": {"name": "adam", "lr": 0.1}}, {"optimizer": {"name": "adam", "lr": 0.1}}),
    ],
)
def test_keywords_are_the_keys_of_a_file(keywords: dict[str, Any], keys: dict[str, Any]) -> None:
    assert options(**keywords) == from_file(**keys)


def test_what_is_given_is_not_changed() -> None:
    pipeline: dict[str, Any] = {"micros": 4}
    options(pipeline=pipeline, method="gpipe")
    assert pipeline == {"micros": 4}


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"batchsize": 3}, r"batchsize.*did you mean 'batch_size'"),
        ({"metod": "gpipe"}, "metod"),
        ({"pipeline": {"mikros": 3}}, r"mikros.*did you mean 'micros'"),
        ({"micros": 0}, "micros"),
        ({"micros": 2, "micro_batch_size": 3}, "micro"),
        ({"batch_size": "many"}, "batch_size"),
        ({"pipeline": 5}, "pipeline"),
        ({"pipeline": 5, "method": "gpipe"}, "pipeline is 5, must be a mapping"),
        ({"method": "gpipe", "pipeline": 5}, "pipeline"),
        ({"federation": None, "every": "step"}, "federation"),
        ({"every": "sometimes"}, "every"),
        ({"topology": {"nodes": {}}}, "topology"),
        ({"task": {"a": 1}}, "task"),
        ({"steps_per_round": 2, "epochs_per_round": 2}, "per_round"),
    ],
)
def test_refused_as_in_a_file(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=message) as caught:
        options(**keywords)
    assert "\n" not in str(caught.value)
