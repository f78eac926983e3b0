"""The two tasks of ``demos/``: their data, their models, and the files that describe a run."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from edgesplit.errors import TaskError
from edgesplit.experiment import Experiment, schema
from edgesplit.loading import load_task
from edgesplit.task import COORDINATOR, Shard, Task
from edgesplit.topology import Topology

DEMOS = Path(__file__).resolve().parents[1] / "demos"
DIRICHLET = {"partition": {"name": "dirichlet", "alpha": 0.5}}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"demo_{name}", DEMOS / name / "task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


digits = load("mnist")
english = load("text")


def shards(count: int, seed: int = 0, data: dict | None = None) -> list[Shard]:
    return [Shard(name=f"pi-{i + 1}", index=i, count=count, seed=seed, data=data or {}) for i in range(count)]


def held_out(count: int = 4, seed: int = 0) -> Shard:
    return Shard(name=COORDINATOR, index=-1, count=count, seed=seed, data=DIRICHLET)


# --- digits ---------------------------------------------------------------------------------------------------------


def test_digits_are_split_into_4000_and_1000_with_equal_shares() -> None:
    train, test = digits.load("train"), digits.load("test")
    assert np.bincount(train[1]).tolist() == [400] * 10
    assert np.bincount(test[1]).tolist() == [100] * 10
    with np.load(digits.DATA) as data:
        whole = sorted(image.tobytes() for image in data["images"])
    assert sorted(image.tobytes() for image in np.concatenate([train[0], test[0]])) == whole


@settings(max_examples=12, deadline=None)
@given(
    count=st.integers(1, 60),
    seed=st.integers(0, 2**32),
    alpha=st.sampled_from([0.05, 0.5, 1, 100.0]),
    part=st.sampled_from(["train", "test"]),
)
def test_a_partition_gives_each_image_to_one_device_and_some_to_each(
    count: int, seed: int, alpha: float, part: str
) -> None:
    labels = digits.load(part)[1]
    data = {"partition": {"name": "dirichlet", "alpha": alpha}}
    parts = [digits.partition(labels, shard)[shard.index] for shard in shards(count, seed, data)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    assert min(map(len, parts)) >= min(digits.LEAST, len(labels) // count)


def test_dirichlet_is_uneven_and_local_test_data_is_uneven_alike() -> None:
    def mix(part: str, data: dict) -> np.ndarray:
        labels = digits.load(part)[1]
        rows = digits.partition(labels, shards(4, data=data)[0])
        return np.array([np.bincount(labels[own], minlength=10) / 10 for own in rows]) / (len(labels) / 100)

    assert np.allclose(mix("train", {}), 0.25, atol=0.01)
    assert mix("train", DIRICHLET).max() > 0.6
    assert np.allclose(mix("train", DIRICHLET), mix("test", DIRICHLET), atol=0.02)


@pytest.mark.parametrize(
    "partition",
    [{"name": "dirichlett", "alpha": 1.0}, {"name": "dirichlet"}, {"alpha": 0.5}, {"name": "dirichlet", "alpha": -1}],
)
def test_a_partition_that_is_not_known_is_refused(partition: dict) -> None:
    with pytest.raises(TaskError, match="partition"):
        digits.mnist().train(shards(4, data={"partition": partition})[0])


def test_shifts_move_the_image_by_at_most_two_pixels_and_depend_on_seed_device_and_epoch_only() -> None:
    shard = shards(4, seed=3, data=DIRICHLET)[1]
    still, moving, again = (digits.mnist(shift=shift).train(shard) for shift in (0, 2, 2))
    moving.set_epoch(5)
    again.set_epoch(2)
    again.set_epoch(5)
    seen = set()
    for i in range(60):
        image = moving[i][0]
        assert np.array_equal(image, again[i][0])
        padded = np.pad(still[i][0][0], 2, constant_values=still.images.min())
        moves = [
            (dy, dx)
            for dy in range(5)
            for dx in range(5)
            if np.array_equal(padded[dy : dy + 28, dx : dx + 28], image[0])
        ]
        assert moves
        seen.update(moves)
    assert len(seen) > 10
    moving.set_epoch(6)
    assert not all(np.array_equal(moving[i][0], again[i][0]) for i in range(10))
    other = digits.mnist().train(shards(4, seed=4, data=DIRICHLET)[1])
    other.set_epoch(5)
    assert not np.array_equal(other.corners[:50], again.corners[:50])


def test_held_out_images_do_not_move_and_depend_on_no_seed() -> None:
    first, second = (digits.mnist().test(held_out(seed=seed)) for seed in (0, 1))
    first.set_epoch(-1)
    assert len(first) == 1000
    assert np.array_equal(first.images, second.images)
    assert first[0][0].shape == (1, 28, 28)
    assert first[0][0].dtype == np.float32


def test_the_cnn_learns() -> None:
    torch.manual_seed(0)
    task = digits.mnist(width=8)
    model, data = task.model(), task.train(Shard(name="a", index=0, count=1, seed=0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    order = np.random.default_rng(0).permutation(len(data))
    for at in range(0, 1600, 32):
        x, y = torch.utils.data.default_collate([data[int(i)] for i in order[at : at + 40]])
        optimizer.zero_grad()
        task.loss(model(x), y).backward()
        optimizer.step()
    assert accuracy(task, model) > 0.8


def accuracy(task: Task, model: torch.nn.Module) -> float:
    assert task.test is not None
    data = task.test(held_out())
    x, y = torch.utils.data.default_collate([data[i] for i in range(len(data))])
    with torch.no_grad():
        right, count = task.metrics["accuracy"](model.eval()(x), y)
    return right / count


# --- English --------------------------------------------------------------------------------------------------------


def batch(task: Task, rows: range, part: str = "train") -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    data = (task.train if part == "train" else task.test)(held_out())
    return task.collate([data[i] for i in rows])


def test_pieces_are_english_of_many_lengths_each_with_itself_one_byte_on() -> None:
    data = english.text(context=48).train(held_out())
    for i in range(0, len(data), 501):
        x, y = data[i]
        assert torch.equal(x[1:], y[:-1])
        assert english.SHORTEST <= len(x) <= 48
    assert len({len(data[i][0]) for i in range(500)}) > 10
    assert "statement" in "".join(bytes(data[i][0].tolist()).decode(errors="replace") for i in range(500))


def test_devices_share_the_training_pieces_and_the_held_out_ones_are_others() -> None:
    task = english.text()
    sizes = [len(task.train(shard)) for shard in shards(3)]
    assert sum(sizes) == len(task.train(held_out()))
    assert max(sizes) - min(sizes) <= 1
    assert sum(len(task.test(shard)) for shard in shards(3)) == len(task.test(held_out()))


def test_weight_is_the_number_of_real_tokens_and_loss_the_mean_over_them() -> None:
    task = english.text(dtype="float64", dropout=0.0)
    x, y = batch(task, range(0, 900, 100))
    model = task.model()
    data = task.train(held_out())
    alone = [data[i] for i in range(0, 900, 100)]
    sums = [F.cross_entropy(model(task.collate([one])[0])[0], one[1], reduction="sum") for one in alone]
    tokens = sum(len(one[1]) for one in alone)
    assert int(task.weight(y)) == tokens == int(x["mask"].sum()) < y.numel()
    assert task.loss(model(x), y).item() == pytest.approx(sum(sums).item() / tokens, abs=1e-12)


def test_more_padding_changes_nothing_that_is_real() -> None:
    tight, wide = english.text(dtype="float64"), english.text(dtype="float64", context=64, pad_to=64)
    samples = [tight.train(held_out())[i] for i in (3, 50, 700)]
    model = wide.model().eval()
    (x, y), (padded, target) = tight.collate(samples), wide.collate(samples)
    assert padded["tokens"].shape == (3, 64)
    assert torch.allclose(model(x), model(padded)[:, : x["tokens"].shape[1]], atol=1e-12)
    assert wide.loss(model(padded), target).item() == pytest.approx(tight.loss(model(x), y).item(), abs=1e-12)


def test_a_token_is_foretold_from_those_before_it_only() -> None:
    task = english.text()
    model = task.model().eval()
    x, _ = batch(task, range(4))
    before = model(x)
    x["tokens"][:, 10] = 65
    changed = (model(x) != before).any(-1).any(0)
    assert not changed[:10].any()
    assert changed[10:].any()


def test_biases_and_norms_do_not_decay() -> None:
    task = english.text()
    named = list(task.model().named_parameters())
    assert task.optimizer is not None
    decays = {id(p): group["weight_decay"] for group in task.optimizer(named).param_groups for p in group["params"]}
    assert {name: decays[id(p)] > 0 for name, p in named} == {name: p.dim() == 2 for name, p in named}


def test_a_layer_carries_the_hidden_state_and_the_mask() -> None:
    task = english.text()
    x, _ = batch(task, range(4))
    hidden = task.model()[:2](x)
    assert set(hidden) == {"hidden", "mask"}
    assert hidden["hidden"].shape == (*x["tokens"].shape, 32)
    assert hidden["mask"].dtype == torch.bool


def test_the_transformer_learns_letters() -> None:
    torch.manual_seed(0)
    task = english.text(lr=1e-2)
    model = task.model()
    assert task.optimizer is not None
    optimizer = task.optimizer(list(model.named_parameters()))
    x, y = batch(task, range(0, 900, 20), "test")
    before = task.loss(model.eval()(x), y).item()
    model.train()
    for step in range(25):
        inputs, target = batch(task, range(step * 8, step * 8 + 8))
        optimizer.zero_grad()
        task.loss(model(inputs), target).backward()
        optimizer.step()
    right, count = task.metrics["token_accuracy"](model.eval()(x), y)
    assert task.loss(model(x), y).item() < before - 1.5
    assert right / count > 0.12


# --- the files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mnist", "text"])
def test_the_files_of_a_demo_are_valid_and_go_together(name: str) -> None:
    experiment = Experiment.load(DEMOS / name / "experiment.yaml")
    topology = Topology.load(experiment.topology_path)
    assert len(topology.nodes) == 7
    assert len(topology.devices()) == 4
    assert experiment.tiers == list(topology.tier_order) == ["device", "edge", "cloud"]
    assert (DEMOS / name / experiment.task.partition(":")[0]).is_file()
    layers = [layer for layer, _ in load(name).__dict__[experiment.task.partition(":")[2]]().model().named_children()]
    assert all(0 < cut < len(layers) for cut in experiment.plan.cuts or [])
    for device in topology.devices():
        assert topology.hops(device.name, "cloud")


def test_the_demo_trains_for_at_least_600_steps() -> None:
    experiment = Experiment.load(DEMOS / "mnist" / "experiment.yaml")
    assert experiment.rounds * (experiment.steps_per_round or 0) >= 600
    assert experiment.data.partition == DIRICHLET["partition"]


@pytest.mark.parametrize("kind", ["experiment", "topology"])
def test_the_schema_that_the_files_name_is_the_present_one(kind: str) -> None:
    """If this fails: write what ``edgesplit.experiment.schema()`` gives into ``docs/``."""
    path = DEMOS.parent / "docs" / f"{kind}.schema.json"
    assert json.loads(path.read_text(encoding="utf-8")) == schema()[kind]
    for name in ("mnist", "text"):
        file = DEMOS / name / ("home.yaml" if kind == "topology" else "experiment.yaml")
        named = file.read_text(encoding="utf-8").splitlines()[0].partition("$schema=")[2]
        assert (file.parent / named).resolve() == path


def test_the_example_of_the_readme_is_complete(tmp_path: Path) -> None:
    text = (DEMOS.parent / "README.md").read_text(encoding="utf-8")
    for name, block in zip(
        ("task.py", "home.yaml", "experiment.yaml"),
        re.findall(r"```(?:python|yaml)\n(.*?)```", text, re.DOTALL),
        strict=True,
    ):
        (tmp_path / name).write_text(block, encoding="utf-8")
    experiment = Experiment.load(tmp_path / "experiment.yaml")
    assert len(Topology.load(experiment.topology_path).nodes) == 4
    task = load_task(experiment.task, experiment.task_args, experiment.base).task
    x, y = task.train(shards(2)[1])[:64]
    assert task.loss(task.model()(x), y).ndim == 0


@pytest.mark.parametrize("name", ["mnist", "text"])
def test_a_demo_is_short_enough_to_read(name: str) -> None:
    assert len((DEMOS / name / "task.py").read_text(encoding="utf-8").splitlines()) <= 120
