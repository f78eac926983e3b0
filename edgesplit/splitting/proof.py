"""A chain is proven, never believed: its layers in a row compute what the model computes, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from edgesplit.errors import TaskError
from edgesplit.segments.base import Samples
from edgesplit.segments.masks import Draw, KeyedRandomness, Running, UnforeseenDraw
from edgesplit.splitting.chain import Chain, Value, checked, random_names
from edgesplit.splitting.cuts import modes_kept, set_train


def prove_chain(chain: Chain, x: Any, *, train_mode: Callable[[nn.Module], None] | None = None) -> None:
    """Check that the chain computes what the model does, bit for bit: two batch sizes, train and eval mode.

    In training mode both draw the same random masks. Buffers and training flags are as before afterwards.

    Args:
        chain: the layers.
        x: a batch of the task, a tensor or a flat dict of tensors with the samples along dimension 0.
        train_mode: the task's.

    Raises:
        TaskError: they differ; names the first place in the model's forward where they do.
    """
    whole = _at_least_four(checked(x, "the data"))
    half = _first(whole, _samples(whole) // 2)
    with modes_kept(chain), buffers_kept(chain.model), torch.no_grad():
        for layer in chain.layers:
            layer.module.eval()
        chain.model.eval()
        for value in (whole, half):
            _prove(chain, value, training=False)
        chain.model.train()
        for layer in chain.layers:
            set_train(layer.module, train_mode)
        draws = [_prove(chain, value, training=True) for value in (whole, half)]
    _check_scaling(draws[0], _samples(whole), draws[1], _samples(half))


def _prove(chain: Chain, x: Value, training: bool) -> list[Draw]:
    """Run model and chain on ``x``; return the chain's draws."""
    draws: list[Draw] = []
    mode = f"in {'training' if training else 'evaluation'} mode on a batch of {_samples(x)}"
    with buffers_kept(chain.model):
        try:
            got: Any = _chain_forward(chain, x, draws if training else None)
        except TaskError:
            raise
        except Exception as error:
            place = _locate(chain, x, draws, training)
            raise TaskError(f"the chain of layers fails {mode}: {error}; {place}") from error
        got_buffers = {name: buffer.clone() for name, buffer in chain.model.named_buffers()}
    with buffers_kept(chain.model):
        try:
            want: Any = _model_forward(chain, x, draws if training else None)
        except UnforeseenDraw as error:
            raise TaskError(f"the chain of layers is not the model {mode}: {error}; {_HINT}") from None
        except TaskError:
            raise
        except Exception as error:
            raise TaskError(f"the model itself fails {mode}: {error}") from error
        same = _same(got, want)
        buffers = [n for n, b in chain.model.named_buffers() if not _same(got_buffers.get(n), b)]
    if not same:
        place = _locate(chain, x, draws, training)
        raise TaskError(f"the chain of layers is not the model {mode}: {place}")
    if buffers:
        raise TaskError(f"the chain of layers is not the model {mode}: it leaves buffer {buffers[0]!r} different")
    return draws


_HINT = "make each step of forward a module of its own and name them all in task.layers, or give wrapper modules"


def _chain_forward(chain: Chain, x: Value, draws: list[Draw] | None) -> Value:
    with _fresh_seed():
        value: Value = _copy(x)
        if draws is None:
            return chain.forward(value)
        for index, layer in enumerate(chain.layers):
            names, first_call = random_names(chain, index)
            running = Running(names)
            running.first_call = first_call
            try:
                with KeyedRandomness(running, _keys(x)) as randomness:
                    value = checked(layer.module(value), layer.name)
                draws.extend(randomness.draws)
            finally:
                running.remove()
        return value


def _model_forward(chain: Chain, x: Value, draws: Sequence[Draw] | None) -> Any:
    with _fresh_seed():
        if draws is None:
            return chain.model(_copy(x))
        with KeyedRandomness(chain.model.named_modules(), _keys(x), replay=draws):
            return chain.model(_copy(x))


def _keys(x: Value) -> Samples:
    return Samples(0, 0, (("proof", 0, _samples(x)),))


class _Call(NamedTuple):
    """A module's input or output, in the order of a forward."""

    module: nn.Module
    what: str
    value: Any


