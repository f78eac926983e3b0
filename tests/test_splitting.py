"""A model as a chain of layers: found, proven or refused, and whose parameter is whose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgesplit.errors import TaskError
from edgesplit.splitting import (
    Chain,
    batch_norm_layers,
    build_chain,
    check_cuts,
    fingerprint,
    layer_buffers,
    layer_params,
    load_weights,
    prove_chain,
    weights_of,
)
from edgesplit.task import Task


def chain_of(model: Callable[[], nn.Module], layers: Any = None) -> Chain:
    return build_chain(Task(model=model, loss=F.cross_entropy, train=lambda shard: None, layers=layers))


class Net(nn.Module):
    """``forward`` does what no child does: between the convolution and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act, self.head = nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(self.act(self.conv(x)), 1))


IMAGES = torch.randn(5, 1, 6, 6)


def test_a_sequentials_children_are_layers_also_nested_and_repeated() -> None:
    act = nn.ReLU()
    inner = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    chain = chain_of(lambda: nn.Sequential(nn.Linear(4, 3), act, inner, act, nn.Linear(3, 2)))
    assert [layer.name for layer in chain.layers] == ["0", "1", "2", "3", "4"]
    assert chain.layers[1].module is chain.layers[3].module
    assert layer_params(chain) == [["0.weight", "0.bias"], [], ["2.0.weight", "2.0.bias"], [], ["4.weight", "4.bias"]]
    prove_chain(chain, torch.randn(3, 4))


def test_layers_by_name_and_by_function() -> None:
    def model() -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.ModuleDict({"c": nn.Linear(2, 2), "act": nn.Tanh()})})

    named = chain_of(model, ["a", "b.act", "b.c", "b.act"])
    assert [layer.name for layer in named.layers] == ["a", "b.act", "b.c", "b.act#2"]
    assert named.layers[2].params == (("weight", "b.c.weight"), ("bias", "b.c.bias"))
    same = chain_of(model, lambda m: [m["a"], m["b"]["act"], m["b"]["c"], m["b"]["act"]])
    assert [layer.name for layer in same.layers] == [layer.name for layer in named.layers]


def test_a_wrapper_uses_the_models_parameters_under_their_names() -> None:
    class Front(nn.Module):
        def __init__(self, net: Net) -> None:
            super().__init__()
            self.c, self.a = net.conv, net.act

        def forward(self, x: Tensor) -> Tensor:
            return torch.flatten(self.a(self.c(x)), 1)

    chain = chain_of(Net, lambda net: [Front(net), net.head])
    assert [layer.name for layer in chain.layers] == ["Front", "head"]
    assert chain.layers[0].params == (("c.weight", "conv.weight"), ("c.bias", "conv.bias"))
    prove_chain(chain, IMAGES)


def test_what_is_no_chain_is_refused_with_what_to_do() -> None:
    class Extra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

    with pytest.raises(
        TaskError, match=r"the model is a Net, not an nn.Sequential.*task.layers=\['conv', 'act', 'head'\]"
    ):
        chain_of(Net)
    with pytest.raises(TaskError, match=r"no submodule 'haed' \(did you mean 'head'\?\)"):
        chain_of(Net, ["conv", "haed"])
    with pytest.raises(TaskError, match="the string 'conv'"):
        chain_of(Net, "conv")
    with pytest.raises(TaskError, match="no layers"):
        chain_of(Net, [])
    with pytest.raises(TaskError, match="layer 'Extra' owns parameter 'scale', which the model does not have"):
        chain_of(Net, lambda net: [net.conv, Extra()])
    with pytest.raises(TaskError, match=r"gives a str: return a list of nn.Modules"):
        chain_of(Net, lambda net: ["conv"])
    with pytest.raises(TaskError, match=r"gives a dict: return an nn.Module"):
        chain_of(dict)  # type: ignore[arg-type, return-value]
    with pytest.raises(TaskError, match=r"'0.weight' has no shape yet"):
        chain_of(lambda: nn.Sequential(nn.LazyLinear(3)))


