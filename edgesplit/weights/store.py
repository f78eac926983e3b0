"""What one node holds of its layers: parameters, buffers, optimizer state, and how to take back a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from edgesplit import optimizers
from edgesplit.errors import RunError
from edgesplit.optimizers import OptimizerSpec, State
from edgesplit.weights.sums import Array, Grads, Layer, Report, StepSums

ToNative = Callable[[np.ndarray[Any, Any], bool], Array]
"""``(array, requires_grad) ->`` the runner's kind of array. It may keep the memory of what it gets."""

Update = Callable[[Mapping[str, Array], Grads, State, float], tuple[dict[str, Array], State]]
"""``(params, grads, state, lr) -> (params, state)``: :func:`optimizers.update` with its spec bound."""


class Exported(NamedTuple):
    """Layers as flat dicts of numpy arrays by global name; ``optimizer`` as :func:`state_arrays` names it."""

    params: dict[str, np.ndarray[Any, Any]]
    buffers: dict[str, np.ndarray[Any, Any]]
    optimizer: dict[str, np.ndarray[Any, Any]]


class Snapshot(NamedTuple):
    """The state after the last update, confirmed or not: arrays that will not change, and the round's weights."""

    arrays: Exported
    round: dict[Layer, float]


@dataclass(slots=True)
class _Undo:
    """The arrays from before an update; updates write none in place, so references are enough."""

    params: dict[str, Array] = field(default_factory=dict)
    state: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    buffers: dict[str, Array] = field(default_factory=dict)
    layers: set[Layer] = field(default_factory=set)


def native_numpy(array: np.ndarray[Any, Any], requires_grad: bool) -> Array:
    """The :data:`ToNative` of numpy runners: the array itself."""
    return array


