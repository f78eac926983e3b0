"""The command line, in this process: exit statuses, one JSON object on stdout, one line of error on stderr."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edgesplit import cli
from edgesplit.cli import output
from edgesplit.errors import RunError
from edgesplit.methods import METHODS
from edgesplit.observe.recorder import Recorder
from edgesplit.plan import Plan, Route, Stage
from edgesplit.profile import LayerProfile, Profile
from edgesplit.schedule import Action, Event
from tests.brokers import free_port

PLAN = Plan(("a", "b", "c"), (Route("d", (Stage("d", 0, 1), Stage("e", 1, 3))),))
HOME = """
nodes:
  cloud: {tier: cloud, gflops: 9000, memory_mb: 64000}
  edge: {tier: edge, parent: cloud, gflops: 400, memory_mb: 8000, up_mbps: 200, down_mbps: 200, latency_ms: 8}
  pi: {tier: device, count: 2, parent: edge, gflops: 6, memory_mb: 2000, up_mbps: 20, down_mbps: 40, latency_ms: 3}
"""
EXPERIMENT = """
task: task.py:make
topology: home.yaml
optimizer: {name: sgd, lr: 0.1}
"""
TASK = """
import edgesplit as es
import torch
from torch import nn
from torch.utils.data import TensorDataset

def make() -> es.Task:
    return es.Task(
        model=lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))),
        loss=nn.functional.cross_entropy,
        train=lambda shard: TensorDataset(torch.zeros(8, 2), torch.zeros(8, dtype=torch.long)),
    )
"""


@dataclass
class Done:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What stdout holds: one JSON object in one line, nothing else."""

        def refuse(name: str) -> None:
            raise AssertionError(f"{name} is not JSON")

        assert self.out.count("\n") == 1
        found = json.loads(self.out, parse_constant=refuse)
        assert isinstance(found, dict)
        return found

    @property
    def error(self) -> str:
        """The one line on stderr."""
        assert self.err.startswith("error: ")
        assert self.err.count("\n") == 1
        assert "Traceback" not in self.err
        return self.err.removeprefix("error: ").strip()


Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs a command in a folder of its own, as ``main`` does but for leaving the process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(output, "_started", False)
    monkeypatch.delenv("EDGESPLIT_DEBUG", raising=False)

    def command(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["edgesplit", *map(str, arguments)])
        capsys.readouterr()
        status = cli._status()
        return Done(status, *capsys.readouterr())

    return command


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    PLAN.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


# --- help and usage -------------------------------------------------------------------------------------------------

COMMANDS = [
    "run",
    "check",
    "node",
    "plan",
    "simulate",
    "methods",
    "schema",
    "doctor",
    "trace",
    "bench",
    "bench pipeline",
]


