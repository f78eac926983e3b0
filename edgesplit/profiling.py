"""Measures what each layer of a chain costs on this machine: seconds, operations, bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from edgesplit.errors import TaskError
from edgesplit.operations import Operations
from edgesplit.profile import LayerProfile, Profile
from edgesplit.segments.base import BARE
from edgesplit.splitting import Chain

WARM_UP = 2
"""Runs before the measured ones: the first allocate memory and choose kernels."""


def profile_chain(chain: Chain, x: Any, target: Any, *, repeats: int = 5) -> Profile:
    """Measure every layer in training mode, on one thread: medians over ``repeats`` runs.

    The model is left as it was: its buffers, modes and the random state are put back.

    Args:
        chain: the layers.
        x: a batch of inputs, a tensor or flat dict of tensors; the first dimension counts samples.
        target: its targets: tensors in dicts, lists or tuples.
        repeats: runs that are timed.

    Raises:
        TaskError: the batch has no samples, or fewer than one run is asked for.
    """
    arrays = _arrays(x)
    first = next(iter(arrays.values()))
    batch = len(first) if first.dim() else 0
    if not batch:
        raise TaskError("profiling needs a batch of at least one sample: check the data that Task.train gives")
    if repeats < 1:
        raise TaskError(f"profiling needs at least one timed run (repeats {repeats})")
    dtype = _dtype(chain.model)
    needs = frozenset[str]()  # data need no gradient
    layers = []
    with _undisturbed(chain.model):
        value: Any = x
        for layer in chain.layers:
            cost, value, needs = _measure(layer.name, layer.module, value, needs, batch, repeats)
            layers.append(cost)
        gflops = _gflops(dtype, repeats)
    return Profile(
        layers=tuple(layers),
        input_bytes=_bytes(x) / batch,
        target_bytes=_bytes(target) / batch,
        dtype=str(dtype).removeprefix("torch."),
        batch=batch,
        gflops=gflops,
    )


def _measure(
    name: str, module: nn.Module, x: Any, needs: frozenset[str], batch: int, repeats: int
) -> tuple[LayerProfile, Any, frozenset[str]]:
    """Return the layer's costs, its output without a graph, and which arrays of it need a gradient."""
    leaves = {key: array.detach().requires_grad_(key in needs) for key, array in _arrays(x).items()}

    def given() -> Any:
        # Clones: a layer may write into its input, which torch forbids on leaves and which would change later runs.
        clones = {key: leaf.clone() for key, leaf in leaves.items()}
        return clones if isinstance(x, Mapping) else clones[BARE]

    forward = _median(module, repeats, given)
    params = list(module.parameters())
    trained = [param for param in params if param.requires_grad]
    with Operations() as operations, _stash(params) as kept:
        out = module(given())
    outputs = _arrays(out)
    backward = {key: array for key, array in outputs.items() if array.requires_grad}
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    cost = LayerProfile(
        name=name,
        forward_s=forward / batch,
        input_grad_s=_grad_time(backward, wanted, repeats) / batch,
        weight_grad_s=_grad_time(backward, trained, repeats) / batch,
        flops=operations.total / batch,
        param_bytes=sum(map(_bytes, params)),
        trainable_bytes=sum(map(_bytes, trained)),
        cut_bytes={key: _bytes(array) / batch for key, array in outputs.items()},
        grad_bytes=sum(map(_bytes, backward.values())) / batch,
        stash_bytes=sum(kept.values()) / batch,
    )
    plain: Any = {key: array.detach() for key, array in outputs.items()}
    return cost, plain if isinstance(out, Mapping) else plain[BARE], frozenset(backward)


def _grad_time(outputs: Mapping[str, Tensor], wanted: Sequence[Tensor], repeats: int) -> float:
    if not outputs or not wanted:
        return 0.0
    out = list(outputs.values())
    seeds = [torch.ones_like(array) for array in out]

    def run(_: None) -> object:
        return torch.autograd.grad(out, wanted, seeds, retain_graph=True, allow_unused=True)

    return _median(run, repeats, lambda: None)


def _median(run: Callable[[Any], object], repeats: int, prepare: Callable[[], object]) -> float:
    """Median seconds of ``run`` on what ``prepare`` makes, after a warm-up."""
    seconds = []
    for _ in range(WARM_UP + repeats):
        prepared = prepare()
        start = time.perf_counter()
        run(prepared)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM_UP:])


@contextmanager
def _stash(params: list[nn.Parameter]) -> Iterator[dict[int, int]]:
    """Collect the bytes of each memory block, parameters aside, that the graph of a forward keeps."""
    own = {param.untyped_storage().data_ptr() for param in params}
    blocks: dict[int, int] = {}
    alive = []  # else a freed block's address could come again

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            alive.append(storage)
            blocks[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield blocks


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Train mode and one thread inside; modes, buffers, random state and threads are as before afterwards."""
    threads = torch.get_num_threads()
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    torch.set_num_threads(1)
    model.train()
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(threads)
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _gflops(dtype: torch.dtype, repeats: int, size: int = 384) -> float:
    a = torch.ones(size, size, dtype=dtype)
    return 2 * size**3 / _median(lambda b: a @ b, repeats, lambda: torch.ones(size, size, dtype=dtype)) / 1e9


def _dtype(model: nn.Module) -> torch.dtype:
    for param in model.parameters():
        if param.is_floating_point():
            return param.dtype
    return torch.get_default_dtype()


def _arrays(value: Any) -> dict[str, Tensor]:
    return dict(value) if isinstance(value, Mapping) else {BARE: value}


def _bytes(value: Any) -> int:
    """Bytes of a tensor, or of all tensors in dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(map(_bytes, value.values()))
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0