class LayerStore:
    """One node's layers, by layer and parameter name.

    A synchronous step is ``begin``, ``accumulate`` for each micro-batch, ``report``, then ``update`` and ``confirm``
    in either order, or ``rollback``. At most one updated step is unconfirmed; forwards of the next may have begun.
    A parameter or buffer that several layers name belongs to the first of them.

    Args:
        params: layer -> global names of its parameters.
        buffers: layer -> global names of its buffers.
        spec: the optimizer; parameters without a rule are never updated.
        frozen: names of parameters that need no gradient.
        to_native: turns numpy arrays into the runner's.
        update: other arithmetic in place of ``spec``'s. It must write nothing in place.
        slots: the names that its state may have in what is loaded; None: any.

    Attributes:
        params: the current parameters by name: a new dict after each update, its arrays never written.
        buffers: the current buffers by name; runners write into this dict and its arrays.
        state: the optimizer's.
    """

    def __init__(
        self,
        params: Mapping[Layer, Sequence[str]],
        buffers: Mapping[Layer, Sequence[str]],
        spec: OptimizerSpec,
        *,
        frozen: Iterable[str] = (),
        to_native: ToNative = native_numpy,
        update: Update | None = None,
        slots: Collection[str] | None = optimizers.SLOTS,
    ) -> None:
        self.layers = tuple(params)
        self._params, self._buffers = _owned(params), _owned({layer: buffers.get(layer, ()) for layer in params})
        self._frozen, self._to_native, self._optimize = (
            frozenset(frozen),
            to_native,
            update or partial(optimizers.update, spec),
        )
        self._slots = slots
        self.params: dict[str, Array] = {}
        self.buffers: dict[str, Array] = {}
        self.state: State = {}
        self._versions = dict.fromkeys(self.layers, 0)
        self._base: dict[str, Array] = {}  # buffers at the end of the last step that cannot be taken back
        self._steps: dict[int, StepSums] = {}
        self._undo: dict[int, _Undo] = {}
        self._confirmed = -1
        self._round: dict[Layer, float] = dict.fromkeys(self.layers, 0.0)

    # -- a step

    def begin(self, step: int, micros: Mapping[Layer, Sequence[int]]) -> None:
        """Expect these micro-batches at each layer in this step, in the order in which to add their gradients."""
        if step <= self._confirmed or step in self._steps:
            raise RunError(f"step {step} has begun already (last confirmed: {self._confirmed})")
        self._known(micros)
        self._steps[step] = StepSums(step, micros)

    def accumulate(self, layers: Iterable[Layer], micro: int, grads: Grads, weight: float) -> None:
        """Add a micro-batch's gradients, of the sum over ``weight`` units, to the layers that it passed."""
        layers = list(layers)
        self._known(layers)
        steps = [self._step_of(layer, micro) for layer in layers]  # all of them before anything changes
        with np.errstate(over="ignore", invalid="ignore"):  # not finite is an answer here, see report
            for layer, sums in zip(layers, steps, strict=True):
                own = {name: grads[name] for name in self._params[layer] if grads.get(name) is not None}
                sums.add(layer, micro, own, weight)

    def report(self, step: int, loss_scale: float = 1.0) -> Report:
        """Whether the step's gradients are finite, and weight and squared norm of each layer's mean gradient."""
        return self._sums(step).report(loss_scale)

    def sums(self, step: int, layers: Iterable[Layer]) -> tuple[dict[str, Array], dict[Layer, float]]:
        """Gradient sums by parameter name (numpy) and weights by layer, to be added to those of other replicas."""
        layers, held = list(layers), self._sums(step)
        held.check_complete(layers)
        arrays = {name: to_numpy(value) for layer in layers for name, value in held.sums(layer).items()}
        return arrays, {layer: held.weight(layer) for layer in layers}

    def set_sums(self, step: int, grads: Grads, weights: Mapping[Layer, float]) -> None:
        """Replace the sums of the layers in ``weights`` by these of all replicas (numpy)."""
        self._known(weights)
        held = self._sums(step)
        for layer, weight in weights.items():
            own = {name: self._to_native(grads[name], False) for name in self._params[layer] if name in grads}
            held.replace(layer, own, weight)

    def update(
        self, step: int, layers: Iterable[Layer], lr: float = 1.0, clip: float = 1.0, loss_scale: float = 1.0
    ) -> None:
        """Apply the step's mean gradient, times ``clip``, to these layers: all of them or, on an error, none.

        A layer of weight 0 in this step keeps its weights and optimizer state.
        """
        layers = list(layers)
        self._known(layers)
        if step not in self._steps and step <= self._confirmed:
            return  # nothing passed these layers, and the step was settled without them
        held = self._sums(step)
        waiting = [other for other in self._steps if other < step and other > self._confirmed]
        if waiting:
            raise RunError(f"step {step} cannot be applied before step {min(waiting)} is confirmed or taken back")
        undo = self._undo.get(step, _Undo())
        if again := undo.layers.intersection(layers):
            raise RunError(f"step {step} has been applied to layer {min(again)!r} already")
        held.check_complete(layers)
        means: dict[str, Array] = {}
        with np.errstate(over="ignore", invalid="ignore"):
            for layer in layers:
                if layer in held and held.weight(layer):
                    means |= held.means(layer, loss_scale, clip)
        params, state = self._apply(means, lr)
        self._undo[step] = undo
        self._remember(undo, layers, means)
        self._swap(layers, params, state)
        for layer in layers:
            if layer in held:
                held.release(layer)
        self._settle(step)

    def apply(self, layers: Iterable[Layer], means: Grads, weight: float, lr: float = 1.0) -> None:
        """Apply mean gradients at once and for good, outside of any step (asynchronous methods)."""
        layers = list(layers)
        self._known(layers)
        params, state = self._apply(means, lr)
        self._swap(layers, params, state)
        for layer in layers:
            self._round[layer] += weight

    def confirm(self, step: int) -> None:
        """The step stands: nothing of it can be taken back, and its weights count for the round.

        It may come before ``update``. A step that this node took no part in needs no ``begin``.
        """
        if step in self._steps:
            self._steps[step].check_complete()
            for layer, weight in self._steps[step].weights().items():
                self._round[layer] += weight
        self._confirmed = max(self._confirmed, step)
        self._settle(step)

    def rollback(self, step: int) -> None:
        """Take back the step: weights, optimizer state and buffers are as at the end of the step before.

        The gradients of this and later steps are dropped; buffers that later forwards wrote are undone too.
        """
        if step <= self._confirmed:
            raise RunError(f"step {step} cannot be taken back: step {self._confirmed} is confirmed")
        if due := [other for other in self._steps if other <= self._confirmed]:
            raise RunError(f"step {step} cannot be taken back before step {due[0]}, which is confirmed, is applied")
        undo = self._undo.pop(step, _Undo())
        self.params = self.params | undo.params
        for name, slots in undo.state.items():
            if slots is None:
                self.state.pop(name, None)
            else:
                self.state[name] = slots
        self.buffers.update({name: _copy(value) for name, value in (self._base | undo.buffers).items()})
        self._base |= undo.buffers
        for layer in undo.layers:
            self._versions[layer] -= 1
        self._steps = {other: sums for other, sums in self._steps.items() if other < step}

    def abandon(self) -> None:
        """Forget every step, without putting anything back, and count from anywhere: before other state is loaded."""
        self._steps.clear()
        self._undo.clear()
        self._confirmed = -1

    # -- the round, state in and out

    def version(self, layers: Iterable[Layer]) -> int:
        """How many updates these layers have had."""
        return max(map(self._versions.__getitem__, layers), default=0)

    def stamp(self, layers: Iterable[str]) -> tuple[int, ...]:
        """The version of each of these layers: equal stamps mean equal weights."""
        return tuple(self._versions[layer] for layer in layers)

    def round_weights(self) -> dict[Layer, float]:
        """Layer -> weight of the confirmed steps since the last :meth:`reset_round`."""
        return dict(self._round)

    def reset_round(self) -> None:
        """Begin a round: its weights are 0."""
        self._round = dict.fromkeys(self.layers, 0.0)

    def params_of(self, layers: Iterable[Layer]) -> dict[str, Array]:
        """The current parameters of these layers."""
        return {name: self.params[name] for layer in layers for name in self._params[layer]}

    def export(self, layers: Iterable[Layer] | None = None) -> Exported:
        """Return the state of these layers (default: all) as numpy arrays.

        Raises:
            RunError: a step is applied but not confirmed.
        """
        self._check_settled("exported")
        chosen = self.layers if layers is None else tuple(layers)
        self._known(chosen)
        params = [name for layer in chosen for name in self._params[layer]]
        buffers = [name for layer in chosen for name in self._buffers[layer]]
        state = optimizers.state_arrays({name: self.state[name] for name in params if name in self.state})
        return Exported(
            {name: to_numpy(self.params[name]) for name in params},
            {name: to_numpy(_copy(self.buffers[name])) for name in buffers},
            {name: to_numpy(value) for name, value in state.items()},
        )

    def snapshot(self, *, frozen: bool) -> Snapshot:
        """Return the state after the last update, to come back to with :meth:`restore`.

        Args:
            frozen: with the parameters that never change.
        """
        params = {name: value for name, value in self.params.items() if frozen or name not in self._frozen}
        buffers = self.buffers | self._base  # as at the last step's end: forwards of the next may have begun
        arrays = Exported(*({n: to_numpy(v) for n, v in held.items()} for held in (params, buffers, self._optimizer())))
        round_ = dict(self._round)
        for step in self._undo:
            if step > self._confirmed:
                for layer, weight in self._steps[step].weights().items():
                    round_[layer] += weight
        return Snapshot(arrays, round_)

    def _optimizer(self) -> dict[str, Any]:
        return optimizers.state_arrays(self.state)

    def inherit(self, before: LayerStore) -> None:
        """Take over the state of the layers that another store holds, too, as after its last update."""
        (params, buffers, optimizer), _ = before.snapshot(frozen=True)
        mine = {name for layer in self.layers if layer in before.layers for name in self._params[layer]}
        own = {name for layer in self.layers if layer in before.layers for name in self._buffers[layer]}
        self.load(
            {name: array for name, array in params.items() if name in mine},
            {name: array for name, array in buffers.items() if name in own},
            {name: array for name, array in optimizer.items() if name.rpartition("//")[0] in mine},
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Put back a whole snapshot; every step is forgotten. Raises RunError where it is of other layers."""
        self.abandon()
        self.state = {}
        self.load(*snapshot.arrays)
        self._known(snapshot.round)
        self._round = dict.fromkeys(self.layers, 0.0) | snapshot.round
        for layer in self.layers:
            self._versions[layer] += 1  # whoever remembers weights by their version must not find the old ones

    def load(
        self,
        params: Mapping[str, np.ndarray[Any, Any]] | None = None,
        buffers: Mapping[str, np.ndarray[Any, Any]] | None = None,
        optimizer: Mapping[str, np.ndarray[Any, Any]] | None = None,
    ) -> None:
        """Replace the parameters, buffers and optimizer state that are named; nothing else changes.

        Raises:
            RunError: an unknown name, another shape or dtype than what is held, or a step applied but not confirmed.
        """
        self._check_settled("loaded")
        _check_arrays("parameter", params or {}, self._params, self.params)
        _check_arrays("buffer", buffers or {}, self._buffers, self.buffers)
        state = optimizers.state_from_arrays(optimizer or {}, self._slots)
        self._check_state(state, params or {})
        self.params = self.params | {
            name: self._to_native(array, name not in self._frozen) for name, array in (params or {}).items()
        }
        # Runners write into buffers, so these must not share memory with what came in.
        self.buffers.update({name: _copy(self._to_native(array, False)) for name, array in (buffers or {}).items()})
        self._base.update({name: _copy(self.buffers[name]) for name in buffers or {}})
        for name, slots in state.items():
            self.state[name] = {
                slot: value if isinstance(value, int) else self._to_native(value, False)
                for slot, value in slots.items()
            }

    def reset_optimizer(self) -> None:
        """Forget the optimizer's state."""
        self._check_settled("reset")
        self.state = {}

    # -- inside

    def _apply(self, means: Grads, lr: float) -> tuple[dict[str, Array], State]:
        params = {name: self.params[name] for name in means}
        state = {name: self.state[name] for name in means if name in self.state}
        with np.errstate(over="ignore", invalid="ignore"):
            return self._optimize(params, means, state, lr)

    def _remember(self, undo: _Undo, layers: Sequence[Layer], means: Grads) -> None:
        undo.layers.update(layers)
        for name in means:
            undo.params[name], undo.state[name] = self.params[name], self.state.get(name)
        for layer in layers:
            # All forwards of this step are done here, so the buffers now are those of its end.
            for name in self._buffers[layer]:
                undo.buffers[name], self._base[name] = self._base[name], _copy(self.buffers[name])

    def _swap(self, layers: Sequence[Layer], params: dict[str, Array], state: State) -> None:
        self.params = self.params | params
        self.state = self.state | state
        for layer in layers:
            self._versions[layer] += 1

    def _settle(self, step: int) -> None:
        """Forget what a confirmed step no longer needs."""
        if step > self._confirmed:
            return
        done = self._undo.pop(step, _Undo()).layers
        if step in self._steps and not self._steps[step].due() <= done:
            self._undo[step] = _Undo(layers=done)  # layers of it are still to be updated
        else:
            self._steps.pop(step, None)

    def _known(self, layers: Iterable[Layer]) -> None:
        for layer in layers:
            if layer not in self._params:
                raise RunError(f"layer {layer!r} is not on this node, which has {', '.join(self.layers)}")

    def _sums(self, step: int) -> StepSums:
        if step not in self._steps:
            raise RunError(f"step {step} is not in flight here (in flight: {sorted(self._steps) or 'none'})")
        return self._steps[step]

    def _step_of(self, layer: Layer, micro: int) -> StepSums:
        for sums in self._steps.values():
            if sums.expects(layer, micro):
                return sums
        raise RunError(f"layer {layer!r} expects no gradient of micro-batch {micro} (again, or of a step taken back)")

    def _check_state(self, state: State, params: Mapping[str, Any]) -> None:
        known = {name for mine in self._params.values() for name in mine}
        for name, slots in state.items():
            if name not in known:
                raise RunError(f"parameter {name!r}, which the optimizer's state names, is not on this node")
            shape = tuple((params[name] if name in params else self.params[name]).shape)
            for slot, value in slots.items():
                if self._slots is not None and slot != "count" and tuple(value.shape) != shape:
                    raise RunError(f"optimizer's {slot} of {name!r} has shape {tuple(value.shape)}, not {shape}")

    def _check_settled(self, what: str) -> None:
        if self._undo:
            step = min(self._undo)
            need = "applied" if step <= self._confirmed else "confirmed or taken back"
            raise RunError(f"weights cannot be {what} before step {step} is {need}")


def _owned(names: Mapping[Layer, Sequence[str]]) -> dict[Layer, tuple[str, ...]]:
    seen: set[str] = set()
    owned = {}
    for layer, mine in names.items():
        owned[layer] = tuple(name for name in dict.fromkeys(mine) if name not in seen)
        seen.update(mine)
    return owned


def _check_arrays(
    kind: str, arrays: Mapping[str, Any], names: Mapping[Layer, Sequence[str]], held: Mapping[str, Array]
) -> None:
    known = {name for mine in names.values() for name in mine}
    for name, array in arrays.items():
        if name not in known:
            raise RunError(f"{kind} {name!r} is not on this node")
        if name in held and tuple(array.shape) != tuple(held[name].shape):
            raise RunError(f"{kind} {name!r} has shape {tuple(array.shape)}, but {tuple(held[name].shape)} is held")
        dtype = str(held[name].dtype).removeprefix("torch.") if name in held else "bfloat16"
        if dtype not in (str(array.dtype), "bfloat16"):  # numpy has no bfloat16: to_native knows what it gets
            raise RunError(f"{kind} {name!r} has dtype {array.dtype}, but {dtype} is held")


def _copy(value: Array) -> Array:
    return value.detach().clone() if hasattr(value, "detach") else np.array(value)


def to_numpy(value: Array) -> np.ndarray[Any, Any]:
    """A numpy array or a torch tensor as numpy, of the same memory where that can be."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)
