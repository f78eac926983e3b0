"""What must hold before a chain is cut at given places, and what a user should know of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from edgesplit.errors import TaskError
from edgesplit.splitting.chain import Chain, layer_buffers, layer_params


def check_cuts(chain: Chain, ranges_by_node: Mapping[str, Sequence[tuple[int, int]]]) -> None:
    """Refuse a placement that tears a tied parameter, or a shared buffer, apart.

    Args:
        chain: the layers.
        ranges_by_node: node -> the layer ranges ``(start, stop)`` that it runs, over all routes.

    Raises:
        TaskError: a parameter or buffer of several layers, and a node that holds some of them but not all.
    """
    users: dict[tuple[str, str], list[int]] = {}
    for kind, by_layer in (("parameter", layer_params(chain)), ("buffer", layer_buffers(chain))):
        for index, names in enumerate(by_layer):
            for name in names:
                users.setdefault((kind, name), []).append(index)
    held = {node: {i for start, stop in ranges for i in range(start, stop)} for node, ranges in ranges_by_node.items()}
    for (kind, name), layers in users.items():
        for node, own in held.items():
            inside = [i for i in layers if i in own]
            outside = [i for i in layers if i not in own]
            if inside and outside:
                others = sorted(other for other in held if outside[0] in held[other])
                raise TaskError(
                    f"{kind} {name!r} is shared by layer {chain.layers[inside[0]].name!r} on {node!r} and layer "
                    f"{chain.layers[outside[0]].name!r} on {', '.join(map(repr, others)) or 'no node'}: "
                    "put both layers on one node, or untie them in the model"
                )


def batch_norm_layers(chain: Chain, train_mode: Callable[[nn.Module], None] | None = None) -> list[str]:
    """Return names of layers that normalise by batch statistics when training: each micro-batch by its own.

    Args:
        chain: the layers.
        train_mode: the task's, which may keep a BatchNorm in evaluation mode.
    """
    found = []
    with modes_kept(chain):
        for layer in chain.layers:
            set_train(layer.module, train_mode)
            norms = (m for m in layer.module.modules() if isinstance(m, _BatchNorm))
            if any(norm.training or norm.running_mean is None for norm in norms):
                found.append(layer.name)
    return found


def set_train(module: nn.Module, train_mode: Callable[[nn.Module], None] | None) -> None:
    """Put a layer into the task's training mode."""
    module.train()
    if train_mode is not None:
        train_mode(module)


@contextmanager
def modes_kept(chain: Chain) -> Iterator[None]:
    """Context in which training flags may be changed; they come back afterwards."""
    modules = [chain.model, *(layer.module for layer in chain.layers)]
    flags = [(module, module.training) for root in modules for module in root.modules()]
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training
