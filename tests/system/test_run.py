"""``edgesplit run`` and ``edgesplit node``: real processes over a real broker, through the command line."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from edgesplit import checkpoint
from edgesplit.observe.recorder import read_events
from edgesplit.plan import Plan
from tests.brokers import Mosquitto
from tests.system.command import SMALL, Command, Ended, Shell, kept, shell, wait_until

pytestmark = pytest.mark.system

NODES = {"cloud", "edge-1", "edge-2", "pi-1", "pi-2", "pi-3", "pi-4"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A project in which many tests run."""
    with shell(tmp_path_factory.mktemp("run")) as found:
        yield found


@pytest.fixture(scope="module")
def seven(place: Shell) -> tuple[Command, Ended]:
    """A run of seven processes over the embedded broker."""
    command = place.start("run", "experiment.yaml", "--name", "seven", "--json")
    return command, command.end()


@pytest.fixture(scope="module")
def two(place: Shell) -> list[Ended]:
    """Two runs of three nodes in one process, side by side, each over a broker of its own."""
    arguments = ("run", "experiment.yaml", *SMALL, "--json")
    options = ("seed=1", "--out", "elsewhere/other", "--log-format", "plain", "--deterministic")
    commands = [
        place.start(*arguments, "--name", "small", "--log-format", "json"),
        place.start(*arguments, *options),
    ]
    return [command.end() for command in commands]


@pytest.fixture(scope="module")
def small(two: list[Ended]) -> Ended:
    """The run of seed 0."""
    return two[0]


@pytest.fixture(scope="module")
def other(two: list[Ended]) -> Ended:
    """That of seed 1, with other options of the command line."""
    return two[1]


# What a run prints and leaves behind


def test_run_prints_one_object(seven: tuple[Command, Ended]) -> None:
    found = seven[1].json
    assert {"accuracy", "rounds", "samples_per_s", "nodes", "links", "bubble", "predicted_s", "measured_s"} <= set(
        found
    )
    assert found["rounds"] == 3
    assert found["accuracy"] > 0.4  # 0.25 is chance
    assert found["samples_per_s"] > 0
    assert found["bubble"] > 0
    assert found["predicted_s"] > 0
    assert found["measured_s"] > 0
    assert seven[1].stderr.count("round ") == 3


def test_each_node_is_a_process(seven: tuple[Command, Ended]) -> None:
    nodes = seven[1].json["nodes"]
    assert set(nodes) == NODES
    assert {name: node["tier"] for name, node in nodes.items()} == {
        name: name.replace("pi", "device").partition("-")[0] for name in NODES
    }
    assert len({node["pid"] for node in nodes.values()}) == 7
    assert nodes["pi-1"]["layers"] == ["fc1", "act1"]
    assert nodes["edge-2"]["layers"] == ["fc2", "fuse", "drop"]
    assert nodes["cloud"]["layers"] == ["act2", "out"]


def test_links_carry_what_the_plan_says(seven: tuple[Command, Ended]) -> None:
    links = seven[1].json["links"]
    for device, edge in (("pi-1", "edge-1"), ("pi-2", "edge-2"), ("pi-3", "edge-1"), ("pi-4", "edge-2")):
        assert links[f"{device}->{edge}"] > 3 * 8 * 16 * 16 * 4  # rounds, steps, samples, features, bytes
        assert links[f"{edge}->{device}"] > 3 * 8 * 16 * 16 * 4
        assert links[f"{device}->cloud"] > 0  # the labels
    assert "pi-1->edge-2" not in links
    assert "pi-1->pi-2" not in links


def test_nothing_runs_after_a_run(seven: tuple[Command, Ended]) -> None:
    command, ended = seven
    command.gone(0.5)
    for node in ended.json["nodes"].values():
        assert not Path(f"/proc/{node['pid']}").exists()


def test_run_directory(place: Shell, seven: tuple[Command, Ended]) -> None:
    folder, printed = place.cwd / "runs" / "seven", seven[1].json
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics == printed
    assert metrics["seed"] == 0
    assert {"edgesplit", "python", "torch", "numpy", "flwr"} <= set(metrics["versions"])
    assert metrics["experiment"]["batch_size"] == 16
    assert metrics["experiment"]["evaluate"] == {"every": 1, "where": ["coordinator"], "best": None}
    assert (folder / "key").stat().st_mode & 0o777 == 0o600
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"round-0002", "round-0003"}
    assert {path.stem for path in (folder / "logs").iterdir()} == NODES
    assert all("the run has ended" in path.read_text() for path in (folder / "logs").iterdir())


