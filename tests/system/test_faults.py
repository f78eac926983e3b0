"""Faults that end a run do so in one line that says what and what to do; nothing runs on, and nothing is lost.

Those that a run survives are in ``test_recovery.py``: here ``on_node_lost`` is ``stop``, or the waits are short.
Most of the time of a fault goes by while processes start or wait, so all that were chosen run side by side.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from paho.mqtt import publish

from edgesplit import checkpoint
from edgesplit.launch import RESTARTS
from edgesplit.observe.recorder import read_events
from tests.brokers import Mosquitto, find_mosquitto, free_port
from tests.system.command import SMALL, Command, Ended, Shell, kept, shell, wait_until

pytestmark = pytest.mark.system

AT_ONCE = 3
"""Faults looked at side by side: what waits leaves its core to others."""

NEEDED = ("topology=small.yaml", "rounds=1", "steps_per_round=4")
STOP = "on_node_lost=stop"
HAND = ("topology=small.yaml",)
"""One device, one edge and one cloud, which somebody else starts."""

Fault = Callable[[Shell], None]
FAULTS: dict[str, Fault] = {}
OVER_MOSQUITTO: set[str] = set()


def fault(function: Fault) -> Fault:
    """Have a fault looked at."""
    FAULTS[function.__name__] = function
    return function


def over_mosquitto(function: Fault) -> Fault:
    """The same for one that needs mosquitto."""
    OVER_MOSQUITTO.add(function.__name__)
    return fault(function)


def refused(ended: Ended, *parts: str, status: int = 2) -> None:
    """The command ended as it must, with an error of which these are parts."""
    assert ended.status == status, ended.stderr
    for part in parts:
        assert part in ended.error


@contextmanager
def mosquitto_with(place: Shell, *options: str, anonymous: bool = True) -> Iterator[Mosquitto]:
    """A mosquitto of one's own."""
    broker = Mosquitto(place.cwd, options, anonymous=anonymous)
    try:
        yield broker
    finally:
        broker.stop()


# Refused before anything is started


def write(place: Shell, name: str, *changes: tuple[str, str]) -> str:
    """Write a variant of a file of the project and return its name."""
    text = (place.cwd / name).read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    variant = place.cwd / f"variant-{len(list(place.cwd.iterdir()))}-{name}"
    variant.write_text(text)
    return variant.name


@fault
def unknown_keys(place: Shell) -> None:
    refused(
        place.run("run", "experiment.yaml", "bathc_size=3"),
        "override: bathc_size: unknown key (did you mean 'batch_size'?)",
    )
    file = write(place, "experiment.yaml", ("micros: 2", "mircos: 2"))
    refused(place.run("run", file), f"{file}: pipeline.mircos: unknown key (did you mean 'micros'?)")
    file = write(place, "small.yaml", ("memory_mb: 2000", "memory_gb: 2"))
    refused(place.run("run", "experiment.yaml", f"topology={file}"), f"{file}: nodes.pi.memory_gb: unknown key")
    refused(place.run("run", "no.yaml"), "no.yaml")


@fault
def unknown_nodes(place: Shell) -> None:
    def topology(*changes: tuple[str, str]) -> Ended:
        return place.run("run", "experiment.yaml", f"topology={write(place, 'small.yaml', *changes)}")

    refused(
        topology(("parent: edge", "parent: edg")),
        "node 'pi' has parent 'edg', which is not a node (did you mean 'edge'?)",
    )
    end = "  pi:", "  hub: {tier: edge, parent: cloud}\n  pi:"
    links = "nodes:", "links: [{between: [edge, hug]}]\nnodes:"
    refused(topology(end, links), "'hug'", "not a node (did you mean 'hub'?)")
    refused(topology(("nodes:", "broker: {at: clod}\nnodes:")), "'clod'", "not a node (did you mean 'cloud'?)")
    refused(
        topology(("cloud: {tier: cloud,", "cloud: {tier: cloud, parent: pi,")),
        "parents go in a circle: cloud -> pi -> edge -> cloud",
    )


@fault
def a_cut_that_cannot_be(place: Shell) -> None:
    refused(
        place.run("run", "experiment.yaml", "plan.cuts=[2,9]"),
        "cut 9 is out of range: the chain has 7 layers, cuts are 1 to 6",
    )


