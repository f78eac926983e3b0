"""The torch runner's own: keyed masks in torch, values at a cut, and what a live forward keeps."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from edgesplit.errors import PlanError, RunError, TaskError
from edgesplit.segments.base import Samples
from edgesplit.segments.masks import KeyedRandomness, Running, loss_may_draw, may_draw
from edgesplit.segments.random import keep_masks
from edgesplit.segments.torch import TorchRunner, from_arrays, to_arrays
from edgesplit.segments.torch.values import settled
from edgesplit.splitting import Chain, build_chain, weights_of
from edgesplit.task import Task

SIX = Samples(3, 8, (("b", 2, 6), ("a", 0, 2)))


class Calls(nn.Module):
    """Runs a function as a module of its own code."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def keyed(module: nn.Module, x: Tensor, samples: Samples = SIX) -> Any:
    with KeyedRandomness(module.named_modules(), samples):
        return module(x)


def mask(name: str, call: int, shape: tuple[int, ...], p: float, samples: Samples = SIX) -> Tensor:
    count = sum(stop - start for _, start, stop in samples.parts)
    return torch.from_numpy(keep_masks(name, call, samples, math.prod(shape) // count, p)).view(shape)


# -- masks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dropout_keeps_what_the_key_says_and_scales_as_torch_does(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Dropout(0.3), nn.Sequential(nn.Dropout(0.3, inplace=True)))
    x = torch.randn(6, 5, dtype=dtype)
    scale = torch.ones((), dtype=dtype) / (1 - 0.3)
    first = x * (mask("0", 0, (6, 5), 0.3).to(dtype) * scale)
    assert torch.equal(keyed(model, x), first * (mask("1.0", 0, (6, 5), 0.3).to(dtype) * scale))
    torch.manual_seed(0)
    values = F.dropout(torch.ones(100, dtype=dtype), 0.3)
    assert torch.equal(values.max(), scale)


@pytest.mark.parametrize(
    ("kind", "shape"), [(nn.Dropout1d, (6, 4, 3)), (nn.Dropout2d, (6, 4, 3, 2)), (nn.Dropout3d, (6, 4, 2, 2, 2))]
)
def test_dropout_of_channels(kind: Callable[[float], nn.Module], shape: tuple[int, ...]) -> None:
    got = keyed(kind(0.5), torch.ones(shape))
    want = mask("", 0, (6, 4, *[1] * (len(shape) - 2)), 0.5) * 2.0
    assert torch.equal(got, want.expand(shape))


def test_every_call_of_a_module_has_its_own_mask() -> None:
    drop = nn.Dropout(0.5)
    got = keyed(nn.Sequential(drop, drop), torch.ones(6, 50))
    assert torch.equal(got, mask("0", 0, (6, 50), 0.5) * mask("0", 1, (6, 50), 0.5) * 4.0)


def test_functions_draw_under_the_name_of_the_module_that_calls_them() -> None:
    model = nn.ModuleDict({"a": Calls(lambda x: torch.dropout(x, 0.5, True)), "b": Calls(lambda x: F.dropout(x, 0.5))})
    model.forward = lambda x: F.dropout(model["b"](model["a"](x)), 0.5)  # type: ignore[method-assign]
    want = mask("a", 0, (6, 9), 0.5) * mask("b", 0, (6, 9), 0.5) * mask("", 0, (6, 9), 0.5) * 8.0
    assert torch.equal(keyed(model, torch.ones(6, 9)), want)


def test_nothing_is_drawn_in_evaluation_mode_or_at_the_ends_of_p() -> None:
    x = torch.randn(6, 4)
    model = nn.Sequential(nn.Dropout(0.0), nn.Dropout(0.5).eval(), nn.Dropout(1.0))
    with KeyedRandomness(model.named_modules(), SIX) as randomness:
        assert torch.equal(model[:2](x), x)
        assert torch.equal(model(x), torch.zeros(6, 4))
    assert randomness.draws == []


@pytest.mark.parametrize("case", ["plain", "causal", "masked", "added", "scaled", "grouped"])
def test_attention_with_dropout_is_its_formula(case: str) -> None:
    torch.manual_seed(0)
    q = torch.randn(6, 4, 5, 8, dtype=torch.float64, requires_grad=True)
    heads = 2 if case == "grouped" else 4
    k, v = (torch.randn(6, heads, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    options: dict[str, Any] = {
        "causal": {"is_causal": True},
        "masked": {"attn_mask": torch.rand(6, 1, 5, 5) > 0.3},
        "added": {"attn_mask": torch.randn(5, 5, dtype=torch.float64)},
        "scaled": {"scale": 0.7},
        "grouped": {"enable_gqa": True},
    }.get(case, {})
    if case == "masked":
        options["attn_mask"][..., 0] = True
    attention = Calls(lambda x: F.scaled_dot_product_attention(q, k, v, dropout_p=0.25, **options))
    got = keyed(attention, q)
    kk, vv = (t.repeat_interleave(4 // heads, dim=1) for t in (k, v))
    scores = q @ kk.transpose(-2, -1) * options.get("scale", 8**-0.5)
    if case == "causal":
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    if case == "masked":
        scores = scores.masked_fill(~options["attn_mask"], -math.inf)
    if case == "added":
        scores = scores + options["attn_mask"]
    want = (scores.softmax(-1) * mask("", 0, (6, 4, 5, 5), 0.25) / 0.75) @ vv
    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)
    seed = torch.randn_like(want)
    for a, b in zip(torch.autograd.grad(got, (q, k, v), seed), torch.autograd.grad(want, (q, k, v), seed), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize("need_weights", [False, True])
def test_multi_head_attention_has_a_mask_per_sample(need_weights: bool) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True)
    x = torch.randn(6, 5, 8)

    def run(value: Tensor, samples: Samples) -> Tensor:
        model = Calls(lambda x: attention(x, x, x, need_weights=need_weights)[0])
        model.inner = attention
        return keyed(model, value, samples)  # type: ignore[no-any-return]

    whole = run(x, SIX)
    assert not torch.equal(whole, run(x, SIX._replace(step=9)))
    parts = [run(x[:3], Samples(3, 8, (("b", 2, 5),))), run(x[3:], Samples(3, 8, (("b", 5, 6), ("a", 0, 2))))]
    torch.testing.assert_close(whole, torch.cat(parts), rtol=0, atol=1e-6)


def test_plain_attention_is_used_with_dropout_only() -> None:
    model = Calls(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5, is_causal=True))
    off = Calls(lambda x: F.scaled_dot_product_attention(x, x, x))
    x = torch.randn(6, 2, 5, 8)
    with KeyedRandomness(model.named_modules(), SIX, attention=True):
        got = model(x)
    assert torch.equal(got, keyed(model, x))
    with KeyedRandomness(off.named_modules(), SIX, attention=True):
        assert torch.equal(off(x), F.scaled_dot_product_attention(x, x, x))


def test_a_fused_dropout_is_keyed_too() -> None:
    x = torch.randn(6, 5, requires_grad=True)
    got = keyed(Calls(lambda x: torch.native_dropout(x, 0.5, True)[0]), x)
    keep = mask("", 0, (6, 5), 0.5)
    assert torch.equal(got, x * keep * 2.0)
    assert torch.equal(torch.autograd.grad(got.sum(), x)[0], keep * 2.0)
    assert torch.equal(keyed(Calls(lambda x: torch.native_dropout(x, 0.5, False)[0]), x), x)


DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "rand": lambda x: x * torch.rand(6, 5),
    "randn": lambda x: x + torch.randn(6, 5),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint": lambda x: x + torch.randint(3, (6, 5)),
    "randperm": lambda x: x[torch.randperm(6)],
    "normal": lambda x: torch.normal(x, 1.0),
    "uniform_": lambda x: x.clone().uniform_(),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "multinomial": lambda x: torch.multinomial(x.exp(), 2),
    "exponential_": F.gumbel_softmax,
    "rrelu_with_noise": lambda x: F.rrelu(x, training=True),
}


@pytest.mark.parametrize("name", DRAWS)
def test_other_draws_are_refused_by_module_and_function(name: str) -> None:
    model = nn.Sequential(nn.Linear(5, 5), Calls(DRAWS[name]))
    with pytest.raises(TaskError, match=f"module '1' draws random numbers with {name}"):
        keyed(model, torch.randn(6, 5))
    model(torch.randn(6, 5))  # nothing is left on


def test_draws_that_are_off_pass() -> None:
    model = Calls(lambda x: F.rrelu(x, training=False))
    x = torch.randn(6, 5)
    assert torch.equal(keyed(model, x), model(x))


def test_a_stochastic_depth_is_keyed() -> None:
    model = Calls(lambda x: x * x.new_empty(6, 1).bernoulli_(0.8))
    assert torch.equal(keyed(model, torch.ones(6, 5)), mask("", 0, (6, 1), 1 - 0.8).expand(6, 5).float())


def test_an_rnn_with_dropout_is_refused_in_training_mode_only() -> None:
    model = nn.Sequential(nn.GRU(5, 5, 2, dropout=0.1, batch_first=True))
    with pytest.raises(TaskError, match=r"module '0' \(GRU\) has dropout=0.1 between its layers"):
        keyed(model, torch.randn(6, 3, 5))
    keyed(model.eval(), torch.randn(6, 3, 5))
    keyed(nn.Sequential(nn.GRU(5, 5, 2, batch_first=True)), torch.randn(6, 3, 5))


def test_a_mask_that_samples_share_is_refused() -> None:
    model = nn.Sequential(Calls(lambda x: x + F.dropout(torch.ones(5), 0.5)))
    with pytest.raises(TaskError, match=r"module '0' draws a random mask of shape \(5,\)"):
        keyed(model, torch.randn(6, 5))


def test_a_mode_of_the_models_own_goes_on_working() -> None:
    inner = nn.Linear(5, 5)

    def counts(x: Tensor) -> Tensor:
        with FlopCounterMode(display=False) as flops:
            y = inner(x)
        assert flops.get_total_flops() == 2 * 6 * 5 * 5
        return F.dropout(y, 0.5)

    model = Calls(counts)
    model.inner = inner
    x = torch.randn(6, 5)
    assert torch.equal(keyed(model, x), inner(x) * mask("", 0, (6, 5), 0.5) * 2.0)


def test_only_code_that_may_draw_pays_for_it() -> None:
    safe = [nn.Linear(2, 2), nn.Sequential(), nn.TransformerEncoderLayer(4, 2), nn.ReLU(), nn.BatchNorm1d(2)]
    assert not any(map(may_draw, safe))
    assert all(map(may_draw, [nn.Dropout(), nn.AlphaDropout(), nn.MultiheadAttention(4, 2), nn.RReLU(), Calls(len)]))


def test_hooks_come_off() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    running = Running(model.named_modules())
    running.remove()
    keyed(model, torch.ones(6, 2))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# -- values


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(2, 3),
        torch.randn(3, 2, dtype=torch.float64).t(),
        {"h": torch.randn(2, 2).half(), "mask": torch.tensor([[True, False]]), "n": torch.tensor(5)},
    ],
)
def test_values_survive_arrays(value: Any) -> None:
    arrays = to_arrays(value)
    for array in arrays.values():
        array = array.copy()
        array.flags.writeable = False
    back = from_arrays(arrays)
    got, want = (v if isinstance(v, dict) else {"x": v} for v in (back, value))
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)
        assert got[name].data_ptr() != tensor.data_ptr()
        assert got[name].is_contiguous()


