"""The chain itself: finding the layers of a model, and the names of what they own.

A layer takes and returns a tensor or a flat ``dict[str, Tensor]``. Parameters, buffers and random masks keep the names
that they have in the original model, whatever layer or node they are on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from edgesplit.errors import TaskError, did_you_mean
from edgesplit.segments.base import BARE
from edgesplit.task import Task

Value = Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class Layer:
    """The smallest unit that the splitter may cut between.

    Attributes:
        name: a submodule's name in the model, or the class of a wrapper; unique in the chain.
        module: what computes it; its parameters are the model's own.
        params: ``(name in the module, name in the model)``; a parameter tied within the layer is there twice.
        buffers: the same for buffers, the non-persistent ones included.
    """

    name: str
    module: nn.Module
    params: tuple[tuple[str, str], ...]
    buffers: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Chain:
    """Layers that, one after the other, are the model."""

    layers: tuple[Layer, ...]
    model: nn.Module

    def forward(self, value: Any) -> Value:
        """Run all layers on ``value``, a tensor or a flat dict of tensors."""
        for layer in self.layers:
            value = checked(layer.module(value), layer.name)
        return checked(value, "the chain")


def checked(value: Any, layer: str) -> Value:
    """Return what ``layer`` gave, a plain dict for any mapping.

    Raises:
        TaskError: it is neither a tensor nor a flat dict of named tensors.
    """
    if isinstance(value, Tensor):
        return carried(value, layer)
    hint = "return a tensor or a flat dict[str, Tensor]"
    if not isinstance(value, Mapping):
        raise TaskError(f"layer {layer!r} gives a {type(value).__name__}, which a cut cannot carry: {hint}")
    for name, item in value.items():
        if not isinstance(name, str) or not isinstance(item, Tensor):
            raise TaskError(f"layer {layer!r} gives a dict with {name!r}: {type(item).__name__}: {hint}")
    if not value:
        raise TaskError(f"layer {layer!r} gives an empty dict: {hint}")
    if list(value) == [BARE]:
        raise TaskError(f"layer {layer!r} gives a dict whose one name is {BARE!r}: return the tensor itself")
    return unaliased({name: carried(item, layer) for name, item in value.items()})


def carried(value: Tensor, layer: str) -> Tensor:
    """Return a tensor that a cut can carry. Raises TaskError where it is complex or bfloat16, which it cannot."""
    if value.is_complex() or value.dtype == torch.bfloat16:
        raise TaskError(
            f"layer {layer!r} gives {value.dtype}, which a cut cannot carry: "
            "give real and imaginary part apart, or compute in float32"
        )
    return value


def unaliased(value: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the dict with no two tensors in the same memory: after a cut they are not, whatever is done in place."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in value.items():
        place = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if place in seen and tensor.numel() else tensor
        seen.add(place)
    return apart


def build_chain(task: Task) -> Chain:
    """Build the task's model and find its layers.

    Raises:
        TaskError: the model has no layers to cut between, or a layer owns what the model does not have.
    """
    model = task.model()
    if not isinstance(model, nn.Module):
        raise TaskError(f"task.model() gives a {type(model).__name__}: return an nn.Module")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise TaskError(f"{name!r} has no shape yet: run the lazy model once on a sample inside task.model()")
    params = {id(tensor): name for name, tensor in model.named_parameters()}
    buffers = {id(tensor): name for name, tensor in model.named_buffers()}
    layers = []
    for name, module in _unique(_find_layers(task, model)):
        layers.append(
            Layer(
                name,
                module,
                _owned(name, "parameter", module.named_parameters(remove_duplicate=False), params),
                _owned(name, "buffer", module.named_buffers(remove_duplicate=False), buffers),
            )
        )
    return Chain(tuple(layers), model)


def _find_layers(task: Task, model: nn.Module) -> list[tuple[str, nn.Module]]:
    if task.layers is None:
        if not isinstance(model, nn.Sequential):
            children = [name for name, _ in model.named_children()]
            raise TaskError(
                f"the model is a {type(model).__name__}, not an nn.Sequential: say where it may be cut, "
                f"as names in the order that forward calls them (task.layers={children}) or as a function "
                "model -> modules"
            )
        # A child may be there twice, which named_children would hide.
        found = [(n, m) for n, m in model.named_modules(remove_duplicate=False) if n and "." not in n]
    elif callable(task.layers):
        names = {module: name for name, module in model.named_modules()}
        modules = list(task.layers(model))
        for module in modules:
            if not isinstance(module, nn.Module):
                raise TaskError(f"task.layers(model) gives a {type(module).__name__}: return a list of nn.Modules")
        found = [(names.get(module) or type(module).__name__, module) for module in modules]
    else:
        if isinstance(task.layers, str):
            raise TaskError(f"task.layers is the string {task.layers!r}: give a list of names")
        known = dict(model.named_modules(remove_duplicate=False))
        for name in task.layers:
            if name not in known:
                raise TaskError(f"the model has no submodule {name!r}{did_you_mean(name, known)}")
        found = [(name, known[name]) for name in task.layers]
    if not found:
        raise TaskError("the model has no layers: give task.layers")
    return found


def _unique(layers: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Number the repeats of a name: a module may be a layer more than once."""
    seen: dict[str, int] = {}
    for name, module in layers:
        seen[name] = seen.get(name, 0) + 1
        yield (name if seen[name] == 1 else f"{name}#{seen[name]}"), module


