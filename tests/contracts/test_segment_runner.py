"""What every SegmentRunner must do: gradients equal plain torch's on the joint batch, however the model is cut.

``pipeline`` runs one step the way a fleet does, on one thread; ``tests.oracle.joint_step`` is the judge.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgesplit.errors import RunError
from edgesplit.segments.base import Arrays, Samples, SegmentRunner
from edgesplit.segments.torch import TorchRunner, to_arrays
from edgesplit.splitting import Chain, build_chain, prove_chain, weights_of
from edgesplit.task import Task
from tests.oracle import Batches, joint_step, size

Runner = Callable[[Chain, int, int, Task], SegmentRunner]
RUNNERS: dict[str, Runner] = {"torch": TorchRunner}


@pytest.fixture(params=RUNNERS.values(), ids=list(RUNNERS))
def make(request: pytest.FixtureRequest) -> Runner:
    runner: Runner = request.param
    return runner


@pytest.fixture(autouse=True)
def float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Block(nn.Module):
    """A transformer block whose cut carries a dict with an integer mask beside the hidden state."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 8))

    def forward(self, value: dict[str, Tensor]) -> dict[str, Tensor]:
        h, pad = value["h"], value["pad"]
        x = self.norm(h)
        h = h + self.attention(x, x, x, key_padding_mask=pad == 0, need_weights=False)[0]
        return {"h": h + F.dropout(self.mlp(h), 0.2, self.training), "pad": pad}


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"h": self.table(tokens), "pad": (tokens > 0).long()}


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 11)
        self.unused = nn.Linear(3, 3)

    def forward(self, value: dict[str, Tensor]) -> Tensor:
        return self.out(value["h"])


