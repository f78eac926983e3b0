from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from edgesplit.errors import ExperimentError, TaskError
from edgesplit.optimizers import (
    OptimizerSpec,
    Rule,
    spec_from_config,
    state_arrays,
    state_from_arrays,
    update,
)
from edgesplit.segments.torch_optim import spec_of

NAMES = ["fc.weight", "fc.bias", "norm.weight"]


def test_config_with_no_decay_makes_two_rules() -> None:
    spec = spec_from_config(
        {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": "5e-4", "no_decay": "bias|norm"}, NAMES
    )
    assert [rule.weight_decay for rule in spec.rules] == [5e-4, 0.0]
    assert [rule.momentum for rule in spec.rules] == [0.9, 0.9]
    assert spec.of == {"fc.weight": 0, "fc.bias": 1, "norm.weight": 1}


def test_config_defaults_are_those_of_torch() -> None:
    for name, kind in (("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)):
        param = nn.Parameter(torch.zeros(1))
        assert spec_from_config({"name": name, "lr": 0.1}, ["w"]) == spec_of(kind([param], lr=0.1), [("w", param)])
    assert spec_from_config({"name": "adam", "lr": 1, "betas": [0.5, 0.6]}, ["w"]).rules[0].beta2 == 0.6


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lr": 1}, "optimizer name None is not known"),
        ({"name": "adm", "lr": 1}, r"did you mean 'adam'"),
        ({"name": "sgd"}, "has no lr"),
        ({"name": "sgd", "lr": 1, "momentun": 0.9}, r"'momentun' is not known \(did you mean 'momentum'\?\)"),
        ({"name": "adam", "lr": 1, "momentum": 0.0}, "momentum has no effect on adam"),
        ({"name": "sgd", "lr": 1, "betas": [0, 0]}, "betas has no effect on sgd"),
        ({"name": "sgd", "lr": 1, "nesterov": True}, "nesterov needs a momentum"),
        ({"name": "sgd", "lr": 1, "dampening": 0.5}, "no effect without momentum"),
        ({"name": "sgd", "lr": 1, "no_decay": "bias"}, "no effect without weight_decay"),
        ({"name": "sgd", "lr": 1, "weight_decay": 1, "no_decay": "x"}, "matches none of the 3 parameters"),
        ({"name": "sgd", "lr": 1, "weight_decay": 1, "no_decay": "w|b"}, "matches all of the 3 parameters"),
        ({"name": "sgd", "lr": 1, "weight_decay": 1, "no_decay": "("}, "is no regular expression"),
        ({"name": "sgd", "lr": "fast"}, "lr is 'fast': give a number"),
        ({"name": "sgd", "lr": True}, "lr is True"),
        ({"name": "sgd", "lr": -1}, "lr is -1: it must not be negative"),
        ({"name": "sgd", "lr": float("nan")}, "give a finite number"),
        ({"name": "adam", "lr": 1, "betas": [0.9, 1.0]}, "beta2 is 1: it must be below 1"),
        ({"name": "adam", "lr": 1, "betas": 0.9}, "give two numbers"),
        ({"name": "adam", "lr": 1, "amsgrad": True}, "amsgrad is not supported"),
        ({"name": "sgd", "lr": 1, "maximize": False}, "maximize is not supported"),
    ],
)
def test_config_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        spec_from_config(config, NAMES)


def test_json_round_trip() -> None:
    spec = spec_from_config({"name": "adamw", "lr": 0.1, "no_decay": "bias"}, NAMES)
    assert OptimizerSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert spec.subset(["fc.bias", "elsewhere"]).of == {"fc.bias": 1}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda value: [],
        lambda value: value | {"more": 1},
        lambda value: value | {"of": {"w": 7}},
        lambda value: value | {"of": {"w": True}},
        lambda value: value | {"of": {"w": -1}},
        lambda value: value | {"of": ["w"]},
        lambda value: value | {"rules": [{"name": "sgd"}]},
        lambda value: value | {"rules": [value["rules"][0] | {"lr": "1"}]},
        lambda value: value | {"rules": [value["rules"][0] | {"name": "lion"}]},
        lambda value: value | {"rules": [value["rules"][0] | {"nesterov": 1}]},
        lambda value: value | {"rules": [value["rules"][0] | {"beta1": float("inf")}]},
    ],
)
def test_json_from_the_network_is_checked(spoil: Any) -> None:
    value = spec_from_config({"name": "sgd", "lr": 0.1}, ["w"]).to_json()
    with pytest.raises(ExperimentError):
        OptimizerSpec.from_json(spoil(value))