def test_arrays_from_the_network_are_read_only_and_not_aligned() -> None:
    data = bytes(1) + np.arange(6, dtype=np.float32).tobytes()
    array = np.frombuffer(data, np.float32, offset=1).reshape(2, 3)
    tensor = from_arrays({"x": array})
    assert tensor.data_ptr() % 64 == 0
    tensor.add_(1)


def test_settled_tensors_look_like_received_ones() -> None:
    plain = torch.zeros(4, 16)
    assert settled(plain) is plain
    for odd in (
        plain.t(),
        plain[1:, :3],
        torch.zeros(1, 4).t().as_strided((4, 1), (1, 7)),
        plain.flatten()[1:],
        torch.zeros(()).expand(3),
    ):
        tensor = settled(odd)
        assert torch.equal(tensor, odd)
        assert tensor.stride() == torch.empty(odd.shape).stride()
        assert tensor.data_ptr() % 64 == 0


# -- the runner


def runner_of(model: nn.Module, start: int = 0, stop: int | None = None) -> tuple[TorchRunner, Chain]:
    task = Task(model=lambda: model, loss=F.cross_entropy, train=lambda shard: None)
    chain = build_chain(task)
    return TorchRunner(chain, start, len(chain.layers) if stop is None else stop, task), chain


def one(count: int) -> Samples:
    return Samples(0, 0, (("a", 0, count),))


