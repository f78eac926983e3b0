"""The runner on torch: a range of the chain's layers, with the weights that it is given."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from edgesplit.errors import PlanError, RunError, TaskError, Within
from edgesplit.segments.base import Arrays, Output, Samples, Weights
from edgesplit.segments.masks import KeyedRandomness, Running, loss_may_draw, may_draw
from edgesplit.segments.torch.graph import Graph, SameWeights, Versions, entries
from edgesplit.segments.torch.values import each, fresh, from_arrays, named, settled, to_arrays
from edgesplit.splitting import Chain, Value, checked, random_names, set_train
from edgesplit.task import Task


class TorchRunner:
    """Computes layers ``start`` to ``stop`` of a chain; see :class:`edgesplit.segments.base.SegmentRunner`.

    It works on copies of the layers' modules without their weights: many nodes in one process may share a chain, and
    nothing but the weights given can be used.

    Args:
        chain: the layers.
        start: the first layer.
        stop: one after the last layer.
        task: its loss, metrics and training mode.
        device: where to compute; the weights and buffers given must be there.

    Raises:
        PlanError: no such range.
        TaskError: a layer's module cannot be copied.
    """

    def __init__(self, chain: Chain, start: int, stop: int, task: Task, device: torch.device | str = "cpu") -> None:
        if not 0 <= start < stop <= len(chain.layers):
            raise PlanError(f"there are no layers {start} to {stop} in a chain of {len(chain.layers)}")
        self.start, self.stop = start, stop
        self.same_weights = self.watchful = False
        self.first_bad: str | None = None
        self._clean = True
        self._task, self._device = task, torch.device(device)
        self._layers = chain.layers[start:stop]
        self._modules, self._running, self._first_calls = _without_weights(chain, start, stop)
        self._within = [Within(f"layer {layer.name!r}") for layer in self._layers]
        pairs = list(zip(self._layers, self._modules, strict=True))
        self._params = [_slots(module, layer.params) for layer, module in pairs]
        self._buffers = [_slots(module, layer.buffers, "_buffers") for layer, module in pairs]
        self._draws = any(may_draw(module) for root in self._modules for module in root.modules())
        self._needed = tuple(dict.fromkeys(name for layer in self._layers for _, name in layer.params))
        for module in self._modules:
            set_train(module, task.train_mode)
        self._training = [(module, module.training) for root in self._modules for module in root.modules()]
        self._live: dict[int, Graph] = {}
        self._loss_module = _Loss(self._loss)
        self._loss_draws = loss_may_draw(task.loss)

    def forward(
        self,
        micro: int,
        weights: Weights,
        buffers: dict[str, Any],
        inputs: Arrays,
        needs_grad: frozenset[str],
        samples: Samples,
    ) -> Output:
        """Run in training mode and keep the graph; ``buffers`` are updated in place."""
        graph, value = self._forward(micro, weights, buffers, inputs, needs_grad, samples)
        graph.versions.end_forward()
        graph.outputs = {name: tensor for name, tensor in named(value).items() if tensor.requires_grad}
        self._live[micro] = graph
        return Output(to_arrays(value), frozenset(graph.outputs))

    def forward_loss(
        self,
        micro: int,
        weights: Weights,
        buffers: dict[str, Any],
        inputs: Arrays,
        needs_grad: frozenset[str],
        samples: Samples,
        target: Arrays,
        weight: float,
        loss_scale: float,
    ) -> Output:
        """Run through the loss. The gradients are those of its mean times ``weight``, times ``loss_scale``."""
        graph, value = self._forward(micro, weights, buffers, inputs, needs_grad, samples)
        loss_sum = 0.0
        if weight == 0:
            graph.zero = True
            graph.outputs = {name: tensor for name, tensor in named(value).items() if tensor.requires_grad}
            graph.received = {name: torch.zeros_like(tensor) for name, tensor in graph.outputs.items()}
        else:
            with torch.enable_grad(), graph.versions.hooks(), self._loss_randomness(samples):
                loss = self._loss_module(value, from_arrays(target, self._device)) * weight
            loss_sum = float(loss.detach())
            if self.watchful:
                self._look("the loss", loss.detach())
            if loss.requires_grad:
                graph.outputs = {"loss": loss}
                graph.received = {"loss": torch.full_like(loss, loss_scale)}
        graph.versions.end_forward()
        graph.last = True
        self._live[micro] = graph
        return Output({}, loss_sum=loss_sum)

    def evaluate(
        self, weights: Weights, buffers: Mapping[str, Any], inputs: Arrays, target: Arrays | None = None
    ) -> Output:
        """Run in evaluation mode without a graph; with ``target``, through loss and metrics."""
        with torch.no_grad(), self._evaluating():
            value = self._chain(self._given(weights), dict(buffers), from_arrays(inputs, self._device))
            if target is None:
                return Output(to_arrays(value))
            wanted = from_arrays(target, self._device)
            weight = self._task.weigh(wanted)
            loss_sum = float(self._loss(value, wanted)) * weight if weight else 0.0
            metrics = self._task.measure(value, wanted)
        return Output({}, loss_sum=loss_sum, metrics=metrics)

    def backward(self, micro: int, weights: Weights, grads: Arrays) -> tuple[Arrays, dict[str, Any]]:
        """Return gradients of the inputs that need one, and of the weights, each only where there is one."""
        graph = self._receive(micro, grads)
        del self._live[micro]
        edges: list[tuple[Any, GradientEdge | Tensor]] = [(("input", n), edge) for n, edge in graph.inputs.items()]
        edges += [(("weight", name), edge) for name, edge in graph.weights.items()]
        found = graph.gradients(edges, weights)
        inputs = {name: grad for (kind, name), grad in found.items() if kind == "input"}
        return to_arrays(inputs), {name: grad for (kind, name), grad in found.items() if kind == "weight"}

    def backward_input(self, micro: int, weights: Weights, grads: Arrays) -> Arrays:
        """The ``I`` half. It keeps the graph: the ``W`` half passes through it again, on the way to the weights."""
        graph = self._receive(micro, grads)
        return to_arrays(graph.gradients(graph.inputs.items(), weights, keep=True))

    def backward_weights(self, micro: int, weights: Weights) -> dict[str, Any]:
        """The ``W`` half; ends the micro-batch."""
        graph = self._graph(micro)
        del self._live[micro]
        return graph.gradients(graph.weights.items(), weights)

    def drop(self, micros: Sequence[int] | None = None) -> None:
        """Forget live forwards: those of ``micros``, or all."""
        for micro in list(self._live) if micros is None else micros:
            self._live.pop(micro, None)

    # -- forward

    def _forward(
        self,
        micro: int,
        weights: Weights,
        buffers: dict[str, Any],
        inputs: Arrays,
        needs_grad: frozenset[str],
        samples: Samples,
    ) -> tuple[Graph, Value]:
        if micro in self._live:
            raise RunError(f"micro-batch {micro} is live already in layers {self.start} to {self.stop}")
        value: Value = from_arrays(inputs, self._device)
        given = self._given(weights)
        wanted = {name: x for name, x in named(value).items() if name in needs_grad and x.is_floating_point()}
        with torch.enable_grad():
            wanted, input_edges = entries(wanted)
            trained = {name: weight for name, weight in given.items() if weight.requires_grad}
            versions: Versions | SameWeights = SameWeights(trained)
            weight_edges: Mapping[str, GradientEdge | Tensor] = trained
            if not self.same_weights:
                trained, weight_edges = entries(trained)
                versions = Versions(given)
            value = {**value, **wanted} if isinstance(value, dict) else next(iter(wanted.values()), value)
            with versions.hooks(), self._randomness(samples):
                value = self._chain({**given, **trained}, buffers, value)
        return Graph(versions, input_edges, weight_edges), value

    def _randomness(self, samples: Samples) -> AbstractContextManager[object]:
        if not self._draws:
            return nullcontext()
        return KeyedRandomness(self._running, samples, attention=self._device.type != "cpu")

    def _loss_randomness(self, samples: Samples) -> AbstractContextManager[object]:
        if not self._loss_draws:
            return nullcontext()
        return KeyedRandomness([("task.loss", self._loss_module)], samples, attention=self._device.type != "cpu")

    def _given(self, weights: Weights) -> dict[str, Tensor]:
        try:
            return {name: weights[name] for name in self._needed}
        except KeyError as error:
            raise RunError(f"layers {self.start} to {self.stop} need weight {error}, which was not given") from None

    def _chain(self, weights: Mapping[str, Tensor], buffers: dict[str, Any], value: Value) -> Value:
        self._clean = not self.watchful or _finite(value)
        for index, layer in enumerate(self._layers):
            self._running.first_call = self._first_calls[index]
            with self._within[index]:
                value = self._call(index, weights, buffers, value)
            value = checked(value, layer.name)
            value = each(value, _boundary)
            if self.watchful:
                self._look(f"layer {layer.name!r}", value)
        return value

    def _look(self, maker: str, made: Value) -> None:
        if self._clean and not _finite(made):
            self._clean = False
            self.first_bad = self.first_bad or maker

    def _call(self, index: int, weights: Mapping[str, Tensor], buffers: dict[str, Any], value: Value) -> Any:
        """Run a layer's module with its slots filled (what ``torch.func.functional_call`` does, without the search)."""
        params, own = self._params[index], self._buffers[index]
        for slot in params:
            slot.place[slot.key] = weights[slot.name]
        for slot in own:
            slot.place[slot.key] = buffers[slot.name]
        try:
            return self._modules[index](value)
        finally:
            for slot in params:
                slot.place[slot.key] = slot.empty
            for slot in own:
                left, slot.place[slot.key] = slot.place[slot.key], slot.empty
                if left is not buffers[slot.name] and isinstance(left, Tensor):
                    buffers[slot.name] = left.detach()

    def _loss(self, output: Value, target: Any) -> Tensor:
        with Within("Task.loss"):
            loss = self._task.loss(output, target)
        if not isinstance(loss, Tensor) or loss.dim():
            shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TaskError(f"task.loss gives {shape}: return a scalar tensor, the mean over weight(target) units")
        return loss

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        for module in self._modules:
            module.eval()
        try:
            yield
        finally:
            for module, training in self._training:
                module.training = training

    # -- backward

    def _graph(self, micro: int) -> Graph:
        if micro not in self._live:
            raise RunError(f"micro-batch {micro} has no live forward in layers {self.start} to {self.stop}")
        return self._live[micro]

    def _receive(self, micro: int, grads: Arrays) -> Graph:
        graph = self._graph(micro)
        if graph.last:
            return graph
        for name, array in grads.items():
            output = graph.outputs.get(name)
            if output is None or array.shape != tuple(output.shape):
                known = {name: tuple(tensor.shape) for name, tensor in graph.outputs.items()}
                raise RunError(f"gradient {name!r} of shape {array.shape} for micro-batch {micro}, whose are {known}")
            graph.received[name] = fresh(array, self._device).to(output.dtype)
        return graph


