"""Cases that an attack on the whole found: each was silently wrong, or hung, once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import edgesplit as es
from edgesplit.checkpoint import latest
from edgesplit.errors import notes
from edgesplit.topology import Node, Topology

OPTIONS: dict[str, Any] = {"batch_size": 8, "steps_per_round": 3, "optimizer": {"name": "sgd", "lr": 0.1}}


def home(devices: int = 1) -> Topology:
    pis = [Node(name=f"pi-{i + 1}", tier="device", parent="edge") for i in range(devices)]
    return Topology.of([Node(name="cloud", tier="cloud"), Node(name="edge", tier="edge", parent="cloud"), *pis])


def data(shard: es.Shard) -> Any:
    generator = torch.Generator().manual_seed(shard.index + 2)
    return torch.utils.data.TensorDataset(
        torch.randn(24, 8, generator=generator), torch.randint(0, 3, (24,), generator=generator)
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def task(**parts: Any) -> es.Task:
    return es.Task(**{"model": mlp, "loss": nn.functional.cross_entropy, "train": data, "test": data, **parts})


def fit(what: es.Task, cuts: tuple[int, ...] = (1, 3), devices: int = 1, **keywords: Any) -> Any:
    return es.fit(what, topology=home(devices), cuts=list(cuts), **{**OPTIONS, **keywords})


def apart(a: Any, b: Any) -> float:
    pairs = zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True)
    return max(float((p.double() - q.double()).abs().max()) for p, q in pairs)


class Fork(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"h": x, "skip": x}


class InPlace(nn.Module):
    def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"h": nn.functional.relu(x["h"], inplace=True), "skip": x["skip"]}


class Join(nn.Module):
    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return x["h"] + x["skip"]


class Fourier(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x)


class Magnitude(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


def test_a_model_that_relies_on_an_alias_across_layers_is_no_chain() -> None:
    forked = task(model=lambda: nn.Sequential(nn.Linear(8, 16), Fork(), InPlace(), Join(), nn.Linear(16, 3)))
    with pytest.raises(es.TaskError, match=r"differ|chain"):
        fit(forked, (2, 3))


def test_a_complex_value_between_layers_is_refused() -> None:
    spectral = task(model=lambda: nn.Sequential(nn.Linear(8, 16), Fourier(), Magnitude(), nn.Linear(16, 3)))
    with pytest.raises(es.TaskError, match=r"'1' gives torch.complex64, which a cut cannot carry"):
        fit(spectral, (1, 2))


def test_buffers_of_a_module_on_two_nodes_are_refused() -> None:
    def shared() -> nn.Module:
        norm = nn.BatchNorm1d(16, affine=False)
        return nn.Sequential(nn.Linear(8, 16), norm, nn.Linear(16, 16), norm, nn.Linear(16, 3))

    with pytest.raises(es.TaskError, match=r"buffer '1.running_mean' is shared"):
        fit(task(model=shared), (2, 3))


def test_what_the_loss_draws_is_keyed() -> None:
    def noisy(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(nn.functional.dropout(output, 0.5), target)

    first, again, cut = fit(task(loss=noisy)), fit(task(loss=noisy)), fit(task(loss=noisy), (2, 4), micros=1)
    assert apart(first, again) == apart(first, cut) == 0.0


def test_an_iterable_of_other_sizes_on_a_later_pass_is_an_error() -> None:
    class Changing:
        passes = 0

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            self.passes += 1
            count = 8 if self.passes == 1 else 2
            for _ in range(3):
                yield torch.randn(count, 8), torch.zeros(count, dtype=torch.long)

    with pytest.raises(es.EdgesplitError, match="same sizes on every pass"):
        fit(task(train=lambda shard: Changing() if shard.index >= 0 else None, test=None), micros=2)


def test_a_dict_target_weighs_its_samples() -> None:
    def named(shard: es.Shard) -> Any:
        return [({"y": y, "z": y}, x) for x, y in data(shard)]

    def collate(samples: Any) -> Any:
        x, y = torch.stack([x for _, x in samples]), torch.stack([target["y"] for target, _ in samples])
        return x, {"y": y, "z": y}

    class Rows(torch.utils.data.Dataset[Any]):
        def __init__(self, shard: es.Shard) -> None:
            self.rows = named(shard)

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> Any:
            return self.rows[index]

    def loss(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(output, target["y"])

    what = task(train=Rows, test=None, collate=collate, loss=loss)
    assert apart(fit(what, batch_size=7, dtype="float64"), fit(what, batch_size=7, micros=4, dtype="float64")) < 1e-12


@pytest.mark.parametrize("weight", [float("nan"), -1.0])
def test_a_weight_that_counts_nothing_is_refused(weight: float) -> None:
    with pytest.raises(es.EdgesplitError, match=r"task.weight gives"):
        fit(task(weight=lambda target: weight))


@pytest.mark.parametrize("tiers", [["devcie"], ["cloud"], []])
def test_federation_of_tiers_without_replicas_is_refused(tiers: list[str]) -> None:
    with pytest.raises(es.ExperimentError, match="replicas are on tiers: device"):
        fit(task(), devices=3, federation={"tiers": tiers})


@pytest.mark.parametrize(
    "keywords",
    [{"broker": "mqtt://localhost:1"}, {"threads": 3}, {"local": {"processes": 2}}, {"strategy": "fedadamm"}],
)
def test_options_without_effect_or_unknown_are_refused(keywords: dict[str, Any]) -> None:
    with pytest.raises(es.ExperimentError):
        fit(task(), **keywords)


def test_evaluation_sees_steps_by_hand() -> None:
    plan = es.plan(task(), home(), cuts=[1, 3], **OPTIONS)
    batch = torch.randn(8, 8), torch.randint(0, 3, (8,))
    with es.Session(plan, task(), **OPTIONS) as session:
        before = session.evaluate()
        for _ in range(5):
            session.step(batch)
        after = session.evaluate()
        session.gather()
        assert before != after == session.evaluate()


def test_a_callback_cannot_take_a_running_rounds_steps_away() -> None:
    class Nested(es.Callback):
        session: Any = None

        def on_start(self, session: Any) -> None:
            self.session = session

        def on_step(self, done: Any) -> None:
            self.session.evaluate("device")

    plan = es.plan(task(), home(), cuts=[1, 3], **OPTIONS)
    options = {**OPTIONS, "evaluate": {"where": ["coordinator", "device"]}}
    with (
        es.Session(plan, task(), callbacks=[Nested()], **options) as session,
        pytest.raises(es.RunError, match="steps are running"),
    ):
        session.fit()


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        ({"pi-9": None}, "no device 'pi-9'"),
        ({}, "no device has a batch"),
        ((torch.zeros(8, 8),), "not a pair"),
        ((torch.zeros(0, 8), torch.zeros(0, dtype=torch.long)), "the same, at least one"),
    ],
)
def test_a_wrong_batch_is_refused_at_once(batch: Any, error: str) -> None:
    plan = es.plan(task(), home(), cuts=[1, 3], **OPTIONS)
    with es.Session(plan, task(), **OPTIONS) as session:
        with pytest.raises(es.TaskError, match=error):
            session.step(batch)
        session.step((torch.zeros(8, 8), torch.zeros(8, dtype=torch.long)))  # and the fleet is still there


def test_callbacks_of_one_fit_are_of_that_fit() -> None:
    class Count(es.Callback):
        rounds = 0

        def on_round(self, done: Any) -> None:
            self.rounds += 1

    count, plan = Count(), es.plan(task(), home(), cuts=[1, 3], **OPTIONS)
    with es.Session(plan, task(), **OPTIONS) as session:
        session.fit(1, callbacks=[count])
        session.fit(1)
    assert count.rounds == 1


def test_resume_refuses_another_batch_size_and_says_what_else_changed(tmp_path: Any) -> None:
    plan = es.plan(task(), home(), cuts=[1, 3], **OPTIONS)
    with es.Session(plan, task(), directory=tmp_path, **OPTIONS) as session:
        session.fit()
    path = latest(tmp_path / "checkpoints")
    assert path is not None
    with (
        es.Session(plan, task(), **{**OPTIONS, "batch_size": 4}) as session,
        pytest.raises(es.RunError, match="batch_size 8, the experiment 4"),
    ):
        session.resume(path)
    with es.Session(plan, task(), **{**OPTIONS, "optimizer": {"name": "sgd", "lr": 5.0}}) as session:
        assert session.resume(path) == ["optimizer.lr was 0.1 and is now 5.0"]


class Broken(nn.Module):
    """Fails on a size that the proof before a run does not try."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 4:
            raise ValueError("four is bad luck")
        return x