def test_model_file_has_the_original_names_and_the_hash(place: Shell, seven: tuple[Command, Ended]) -> None:
    arrays = load_file(place.cwd / "runs" / "seven" / "model.safetensors")
    assert set(arrays) == {f"{layer}.{part}" for layer in ("fc1", "fc2", "out") for part in ("weight", "bias")}
    assert checkpoint.weights_hash(arrays) == seven[1].json["weights"]
    saved = place.last_checkpoint("seven")
    assert saved.position.round == 3
    assert checkpoint.weights_hash(saved.model) == seven[1].json["weights"]


def test_events_trace_and_plan_can_be_read(place: Shell, seven: tuple[Command, Ended]) -> None:
    folder = place.cwd / "runs" / "seven"
    events = read_events(folder / "events.jsonl")
    assert {event.node for event in events} == NODES
    assert {event.step for event in events} == set(range(24))
    trace = json.loads((folder / "trace.json").read_text())
    assert {row["args"]["name"] for row in trace["traceEvents"] if row["name"] == "thread_name"} == NODES
    assert set(Plan.load(folder / "plan.json").nodes()) == NODES


def test_json_progress_is_a_line_an_event(small: Ended) -> None:
    lines = [json.loads(line) for line in small.stderr.splitlines() if line.startswith("{")]
    assert [line["step"] for line in lines if line["event"] == "step"] == list(range(24))
    assert [line["round"] for line in lines if line["event"] == "round"] == [1, 2, 3]


def test_plain_progress_folder_and_determinism(place: Shell, small: Ended, other: Ended) -> None:
    found = other.json
    assert found["directory"] == "elsewhere/other"
    assert (place.cwd / "elsewhere" / "other" / "model.safetensors").is_file()
    assert [line.split()[1] for line in other.stderr.splitlines() if line.startswith("round ")] == ["1/3", "2/3", "3/3"]
    assert found["experiment"]["seed"] == 1
    assert found["weights"] != small.json["weights"]


def test_dry_run_starts_nothing(place: Shell) -> None:
    found = place.run("run", "experiment.yaml", "pipeline.micros=4", "--dry-run", "--json", "--name", "dry").json
    assert found["predicted_s"] > 0
    assert set(Plan.from_json(found["plan"]).nodes()) == NODES
    assert not (place.cwd / "runs" / "dry").exists()


def test_a_second_run_into_the_same_folder_is_refused(place: Shell, small: Ended) -> None:
    before = small.json["weights"]
    refused = place.run("run", "experiment.yaml", *SMALL, "--name", "small")
    assert refused.status == 2
    assert "runs/small holds a run already: resume it with --resume, or choose another folder" in refused.error
    assert json.loads((place.cwd / "runs" / "small" / "metrics.json").read_text())["weights"] == before


def test_emulated_run_takes_its_predicted_time(place: Shell, small: Ended) -> None:
    options = ("emulate=true", "rounds=1", "steps_per_round=2", "lr_schedule={name: cosine, total_steps: 24}")
    found = place.run("run", "experiment.yaml", *SMALL, *options, "--name", "emulated", "--json").json
    assert found["measured_s"] > 0.9 * found["predicted_s"] > 0.5
    assert found["measured_s"] > small.json["measured_s"]


# Runs that end early


def test_a_killed_run_is_resumed_exactly(place: Shell, small: Ended) -> None:
    (place.cwd / "sleep").touch()  # so that it does not end before it is killed
    arguments = ("run", "experiment.yaml", *SMALL, "--name", "killed")
    command = place.start(*arguments, "--log-format", "json")
    command.wait_step(12).send(signal.SIGKILL)
    assert command.end().status == -signal.SIGKILL
    command.gone()  # nodes and broker notice by themselves
    (place.cwd / "sleep").unlink()
    assert place.last_checkpoint("killed").position.round in (1, 2)
    assert not (place.cwd / "runs" / "killed" / "metrics.json").exists()

    found = place.run(*arguments, "--resume", "--json").json
    assert found["weights"] == small.json["weights"]
    assert found["accuracy"] == small.json["accuracy"]
    assert found["rounds"] == 3