def test_a_runner_uses_only_the_weights_that_it_is_given() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    runner, chain = runner_of(model)
    weights, buffers = weights_of(chain, range(3))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(math.nan)
    output = runner.forward(0, weights, buffers, to_arrays(torch.randn(4, 3)), frozenset(), one(4))
    assert np.isfinite(output.arrays["x"]).all()
    assert int(model[1].num_batches_tracked) == 0
    assert int(buffers["1.num_batches_tracked"]) == 1
    assert all(param.grad is None for param in weights.values())
    with pytest.raises(RunError, match=r"layers 0 to 3 need weight '0.bias', which was not given"):
        runner.forward(1, {"0.weight": weights["0.weight"]}, buffers, {}, frozenset(), one(4))
    with pytest.raises(PlanError, match="no layers 2 to 4 in a chain of 3"):
        runner_of(model, 2, 4)


def test_a_replaced_buffer_ends_up_in_the_dict() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.seen + x.sum(0)
            return x * 2

    runner, chain = runner_of(nn.Sequential(nn.Linear(3, 3), Counts()))
    weights, buffers = weights_of(chain, range(2))
    before = buffers["1.seen"]
    runner.forward(0, weights, buffers, to_arrays(torch.ones(2, 3)), frozenset(), one(2))
    assert buffers["1.seen"] is not before
    assert not buffers["1.seen"].requires_grad
    assert bool((buffers["1.seen"] != 0).any())