def test_help_of_every_command_loads_nothing_heavy() -> None:
    code = """
import json, sys
from edgesplit.cli import _status
found = {}
for command in json.loads(sys.argv[1]):
    sys.argv = ["edgesplit", *command.split(), "--help"]
    found[command] = _status()
heavy = {"torch", "flwr", "onnx", "onnxruntime", "iotcore", "numpy", "pydantic", "paho"} & set(sys.modules)
print(json.dumps([found, sorted(heavy)]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(["", *COMMANDS])], capture_output=True, text=True, check=True
    )
    statuses, heavy = json.loads(done.stdout.splitlines()[-1])
    assert statuses == dict.fromkeys(["", *COMMANDS], 0)
    assert heavy == []
    assert all(command.split()[0] in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("arguments", [(), ("bench",)])
def test_nothing_to_do_shows_the_help(run: Run, arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.status == 2
    assert "Usage" in done.out + done.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("simulte",), "simulte"),
        (("simulate", "--steps"), "--steps"),
        (("simulate",), "PLAN"),
        (("methods", "--jsn"), "--jsn"),
        (("methods", "extra"), "extra"),
        (("simulate", "plan.json", "--micros", "0"), "--micros"),
        (("simulate", "plan.json", "--micros", "many"), "many"),
        (("plan", "home.yaml"), "TASK"),
        (("node", "a"), "--broker"),
        (("node", "a", "--broker", "mqtt://127.0.0.1", "--state", "s", "--no-state"), "--no-state"),
        (("node", "--broker", "mqtt://127.0.0.1"), "NAMES"),
        (("run",), "EXPERIMENT"),
        (("bench", "everything"), "everything"),
    ],
)
def test_what_cannot_be_meant_is_refused(run: Run, arguments: tuple[str, ...], text: str) -> None:
    done = run(*arguments)
    assert done.status == 2
    assert text in done.error
    assert done.out == ""


# --- exit statuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RunError("the disk\nis full"), "the disk is full"),
        (OSError(28, "No space left on device", "/x/metrics.json"), "/x/metrics.json: no space left on device"),
        (OSError("what else"), "what else"),
        (ValueError("3 is not 4"), "ValueError: 3 is not 4 ("),
        (RecursionError(), "RecursionError"),
    ],
)
def test_refused_before_the_first_step_and_failed_after_it(
    run: Run, plan: Path, monkeypatch: pytest.MonkeyPatch, begun: bool, error: Exception, text: str
) -> None:
    def fail(path: Path) -> None:
        if begun:
            output.mark_started()
        raise error

    monkeypatch.setattr(Plan, "load", fail)
    done = run("simulate", plan)
    assert done.status == (1 if begun else 2)
    assert text.lower() in done.error.lower()
    assert done.out == ""


def test_ctrl_c(run: Run, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Plan, "load", interrupt)
    done = run("simulate", plan)
    assert (done.status, done.error) == (130, "interrupted")


def test_the_status_of_the_process(tmp_path: Path) -> None:
    for arguments, status in ((["schema"], 0), (["simulate", "absent.json"], 2)):
        done = subprocess.run(
            [sys.executable, "-m", "edgesplit", *arguments], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == status
        assert (done.stderr == "") == (status == 0)
        assert (done.stdout == "") == (status != 0)


# --- methods, schema ------------------------------------------------------------------------------------------------


def test_methods(run: Run) -> None:
    found = run("methods", "--json")
    assert found.status == 0
    assert found.err == ""
    assert [row["name"] for row in found.json["methods"]] == list(METHODS)
    assert "fedavg" in found.json["strategies"]
    text = run("methods").out
    assert all(name in text for name in METHODS)


def test_schema(run: Run) -> None:
    found = run("schema")
    assert found.status == 0
    assert "properties" in json.dumps(found.json)


# --- simulate -------------------------------------------------------------------------------------------------------


def test_simulate(run: Run, plan: Path, tmp_path: Path) -> None:
    done = run("simulate", plan, "--method", "gpipe", "--micros", 3, "--steps", 2, "--trace", "t.json", "--json")
    assert done.status == 0
    assert set(done.json) == {"seconds", "bubble", "busy_s", "link_bytes"}
    assert set(done.json["busy_s"]) == {"d", "e"}
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    text = run("simulate", plan)
    assert text.status == 0
    assert "s for 1 step(s), bubble" in text.out


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot read"),
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "must be a mapping"),
        ('{"version": 1}', "'layers' is missing"),
        ('{"version": 7, "layers": [], "routes": []}', "has version 7"),
        ('{"version": 1, "layers": ["a"], "routes": [], "rutes": 1}', "unknown key 'rutes' (did you mean 'routes'?)"),
        ("\udcff", "not JSON"),
    ],
)
@pytest.mark.parametrize("json_", [True, False])
def test_simulate_on_what_is_no_plan(run: Run, tmp_path: Path, content: str | None, text: str, json_: bool) -> None:
    if content is not None:
        (tmp_path / "bad.json").write_text(content, errors="surrogateescape")
    done = run("simulate", "bad.json", *(["--json"] if json_ else []))
    assert done.status == 2
    assert text in done.error
    assert done.out == ""


def test_simulate_with_a_method_that_is_none_or_does_not_go(run: Run, plan: Path) -> None:
    assert "no method is called 'gpip' (did you mean 'gpipe'?)" in run("simulate", plan, "--method", "gpip").error
    done = run("simulate", plan, "--method", "interleaved")
    assert done.status == 2
    assert "interleaved needs a looping placement" in done.error


def test_simulate_where_the_trace_cannot_be_written(run: Run, plan: Path) -> None:
    done = run("simulate", plan, "--trace", "no/such/folder/t.json")
    assert done.status == 2
    assert "no/such/folder" in done.error


# --- plan -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A profile as a planner uses it, and the topology beside it."""
    (tmp_path / "home.yaml").write_text(HOME)
    costs = dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s", "flops", "grad_bytes", "stash_bytes"), 0.25)
    layers = tuple(
        LayerProfile(name=f"l{i}", **costs, param_bytes=8, trainable_bytes=8, cut_bytes={"x": 100.0}) for i in range(6)
    )
    made = Profile(layers=layers, input_bytes=10.0, target_bytes=1.0, dtype="float32", batch=4, gflops=50.0)
    (tmp_path / "profile.json").write_text(json.dumps(made.to_json()))
    return tmp_path / "profile.json"


def test_plan_of_a_profile(run: Run, profile: Path, tmp_path: Path) -> None:
    done = run("plan", "home.yaml", profile, "-o", "plan.json", "--json")
    assert done.status == 0
    made = Plan.from_json(done.json)
    assert len(made.routes) == 2
    assert Plan.load(tmp_path / "plan.json") == made
    assert run("simulate", "plan.json", "--json").status == 0
    text = run("plan", "home.yaml", profile)
    assert "6 layers" in text.out