def test_a_chain_that_drops_what_forward_does_is_refused_with_the_place() -> None:
    chain = chain_of(Net, ["conv", "act", "head"])
    with pytest.raises(
        TaskError, match=r"between 'act' and 'head'.*\(5, 32\) in the model.*\(5, 2, 4, 4\) in the chain"
    ):
        prove_chain(chain, IMAGES)


@pytest.mark.parametrize(
    ("layers", "place"),
    [
        (["a", "b"], r"after 'b' the model's forward does something that no layer does"),
        (["b", "a"], r"after the start the model's forward calls 'a' where the layers call 'b'"),
        (["a"], r"after 'a' the model's forward does something"),
        (["a", "b", "c"], r"the model's forward does not call 'c' after 'b'"),
        (["a", "b", "a"], r"the model's forward does not call 'a' after 'b'"),
    ],
)
def test_the_place_where_model_and_chain_part(layers: list[str], place: str) -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) + 1.0

    with pytest.raises(TaskError, match=place):
        prove_chain(chain_of(Sums, layers), torch.randn(4, 3))


def test_a_skip_around_a_layer_is_found() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.c(h + self.b(h))

    with pytest.raises(TaskError, match=r"evaluation mode on a batch of 5: between 'b' and 'c'"):
        prove_chain(chain_of(Skips, ["a", "b", "c"]), torch.randn(5, 3))


def test_a_difference_in_training_mode_only_is_found() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.dropout(self.a(x), 0.5, self.training))

    with pytest.raises(
        TaskError, match=r"in training mode.*mask of shape \(4, 3\) in module '' where its layers draw none"
    ):
        prove_chain(chain_of(Noisy, ["a", "b"]), torch.randn(4, 3))


def test_a_batch_size_written_into_forward_is_found() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).view(6, 3)

    with pytest.raises(TaskError, match="the model itself fails in evaluation mode on a batch of 3"):
        prove_chain(chain_of(Fixed, ["a"]), torch.randn(6, 3))


def test_randomness_in_a_functional_call_of_a_wrapper_is_keyed_alike() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.drop, self.b = nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.b(F.dropout(self.drop(self.a(x)), 0.5, self.training)))

    class Middle(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5, self.training)

    prove_chain(chain_of(Noisy, lambda net: [net.a, net.drop, Middle(), net.b, net.drop]), torch.randn(4, 3))


def test_proving_changes_nothing() -> None:
    chain = chain_of(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)))
    chain.model.eval()
    chain.model[1].train()  # type: ignore[index, union-attr]
    before = {name: tensor.clone() for name, tensor in chain.model.state_dict().items()}
    kept = dict(chain.model.named_buffers())
    x, state = torch.randn(1, 3), torch.get_rng_state()
    prove_chain(chain, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in chain.model.state_dict().items())
    assert all(buffer is kept[name] for name, buffer in chain.model.named_buffers())
    assert [module.training for module in chain.model] == [False, True, False]  # type: ignore[attr-defined]


def test_masks_shared_by_samples_are_refused() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.transpose(0, 1)).transpose(0, 1)

    with pytest.raises(TaskError, match="batch as the first dimension"):
        prove_chain(chain_of(lambda: nn.Sequential(Rows())), torch.randn(4, 8, 4))