def test_a_graph_keeps_no_weights_alive_and_leaves_no_cycle() -> None:
    runner, chain = runner_of(nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), nn.LayerNorm(3), nn.Linear(3, 3)), 0, 4)
    old, buffers = weights_of(chain, range(4))
    new = {name: weight.detach().clone().requires_grad_() for name, weight in old.items()}
    gone = [weakref.ref(weight) for weight in old.values()]
    storages = [weakref.ref(weight.untyped_storage()) for weight in old.values()]
    gc.collect()
    gc.disable()
    try:
        runner.forward(0, old, buffers, to_arrays(torch.randn(4, 3)), frozenset({"x"}), one(4))
        outputs = [weakref.ref(tensor) for tensor in runner._live[0].outputs.values()]
        del old
        assert [ref() for ref in gone + storages] == [None] * 12
        back, grads = runner.backward(0, new, {"x": np.ones((4, 3), np.float32)})
        assert [ref() for ref in outputs] == [None]
    finally:
        gc.enable()
    assert grads.keys() == new.keys()
    assert back.keys() == {"x"}


def test_a_value_overwritten_before_its_backward_is_an_error_and_not_a_wrong_gradient() -> None:
    def overwrites(x: Tensor) -> Tensor:
        y = x.exp()
        z = y.sin()
        y.mul_(2)
        return z

    runner, _ = runner_of(nn.Sequential(Calls(overwrites)))
    x = to_arrays(torch.randn(2, 3))
    runner.forward(0, {}, {}, x, frozenset({"x"}), one(2))
    with pytest.raises(TaskError, match="written to in place"):
        runner.backward(0, {}, x)