def test_cuts_by_hand(run: Run, profile: Path) -> None:
    made = run("plan", "home.yaml", profile, "--cuts", "1,l4", "--json").json
    assert [stage[1:] for stage in made["routes"][0]["stages"]] == [[0, 1], [1, 4], [4, 6]]
    made = run("plan", "home.yaml", profile, "--cuts", "2", "--tiers", "device,cloud", "--json").json
    assert [stage[0] for stage in made["routes"][0]["stages"]] == [made["routes"][0]["device"], "cloud"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("absent.yaml", "profile.json"), "absent.yaml"),
        (("home.yaml", "absent.json"), "absent.json"),
        (("home.yaml", "home.yaml.json"), "home.yaml.json"),
        (("home.yaml", "broken.json"), "broken.json"),
        (("home.yaml", "list.json"), "profile"),
        (("profile.json", "profile.json"), "profile.json"),
        (("home.yaml", "profile.json", "--cuts", "9,12"), "9"),
        (("home.yaml", "profile.json", "--cuts", "l9,l10"), "l9"),
        (("home.yaml", "profile.json", "--cuts", "-1,2"), "-1"),
        (("home.yaml", "profile.json", "--cuts", "1"), "cut"),
        (("home.yaml", "profile.json", "--planner", "evn"), "did you mean 'even'"),
        (("home.yaml", "profile.json", "--planner", "manual"), "cuts"),
        (("home.yaml", "profile.json", "--planner", "even", "--cuts", "1,2"), "cuts"),
        (("home.yaml", "profile.json", "--tiers", "device,moon"), "moon"),
        (("home.yaml", "profile.json", "-o", "no/such/plan.json"), "no/such"),
        (("home.yaml", "absent.py:make"), "does not exist"),
        (("home.yaml", "task"), "FILE.py:NAME"),
    ],
)
def test_plans_that_cannot_be(run: Run, profile: Path, tmp_path: Path, arguments: Any, text: str) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "home.yaml.json").write_text(HOME)
    done = run("plan", *arguments, "--json")
    assert done.status == 2
    assert text in done.error
    assert done.out == ""


# --- trace ----------------------------------------------------------------------------------------------------------


def test_trace(run: Run, tmp_path: Path) -> None:
    with Recorder(tmp_path / "events.jsonl") as recorder:
        for i, node in enumerate("ab"):
            recorder.add(Event(node, Action("F", i, 0), 1.0 + i, 2.0 + i))
    done = run("trace", ".", "--json")
    assert done.status == 0
    assert done.json == {"trace": "trace.json", "events": 2, "bubble": 1.0, "busy_s": {"a": 1.0, "b": 1.0}}
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    text = run("trace", ".", "-o", "other.json")
    assert "2 events in other.json" in text.out


def test_trace_of_a_run_without_events(run: Run, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("")
    assert run("trace", ".", "--json").json == {"trace": "trace.json", "events": 0, "bubble": None, "busy_s": {}}
    assert run("trace", ".").status == 0


@pytest.mark.parametrize("content", [None, "{}\n", "nonsense\n", '{"node": 3}\n', "[]\n", "\n", "\x00\n"])
def test_trace_of_what_is_no_run(run: Run, tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "events.jsonl").write_text(content)
    done = run("trace", ".", "--json")
    assert done.status == 2
    assert "events.jsonl" in done.error
    assert not (tmp_path / "trace.json").exists()


def test_trace_of_bytes_that_are_no_text(run: Run, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b"\xff\xfe\n")
    done = run("trace", ".")
    assert done.status == 2
    assert "events.jsonl" in done.error


# --- run and check, as far as they go without torch ------------------------------------------------------------------


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    (tmp_path / "home.yaml").write_text(HOME)
    (tmp_path / "experiment.yaml").write_text(EXPERIMENT)
    return tmp_path / "experiment.yaml"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("absent.yaml",), "absent.yaml"),
        (("experiment.yaml", "batchsize=3"), "did you mean 'batch_size'"),
        (("experiment.yaml", "pipeline.mikros=3"), "did you mean 'micros'"),
        (("experiment.yaml", "rounds"), "rounds"),
        (("experiment.yaml", "rounds=many"), "rounds"),
        (("experiment.yaml", "=3"), "=3"),
        (("experiment.yaml", "topology=absent.yaml"), "absent.yaml"),
        (("experiment.yaml", "task=absent.py:make"), "absent.py does not exist"),
        (("experiment.yaml", "--log-format", "xml"), "--log-format is 'xml': auto, plain or json"),
        (("experiment.yaml", "--resume"), "--resume needs the run"),
        ((".",), "."),
    ],
)
@pytest.mark.parametrize("json_", [True, False])
def test_runs_that_are_refused(
    run: Run, experiment: Path, tmp_path: Path, arguments: Any, text: str, json_: bool
) -> None:
    (tmp_path / "task.py").write_text(TASK)
    done = run("run", *arguments, *(["--json"] if json_ else []))
    assert done.status == 2
    assert text in done.error
    assert done.out == ""
    assert not (tmp_path / "runs").exists()