def test_interrupted(place: Shell) -> None:
    ways: dict[str, Callable[[Command], None]] = {
        "int": lambda command: command.send(signal.SIGINT),
        "term": lambda command: command.send(signal.SIGTERM),
        "terminal": lambda command: command.send_group(signal.SIGINT),
    }
    commands = {name: place.begin(name) for name in ways}
    for name, command in commands.items():
        ways[name](command.wait_step())
        ended = command.end()
        assert (ended.status, ended.error) == (130, "error: interrupted")
        command.gone(0.5)
        assert place.last_checkpoint(name).position.round >= 1


def test_interrupted_before_the_first_step(place: Shell) -> None:
    command = place.begin("early")
    wait_until("node processes", lambda: len(command.processes()) > 2)
    command.send(signal.SIGINT)
    ended = command.end()
    assert (ended.status, ended.error) == (130, "error: interrupted")
    command.gone()  # a process that was just being started ends by itself


# Over a broker of one's own


@pytest.fixture
def guarded(start_mosquitto: Callable[..., Mosquitto], tmp_path: Path) -> tuple[str, dict[str, str]]:
    """A mosquitto that asks for a password: its url with a user, and the environment that knows it."""
    users, secret = tmp_path / "users", tmp_path / "secret"
    subprocess.run(["mosquitto_passwd", "-b", "-c", str(users), "ann", "open sesame"], check=True, capture_output=True)
    secret.write_text("open sesame\n")
    broker = start_mosquitto([f"password_file {users}"], anonymous=False)
    return f"mqtt://ann@{broker.address}", {"EDGESPLIT_PASSWORD_FILE": str(secret)}


def test_seven_nodes_started_by_hand(
    place: Shell, seven: tuple[Command, Ended], guarded: tuple[str, dict[str, str]]
) -> None:
    url, env = guarded
    node = ("node", "--broker", url)
    early = [
        place.start(*node, "pi-1", env=env),  # finds the run, and the task beside it
        place.start(*node, "cloud", "--run", "hand", "--task", "task.py:points", env=env),
    ]
    run = place.start("run", "experiment.yaml", "--broker", url, "--name", "hand", "--json", env=env)
    run.wait_for("waiting for 7 nodes")
    late = [place.start(*node, name, "--run", "hand", env=env) for name in sorted(NODES - {"pi-1", "cloud"})]

    found = run.end().json
    assert found["weights"] == seven[1].json["weights"]
    assert {name: v["pid"] for name, v in found["nodes"].items() if name in ("pi-1", "cloud")} == {
        "pi-1": early[0].pid,
        "cloud": early[1].pid,
    }
    for command in (*early, *late):
        ended = command.end()
        assert (ended.status, "the run has ended" in ended.stderr) == (0, True), ended.stderr


def test_two_runs_on_one_broker(place: Shell, mosquitto: Mosquitto, small: Ended, other: Ended) -> None:
    arguments = ("run", "experiment.yaml", *SMALL, "--broker", mosquitto.url, "--json")
    both = [place.start(*arguments, f"seed={seed}", "--name", f"beside-{seed}") for seed in (0, 1)]
    weights = [command.end().json["weights"] for command in both]
    assert weights == [small.json["weights"], other.json["weights"]]
    for command in both:
        command.gone(0.5)
    assert not [topic for topic in kept(mosquitto.port) if topic.startswith("edgesplit/beside-")]


def test_a_node_that_finds_two_runs_asks_which(place: Shell, mosquitto: Mosquitto) -> None:
    arguments = ("run", "experiment.yaml", "topology=small.yaml", "--broker", mosquitto.url)
    both = [place.start(*arguments, "--name", f"waiting-{number}") for number in (1, 2)]
    for command in both:
        command.wait_for("waiting for 3 nodes")
    refused = place.run("node", "pi", "--broker", mosquitto.url)
    assert refused.status == 2
    assert "several runs" in refused.error
    assert "choose with --run: waiting-1, waiting-2" in refused.error
