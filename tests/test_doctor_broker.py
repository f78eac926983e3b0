"""What the doctor finds at real brokers: their speed, packet limits, access rules, and what dead runs have left."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

from edgesplit import doctor
from edgesplit.doctor import Finding, access, examine, packets, speed, statuses
from edgesplit.doctor.access import examine_topics
from edgesplit.doctor.broker import examine_broker
from edgesplit.doctor.installation import OPTIONAL, REQUIRED
from edgesplit.doctor.look import Look
from edgesplit.doctor.packets import largest, packet_limit, payload_of
from edgesplit.doctor.speed import Trips, judge_trips
from edgesplit.doctor.statuses import Retained, judge_clocks, judge_retained, listen
from edgesplit.transport.access import Access
from edgesplit.transport.broker import EmbeddedBroker
from edgesplit.transport.caller import Caller, Got
from edgesplit.transport.client import PROTOCOLS
from edgesplit.transport.mqtt import MqttTransport
from edgesplit.transport.presence import Status
from tests.brokers import Mosquitto, WebBroker, free_port
from tests.test_doctor import by_name

TOPICS = {"inbox", "another's inbox", "coordinator's inbox", "own status", "statuses of others", "lobby"}
MEASURED = {"transport", "packet limit", "round trip", "tcp_nodelay", "throughput"}
ALL = {"broker", "mqtt versions", "retained"} | TOPICS | MEASURED
MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "WAIT_S", 1.0)
    monkeypatch.setattr(speed, "ROUND_TRIPS", 3)
    monkeypatch.setattr(speed, "STALLED_TRIPS", 5)
    monkeypatch.setattr(speed, "LARGE_BYTES", 3_000_000)


def broker_part(found: list[Finding]) -> dict[str, Finding]:
    return {name: f for name, f in by_name(found).items() if name not in {"python", "clock", *REQUIRED, *OPTIONAL}}


def look_at(url: str, **names: Any) -> Look:
    return Look(access=Access(url), **names)


def verdicts(found: dict[str, Finding]) -> dict[str, str]:
    return {name: finding.values["verdict"] for name, finding in found.items() if name in TOPICS}


# --- brokers that are as they should be -----------------------------------------------------------------------------


def test_a_broker(mosquitto: Mosquitto) -> None:
    found = broker_part(examine(Access(mosquitto.url, prefix="of/this-test")))
    assert set(found) == ALL
    assert {name: f.mark for name, f in found.items()} == dict.fromkeys(ALL, "ok")
    assert mosquitto.url in found["broker"].text
    assert found["mqtt versions"].values == {"versions": ["5", "3.1.1"]}
    assert set(verdicts(found).values()) == {"ok"}
    assert "(median of 3" in found["round trip"].text
    assert 0 < found["round trip"].values["ms"] < 1000
    assert found["throughput"].values["mb_per_s"] > 1
    assert found["packet limit"].values == {
        "largest_bytes": packets.MOST,
        "connack_bytes": 0,
        "chunk_bytes": found["throughput"].values["packet_bytes"],
        "why": "larger ones were not tried",
    }
    assert found["retained"].text == "nothing of dead runs under of/this-test"


def test_it_leaves_nothing_behind(start_mosquitto: Callable[..., Mosquitto]) -> None:
    broker = start_mosquitto()
    examine_broker(broker.url)
    examine_broker(broker.url, run="somebodys")
    assert listen(look_at(broker.url)).nodes == {}


def test_the_embedded_broker(monkeypatch: pytest.MonkeyPatch, embedded_broker: EmbeddedBroker) -> None:
    class Given:
        def __enter__(self) -> EmbeddedBroker:
            return embedded_broker

        def __exit__(self, *exc_info: object) -> None: ...

    monkeypatch.setattr(doctor, "EmbeddedBroker", Given)
    found = broker_part(examine())
    assert set(found) == (ALL - {"broker"}) | {"embedded broker"}
    assert all(finding.ok for finding in found.values())
    assert found["mqtt versions"].text == "5"
    assert set(verdicts(found).values()) == {"ok"}


def test_a_broker_that_speaks_the_old_version_only(embedded_broker: EmbeddedBroker) -> None:
    found = broker_part(examine(embedded_broker.url_v3))
    assert found["mqtt versions"].text == "3.1.1"
    assert "cannot say" in found["mqtt versions"].hint
    assert all(finding.ok for finding in found.values())


def test_over_tls_with_a_certificate(mosquitto_tls: Access) -> None:
    found = broker_part(examine(mosquitto_tls))
    assert set(found) == ALL
    assert all(finding.ok for finding in found.values())
    assert found["broker"].text.startswith("mqtts://")


def test_over_tls_without_a_certificate(mosquitto_tls: Access) -> None:
    (found,) = examine_broker(replace(mosquitto_tls, cert=None, cert_key=None))
    assert not found.ok
    assert "certificate" in found.text


def test_over_websockets(web_broker: WebBroker) -> None:
    found = broker_part(examine(web_broker.plain))
    assert set(found) == ALL
    assert all(finding.ok for finding in found.values())


def test_client_ids_that_lives_share(mosquitto: Mosquitto) -> None:
    """The doctor is several clients at once, and does not throw itself out, nor a node that is at work."""
    access = Access(mosquitto.url, client_id="{run}-{node}", prefix="of/that-test")
    with MqttTransport(access, run="live", node="pi") as pi:
        found = broker_part(examine(access, node="pi"))
        assert all(finding.ok for finding in found.values())
        assert pi.connected


def test_the_version_asked_for(mosquitto: Mosquitto, embedded_broker: EmbeddedBroker) -> None:
    found = broker_part(examine_broker(Access(mosquitto.url, mqtt="3.1.1")))
    assert all(finding.ok for finding in found.values())
    (refused,) = examine_broker(Access(embedded_broker.url, mqtt="3.1.1"))
    assert not refused.ok
    assert "in MQTT 3.1.1" in refused.text


# --- none at all ----------------------------------------------------------------------------------------------------


@pytest.fixture
def deaf() -> Iterator[int]:
    """Something that listens and is no broker: it answers everything with a web page."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client:
                    client.recv(100)
                    client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def test_no_broker_there() -> None:
    port = free_port()
    found = broker_part(examine(f"mqtt://127.0.0.1:{port}"))
    assert set(found) == {"broker"}
    assert not found["broker"].ok
    assert f"127.0.0.1:{port}" in found["broker"].text