def test_a_parameter_without_rule_or_gradient_is_the_same_array() -> None:
    spec = OptimizerSpec((Rule(name="sgd", lr=0.1),), {"a": 0, "b": 0})
    params = {"a": np.ones(2), "b": np.ones(2), "c": np.ones(2)}
    new, state = update(spec, params, {"a": np.ones(2), "c": np.ones(2)}, {})
    assert new["b"] is params["b"]
    assert new["c"] is params["c"]
    assert state.keys() == {"a"}


def test_state_goes_to_flat_arrays_and_back() -> None:
    spec = spec_from_config({"name": "adam", "lr": 0.1}, ["fc/odd//w"])
    _, state = update(spec, {"fc/odd//w": np.ones(3, np.float32)}, {"fc/odd//w": np.ones(3, np.float32)}, {})
    flat = state_arrays(state)
    assert {name: (array.dtype, array.shape) for name, array in flat.items()} == {
        "fc/odd//w//count": (np.int64, ()),
        "fc/odd//w//mean": (np.float32, (3,)),
        "fc/odd//w//square": (np.float32, (3,)),
    }
    back = state_from_arrays(flat)
    assert back["fc/odd//w"]["count"] == 1
    assert type(back["fc/odd//w"]["count"]) is int
    assert back["fc/odd//w"]["mean"] is state["fc/odd//w"]["mean"]


@pytest.mark.parametrize(
    "arrays",
    [
        {"w": np.ones(1)},
        {"w//secret": np.ones(1)},
        {"w//momentum": np.ones(1)},
        {"w//count": np.ones(2, np.int64)},
        {"w//count": np.zeros((), np.int64)},
        {"w//count": np.asarray(1, np.int64), "w//mean": np.ones(1)},
    ],
)
def test_state_from_the_network_is_checked(arrays: dict[str, Any]) -> None:
    with pytest.raises(ExperimentError):
        state_from_arrays(arrays)


def test_spec_of_reads_groups_and_flags_that_change_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    named = list(model.named_parameters())
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": [model[1].weight], "weight_decay": 0.0}]
    spec = spec_of(torch.optim.AdamW(groups, lr=torch.tensor(0.25), foreach=False), named)
    assert spec.of == {"0.weight": 0, "0.bias": 0, "1.weight": 1}
    assert [(rule.lr, rule.weight_decay) for rule in spec.rules] == [(0.5, 0.01), (0.25, 0.0)]
    decoupled = torch.optim.Adam(model.parameters(), decoupled_weight_decay=True, weight_decay=0.1)
    assert spec_of(decoupled, named).rules[0].name == "adamw"


class OwnSGD(torch.optim.SGD):
    """A subclass may do anything in its step."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.RMSprop(p), "RMSprop is not supported here: use SGD, Adam or AdamW"),
        (lambda p: OwnSGD(p), "OwnSGD is not supported"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "group 0 sets amsgrad"),
        (lambda p: torch.optim.SGD(p, maximize=True), "group 0 sets maximize"),
        (lambda p: torch.optim.AdamW(p, differentiable=True), "group 0 sets differentiable"),
        (lambda p: torch.optim.SGD([nn.Parameter(torch.zeros(3))]), r"shape \(3,\) that is not the model's"),
    ],
)
def test_spec_of_refuses(make: Any, message: str) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(TaskError, match=message):
        spec_of(make(list(model.parameters())), list(model.named_parameters()))


def test_spec_of_refuses_an_optimizer_that_has_made_steps() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(TaskError, match="has made steps already"):
        spec_of(optimizer, list(model.named_parameters()))