class Transposes(nn.Module):
    """Gives a tensor that is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.4), nn.Linear(12, 9), nn.ReLU(True), nn.Linear(9, 4))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(inplace=True),
        nn.Dropout2d(0.3),
        nn.Conv2d(4, 6, 3),
        nn.Flatten(2),
        Transposes(),
        nn.Linear(6, 5),
        nn.Dropout(0.2, inplace=True),
        nn.Flatten(),
        nn.Linear(20, 4),
    )


def text() -> nn.Module:
    return nn.Sequential(Embed(), Block(0.1), Block(0.3), Head())


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
    )


def frozen_front() -> nn.Module:
    model = mlp()
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith("0") and name != "3.bias")
    return model


def recurrent() -> nn.Module:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(6, 5, num_layers=2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x)[0][:, -1]

    return nn.Sequential(nn.Linear(6, 6), Last(), nn.Linear(5, 4))


def encoder() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True, norm_first=True),
        nn.Flatten(),
        nn.Linear(24, 4),
    )


def weight_normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 4)
    )


def alpha() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.SELU(), nn.AlphaDropout(0.2), nn.Linear(8, 8), nn.FeatureAlphaDropout(0.1), nn.Linear(8, 4)
    )


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=0)


def task_of(model: Callable[[], nn.Module]) -> Task:
    def built() -> nn.Module:
        torch.manual_seed(5)
        return model()

    if model is text:
        return Task(model=built, loss=token_loss, weight=lambda t: (t > 0).sum(), train=lambda shard: None)
    return Task(model=built, loss=F.cross_entropy, train=lambda shard: None)


SHAPES: dict[Any, tuple[int, ...]] = {cnn: (1, 6, 6), recurrent: (4, 6), encoder: (3, 6)}


def batches_of(model: Callable[[], nn.Module], sizes: Mapping[str, int]) -> Batches:
    generator = torch.Generator().manual_seed(1)
    found = {}
    for device, count in sizes.items():
        if model is text:
            tokens = torch.randint(0, 11, (count, 6), generator=generator)
            tokens[:, 0] = 1
            found[device] = (tokens[:, :5].clone(), tokens[:, 1:].clone())
        else:
            x = torch.randn(count, *SHAPES.get(model, (6,)), generator=generator)
            found[device] = (x, torch.randint(0, 4, (count,), generator=generator))
    return found


def rows(value: Any, start: int, stop: int) -> Arrays:
    return {name: array[start:stop] for name, array in to_arrays(value).items()}


def pipeline(
    make: Runner,
    chain: Chain,
    task: Task,
    cuts: Sequence[int],
    batches: Batches,
    micro_size: int,
    *,
    split: bool = False,
    scale: float = 1.0,
    order: Callable[[list[Any]], list[Any]] = list,
) -> tuple[float, dict[str, Tensor], dict[str, Any]]:
    """Return the step's mean loss, mean gradients, and buffers."""
    ends = [0, *cuts, len(chain.layers)]
    spans = list(itertools.pairwise(ends))
    runners = [make(chain, start, stop, task) for start, stop in spans]
    weights, buffers = weights_of(chain, range(len(chain.layers)))
    total, loss_sum, grads = 0.0, 0.0, dict[str, Tensor]()
    live, micro = [], 0
    for device, (x, target) in batches.items():
        for at in range(0, size(x), micro_size):
            end = min(at + micro_size, size(x))
            samples = Samples(0, 0, ((device, at, end),))
            value, needs = rows(x, at, end), frozenset[str]()
            for runner in runners[:-1]:
                output = runner.forward(micro, weights, buffers, value, needs, samples)
                value, needs = output.arrays, output.needs_grad
            part = rows(target, at, end)
            weight = float(task.weight(torch.from_numpy(part["x"])))
            output = runners[-1].forward_loss(micro, weights, buffers, value, needs, samples, part, weight, scale)
            assert output.arrays == {}
            loss_sum, total = loss_sum + output.loss_sum, total + weight
            live.append(micro)
            micro += 1
    for micro in order(live):
        back: Arrays = {}
        for runner in reversed(runners):
            if split:
                back = runner.backward_input(micro, weights, back)
                found = runner.backward_weights(micro, weights)
            else:
                back, found = runner.backward(micro, weights, back)
            for name, grad in found.items():
                grads[name] = grads[name] + grad if name in grads else grad
    return loss_sum / total, {name: grad / total / scale for name, grad in grads.items()}, buffers


def assert_equal_grads(got: Mapping[str, Tensor], want: Mapping[str, Tensor | None], tolerance: float = 1e-12) -> None:
    assert got.keys() == {name for name, grad in want.items() if grad is not None}
    for name, grad in got.items():
        expected = want[name]
        assert expected is not None
        assert (grad - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max())), name