def test_what_listens_there_is_no_broker(deaf: int) -> None:
    found = broker_part(examine(f"mqtt://127.0.0.1:{deaf}"))
    assert set(found) == {"broker"}
    assert not found["broker"].ok
    assert f"127.0.0.1:{deaf}" in found["broker"].text


@pytest.mark.parametrize(
    "url", ["", "nonsense", "http://127.0.0.1", "mqtt://", "mqtt://127.0.0.1:port", "mqtt://127.0.0.1:99999"]
)
def test_addresses_that_are_none(url: str) -> None:
    found = broker_part(examine(url))
    assert [finding.ok for finding in found.values()] == [False]
    assert "\n" not in found["broker"].text


@pytest.mark.parametrize("names", [{"run": "#"}, {"node": "a/b"}])
def test_names_that_are_no_topics(names: dict[str, str]) -> None:
    (found,) = examine_broker("mqtt://127.0.0.1", **names)
    assert not found.ok
    assert "it becomes a topic" in found.text


def test_who_is_not_let_in(start_mosquitto: Callable[..., Mosquitto]) -> None:
    (found,) = examine_broker(start_mosquitto(anonymous=False).url)
    assert not found.ok
    assert "Not authorized" in found.text


# --- packets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["5", "3.1.1"])
def test_a_packet_is_as_long_as_it_is_to_be(version: str) -> None:
    """What paho really writes."""
    for size in (100, 129, 131, 1000, 16386, 16388, 70000):
        assert written(version, "t" * 40, payload_of(size, "t" * 40, version)) == size


