"""Random masks in torch that belong to the module and the sample: what Dropout and attention draw is replaced.

Below autograd every draw of torch, by whatever function, is an operator with the tag ``nondeterministic_seeded``. The
masks of dropout are ``bernoulli_``; they are filled from :mod:`edgesplit.segments.random`. Every other draw is refused:
it would depend on how the model is cut. (A mode on the level of functions would not see what composite functions such
as multi-head attention draw inside.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.hooks import RemovableHandle

from edgesplit.dispatch import Dispatch
from edgesplit.errors import TaskError
from edgesplit.segments.base import Samples
from edgesplit.segments.random import keep_masks

aten = torch.ops.aten

_DRAWING = (_DropoutNd, nn.MultiheadAttention, nn.RReLU, nn.RNNBase, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


class Draw(NamedTuple):
    """A mask that was drawn: by which module, its how-manieth, the shape of all samples' masks, drop probability."""

    name: str
    call: int
    shape: tuple[int, ...]
    p: float


class Running:
    """Knows which module of a forward runs, by hooks on the modules; ``remove`` takes them off again.

    Args:
        modules: ``(name in the original model, module)``.

    Attributes:
        first_call: name -> the number of its first call in the layer that runs, where that is not 0.
        stack: the modules that run, from the outermost: name, and whether its own code may draw.
        switch: called when another module runs.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self.first_call: Mapping[str, int] = {}
        self.stack: list[tuple[str, bool]] = []
        self.switch: Callable[[], None] = _nothing
        self._handles: list[RemovableHandle] = []
        named = [(name, module, may_draw(module)) for name, module in modules]
        # A module that draws nothing matters only within one that does: there the switch goes off for its time.
        inside = {part for _, module, draws in named if draws for part in module.modules()}
        for name, module, draws in named:
            if module in inside:
                self._hook(module, (name, draws))

    def _hook(self, module: nn.Module, entry: tuple[str, bool]) -> None:
        def enter(module: nn.Module, args: Any) -> None:
            self.stack.append(entry)
            self.switch()
            if isinstance(module, nn.RNNBase) and module.training and module.dropout and module.num_layers > 1:
                raise TaskError(
                    f"module {entry[0]!r} ({type(module).__name__}) has dropout={module.dropout} between its layers, "
                    "whose masks would depend on the cut: stack RNNs of one layer with nn.Dropout between them"
                )

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self.stack:
                self.stack.pop()
            self.switch()

        self._handles.append(module.register_forward_pre_hook(enter))
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def may_draw(module: nn.Module) -> bool:
    """Return whether a module's own forward may draw; of torch's own modules only a few do."""
    known = type(module).__module__.startswith("torch.nn.modules.") and "forward" not in vars(module)
    return not known or isinstance(module, _DRAWING)


def loss_may_draw(loss: Callable[..., Any]) -> bool:
    """Return whether a loss may draw: torch's own functions and modules for losses do not, anything else may."""
    while isinstance(loss, partial):
        loss = loss.func
    if isinstance(loss, nn.Module):
        return any(may_draw(module) for module in loss.modules())
    name = getattr(loss, "__name__", "")
    return getattr(nn.functional, name, None) is not loss or not name.endswith(("_loss", "cross_entropy"))