MODELS = [mlp, cnn, text, frozen_front, recurrent, encoder, weight_normed, alpha]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("micro_size", [2, 3, 7])
def test_gradients_equal_the_joint_batch(make: Runner, model: Callable[[], nn.Module], micro_size: int) -> None:
    task = task_of(model)
    chain = build_chain(task)
    batches = batches_of(model, {"a": 5, "b": 7})
    want = joint_step(chain.model, task, batches)
    last = len(chain.layers)
    for cuts in ([], [1], [last // 2, last - 1], list(range(1, last))):
        loss, grads, _ = pipeline(make, chain, task, cuts, batches, micro_size)
        assert loss == pytest.approx(want.loss, abs=1e-13)
        assert_equal_grads(grads, want.grads)


@pytest.mark.parametrize("model", MODELS)
def test_cuts_do_not_change_a_bit(make: Runner, model: Callable[[], nn.Module]) -> None:
    task = task_of(model)
    chain = build_chain(task)
    batches = batches_of(model, {"a": 5, "b": 7})
    loss, grads, _ = pipeline(make, chain, task, [], batches, 3)
    last = len(chain.layers)
    for cuts in ([1], [last // 2], list(range(1, last))):
        cut_loss, cut_grads, _ = pipeline(make, chain, task, cuts, batches, 3)
        assert cut_loss == loss
        assert cut_grads.keys() == grads.keys()
        assert all(torch.equal(cut_grads[name], grads[name]) for name in grads)


@pytest.mark.parametrize("model", [mlp, cnn, text, frozen_front, encoder])
def test_input_and_weight_halves_equal_the_whole_backward(make: Runner, model: Callable[[], nn.Module]) -> None:
    task = task_of(model)
    chain = build_chain(task)
    batches = batches_of(model, {"a": 6})
    _, whole, _ = pipeline(make, chain, task, [2], batches, 3)
    _, halves, _ = pipeline(make, chain, task, [2], batches, 3, split=True)
    assert_equal_grads(halves, whole, 1e-15)


def test_backward_in_any_order_and_with_a_loss_scale(make: Runner) -> None:
    task = task_of(cnn)
    chain = build_chain(task)
    batches = batches_of(cnn, {"a": 6})
    want = joint_step(chain.model, task, batches)
    _, grads, _ = pipeline(make, chain, task, [3, 6], batches, 2, scale=1024.0, order=lambda live: live[::-1])
    assert_equal_grads(grads, want.grads)


def test_batch_norm_buffers_follow_each_micro_batch(make: Runner) -> None:
    task = task_of(normed)
    chain = build_chain(task)
    batches = batches_of(normed, {"a": 4, "b": 8})
    (loss, grads, buffers), (_, _, uncut) = (pipeline(make, chain, task, cuts, batches, 4) for cuts in ([2, 3], []))
    model = task.model().train()
    sums: dict[str, Any] = {}
    losses = 0.0
    for x, target in batches.values():
        for at in range(0, size(x), 4):
            mean = F.cross_entropy(model(x[at : at + 4]), target[at : at + 4])
            losses += float(mean.detach()) * 4
            for name, param in model.named_parameters():
                sums[name] = sums.get(name, 0) + torch.autograd.grad(mean * 4, param, retain_graph=True)[0] / 12
    assert loss == pytest.approx(losses / 12, abs=1e-13)
    assert_equal_grads(grads, sums)
    want = dict(model.named_buffers())
    assert buffers.keys() == want.keys()
    assert all(torch.equal(buffers[name], want[name]) and torch.equal(uncut[name], want[name]) for name in want)
    assert int(buffers["1.num_batches_tracked"]) == 3


def test_batch_norm_kept_in_evaluation_mode_equals_the_joint_batch(make: Runner) -> None:
    def keep(module: nn.Module) -> None:
        for part in module.modules():
            if isinstance(part, nn.BatchNorm1d):
                part.eval()

    task = dataclasses.replace(task_of(normed), train_mode=keep)
    chain = build_chain(task)
    batches = batches_of(normed, {"a": 4, "b": 5})
    want = joint_step(chain.model, task, batches)
    loss, grads, buffers = pipeline(make, chain, task, [2], batches, 3)
    assert loss == pytest.approx(want.loss, abs=1e-13)
    assert_equal_grads(grads, want.grads)
    assert int(buffers["1.num_batches_tracked"]) == 0


def test_a_frozen_segment_computes_and_sends_nothing(make: Runner) -> None:
    def model() -> nn.Module:
        built = mlp()
        built[0].requires_grad_(False)
        return built

    task = task_of(model)
    chain = build_chain(task)
    weights, buffers = weights_of(chain, range(len(chain.layers)))
    x = to_arrays(torch.randn(3, 6))
    for split in (False, True):
        runner = make(chain, 0, 2, task)
        output = runner.forward(0, weights, buffers, x, frozenset(), Samples(0, 0, (("a", 0, 3),)))
        assert output.needs_grad == frozenset()
        if split:
            assert runner.backward_input(0, weights, {}) == {}
            assert runner.backward_weights(0, weights) == {}
        else:
            assert runner.backward(0, weights, {}) == ({}, {})


def test_integers_need_no_gradient_even_if_asked_for(make: Runner) -> None:
    task = task_of(text)
    chain = build_chain(task)
    weights, buffers = weights_of(chain, range(4))
    samples = Samples(0, 0, (("a", 0, 2),))
    first = make(chain, 0, 1, task).forward(
        0, weights, buffers, to_arrays(torch.ones(2, 5).long()), frozenset(), samples
    )
    assert first.needs_grad == {"h"}
    runner = make(chain, 1, 2, task)
    second = runner.forward(0, weights, buffers, first.arrays, frozenset({"h", "pad"}), samples)
    assert second.needs_grad == {"h"}
    assert second.arrays["pad"].dtype == np.int64
    back, _ = runner.backward(0, weights, {"h": np.ones((2, 5, 8))})
    assert back.keys() == {"h"}


@pytest.mark.parametrize("split", [False, True])
def test_a_micro_batch_of_weight_0_gives_zeros_without_calling_the_loss(make: Runner, split: bool) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise AssertionError("called")

    task = dataclasses.replace(task_of(mlp), loss=loss)
    chain = build_chain(task)
    weights, buffers = weights_of(chain, range(6))
    runner = make(chain, 1, 6, task)
    x = {"x": np.full((2, 12), np.nan)}
    target = to_arrays(torch.zeros(2).long())
    samples = Samples(0, 0, (("a", 0, 2),))
    output = runner.forward_loss(3, weights, buffers, x, frozenset({"x"}), samples, target, 0.0, 1.0)
    assert output.loss_sum == 0.0
    if split:
        back = runner.backward_input(3, weights, {})
        grads = runner.backward_weights(3, weights)
    else:
        back, grads = runner.backward(3, weights, {})
    assert (back["x"] == 0).all()
    assert grads.keys() == {"3.weight", "3.bias", "5.weight", "5.bias"}
    assert all((grad == 0).all() for grad in grads.values())


def test_an_output_without_a_gradient_leaves_its_weights_without_one(make: Runner) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.aside = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"used": self.used(x), "aside": self.aside(x)}

    class One(nn.Module):
        def forward(self, value: dict[str, Tensor]) -> Tensor:
            return value["used"]

    task = task_of(lambda: nn.Sequential(Two(), One()))
    chain = build_chain(task)
    batches = batches_of(mlp, {"a": 4})
    batches = {"a": (batches["a"][0], batches["a"][1].clamp(max=2))}
    want = joint_step(chain.model, task, batches)
    for cuts in ([], [1]):
        assert_equal_grads(pipeline(make, chain, task, cuts, batches, 2)[1], want.grads)


def test_a_tied_parameter_has_one_gradient(make: Runner) -> None:
    def model() -> nn.Module:
        built = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 4))
        built[2].weight = built[0].weight
        return built

    task = task_of(model)
    chain = build_chain(task)
    batches = batches_of(mlp, {"a": 5})
    want = joint_step(chain.model, task, batches)
    assert "2.weight" not in want.grads
    for cuts in ([], [3]):
        assert_equal_grads(pipeline(make, chain, task, cuts, batches, 2)[1], want.grads)


def test_evaluation_equals_the_model_and_leaves_training_mode_as_it_was(make: Runner) -> None:
    metrics = {"accuracy": lambda output, target: ((output.argmax(-1) == target).sum(), len(target))}
    task = dataclasses.replace(task_of(normed), metrics=metrics)
    chain = build_chain(task)
    weights, buffers = weights_of(chain, range(6))
    x, target = batches_of(normed, {"a": 7})["a"]
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    first, last = make(chain, 0, 3, task), make(chain, 3, 6, task)
    middle = first.evaluate(weights, buffers, to_arrays(x))
    end = last.evaluate(weights, buffers, middle.arrays, to_arrays(target))
    model = chain.model.eval()
    with torch.no_grad():
        np.testing.assert_array_equal(last.evaluate(weights, buffers, middle.arrays).arrays["x"], model(x).numpy())
        assert end.loss_sum == pytest.approx(float(F.cross_entropy(model(x), target)) * 7, abs=1e-12)
        assert end.metrics == {"accuracy": (float((model(x).argmax(-1) == target).sum()), 7.0)}
    assert end.arrays == {}
    assert all(torch.equal(before[name], buffers[name]) for name in buffers)
    first.forward(0, weights, buffers, to_arrays(x), frozenset(), Samples(0, 0, (("a", 0, 7),)))
    assert int(buffers["1.num_batches_tracked"]) == 1


@pytest.mark.parametrize("split", [False, True])
def test_a_backward_on_another_version_of_the_weights(make: Runner, split: bool) -> None:
    """Written out by hand: h = tanh(x A'), y = h B', loss = sum(y * c)/n; products in the backward use A2, B2."""
    task = Task(
        model=lambda: nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 4, bias=False)),
        loss=lambda output, target: (output * target).sum() / len(target),
        train=lambda shard: None,
    )
    chain = build_chain(task)
    old, buffers = weights_of(chain, range(3))
    new = {name: torch.randn_like(w).requires_grad_() for name, w in old.items()}
    x, c = torch.randn(3, 6), torch.randn(3, 4)
    runner = make(chain, 0, 3, task)
    samples = Samples(0, 0, (("a", 0, 3),))
    runner.forward_loss(0, old, buffers, to_arrays(x), frozenset({"x"}), samples, to_arrays(c), 3.0, 1.0)
    if split:
        back, grads = runner.backward_input(0, new, {}), runner.backward_weights(0, new)
    else:
        back, grads = runner.backward(0, new, {})
    h = (x @ old["0.weight"].T).tanh().detach()
    inner = (c @ new["2.weight"]) * (1 - h * h)
    torch.testing.assert_close(grads["2.weight"], c.T @ h, rtol=0, atol=1e-13)
    torch.testing.assert_close(grads["0.weight"], (inner.T @ x).detach(), rtol=0, atol=1e-13)
    torch.testing.assert_close(torch.from_numpy(back["x"]), (inner @ new["0.weight"]).detach(), rtol=0, atol=1e-13)