def written(version: str, topic: str, payload: int) -> int:
    client = paho.Client(CallbackAPIVersion.VERSION2, protocol=PROTOCOLS[version])
    client.on_socket_register_write = lambda *_: None
    client._sock = socket.socket()
    client.publish(topic, bytes(payload), qos=0)
    (packet,) = client._out_packet
    client._sock.close()
    client._sock = None
    return len(packet["packet"])


def test_packets_that_are_swallowed(start_mosquitto: Callable[..., Mosquitto]) -> None:
    broker = start_mosquitto(["message_size_limit 100000"])
    look = look_at(broker.url)
    found = packet_limit(look, 61_440)
    passed = found.values["largest_bytes"]
    assert payload_of(passed, look.topic(look.node), "5") == 100_000
    assert "swallows" in found.text
    assert "CONNACK names no limit" in found.text
    assert "in chunks of 61,440 bytes" in found.text
    assert found.mark == "hint"


def test_packets_at_which_the_broker_hangs_up(start_mosquitto: Callable[..., Mosquitto]) -> None:
    broker = start_mosquitto(["max_packet_size 50000"])
    found = broker_part(examine(broker.url))
    # mosquitto counts what follows the fixed header
    assert found["packet limit"].values["largest_bytes"] - 50_000 in range(5)
    assert found["packet limit"].values["connack_bytes"] == 50_000
    assert "closes the connection" in found["packet limit"].text
    assert "allow packets of 262,144 bytes" in found["packet limit"].hint
    assert all(finding.ok for finding in found.values())


def test_a_broker_that_takes_less_than_it_names(monkeypatch: pytest.MonkeyPatch, mosquitto: Mosquitto) -> None:
    monkeypatch.setattr(Caller, "packet_limit", property(lambda self: 1 << 20, lambda self, value: None), raising=False)
    monkeypatch.setattr(packets, "largest", lambda look: packets.Largest(300_000, "the broker swallows a larger one"))
    found = packet_limit(look_at(mosquitto.url), 262_000)
    assert found.hint.startswith("the broker names 1,048,576 bytes and takes 300,000")


def test_no_larger_packets_over_a_slow_link(monkeypatch: pytest.MonkeyPatch, mosquitto: Mosquitto) -> None:
    monkeypatch.setattr(packets, "SLOW_S", 0.0)
    assert largest(look_at(mosquitto.url)) == (packets.FIRST, "larger ones were not tried: the link is slow")


# --- what holds small packets up ------------------------------------------------------------------------------------


def test_nagle_is_found(start_mosquitto: Callable[..., Mosquitto], mosquitto: Mosquitto) -> None:
    slow = start_mosquitto(["set_tcp_nodelay false"])
    bad = judge_trips(speed.measure_trips(look_at(slow.url)))[1]
    good = judge_trips(speed.measure_trips(look_at(mosquitto.url)))[1]
    assert bad.mark == "hint"
    assert "set_tcp_nodelay true" in bad.hint
    assert bad.values["plain_ms"] > good.values["no_delay_ms"]
    assert good.mark == "ok"


def test_what_is_said_of_nagle() -> None:
    trip, delay = judge_trips(Trips(0.5, 44.0, 88.0))
    assert "0.50 ms" in trip.text
    assert "44.00 ms with it and 88.00 ms without" in delay.text
    assert delay.hint
    assert not judge_trips(Trips(100.0, 101.0, 143.0))[1].hint, "a long way is not Nagle's"


# --- access rules ---------------------------------------------------------------------------------------------------

OPEN = ["readwrite edgesplit/+/+/in", "readwrite edgesplit/+/+/status"]