class KeyedRandomness:
    """Context of one forward in training mode: masks are keyed by module and sample, other draws refused.

    Args:
        modules: a :class:`Running`, or ``model.named_modules()`` to put hooks on for the time of the context.
        samples: whose samples the forward computes, in order. A mask's leading dimension must be a multiple of
            their number, sample by sample (as in multi-head attention: samples times heads).
        attention: make fused attention with dropout use its plain formula; needed off the CPU.
        replay: draws to repeat one by one, whoever draws, instead of asking which module runs.

    Attributes:
        draws: what has been drawn so far.
    """

    def __init__(
        self,
        modules: Running | Iterable[tuple[str, nn.Module]],
        samples: Samples,
        *,
        attention: bool = False,
        replay: Sequence[Draw] | None = None,
    ) -> None:
        self._own = not isinstance(modules, Running)
        self._running = modules if isinstance(modules, Running) else Running(modules)
        self._samples = samples
        self._count = sum(stop - start for _, start, stop in samples.parts)
        self._calls: dict[tuple[str, int], int] = {}
        self._replay = replay
        self._modes = _Modes(self._draw, self._where, attention)
        self.draws: list[Draw] = []

    def __enter__(self) -> Self:
        self._running.stack.clear()
        self._running.switch = self._switch
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._running.switch = _nothing
        self._running.stack.clear()
        self._modes.off()
        if self._own:
            self._running.remove()

    def _switch(self) -> None:
        # The mode costs time on every operator: it is on only while code runs that may draw.
        stack = self._running.stack
        if stack and stack[-1][1]:
            self._modes.on()
        else:
            self._modes.off()

    def _where(self) -> str:
        return f"module {self._running.stack[-1][0]!r}" if self._running.stack else "the model"

    def _draw(self, shape: tuple[int, ...], p: float) -> Tensor:
        draw = self._next(shape, p)
        self.draws.append(draw)
        if not shape or shape[0] % self._count:
            raise TaskError(
                f"{self._where()} draws a random mask of shape {shape}, whose first dimension is not a multiple of "
                f"the {self._count} samples: every sample needs a mask of its own, with the batch as the first "
                "dimension (batch_first=True)"
            )
        elements = torch.Size(shape).numel() // self._count
        keep = keep_masks(draw.name, draw.call, self._samples, elements, p)
        return torch.from_numpy(keep).view(shape)

    def _next(self, shape: tuple[int, ...], p: float) -> Draw:
        if self._replay is None:
            name = self._running.stack[-1][0] if self._running.stack else ""
            first = self._running.first_call.get(name, 0)
            call = self._calls.get((name, first), first)
            self._calls[name, first] = call + 1
            return Draw(name, call, shape, p)
        at = len(self.draws)
        if at >= len(self._replay) or (self._replay[at].shape, self._replay[at].p) != (shape, p):
            raise UnforeseenDraw(
                f"the model's forward draws a random mask of shape {shape} in {self._where()} where its layers draw "
                + (f"one of shape {self._replay[at].shape}" if at < len(self._replay) else "none")
            )
        return self._replay[at]


class UnforeseenDraw(TaskError):
    """A replayed forward draws what the recorded one did not."""


class _Modes:
    """The modes, and whether they are on: only the innermost mode can be taken off."""

    def __init__(self, draw: Callable[[tuple[int, ...], float], Tensor], where: Callable[[], str], attention: bool):
        self._dispatch = _Draws(draw, where)
        self._attention = attention
        self._stack: ExitStack | None = None

    def on(self) -> None:
        if self._stack is None:
            self._stack = ExitStack()
            self._stack.enter_context(self._dispatch)
            if self._attention:
                self._stack.enter_context(_PlainAttention())

    def off(self) -> None:
        # Left on under a mode of the model's own, which must come off first.
        if self._stack is not None and _get_current_dispatch_mode() is self._dispatch:
            self._stack.close()
            self._stack = None


class _Draws(Dispatch):
    """Replaces what masks are drawn from, and refuses other draws."""

    def __init__(self, draw: Callable[[tuple[int, ...], float], Tensor], where: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draw, self._where = draw, where

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _seeded(func):
            return func(*args, **kwargs)
        if func is aten.bernoulli_.float:
            noise, keep = args[0], args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            return noise.copy_(self._draw(tuple(noise.shape), 1.0 - keep))
        if func is aten.native_dropout.default:
            return self._native_dropout(*args, **kwargs)
        if _draws_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        raise TaskError(
            f"{self._where()} draws random numbers with {func.name().removeprefix('aten::')} in training mode, which "
            "would depend on how the model is cut: draw with nn.Dropout or F.dropout"
        )

    def _native_dropout(self, x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
        if train is False or p in (0.0, 1.0):
            keep = torch.full_like(x, p < 1.0 or train is False, dtype=torch.bool)
            return x * keep, keep
        keep = self._draw(tuple(x.shape), p).to(x.device)
        return x * keep.to(x.dtype).div_(1.0 - p), keep


class _PlainAttention(TorchFunctionMode):
    """Attention with dropout by its formula: a fused kernel would draw inside."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        place = _DROPOUT_P.get(func)
        if place is None or not (kwargs["dropout_p"] if "dropout_p" in kwargs else (*args, *[0.0] * 11)[place]):
            return func(*args, **kwargs)
        with sdpa_kernel(SDPBackend.MATH):
            return func(*args, **kwargs)


_DROPOUT_P = {nn.functional.scaled_dot_product_attention: 4, nn.functional.multi_head_attention_forward: 10}
"""Functions that end in fused attention, and which of their arguments is ``dropout_p``."""


@cache
def _seeded(operator: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operator.tags


def _draws_nothing(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator that can draw does not: without dropout, or not in training."""
    given = {argument.name: argument.default_value for argument in operator._schema.arguments}  # noqa: SLF001
    given.update(zip(given, args, strict=False))
    given.update(kwargs)
    switches = [given[name] for name in ("dropout_p", "dropout", "train", "training") if name in given]
    return any(not switch for switch in switches)


def _nothing() -> None:
    return None