class _Loss(nn.Module):
    """The Task's loss as a module, so that what it draws is keyed as a layer's draws are."""

    def __init__(self, loss: Callable[[Value, Any], Tensor]) -> None:
        super().__init__()
        self._loss = loss

    def forward(self, output: Value, target: Any) -> Tensor:
        return self._loss(output, target)


class _Slot(NamedTuple):
    """Where a module keeps a parameter or buffer: dict and key, the name in the model, and what is there now."""

    place: dict[str, Any]
    key: str
    name: str
    empty: Tensor


def _slots(module: nn.Module, names: Sequence[tuple[str, str]], kind: str = "_parameters") -> list[_Slot]:
    slots = []
    for local, name in names:
        owner, _, key = local.rpartition(".")
        place = getattr(module.get_submodule(owner), kind)
        slots.append(_Slot(place, key, name, place[key]))
    return slots


def _finite(value: Value) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in named(value).values())


def _boundary(tensor: Tensor) -> Tensor:
    tensor = settled(tensor)
    node = tensor.grad_fn
    if node is not None:
        node.register_prehook(_settle_all)
    return tensor


def _settle_all(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if grad is None else settled(grad) for grad in grads)


def _without_weights(chain: Chain, start: int, stop: int) -> tuple[list[nn.Module], Running, list[dict[str, int]]]:
    """Return copies of the layers' modules whose parameters and buffers have no memory.

    Also hooks on them that know which module runs, and by layer the first call numbers of its names.
    """
    memo: dict[int, Any] = {}
    for layer in chain.layers[start:stop]:
        for parameter in layer.module.parameters():
            empty = torch.empty_like(parameter, device="meta")
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for buffer in layer.module.buffers():
            memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    modules = []
    for layer in chain.layers[start:stop]:
        try:
            modules.append(copy.deepcopy(layer.module, memo))
        except Exception as error:
            raise TaskError(
                f"layer {layer.name!r} cannot be copied: {error}; keep no computed tensors or open resources as "
                "attributes of a module (for a weight norm: torch.nn.utils.parametrizations)"
            ) from error
    names = [random_names(chain, index) for index in range(start, stop)]
    hooked = {memo[id(module)]: name for own, _ in names for name, module in own}
    return modules, Running((name, module) for module, name in hooked.items()), [first for _, first in names]