@pytest.fixture
def ruled(start_mosquitto: Callable[..., Mosquitto], tmp_path: Path) -> Callable[[Sequence[str]], Mosquitto]:
    """Starts a mosquitto with rules such as ``read edgesplit/#``."""

    def start(rules: Sequence[str]) -> Mosquitto:
        path = tmp_path / "acl"
        path.write_text("".join(f"topic {rule}\n" for rule in rules))
        path.chmod(0o600)
        return start_mosquitto([f"acl_file {path}"])

    return start


def test_rules_that_allow_what_a_run_needs(ruled: Callable[[Sequence[str]], Mosquitto]) -> None:
    found = broker_part(examine(ruled(OPEN).url))
    assert {name: f.mark for name, f in found.items()} == dict.fromkeys(ALL, "ok")


# What the rules allow -> what is not ok, and its verdict.
RULES = {
    "no writing to the coordinator": (
        ["readwrite edgesplit/run/node/in", "readwrite edgesplit/+/+/status", "read edgesplit/+/coordinator/in"],
        {"another's inbox": "publish refused", "coordinator's inbox": "publish refused"},
    ),
    "no statuses": (
        ["readwrite edgesplit/+/+/in"],
        {"own status": "publish refused"},
    ),
    "statuses can be written, not read": (
        ["readwrite edgesplit/+/+/in", "write edgesplit/+/+/status"],
        {"own status": "publish swallowed", "statuses of others": "publish swallowed"},
    ),
    "another prefix": (
        ["readwrite else/#"],
        {
            "inbox": "publish refused", "another's inbox": "publish refused", "coordinator's inbox": "publish refused",
            "own status": "publish refused",
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize(("rules", "refused"), list(RULES.values()), ids=list(RULES))
def test_what_rules_refuse(
    ruled: Callable[[Sequence[str]], Mosquitto], rules: list[str], refused: dict[str, str]
) -> None:
    found = broker_part(examine_broker(ruled(rules).url, run="run", node="node"))
    bad = {name: verdict for name, verdict in verdicts(found).items() if not found[name].ok}
    assert bad == refused
    for name in refused:
        assert found[name].values["topic"] in found[name].text
        assert found[name].hint.startswith("this user must be allowed to ")
    measured = set() if "inbox" in refused else MEASURED - {"transport"}
    assert set(found) & MEASURED == measured, "without an inbox there is nothing to measure with"


def test_the_old_version_does_not_say_what_a_rule_refuses(ruled: Callable[[Sequence[str]], Mosquitto]) -> None:
    rules = ["readwrite edgesplit/run/node/in", "readwrite edgesplit/+/+/status"]
    look = look_at(ruled(rules).url, run="run", node="node", other="other", version="3.1.1")
    found = by_name(examine_topics(look, own_run=False))
    assert verdicts(found) == {
        "inbox": "ok",
        "another's inbox": "publish swallowed",
        "coordinator's inbox": "publish swallowed",
        "own status": "ok",
        "statuses of others": "ok",
        "lobby": "not proven",
    }
    text = found["another's inbox"].text
    assert text.startswith("edgesplit/run/other/in: publish swallowed (or its way back: MQTT 3.1.1 acknowledges")


def test_rules_for_each_user_alone(start_mosquitto: Callable[..., Mosquitto], tmp_path: Path) -> None:
    """A device that may write everywhere and read what is its own: what it cannot see is not called a fault."""
    path = tmp_path / "acl"
    path.write_text(
        "topic write edgesplit/+/+/in\ntopic read edgesplit/+/pi/in\ntopic readwrite edgesplit/+/+/status\n"
    )
    path.chmod(0o600)
    found = broker_part(examine_broker(start_mosquitto([f"acl_file {path}"]).url, node="pi"))
    assert all(finding.ok for finding in found.values())
    assert {n for n, v in verdicts(found).items() if v == "not proven"} == {"another's inbox", "coordinator's inbox"}
    assert found["coordinator's inbox"].hint.startswith("this user must be allowed to write edgesplit/+/coordinator/in")


DYNAMIC = "mosquitto_dynamic_security.so"


def dynamic_security() -> str | None:
    found = [*Path("/usr/lib").rglob(DYNAMIC)]
    return str(found[0]) if found else None


def test_a_subscription_that_is_refused(
    start_mosquitto: Callable[..., Mosquitto], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mosquitto's files of rules grant every subscription; its plugin refuses some."""
    plugin = dynamic_security()
    assert plugin is not None
    rules = tmp_path / "dynamic.json"
    rules.write_text(json.dumps(_dynamic(["edgesplit/+/+/in"])))
    broker = start_mosquitto([f"plugin {plugin}", f"plugin_opt_config_file {rules}"])
    found = broker_part(examine_broker(broker.url))
    assert verdicts(found)["inbox"] == "ok"
    assert verdicts(found)["own status"] == "subscribe refused"
    assert not found["own status"].ok
    assert found["own status"].hint == "this user must be allowed to read and write edgesplit/+/+/status"
    assert verdicts(found)["lobby"] == "subscribe refused"
    assert "cannot be seen" in found["retained"].text


def _dynamic(readable: Sequence[str]) -> dict[str, Any]:
    acls = [{"acltype": "publishClientSend", "topic": "#", "priority": 0, "allow": True}]
    acls += [{"acltype": kind, "topic": topic, "priority": 0, "allow": True}
             for topic in readable for kind in ("publishClientReceive", "subscribePattern")]  # fmt: skip
    denied = {"publishClientSend": False, "publishClientReceive": False, "subscribe": False, "unsubscribe": True}
    return {
        "defaultACLAccess": denied,
        "clients": [],
        "groups": [{"groupname": "anybody", "roles": [{"rolename": "node"}], "clients": []}],
        "roles": [{"rolename": "node", "acls": acls}],
        "anonymousGroup": "anybody",
    }


# --- what lies there ------------------------------------------------------------------------------------------------


def leave(url: str, statuses_: dict[str, bytes]) -> None:
    with look_at(url).call() as caller:
        for topic, payload in statuses_.items():
            assert caller.ask(topic, payload, retain=True) is None


def a_status(state: str, seconds_ago: float) -> bytes:
    return Status(state, 7, time.time() - seconds_ago).to_json()


def test_what_dead_runs_have_left(start_mosquitto: Callable[..., Mosquitto], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statuses, "LISTEN_S", 1.0)
    broker = start_mosquitto()
    leave(
        broker.url,
        {
            "edgesplit/old/pi-1/status": a_status("online", 3 * DAY),
            "edgesplit/old/coordinator/status": a_status("offline", 2 * DAY),
            "edgesplit/recent/pi-1/status": a_status("offline", 10 * MINUTE),
            "edgesplit/mixed/pi-1/status": a_status("offline", DAY),
            "edgesplit/mixed/pi-2/status": a_status("offline", MINUTE),
            "edgesplit/odd/pi-1/status": b"not json",
            "edgesplit/kept/pi-1/in": b"a frame that somebody retained",
            "other/old/pi-1/status": a_status("online", 3 * DAY),
        },
    )
    look = look_at(broker.url)
    finding = judge_retained(listen(look), look, time.time())
    assert finding.mark == "hint"
    assert "6 statuses of runs without a living node, up to 3 days old: old (2, 3 days)" in finding.text
    assert "1 messages that are no statuses of ours: edgesplit/kept/pi-1/in" in finding.text
    assert finding.values["stale"] == {"old": ["coordinator", "pi-1"]}
    assert set(finding.values["left"]) == {"old", "recent", "mixed", "odd"}

    found = broker_part(examine(broker.url, clear_stale=True))
    assert found["retained"].values["cleared"] == 2
    assert "2 statuses cleared" in found["retained"].text
    left = listen(look)
    assert set(left.nodes) == {"recent", "mixed", "odd"}
    assert left.foreign == {"edgesplit/kept/pi-1/in"}


def test_living_nodes_are_let_live(start_mosquitto: Callable[..., Mosquitto]) -> None:
    """However old the doctor's clock makes them."""
    broker = start_mosquitto()
    with MqttTransport(broker.url, run="live", node="pi", heartbeat=0.2):
        leave(broker.url, {"edgesplit/live/gone/status": a_status("offline", 3 * DAY)})
        found = broker_part(examine_broker(broker.url, clear_stale=True))
        assert found["retained"].values["living"] == ["live/pi"]
        assert found["retained"].values["cleared"] == 0
        assert found["clocks"].mark == "ok"
        assert abs(found["clocks"].values["ahead_s"]["live/pi"]) < 1.0
        assert "topics" not in found, "it is somebody else's"
        busy = broker_part(examine_broker(broker.url, run="live", node="pi"))
        assert not busy["topics"].ok
        assert "at work in run 'live'" in busy["topics"].text
        assert TOPICS.isdisjoint(busy)


def test_a_runs_own_topics_while_it_is_at_work(start_mosquitto: Callable[..., Mosquitto]) -> None:
    broker = start_mosquitto()
    with (
        MqttTransport(broker.url, run="live", node="coordinator", heartbeat=0.2) as coordinator,
        MqttTransport(broker.url, run="live", node="pi", heartbeat=0.2) as pi,
    ):
        found = broker_part(examine_broker(broker.url, run="live"))
        assert {name for name, f in found.items() if not f.ok} == set()
        assert verdicts(found)["lobby"] == "ok"
        pi.probe(["coordinator"], 5.0)
        assert coordinator.connected
        inbox, states = coordinator.mailbox("coordinator"), []
        while (message := inbox.poll()) is not None:
            states.append((message.sender, message.meta["state"]))
        assert ("pi", "offline") not in states
        assert {"edgesplit/live/coordinator/status", "edgesplit/live/pi/status"} <= kept(broker)


def kept(broker: Mosquitto) -> set[str]:
    return {
        f"edgesplit/{run}/{node}/status" for run, nodes in listen(look_at(broker.url)).nodes.items() for node in nodes
    }


def heard(**ahead: float) -> Retained:
    found = Retained()
    look = look_at("mqtt://nowhere")
    for node, seconds in ahead.items():
        status = Status("online", 7, 1e9).to_json()
        found.take(look, Got(f"edgesplit/run/{node}/status", status, False, 1e9 + seconds))
    return found


def test_clocks_are_compared() -> None:
    assert judge_clocks(heard()) is None
    near = judge_clocks(heard(a=0.2, b=-1.5))
    assert near is not None
    assert near.text == "living nodes: 2; this host's clock is 1.5 s behind that of run/b"
    assert near.hint == ""
    ours = judge_clocks(heard(a=-1e9, b=-1e9 + 1))
    assert ours is not None
    assert ours.hint.startswith("this host's clock is far from theirs")
    theirs = judge_clocks(heard(a=0.0, b=0.1, c=1e9))
    assert theirs is not None
    assert theirs.hint == "set the clocks of run/c"


def test_nonsense_on_status_topics() -> None:
    found, look = Retained(), look_at("mqtt://nowhere")
    for topic in ("edgesplit/a/status", "edgesplit/a/b/c/status", "edgesplit/a/b c/status", "edgesplit/", "edgesplit"):
        found.take(look, Got(topic, b"x", False, 0.0))
        found.take(look, Got(topic, b"", False, 0.0))
    assert (found.nodes, found.foreign) == ({}, set())
    found.take(look, Got("edgesplit/a/b/status", b"\xff" * 10_000, False, 0.0))
    assert found.living() == {}