def test_dicts_flow_and_anything_else_is_refused_by_name() -> None:
    class Both(nn.Module):
        def forward(self, value: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"sum": value["a"] + value["b"], "b": value["b"]}

    class Gives(nn.Module):
        def __init__(self, value: Any) -> None:
            super().__init__()
            self.value = value

        def forward(self, value: Any) -> Any:
            return self.value

    x = {"a": torch.randn(5, 2), "b": torch.arange(5)[:, None]}
    prove_chain(chain_of(lambda: nn.Sequential(Both())), x)
    for value, message in [
        ((torch.ones(1),), "layer '0' gives a tuple"),
        ({"a": {"b": torch.ones(1)}}, "layer '0' gives a dict with 'a': dict"),
        ({1: torch.ones(1)}, "a dict with 1: Tensor"),
        ({"x": torch.ones(1)}, "whose one name is 'x'"),
        ({}, "an empty dict"),
    ]:
        with pytest.raises(TaskError, match=message):
            chain_of(lambda value=value: nn.Sequential(Gives(value))).forward(x)  # type: ignore[misc]


def test_tied_parameters_may_not_be_torn_apart() -> None:
    def model() -> nn.Module:
        built = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False))
        built[2].weight = built[0].weight
        return built

    chain = chain_of(model)
    assert chain.layers[2].params == (("weight", "0.weight"),)
    check_cuts(chain, {"pi": [(0, 1), (2, 3)], "edge": [(1, 2)]})
    with pytest.raises(
        TaskError,
        match=r"parameter '0.weight' is shared by layer '0' on 'pi' and layer '2' on 'cloud': put both",
    ):
        check_cuts(chain, {"pi": [(0, 2)], "cloud": [(2, 3)]})


def test_weights_are_named_once_and_copied() -> None:
    def model() -> nn.Module:
        built = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        built[2].weight = built[0].weight
        built[0].bias.requires_grad_(False)
        return built

    chain = chain_of(model)
    params, buffers = weights_of(chain, [0, 1, 2])
    assert params.keys() == dict(chain.model.named_parameters()).keys()
    assert layer_buffers(chain) == [[], ["1.running_mean", "1.running_var", "1.num_batches_tracked"], []]
    assert buffers.keys() == set(layer_buffers(chain)[1])
    assert not params["0.bias"].requires_grad
    assert params["2.bias"].requires_grad
    assert params["2.bias"].is_leaf
    params["2.bias"].detach().fill_(7)
    assert not (chain.model[2].bias == 7).any()  # type: ignore[index, union-attr, operator]
    assert weights_of(chain, [1])[0].keys() == {"1.weight", "1.bias"}


def test_loading_weights_keeps_ties_and_refuses_what_does_not_fit() -> None:
    chain = chain_of(lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    array = np.arange(4.0, dtype=np.float32).reshape(2, 2)
    array.flags.writeable = False
    load_weights(chain.model, {"0.weight": array, "1.num_batches_tracked": np.array(5), "1.bias": torch.ones(2)})
    weights = chain.model.state_dict()
    assert torch.equal(weights["0.weight"], torch.tensor([[0.0, 1], [2, 3]]))
    assert int(weights["1.num_batches_tracked"]) == 5
    with pytest.raises(TaskError, match=r"no parameter or buffer '0.wieght'"):
        load_weights(chain.model, {"0.wieght": array})
    with pytest.raises(TaskError, match=r"'0.bias' has shape \(2,\) in the model, not \(2, 2\)"):
        load_weights(chain.model, {"0.bias": array})


def test_a_fingerprint_tells_structures_apart_and_no_values() -> None:
    def prints(width: int, source: str | None = None, layers: Any = None) -> str:
        return fingerprint(chain_of(lambda: nn.Sequential(nn.Linear(2, width), nn.Tanh()), layers), source)

    assert prints(3) == prints(3)
    assert len({prints(3), prints(4), prints(3, "x = 1"), prints(3, layers=["0"])}) == 4


def test_batch_norm_layers_are_named_unless_kept_in_evaluation_mode() -> None:
    chain = chain_of(
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.ReLU()), nn.LayerNorm(2))
    )
    chain.model.eval()
    assert batch_norm_layers(chain) == ["1"]
    assert batch_norm_layers(chain, lambda module: module.eval() and None) == []
    assert not any(module.training for module in chain.model.modules())