def broken() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), Broken(), nn.Linear(16, 3))


def no_file(shard: es.Shard) -> Any:
    raise FileNotFoundError(2, "No such file or directory", "mine.npz")


class Torn(torch.utils.data.TensorDataset):
    """A sample that cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise OSError("bad sector")
        return super().__getitem__(index)


def failing(*args: Any) -> Any:
    raise ZeroDivisionError("my own fault")


@pytest.mark.parametrize(
    ("parts", "keywords", "kind", "where"),
    [
        ({"model": broken}, {"batch_size": 7, "micros": 2}, es.RunError, "in layer '3'"),
        ({"train": no_file}, {}, FileNotFoundError, "in the data of 'pi-1'"),
        ({"train": lambda shard: Torn(*data(shard).tensors)}, {}, es.RunError, "in the data of 'pi-1'"),
        ({"metrics": {"mine": failing}}, {"evaluate": {"every": 1}}, ZeroDivisionError, "in metric 'mine'"),
        ({"lr": failing}, {}, ZeroDivisionError, "in Task.lr"),
    ],
)
def test_an_exception_of_the_users_own_says_where(parts: Any, keywords: Any, kind: type[Exception], where: str) -> None:
    """On the coordinator it is raised as it is, with a note; a node's comes as a line."""
    with pytest.raises(kind) as caught:
        fit(task(**parts), **keywords)
    assert where in str(caught.value) + notes(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_rate_that_is_none_is_refused_with_its_step(value: float) -> None:
    with pytest.raises(es.TaskError, match=r"Task.lr gives .* for step 2"):
        fit(task(lr=lambda step: value if step == 2 else 1.0))


class Root(nn.Module):
    """The square root of what may be below 0."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - 3).sqrt()


class Quiet(nn.Module):
    """Hides what is not a number from all that follow, but not its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x.nan_to_num()


def rooted(*after: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), Root(), nn.Linear(16, 16), *after, nn.Linear(16, 3))


def no_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target) - torch.tensor(-1.0).log()


@pytest.mark.parametrize(
    ("parts", "where"),
    [
        ({"model": rooted}, "first in layer '2' on 'edge'"),
        ({"model": lambda: rooted(Quiet())}, "first in layer '2' on 'edge'"),
        ({"loss": no_loss}, "first in the loss on 'cloud'"),
    ],
)
@pytest.mark.parametrize("method", ["gpipe", "1f1b"])
def test_what_is_not_finite_is_traced_to_where_it_began(parts: Any, where: str, method: str) -> None:
    with pytest.raises(es.RunError, match=f"3 steps in a row were not finite .*{where}"):
        fit(task(**parts), method=method, devices=2)