def test_live_forwards_are_named_once_and_can_be_dropped(make: Runner) -> None:
    task = task_of(mlp)
    chain = build_chain(task)
    weights, buffers = weights_of(chain, range(6))
    x = to_arrays(torch.randn(2, 6))
    runner = make(chain, 0, 3, task)
    samples = Samples(0, 0, (("a", 0, 2),))
    for micro in (1, 2, 3):
        runner.forward(micro, weights, buffers, x, frozenset(), samples)
    with pytest.raises(RunError, match="micro-batch 1 is live already"):
        runner.forward(1, weights, buffers, x, frozenset(), samples)
    runner.drop([1])
    with pytest.raises(RunError, match="micro-batch 1 has no live forward"):
        runner.backward(1, weights, {})
    runner.drop()
    with pytest.raises(RunError, match="micro-batch 3 has no live forward"):
        runner.backward_weights(3, weights)


def test_a_gradient_of_the_wrong_shape_is_refused(make: Runner) -> None:
    task = task_of(mlp)
    chain = build_chain(task)
    weights, buffers = weights_of(chain, range(6))
    runner = make(chain, 0, 1, task)
    runner.forward(0, weights, buffers, to_arrays(torch.randn(2, 6)), frozenset(), Samples(0, 0, (("a", 0, 2),)))
    with pytest.raises(RunError, match=r"gradient 'x' of shape \(2, 3\) for micro-batch 0"):
        runner.backward(0, weights, {"x": np.zeros((2, 3))})


@pytest.mark.parametrize("model", MODELS)
def test_the_models_of_this_suite_are_proven_chains(model: Callable[[], nn.Module]) -> None:
    prove_chain(build_chain(task_of(model)), batches_of(model, {"a": 5})["a"][0])