def test_dry_run(run: Run, experiment: Path, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    done = run("run", experiment, "pipeline.micros=2", "--dry-run", "--json")
    assert done.status == 0, done.err
    assert set(done.json) == {"plan", "predicted_s"}
    assert done.json["predicted_s"] > 0
    assert len(Plan.from_json(done.json["plan"]).routes) == 2
    assert not (tmp_path / "runs").exists(), "nothing is started"
    assert "predicted: " in run("run", experiment, "--dry-run").out


def test_plan_of_a_task(run: Run, experiment: Path, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    done = run("plan", "home.yaml", "task.py:make", "--json")
    assert done.status == 0, done.err
    made = Plan.from_json(done.json)
    assert made.layers == ("0", "1", "2", "3")
    assert made.profile is not None


@pytest.mark.parametrize(
    ("task", "text"), [("absent.py:make", "does not exist"), ("make", "FILE.py:NAME"), ("", "FILE.py:NAME")]
)
def test_check_of_nothing(run: Run, task: str, text: str) -> None:
    done = run("check", task, "--json")
    assert done.status == 2
    assert not done.json["ok"]
    assert text in done.json["facts"][-1]["text"]


# --- doctor ---------------------------------------------------------------------------------------------------------


def test_doctor_says_that_a_broker_is_not_there(run: Run) -> None:
    address = f"127.0.0.1:{free_port()}"
    done = run("doctor", "--broker", f"mqtt://{address}", "--json")
    assert done.status == 2
    assert not done.json["ok"]
    (bad,) = [finding for finding in done.json["findings"] if not finding["ok"]]
    assert bad["name"] == "broker"
    assert address in bad["text"]
    text = run("doctor", "--broker", f"mqtt://{address}")
    assert text.status == 2
    assert any(line.startswith("FAIL  broker") for line in text.out.splitlines())


@pytest.mark.parametrize("option", [["--run", "x"], ["--node", "x"], ["--topic-prefix", "x"], ["--clear-stale"]])
def test_doctor_refuses_options_that_would_have_no_effect(run: Run, option: list[str]) -> None:
    done = run("doctor", *option)
    assert done.status == 2
    assert "need --broker" in done.error


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--ca", "ca.pem"), "need --broker"),
        (
            ("--broker", "mqtt://h", "--ca", "ca.pem"),
            "error: ca has no effect over mqtt://: use mqtts://, or remove it",
        ),
        (("--broker", "mqtt://h", "--client-id", "{nod}"), "error: client id '{nod}': {nod} is none of"),
    ],
)
def test_options_of_a_broker_that_are_wrong(run: Run, arguments: tuple[str, ...], line: str) -> None:
    done = run("doctor", *arguments)
    assert (done.status, done.out) == (2, "")
    assert line in done.err


def test_a_node_whose_files_are_wrong_is_refused_at_once(run: Run, tmp_path: Path) -> None:
    secret = "mqtts://pi:secret@127.0.0.1"
    for command in (("node", "pi", "--broker", secret), ("run", "x.yaml", "--broker", secret)):
        (tmp_path / "x.yaml").write_text("task: task.py:x\ntopology: home.yaml\n")
        done = run(*command)
        assert done.status == 2
        assert "EDGESPLIT_PASSWORD_FILE" in done.err
        assert "secret" not in done.err
    done = run("node", "pi", "--broker", "mqtt://127.0.0.1:1", "--run", "r", "--key-file", "gone")
    assert (done.status, done.err) == (2, "error: cannot read the key file 'gone': No such file or directory\n")
    done = run("node", "pi", "--broker", "mqtts://127.0.0.1:1", "--run", "r", "--ca", "gone.pem")
    assert (done.status, done.err) == (2, "error: --ca: cannot read 'gone.pem': No such file or directory\n")


# --- output ---------------------------------------------------------------------------------------------------------


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    output.show_json({"a": math.nan, "b": [1.0, -math.inf], "c": {"d": (math.inf,)}, "e": Path("x")})
    assert capsys.readouterr().out == '{"a": null, "b": [1.0, null], "c": {"d": [null]}, "e": "x"}\n'


def test_tables_do_not_break_their_cells(capsys: pytest.CaptureFixture[str]) -> None:
    output.show_table("title", ["a", "b"], [["x" * 30, 3], ["[bold]y[/bold]", None]])
    out = capsys.readouterr().out
    assert "x" * 30 in out
    assert "[bold]y[/bold]" in out