def _locate(chain: Chain, x: Value, draws: list[Draw], training: bool) -> str:
    """Run chain and model once more side by side; say where the model's forward first differs."""
    names = {module: name for name, module in chain.model.named_modules() if module is not chain.model}
    replay = list(draws) if training else None
    with buffers_kept(chain.model):
        in_chain = _calls(names, lambda: _chain_forward(chain, x, [] if training else None))
    with buffers_kept(chain.model):
        in_model = _calls(names, lambda: _model_forward(chain, x, replay))
    used = {call.module for call in in_chain}
    in_model = [call for call in in_model if call.module in used]
    before = "the start"
    for ours, theirs in zip(in_chain, in_model, strict=False):
        if ours.module is not theirs.module or ours.what != theirs.what:
            return (
                f"after {before} the model's forward calls {names[theirs.module]!r} where the layers call "
                f"{names[ours.module]!r}; {_HINT}"
            )
        if not _same(ours.value, theirs.value):
            name = names[ours.module]
            if ours.what == "output":
                return f"{name!r} gives another output on the same input: does it keep state between calls?"
            return (
                f"between {before} and {name!r} the model's forward does something that no layer does ({name!r} gets "
                f"{_shown(theirs.value)} in the model, {_shown(ours.value)} in the chain); {_HINT}"
            )
        before = repr(names[ours.module])
    if len(in_model) > len(in_chain):
        return f"after {before} the model's forward calls {names[in_model[len(in_chain)].module]!r} again; {_HINT}"
    if len(in_chain) > len(in_model):
        return f"the model's forward does not call {names[in_chain[len(in_model)].module]!r} after {before}; {_HINT}"
    return f"after {before} the model's forward does something that no layer does; {_HINT}"


def _calls(names: dict[nn.Module, str], forward: Callable[[], Any]) -> list[_Call]:
    """Return all calls of modules in a forward, up to where it fails if it does."""
    calls: list[_Call] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append(_Call(module, "input", _kept([*args, *kwargs.values()])))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        calls.append(_Call(module, "output", _kept(output)))

    handles = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in names]
    handles += [module.register_forward_hook(leave) for module in names]
    try:
        forward()
    except Exception:  # noqa: BLE001, S110  # any failure of the user's code: the calls up to it are what is wanted
        pass
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _kept(value: Any) -> Any:
    """Copy tensors, which a later operation may write to."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _kept(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_kept(item) for item in value]
    return value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    # Anything else is a module's option (a flag, a callable): no value that flows along the chain.
    return not isinstance(a, Tensor | dict | list) and not isinstance(b, Tensor | dict | list)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_shown(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return _shown(value[0]) if len(value) == 1 else "(" + ", ".join(map(_shown, value)) + ")"
    return type(value).__name__


def _check_scaling(whole: list[Draw], n: int, half: list[Draw], m: int) -> None:
    """Refuse masks that do not grow with the batch: no sample would have its own."""
    for a, b in zip(whole, half, strict=False):
        if a.shape[0] * m != b.shape[0] * n or a.shape[1:] != b.shape[1:]:
            raise TaskError(
                f"module {a.name!r} draws a random mask of shape {a.shape} for {n} samples and {b.shape} for {m}: "
                "every sample needs a mask of its own, with the batch as the first dimension (batch_first=True)"
            )
    if len(whole) != len(half):
        raise TaskError(f"the model draws {len(whole)} random masks for {n} samples but {len(half)} for {m}")


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Context in which buffers may be updated; they come back afterwards, the same tensors with the same values."""
    kept = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in kept:
                setattr(module, name, buffer.copy_(value))


@contextmanager
def _fresh_seed() -> Iterator[None]:
    """Let torch's own generator, which evaluation mode may use, start alike for both."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _samples(value: Value) -> int:
    tensor = value if isinstance(value, Tensor) else next(iter(value.values()))
    if tensor.dim() == 0 or len(tensor) == 0:
        raise TaskError(f"the data gives a batch of shape {tuple(tensor.shape)}: dimension 0 is for the samples")
    return len(tensor)


def _map(value: Value, change: Callable[[Tensor], Tensor]) -> Value:
    return change(value) if isinstance(value, Tensor) else {name: change(item) for name, item in value.items()}


def _copy(value: Value) -> Value:
    return _map(value, torch.clone)


def _first(value: Value, count: int) -> Value:
    return _map(value, lambda tensor: tensor[:count])


def _at_least_four(value: Value) -> Value:
    """Repeat the samples until there are two batch sizes above one, which BatchNorm refuses in training mode."""
    repeats = -(-4 // _samples(value))
    return value if repeats == 1 else _map(value, lambda tensor: torch.cat([tensor] * repeats))