@fault
def a_task_that_does_not_import(place: Shell) -> None:
    (place.cwd / "broken.py").write_text("import no_such_module\n")
    refused(
        place.run("run", "experiment.yaml", "task=broken.py:task"), "broken.py cannot be imported", "'no_such_module'"
    )


@fault
def a_task_that_is_no_chain(place: Shell) -> None:
    refused(
        place.run("run", "experiment.yaml", "task=task.py:skips_a_layer"),
        "the chain of layers is not the model",
        "between 'act1' and 'fc2' the model's forward does something that no layer does",
    )


@fault
def a_parameter_that_a_cut_tears_apart(place: Shell) -> None:
    ended = place.run("run", "experiment.yaml", *SMALL, "task=task.py:tied", "plan.cuts=[1,2]")
    refused(ended, "parameter '0.weight' is shared by layer '0' on", "put both layers on one node, or untie them")


# Brokers


@fault
def no_broker(place: Shell) -> None:
    where = f"127.0.0.1:{free_port()}"
    run = ("run", "experiment.yaml", "--name", "r")  # what was refused may be tried again
    for command in (run, run, ("node", "pi")):
        refused(place.run(*command, "--broker", f"mqtt://{where}"), f"cannot reach the broker at {where}")


@over_mosquitto
def a_wrong_password(place: Shell) -> None:
    users, secret = place.cwd / "users", place.cwd / "secret"
    subprocess.run(["mosquitto_passwd", "-b", "-c", str(users), "ann", "right"], check=True, capture_output=True)
    secret.write_text("wrong\n")
    env = {"EDGESPLIT_PASSWORD_FILE": str(secret)}
    with mosquitto_with(place, f"password_file {users}", anonymous=False) as broker:
        for command in (("run", "experiment.yaml"), ("node", "pi")):
            ended = place.run(*command, "--broker", f"mqtt://ann@{broker.address}", env=env)
            refused(ended, "refuses user 'ann'", "look at the user in the url and at EDGESPLIT_PASSWORD_FILE")
            assert "wrong" not in ended.stderr


@over_mosquitto
def an_access_rule_that_swallows_what_nodes_tell_the_coordinator(place: Shell) -> None:
    acl = place.cwd / "acl"
    rules = [f"topic write edgesplit/+/{node}/#" for node in ("pi", "edge", "cloud")]
    acl.write_text("\n".join(["user boss", "topic readwrite #", "user hand", "topic read #", *rules, ""]))
    users = place.cwd / "users"
    users.touch(0o600)
    for user in ("boss", "hand"):
        subprocess.run(["mosquitto_passwd", "-b", str(users), user, "pw"], check=True, capture_output=True)
    env = {"EDGESPLIT_PASSWORD": "pw"}
    with mosquitto_with(place, f"acl_file {acl}", f"password_file {users}", anonymous=False) as broker:
        names = ("pi", "edge", "cloud", "--coordinator-s", "2")
        nodes = place.start("node", *names, "--broker", f"mqtt://hand@{broker.address}", env=env)
        run = place.start("run", "experiment.yaml", *HAND, "--broker", f"mqtt://boss@{broker.address}", env=env)
        refused(
            run.end(),
            "'pi', 'edge', 'cloud': online, but nothing that it sends arrives",
            "does the broker let nodes publish to the coordinator's topic",
        )
        refused(nodes.end(), "the coordinator is gone (closed) and did not come back within 2 s")


@over_mosquitto
def an_access_rule_between_two_nodes(place: Shell) -> None:
    acl = place.cwd / "acl"
    rules = [f"topic readwrite edgesplit/+/{node}/#" for node in ("pi", "cloud", "coordinator")]
    acl.write_text("\n".join(["topic read edgesplit/+/+/status", *rules, "topic write edgesplit/+/edge/status", ""]))
    with mosquitto_with(place, f"acl_file {acl}") as broker:
        node = place.run("node", "edge", "--run", "r", "--broker", broker.url)
        refused(node, "from 'edge' to itself on topic edgesplit/r/edge/in was lost", "an access rule")


@over_mosquitto
def packet_limits(place: Shell) -> None:
    for option, part in (
        ("max_packet_size 600", "the broker's packet limit of 600 bytes is too small: allow 64 KiB or more"),
        ("message_size_limit 600", "a packet limit of the broker swallows it"),
    ):
        with mosquitto_with(place, option) as broker:
            refused(place.run("run", "experiment.yaml", *SMALL, "--broker", broker.url), part)