def _owned(
    layer: str, kind: str, local: Iterable[tuple[str, Tensor]], names: Mapping[int, str]
) -> tuple[tuple[str, str], ...]:
    pairs = []
    for name, tensor in local:
        if id(tensor) not in names:
            raise TaskError(
                f"layer {layer!r} owns {kind} {name!r}, which the model does not have: "
                "make it part of the model, and let the layer only use it"
            )
        pairs.append((name, names[id(tensor)]))
    return tuple(pairs)


def layer_params(chain: Chain) -> list[list[str]]:
    """Return the global names of each layer's parameters, each once."""
    return [list(dict.fromkeys(name for _, name in layer.params)) for layer in chain.layers]


def layer_buffers(chain: Chain) -> list[list[str]]:
    """Return the global names of each layer's buffers, each once."""
    return [list(dict.fromkeys(name for _, name in layer.buffers)) for layer in chain.layers]


def random_names(chain: Chain, index: int) -> tuple[list[tuple[str, nn.Module]], dict[str, int]]:
    """Return what the random masks of a layer are keyed by: its modules' names, and the first call of some.

    A name is the module's in the original model; what only a wrapper has draws as the root, ``""``. A name that draws
    in several layers starts each of them at a call number of its own, so that nobody has to know how often the layers
    before have drawn; other names start at 0.
    """
    names = {module: name for name, module in chain.model.named_modules()}
    users: dict[str, set[int]] = {}
    for i, layer in enumerate(chain.layers):
        for module in layer.module.modules():
            users.setdefault(names.get(module, ""), set()).add(i)
    own = [(names.get(module, ""), module) for module in chain.layers[index].module.modules()]
    return own, {name: index << 16 for name, _ in own if len(users[name]) > 1}


def weights_of(chain: Chain, layers: Iterable[int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return ``(parameters, buffers)`` of some layers by global name: detached clones.

    A parameter's clone requires a gradient where the model's does.
    """
    all_params, all_buffers = dict(chain.model.named_parameters()), dict(chain.model.named_buffers())
    params, buffers = {}, {}
    for index in layers:
        for _, name in chain.layers[index].params:
            params[name] = all_params[name].detach().clone().requires_grad_(all_params[name].requires_grad)
        for _, name in chain.layers[index].buffers:
            buffers[name] = all_buffers[name].detach().clone()
    return params, buffers


def load_weights(model: nn.Module, arrays: Mapping[str, Any]) -> None:
    """Copy parameters and buffers (numpy or torch, by global name) into ``model``; what is not named stays.

    Raises:
        TaskError: a name or a shape that the model does not have.
    """
    own: dict[str, Tensor] = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    for name, array in arrays.items():
        if name not in own:
            raise TaskError(f"the model has no parameter or buffer {name!r}{did_you_mean(name, own)}")
        if tuple(array.shape) != tuple(own[name].shape):
            raise TaskError(f"{name!r} has shape {tuple(own[name].shape)} in the model, not {tuple(array.shape)}")
    with torch.no_grad():
        for name, array in arrays.items():
            # A clone first: numpy arrays from the network may be read-only, which from_numpy warns of.
            own[name].copy_(array if isinstance(array, Tensor) else torch.tensor(array))


def fingerprint(chain: Chain, source: str | None = None) -> str:
    """Return a SHA-256 over what two nodes must agree on.

    That is the layers, the names, shapes and dtypes of their parameters and buffers, which are frozen, and the
    task's ``source`` text.
    """
    tensors: dict[str, Tensor] = {**dict(chain.model.named_parameters()), **dict(chain.model.named_buffers())}
    facts = {
        "layers": [
            [layer.name, type(layer.module).__qualname__, layer.params, layer.buffers] for layer in chain.layers
        ],
        "tensors": {name: [list(t.shape), str(t.dtype), t.requires_grad] for name, t in tensors.items()},
        "source": source,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