def test_weights_in_one_storage_keep_the_forwards_values() -> None:
    runner, _ = runner_of(nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)))
    flat = torch.randn(18, requires_grad=True)
    weights = {
        "0.weight": flat[:9].view(3, 3).detach().requires_grad_(),
        "1.weight": flat[9:].view(3, 3).detach().requires_grad_(),
    }
    x, g = torch.randn(2, 3), torch.randn(2, 3)
    runner.forward(0, weights, {}, to_arrays(x), frozenset({"x"}), one(2))
    back, grads = runner.backward(0, weights, to_arrays(g))
    torch.testing.assert_close(torch.from_numpy(back["x"]), (g @ weights["1.weight"] @ weights["0.weight"]).detach())
    torch.testing.assert_close(grads["1.weight"], (g.T @ x @ weights["0.weight"].T).detach())


def test_a_version_in_another_layout_is_the_same_version() -> None:
    runner, chain = runner_of(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4)))
    weights, _ = weights_of(chain, range(2))
    turned = {name: w.detach().t().clone().t().requires_grad_() if w.dim() == 2 else w for name, w in weights.items()}
    x, g = to_arrays(torch.randn(5, 3)), to_arrays(torch.randn(5, 4))
    results = []
    for version in (weights, turned):
        runner.forward(0, weights, {}, x, frozenset({"x"}), one(5))
        results.append(runner.backward(0, version, g))
    np.testing.assert_array_equal(results[0][0]["x"], results[1][0]["x"])


def test_a_dropout_used_in_two_layers_draws_alike_for_every_cut() -> None:
    drop = nn.Dropout(0.5)
    model = nn.Sequential(nn.Linear(3, 50), drop, nn.Linear(50, 50), drop)
    x = to_arrays(torch.randn(4, 3))
    whole, chain = runner_of(model)
    weights, _ = weights_of(chain, range(4))
    want = whole.forward(0, weights, {}, x, frozenset(), one(4)).arrays["x"]
    for cut in (1, 2, 3):
        front, back = runner_of(model, 0, cut)[0], runner_of(model, cut)[0]
        middle = front.forward(0, weights, {}, x, frozenset(), one(4)).arrays
        np.testing.assert_array_equal(back.forward(0, weights, {}, middle, frozenset({"x"}), one(4)).arrays["x"], want)


def test_runners_of_one_chain_do_not_disturb_each_other() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    a, chain = runner_of(model)
    b = TorchRunner(
        chain, 0, 2, Task(model=lambda: model, loss=F.mse_loss, train=lambda shard: None, train_mode=nn.Module.eval)
    )  # type: ignore[arg-type]
    weights, _ = weights_of(chain, range(2))
    x = to_arrays(torch.randn(40, 3))
    assert (a.forward(0, weights, {}, x, frozenset(), one(40)).arrays["x"] == 0).any()
    assert not (b.forward(0, weights, {}, x, frozenset(), one(40)).arrays["x"] == 0).any()


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    held = Calls(torch.relu)
    held.made = torch.ones(2, requires_grad=True) * 2  # a computed tensor
    with pytest.raises(TaskError, match="layer '0' cannot be copied"):
        runner_of(nn.Sequential(held))


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    runner, chain = runner_of(nn.Sequential(nn.Linear(3, 3)))
    runner._task = Task(model=nn.Identity, loss=lambda o, t: o.sum(1), train=lambda shard: None)
    weights, _ = weights_of(chain, [0])
    with pytest.raises(TaskError, match=r"task.loss gives a tensor of shape \(2,\): return a scalar"):
        runner.forward_loss(
            0, weights, {}, to_arrays(torch.ones(2, 3)), frozenset(), one(2), to_arrays(torch.ones(2)), 2.0, 1.0
        )


@pytest.mark.parametrize(
    ("loss", "draws"),
    [
        (F.cross_entropy, False),
        (F.mse_loss, False),
        (partial(F.cross_entropy, label_smoothing=0.1), False),
        (nn.CrossEntropyLoss(), False),
        (F.dropout, True),
        (lambda output, target: F.dropout(output).mean(), True),
        (nn.Sequential(nn.Dropout(), nn.Flatten()), True),
    ],
)
def test_only_torchs_own_losses_are_known_not_to_draw(loss: Callable[..., Any], draws: bool) -> None:
    assert loss_may_draw(loss) is draws