@over_mosquitto
def packet_limits_of_64_kib_are_kept(place: Shell) -> None:
    for option in ("max_packet_size 65536", "message_size_limit 65536"):
        with mosquitto_with(place, option) as broker:
            wide = ("task_args.width=256", "local.processes=1")  # a layer of 256 KiB
            found = place.run("run", "experiment.yaml", *NEEDED, *wide, "--broker", broker.url, "--json").json
            assert found["links"]["coordinator->edge"] > 256 << 10


@over_mosquitto
def two_with_one_name(place: Shell) -> None:
    with mosquitto_with(place) as broker:
        run = ("run", "experiment.yaml", *HAND, "timeouts.join_s=600", "--name", "r", "--broker", broker.url)
        first = place.start(*run).wait_for("waiting for 3 nodes")
        refused(place.run(*run, "--out", "other"), "node 'coordinator' is already in run 'r'", "another name")
        node = ("node", "pi", "--run", "r", "--broker", broker.url)
        both = [place.start(*node), place.start(*node)]
        wait_until("one of the two told", lambda: not all(command.processes() for command in both))
        second = next(command for command in both if not command.processes())
        refused(second.end(), "node 'pi' is already in run 'r'", "stop that one, or give this node or run another name")
        stray = place.run("node", "pi-9", "--run", "r", "--broker", broker.url)
        refused(stray, "the run has no node 'pi-9' (did you mean 'pi'?): its nodes are", "'cloud'", "'edge'", "'pi'")
        first.send(signal.SIGINT)
        assert first.end().status == 130
        for command in both:
            command.end()


# Nodes that do not come, or do not stay


@over_mosquitto
def a_node_that_never_comes(place: Shell) -> None:
    with mosquitto_with(place) as broker:
        nodes = place.start("node", "edge", "cloud", "--run", "r", "--broker", broker.url)
        there = {"edgesplit/r/edge/status", "edgesplit/r/cloud/status"}
        wait_until("both nodes there", lambda: there <= set(kept(broker.port)))
        options = (*HAND, "timeouts.join_s=10", "--name", "r", "--broker", broker.url)
        refused(
            place.run("run", "experiment.yaml", *options),
            "no word from 'pi' within 10 s: start 'edgesplit node NAME --broker URL' there",
        )
        refused(nodes.end(), "the run was ended: no word from 'pi'")


def killed(place: Shell, node: str) -> None:
    command = place.begin(node, "topology=small.yaml", STOP).wait_step()
    os.kill(command.node_pid(node), signal.SIGKILL)
    others = {"pi", "edge", "cloud"} - {node}
    ended = command.end()
    refused(ended, f"{node} was killed by signal 9", *(f"'{other}' waited for" for other in others), status=1)
    command.gone(0.5)
    assert place.last_checkpoint(node).position.round >= 1
    assert read_events(place.cwd / "runs" / node / "events.jsonl")


@fault
def a_killed_device(place: Shell) -> None:
    killed(place, "pi")


@fault
def a_killed_edge(place: Shell) -> None:
    killed(place, "edge")


@fault
def a_killed_cloud(place: Shell) -> None:
    killed(place, "cloud")


@fault
def a_node_that_hangs(place: Shell) -> None:
    command = place.begin("hung", "topology=small.yaml", "timeouts.step_s=10", STOP).wait_step()
    os.kill(command.node_pid("edge"), signal.SIGSTOP)
    refused(command.end(), "no progress ", " for 10 s: nothing from ", "'edge'", status=1)
    command.gone(0.5)
    assert place.last_checkpoint("hung").position.round >= 1


@contextmanager
def by_hand(place: Shell, *arguments: str, nodes: Sequence[str] = ("pi cloud", "edge")) -> Iterator[list[Command]]:
    """A run over a mosquitto, and the commands that its nodes were started with."""
    with mosquitto_with(place) as broker:
        options = ("--run", "hand", "--coordinator-s", "2", "--state", "kept", "--broker", broker.url)
        commands = [place.start("node", *names.split(), *options) for names in nodes]
        yield [place.begin("hand", *HAND, *arguments, "--broker", broker.url), *commands]


