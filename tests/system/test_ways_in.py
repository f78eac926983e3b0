"""Whole runs over brokers that let in only whom they know, through the command line."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgesplit.transport.client import Client
from tests.brokers import Mosquitto, WebBroker, tls_options, with_certificate
from tests.certificates import Authority
from tests.system.command import SMALL, Shell, shell

pytestmark = pytest.mark.system

DOC = Path(__file__).parents[2] / "docs" / "security.md"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    with shell(tmp_path_factory.mktemp("ways")) as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(place: Shell) -> str:
    """The weights of the same run over the embedded broker."""
    return str(place.run("run", "experiment.yaml", *SMALL, "--json").json["weights"])


def rules(prefix: str) -> str:
    """The access rules of the docs, for another prefix."""
    (text,) = (part for part in DOC.read_text().split("```\n") if part.startswith("# everybody"))
    return text.replace("edgesplit/", f"{prefix}/")


def papers(authority: Authority, name: str) -> list[str]:
    """A node's options for TLS; its name is in its certificate."""
    return [*authority.options(name), "--topic-prefix", "site/a"]


def test_a_run_with_certificates_access_rules_and_the_key(
    place: Shell, undisturbed: str, start_mosquitto: Callable[..., Mosquitto], authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "rules").write_text(rules("site/a"))
    broker = start_mosquitto(
        [*tls_options(authority), "use_identity_as_username true", f"acl_file {tmp_path / 'rules'}"], anonymous=False
    )
    url = broker.url.replace("mqtt", "mqtts")
    for file in (authority.ca, *authority.sign("coordinator")):
        shutil.copy(file, place.cwd)
    settings = {
        "url": url,
        "ca": "ca.pem",
        "cert": "coordinator.pem",
        "key": "coordinator.key",
        "topic_prefix": "site/a",
    }
    options = ("topology=small.yaml", f"broker={json.dumps(settings)}", "security.key=required")
    run = place.start("run", "experiment.yaml", *options, "--name", "tls", "--json")
    run.wait_for("waiting for 3 nodes")
    assert f"--key-file {Path('runs/tls/key')}" in run.stderr

    own = {name: papers(authority, name) for name in ("pi", "edge", "cloud")}

    def node(name: str, *more: str) -> tuple[str, ...]:
        return ("node", name, "--broker", url, "--run", "tls", *own[name], *more)

    (place.cwd / "other.key").write_text(secrets.token_hex(32))
    refused = [place.start(*node("pi", "--key-file", "other.key")), place.start(*node("edge"))]
    wrong, without = (command.end() for command in refused)
    assert (wrong.status, without.status) == (2, 2)
    assert "no way to the coordinator: its frames are signed with another key than this node's" in wrong.error
    assert "no way to the coordinator: it takes signed frames only: start this node with --key-file" in without.error
    run.wait_for("pi: its frames are signed with another key")
    run.wait_for("edge: its frames are not signed")

    nodes = [place.start(*node(name, "--key-file", "runs/tls/key")) for name in ("pi", "edge", "cloud")]
    assert run.end().json["weights"] == undisturbed
    for command in nodes:
        assert command.end().status == 0


def test_a_node_that_reaches_for_what_is_not_its_own(
    start_mosquitto: Callable[..., Mosquitto], place: Shell, authority: Authority, tmp_path: Path
) -> None:
    """The same rules, seen from outside: a device publishes and subscribes wherever it likes."""
    (tmp_path / "rules").write_text(rules("edgesplit"))
    broker = start_mosquitto(
        [*tls_options(authority), "use_identity_as_username true", f"acl_file {tmp_path / 'rules'}"], anonymous=False
    )
    heard = {name: Listener(broker, authority, name) for name in ("pi", "edge", "coordinator")}
    for name in ("coordinator", "edge", "cloud", "pi"):
        for what in ("in", "status"):
            heard["pi"].client.publish(f"edgesplit/r/{name}/{what}", f"pi to {name}/{what}", qos=1)
    heard["coordinator"].client.publish("edgesplit/r/pi/in", "end", qos=1)
    heard["coordinator"].client.publish("edgesplit/r/edge/in", "end", qos=1)
    got = {
        name: listener.until("end" if name != "coordinator" else "pi to pi/status") for name, listener in heard.items()
    }
    assert got["pi"] == {"pi to pi/in", "pi to pi/status", "end"}
    assert got["edge"] == {"pi to edge/in", "end"}
    assert got["coordinator"] == {"pi to coordinator/in", "pi to pi/status"}


class Listener:
    """A client of a user's that subscribes to everything."""

    def __init__(self, broker: Mosquitto, authority: Authority, name: str) -> None:
        self.got: set[str] = set()
        access = with_certificate(authority, broker.url, name)
        self.client = Client(access, f"listener-{name}", mqtt="5", timeout=5.0)
        self.client.on_message = lambda _c, _u, message: self.got.add(message.payload.decode())
        granted: list[object] = []
        self.client.on_subscribe = lambda *_: granted.append(1)
        self.client.on_connect = lambda client, *_: client.subscribe("#", qos=1)
        self.client.connect(access.address.host, access.address.port)
        while not granted:
            self.client.loop(0.1)

    def until(self, last: str) -> set[str]:
        for _ in range(100):
            self.client.loop(0.05)
            if last in self.got:
                break
        for _ in range(4):
            self.client.loop(0.05)
        self.client.disconnect()
        return self.got


def test_a_run_by_websocket_whose_processes_get_the_same_settings(
    place: Shell, undisturbed: str, web_broker: WebBroker
) -> None:
    access = web_broker.secure
    options = ("--broker", access.url, "--ca", str(access.ca), "--topic-prefix", "a/b/c", "--client-id", "{run}.{node}")
    run = place.start("run", "experiment.yaml", *SMALL, *options, "--name", "web", "--json")
    run.wait_for("all 3 nodes have joined")
    secret = (place.cwd / "runs" / "web" / "key").read_text().strip()
    lines = list(run.processes().values())
    assert any("--key-file runs/web/key" in line and "--topic-prefix a/b/c" in line for line in lines)
    assert not any(secret in line for line in lines)
    assert run.end().json["weights"] == undisturbed