@over_mosquitto
def a_killed_node_on_another_machine(place: Shell) -> None:
    with by_hand(place, STOP) as (run, others, edge):
        run.wait_step()
        edge.send(signal.SIGKILL)
        ended = run.end()
        refused(ended, "node 'edge' was lost", "'pi' waited for", "'cloud' waited for", status=1)
        refused(others.end(), "the run was ended: node 'edge' was lost", status=1)


@over_mosquitto
def a_killed_coordinator_of_nodes_on_other_machines(place: Shell) -> None:
    with by_hand(place) as (run, *nodes):
        run.wait_step()
        run.send(signal.SIGKILL)
        for node in nodes:
            refused(node.end(), "the coordinator is gone (", " and did not come back within 2 s", status=1)


@over_mosquitto
def another_version_of_the_task(place: Shell) -> None:
    with by_hand(place, nodes=("pi edge",)) as (run, node), shell(place.cwd) as elsewhere:
        task = elsewhere.cwd / "task.py"
        task.write_text(task.read_text().replace("nn.Dropout(0.1)", "nn.Dropout(0.2)"))
        broker = node.arguments[-1]
        stray = elsewhere.start("node", "cloud", "--run", "hand", "--broker", broker)
        parts = "the task on 'cloud' is not the coordinator's (fingerprint ", "copy the same code to both"
        refused(run.end(), "'cloud' failed: ", *parts)
        refused(stray.end(), *parts)
        refused(node.end(), "the run was ended: ", *parts)


# What a user's own code and data can do


@fault
def an_exception_in_a_layer(place: Shell) -> None:
    command = place.begin("raised", *SMALL, "evaluate.every=0").wait_step()
    (place.cwd / "raise").touch()
    refused(
        command.end(), "'edge' failed: ZeroDivisionError: the fuse has blown in layer 'fuse' (", "task.py:", status=1
    )
    command.gone(0.5)
    assert place.last_checkpoint("raised").position.round >= 1


@fault
def data_that_cannot_be_read(place: Shell) -> None:
    ended = place.run("run", "experiment.yaml", "local.processes=1", "task_args.spoiled=pi-3")
    refused(ended, "'pi-3' failed: OSError: sample ", " cannot be read")


@fault
def data_that_is_not_finite(place: Shell) -> None:
    ended = place.run("run", "experiment.yaml", "local.processes=1", "task_args.infinite=pi-3", "--name", "infinite")
    refused(
        ended,
        "3 steps in a row were not finite (steps 0 to 2), last in layer 'fc1' on 'pi-3'",
        "lower the learning rate, clip the norm, or look at that device's data",
        status=1,
    )
    assert ended.stderr.count("was not finite and is skipped") == 3


def diverged(place: Shell, name: str, *options: str) -> None:
    command = place.begin(name, *SMALL, "evaluate.every=0", *options).wait_step()
    (place.cwd / "nan").touch()
    refused(command.end(), "3 steps in a row were not finite (steps ", "first in layer 'fuse' on 'edge'", status=1)
    command.gone(0.5)
    saved = place.last_checkpoint(name)
    assert all(np.isfinite(array).all() for array in saved.model.values())


@fault
def a_loss_that_stays_nan(place: Shell) -> None:
    diverged(place, "plain")


@fault
def a_loss_that_stays_nan_though_the_norm_is_clipped(place: Shell) -> None:
    diverged(place, "clipped", "clip_norm=1.0")


# Disks, and brokers that go away


def limited(blocks: int) -> tuple[str, ...]:
    """Start a command that may write files of so many blocks of 512 bytes, as a full disk would have it."""
    return ("sh", "-c", f'ulimit -f {blocks}; exec "$@"', "sh")


@fault
def a_full_disk_at_the_events(place: Shell) -> None:
    command = place.begin("events", *SMALL, launcher=limited(80))
    refused(command.end(), "cannot write ", "runs/events/events.jsonl", "file too large", status=1)
    command.gone(0.5)
    done = place.last_checkpoint("events").position.round
    assert done >= 1
    # With room on the disk it goes on, and what was cut short does no harm.
    options = (*SMALL, f"rounds={done + 1}", "steps_per_round=20", "--name", "events", "--resume", "--json")
    assert place.run("run", "experiment.yaml", *options).json["rounds"] == done + 1
    assert max(event.step for event in read_events(place.cwd / "runs" / "events" / "events.jsonl")) == 20 * done + 19


@fault
def a_full_disk_at_the_checkpoint(place: Shell) -> None:
    command = place.begin("full", *SMALL, "task_args.width=160", "rounds=2", "steps_per_round=2", launcher=limited(200))
    refused(command.end(), "cannot write checkpoint 'runs/full/checkpoints/round-0001'", "file too large", status=1)
    command.gone(0.5)
    assert checkpoint.latest(place.cwd / "runs" / "full" / "checkpoints") is None
    assert not list((place.cwd / "runs" / "full" / "checkpoints").iterdir())


@fault
def a_disk_that_fills_up(place: Shell) -> None:
    disk = place.cwd / "disk" / "checkpoints"
    disk.mkdir(parents=True)
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True)
    if mount.returncode != 0:
        return  # an ordinary user cannot; the limits above stand in for it
    try:
        command = place.begin("disk", *SMALL, "--out", "disk").wait_step()
        with pytest.raises(OSError, match="No space left"):
            (disk / "filler").write_bytes(bytes(1 << 20))
        refused(command.end(), "cannot write checkpoint 'disk/checkpoints/round-", "no space left", status=1)
        found = checkpoint.latest(disk)
        assert found is not None
        assert checkpoint.load(found).position.round >= 1
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@over_mosquitto
def a_broker_that_goes_away(place: Shell) -> None:
    with mosquitto_with(place) as broker:
        command = place.begin("away", *SMALL, "timeouts.broker_s=3", "--broker", broker.url).wait_step()
        broker.stop(signal.SIGKILL)
        refused(command.end(), f"no broker at {broker.address} for 3 s", status=1)
        command.gone(0.5)
    assert place.last_checkpoint("away").position.round >= 1


@fault
def a_node_that_is_killed_again_and_again(place: Shell) -> None:
    command = place.begin("again", "topology=small.yaml").wait_step()
    seen: set[int] = set()

    def next_one() -> int | None:
        pids = (pid for pid, line in command.processes().items() if " node " in line and line.split()[-1] == "edge")
        return next((pid for pid in pids if pid not in seen), None)

    for _ in range(RESTARTS + 1):
        pid = wait_until("a process of the edge", next_one)
        seen.add(pid)
        os.kill(pid, signal.SIGKILL)
    refused(command.end(), "the process of edge was killed by signal 9", status=1)
    command.gone(0.5)
    assert place.last_checkpoint("again").position.round >= 1


@over_mosquitto
def rubbish_on_the_topics(place: Shell) -> None:
    options = (*SMALL, "rounds=2", "steps_per_round=4", "--json")
    undisturbed = place.run("run", "experiment.yaml", *options).json["weights"]
    with mosquitto_with(place) as broker:
        command = place.start("run", "experiment.yaml", *options, "--name", "rubbish", "--broker", broker.url)
        topics = [f"edgesplit/rubbish/{node}/{end}" for node in ("coordinator", "edge") for end in ("in", "status")]
        payloads = [b"", b"rubbish", bytes(70_000), b"\xff" * 64, json.dumps({"state": "offline"}).encode()]
        messages = [{"topic": topic, "payload": payload} for topic in topics for payload in payloads]
        while command.processes():
            publish.multiple(messages, hostname="127.0.0.1", port=broker.port)
        assert command.end().json["weights"] == undisturbed


# All of them


@pytest.fixture(scope="module")
def looked_at(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[None]]]:
    """The faults that were chosen, on their way."""
    folder = tmp_path_factory.mktemp("faults")
    wanted = [
        item.callspec.params["name"]
        for item in request.session.items
        if hasattr(item, "callspec") and item.module is request.module
    ]

    def look(name: str) -> None:
        with shell(folder) as place:
            FAULTS[name](place)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {name: pool.submit(look, name) for name in wanted}


MISSING = pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")
CASES = [
    pytest.param(name, marks=[pytest.mark.mosquitto, MISSING] if name in OVER_MOSQUITTO else [], id=name)
    for name in FAULTS
]


@pytest.mark.parametrize("name", CASES)
def test_fault(name: str, looked_at: dict[str, Future[None]]) -> None:
    looked_at[name].result()
