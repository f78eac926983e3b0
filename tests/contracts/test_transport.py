"""What every transport must do: one suite over memory and brokers, MQTT 5 and 3.1.1, with TLS and by WebSocket."""

from __future__ import annotations

import contextlib
import itertools
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

from edgesplit.codecs import CODECS, pack, unpack
from edgesplit.errors import FrameError, TransportError, TransportTimeout
from edgesplit.transport import base, frames
from edgesplit.transport.access import Access
from edgesplit.transport.base import Inbox, Message, Transport
from edgesplit.transport.broker import EmbeddedBroker
from edgesplit.transport.frames import Flag
from edgesplit.transport.key import Key
from edgesplit.transport.memory import MemoryTransport
from edgesplit.transport.mqtt import SHORTER, MqttTransport
from tests.brokers import Mosquitto, WebBroker, free_port, tls_options, with_certificate
from tests.certificates import Authority
from tests.system.relay import Relay

ROOT = Path(__file__).parents[2]
RUNS = itertools.count()

Open = Callable[[str], Transport]
"""Node -> its transport, open until the test ends."""


def take(inbox: Inbox, timeout: float = 15.0) -> Message:
    """The next message that is not a status."""
    deadline = time.monotonic() + timeout
    while True:
        message = inbox.get(deadline - time.monotonic())
        if message.kind != "status":
            return message


def status_of(inbox: Inbox, node: str, state: str, timeout: float = 15.0) -> Message:
    """The next status that says that ``node`` is in ``state``."""
    deadline = time.monotonic() + timeout
    while True:
        message = inbox.get(deadline - time.monotonic(), f"{node} to be {state}")
        if message.kind == "status" and message.sender == node and message.meta["state"] == state:
            return message


class Fleet:
    """Transports of one run, closed together."""

    def __init__(self, broker: str | Access, *, mqtt_version: str | None = None, **options: Any) -> None:
        self.access = replace(broker if isinstance(broker, Access) else Access(broker), mqtt=mqtt_version)
        self.url = self.access.url
        self.run = f"run-{next(RUNS)}"
        self._options = {"heartbeat": 0.2, "grace": 0.5, "connect_timeout": 5.0} | options
        self._opened: list[MqttTransport] = []

    def __call__(self, node: str, *, mqtt_version: str | None = None, **options: Any) -> MqttTransport:
        access = replace(self.access, mqtt=mqtt_version) if mqtt_version else self.access
        transport = MqttTransport(access, run=self.run, node=node, **{**self._options, **options})
        self._opened.append(transport)
        return transport

    def close(self) -> None:
        for transport in self._opened:
            transport.close()


PLAIN = ["mosquitto-5", "mosquitto-3.1.1", "mosquitto-qos-1", "embedded-5", "embedded-3.1.1"]
OTHERS = ["mqtts-5", "mqtts-3.1.1", "ws", "wss"]
KEY = Key(bytes(range(32)))


def way_in(request: pytest.FixtureRequest, kind: str) -> Fleet:
    """A fleet over one of the ways to a broker."""
    name, _, version = kind.partition("-")
    if name in ("ws", "wss"):
        web = request.getfixturevalue("web_broker")
        return Fleet(web.secure if name == "wss" else web.plain)
    if name == "mqtts":
        return Fleet(request.getfixturevalue("mosquitto_tls"), mqtt_version=version)
    if name == "signed":
        return Fleet(request.getfixturevalue("mosquitto").url, key=KEY)
    if version == "qos-1":
        return Fleet(request.getfixturevalue("mosquitto").url, qos=1)
    broker = request.getfixturevalue("mosquitto" if name == "mosquitto" else "embedded_broker")
    return Fleet(broker.url_v3 if kind == "embedded-3.1.1" else broker.url, mqtt_version=version)


@pytest.fixture(params=["memory", *PLAIN, "signed", *OTHERS])
def network(request: pytest.FixtureRequest) -> Iterator[Open]:
    kind = request.param
    if kind == "memory":
        with MemoryTransport() as transport:
            yield lambda node: transport
        return
    fleet = way_in(request, kind)
    yield fleet
    fleet.close()


@pytest.fixture(params=["mosquitto-5", *OTHERS])
def anyhow(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """A fleet over each way in that reads and writes its sockets in another way."""
    fleet = way_in(request, request.param)
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(mosquitto: Mosquitto) -> Iterator[Fleet]:
    fleet = Fleet(mosquitto.url)
    yield fleet
    fleet.close()


# --- all transports ---


def test_messages_arrive_once_and_in_order_per_sender(network: Open) -> None:
    a, b, c = network("a"), network("b"), network("c")
    inbox = c.mailbox("c")

    def send(transport: Transport, name: str) -> None:
        for number in range(300):
            transport.send("c", Message(kind="x", sender=name, micro=number, meta={"pad": "." * (number % 7 * 100)}))

    threads = [threading.Thread(target=send, args=pair) for pair in ((a, "a"), (b, "b"))]
    for thread in threads:
        thread.start()
    seen: dict[str, list[int]] = {"a": [], "b": []}
    for _ in range(600):
        message = take(inbox)
        seen[message.sender].append(message.micro)
    for thread in threads:
        thread.join()
    assert seen == {"a": list(range(300)), "b": list(range(300))}
    a.flush(10)
    assert all(message.kind == "status" for message in iter(inbox.poll, None))
    with pytest.raises(TransportTimeout, match=r"'c' waited 0\.1 s for more, which did not come"):
        inbox.get(0.1, "more")


def test_a_message_is_what_it_was_when_it_was_sent(network: Open) -> None:
    a, b = network("a"), network("b")
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    arrays = pack({"h": values, "mask": np.array([True, False]), "none": np.zeros((0, 3))})
    arrays["small"] = CODECS["int8"].encode(values)
    sent = Message(
        kind="act", sender="a", stage=2, micro=7, slice=1, term=3, weight=12.5, version=4, loss_scale=1024.0,
        sent=1.25, meta={"list": (1, 2), "nested": {"x": None}}, arrays=arrays,
    )  # fmt: skip
    a.send("b", sent)
    values += 100  # what the sender does afterwards is its own business
    got = take(b.mailbox("b"))
    for field in ("kind", "sender", "stage", "micro", "slice", "term", "weight", "version", "loss_scale", "sent"):
        assert getattr(got, field) == getattr(sent, field)
    assert got.meta == {"list": [1, 2], "nested": {"x": None}}
    decoded = unpack(got.arrays)
    np.testing.assert_array_equal(decoded["h"], np.arange(12, dtype=np.float32).reshape(3, 4))
    np.testing.assert_allclose(decoded["small"], decoded["h"], atol=0.05)
    assert decoded["none"].shape == (0, 3)
    assert decoded["mask"].dtype == bool


def test_a_tensor_of_64_mb(network: Open) -> None:
    a, b = network("a"), network("b")
    values = np.arange(16 << 20, dtype=np.float32)
    a.send("b", Message(kind="act", sender="a", arrays=pack({"h": values})))
    a.send("b", Message(kind="act", sender="a", micro=1))
    inbox = b.mailbox("b")
    assert np.array_equal(unpack(take(inbox, 60).arrays)["h"], values)
    assert take(inbox).micro == 1
    a.flush(10)
    assert 64 << 20 < a.traffic("a")["b"] < 65 << 20
    assert b.traffic("b") == {}, "it has sent nothing"


def test_a_receiver_that_comes_later_gets_what_was_sent(network: Open) -> None:
    a = network("a")
    for number in range(20):
        a.send("b", Message(kind="x", sender="a", micro=number))
    time.sleep(0.1)
    b = network("b")
    inbox = b.mailbox("b")
    assert [take(inbox).micro for _ in range(20)] == list(range(20))


def test_who_does_not_read_holds_up_the_sender_and_loses_nothing(
    anyhow: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "MOST_WAITING", 1 << 20)
    receiver, sender, other = anyhow("r"), anyhow("s"), anyhow("o")
    inbox, arrays = receiver.mailbox("r"), pack({"x": np.zeros(100_000, np.uint8)})
    for number in range(150):
        sender.send("r", Message(kind="x", sender="s", micro=number, arrays=arrays))
    deadline = time.monotonic() + 30
    while inbox.waiting().get("s", 0) < 1 << 20:
        assert time.monotonic() < deadline, "what may wait never came"
        time.sleep(0.01)
    time.sleep(0.7)  # if it did not hold, more would come
    assert inbox.waiting()["s"] <= (1 << 20) + (1 << 18), "one message, and a chunk of several, more"
    with pytest.raises(TransportTimeout, match=r"'s' has no acknowledgement from 'r' \(\d+ chunks\)"):
        sender.flush(0.1)
    other.send("r", Message(kind="x", sender="o"))  # the inbox is full for one only
    other.flush(10.0)
    found = [take(inbox) for _ in range(151)]
    assert [message.micro for message in found if message.sender == "s"] == list(range(150))
    sender.flush(10.0)
    assert "s" not in inbox.waiting()


def test_both_ways_at_once_and_to_oneself(network: Open) -> None:
    a, b = network("a"), network("b")
    for number in range(100):
        a.send("b", Message(kind="x", sender="a", micro=number))
        b.send("a", Message(kind="x", sender="b", micro=number))
    a.send("a", Message(kind="x", sender="a", micro=-1))
    assert [take(b.mailbox("b")).micro for _ in range(100)] == list(range(100))
    got = [take(a.mailbox("a")) for _ in range(101)]
    assert [m.micro for m in got if m.sender == "b"] == list(range(100))
    assert [m.micro for m in got if m.sender == "a"] == [-1]


def test_what_cannot_travel_is_refused_by_the_sender(network: Open) -> None:
    a = network("a")
    with pytest.raises(FrameError, match="not JSON"):
        a.send("b", Message(kind="x", sender="a", meta={"x": object()}))
    with pytest.raises(TransportError, match="'b/#'"):
        a.send("b/#", Message(kind="x", sender="a"))


def test_close_may_be_called_twice_and_ends_sending(network: Open) -> None:
    a = network("a")
    a.close()
    a.close()
    with pytest.raises(TransportError, match="closed"):
        a.send("b", Message(kind="x", sender="a"))


def test_memory_tells_who_is_gone() -> None:
    with MemoryTransport() as transport:
        a, b = transport.mailbox("a"), transport.mailbox("b")
        transport.offline("b", "it died")
        assert status_of(a, "b", "offline").meta["reason"] == "it died"
        assert b.poll() is None


# --- over a broker: liveness ---


def test_statuses_of_the_run_become_messages(fleet: Fleet) -> None:
    a, b = fleet("a"), fleet("b")
    for transport, other in ((a, "b"), (b, "a")):
        status_of(transport.mailbox(transport.node), other, "online")
    a.send("b", Message(kind="x", sender="a"))
    take(b.mailbox("b"))
    assert time.monotonic() - (b.last_seen("a") or 0) < 5
    assert b.last_seen("nobody") is None
    a.close()
    assert status_of(b.mailbox("b"), "a", "offline").meta["reason"] == "closed"
    c = fleet("c")  # a clean end leaves no status behind
    assert status_of(c.mailbox("c"), "b", "online")
    time.sleep(0.3)
    assert all(m.sender != "a" for m in iter(c.mailbox("c").poll, None))


NODE = """
import sys, time
from edgesplit.transport.base import Message
from edgesplit.transport.mqtt import SHORTER, MqttTransport
url, run, node = sys.argv[1:]
transport = MqttTransport(url, run=run, node=node, heartbeat=0.2)
inbox = transport.mailbox(node)
while True:
    message = inbox.get(60)
    if message.kind == "echo":
        transport.send(message.sender, Message(kind="echo", sender=node, micro=message.micro))
"""


@pytest.mark.parametrize("embedded", [False, True])
def test_a_killed_process_is_reported_and_another_can_take_its_place(
    request: pytest.FixtureRequest, embedded: bool
) -> None:
    broker = request.getfixturevalue("embedded_broker" if embedded else "mosquitto")
    fleet = Fleet(broker.url)
    a = fleet("a")
    inbox = a.mailbox("a")
    try:
        for life in range(2):
            process = subprocess.Popen([sys.executable, "-c", NODE, fleet.url, fleet.run, "b"], cwd=ROOT)
            try:
                status_of(inbox, "b", "online", 30)
                a.send("b", Message(kind="echo", sender="a", micro=life))
                assert take(inbox).micro == life
            finally:
                process.kill()
                process.wait()
            assert status_of(inbox, "b", "offline").meta["reason"]
        a.send("b", Message(kind="echo", sender="a", micro=9))
        with pytest.raises(TransportTimeout, match=r"'b' \(1 chunk"):
            a.flush(0.2)
        a.forget("b")
        a.flush(0.2)
    finally:
        fleet.close()


def test_a_short_break_of_the_connection_loses_nothing_and_alarms_nobody(anyhow: Fleet) -> None:
    a, b = (anyhow(name, grace=2.0) for name in "ab")  # a TLS handshake may take a while on a busy machine
    inbox = b.mailbox("b")
    for number in range(400):
        with contextlib.suppress(OSError):  # the last break may not be over: its socket is closed
            if number % 100 == 50:
                a._client.raw.shutdown(2)
            if number % 100 == 75:
                b._client.raw.shutdown(2)
        a.send("b", Message(kind="x", sender="a", micro=number))
        time.sleep(0.001)
    assert [take(inbox).micro for _ in range(400)] == list(range(400))
    a.flush(10)
    time.sleep(2.3)
    assert all(message.meta["state"] == "online" for message in iter(inbox.poll, None))


def test_an_old_offline_and_an_old_online_are_not_believed(fleet: Fleet, mosquitto: Mosquitto) -> None:
    with raw_client(mosquitto) as client:
        topic = f"edgesplit/{fleet.run}/ghost/status"
        client.publish(topic, b'{"state": "online", "boot": "5", "time": 12.0}', retain=True)
        time.sleep(0.1)
        a, b = fleet("a"), fleet("b")
        inbox = a.mailbox("a")
        status_of(inbox, "b", "online")
        client.publish(f"edgesplit/{fleet.run}/b/status", b'{"state": "offline", "boot": "77", "time": 12.0}')
        time.sleep(1.0)
        assert list(iter(inbox.poll, None)) == []
        client.publish(topic, b'{"state": "online", "boot": "5", "time": 12.0}')  # alive, its clock is wrong
        status_of(inbox, "ghost", "online")
        client.publish(topic, b"", retain=True)
        time.sleep(0.05)
        assert b.connected


# --- over a broker: outages ---


@pytest.mark.parametrize(
    ("version", "how", "tls"),
    [("5", "SIGTERM", False), ("5", "SIGKILL", False), ("3.1.1", "SIGTERM", False), ("3.1.1", "SIGKILL", True)],
)
def test_messages_outlive_a_broker_that_forgets_everything(
    start_mosquitto: Callable[..., Mosquitto], authority: Authority, version: str, how: str, tls: bool
) -> None:
    broker = start_mosquitto(tls_options(authority) if tls else ())
    fleet = Fleet(with_certificate(authority, broker.url) if tls else broker.url, mqtt_version=version, grace=5.0)
    a, b = fleet("a"), fleet("b")
    inbox = b.mailbox("b")

    def outage() -> None:
        broker.stop(getattr(signal, how))
        for number in range(3):
            a.send("b", Message(kind="during", sender="a", micro=number))
        time.sleep(0.3)
        broker.start()

    try:
        numbers = iter(range(200))
        for number in itertools.islice(numbers, 60):
            arrays = pack({"h": np.full(50_000, number, np.float32)})
            a.send("b", Message(kind="x", sender="a", micro=number, arrays=arrays))
        outage()
        for number in itertools.islice(numbers, 60):
            a.send("b", Message(kind="x", sender="a", micro=number))
        got = [take(inbox, 30) for _ in range(123)]
        assert [m.micro for m in got if m.kind == "x"] == list(range(120))
        assert [m.kind for m in got] == ["x"] * 60 + ["during"] * 3 + ["x"] * 60
        a.flush(10)
        assert all(m.meta["state"] == "online" for m in iter(inbox.poll, None))
    finally:
        fleet.close()


@pytest.mark.parametrize("web", [False, True])
def test_messages_outlive_a_restart_of_the_embedded_broker(authority: Authority, tmp_path: Path, web: bool) -> None:
    ports = free_port(), free_port()

    def start() -> EmbeddedBroker | WebBroker:
        return WebBroker(tmp_path, authority, ports) if web else EmbeddedBroker(ports[0])

    broker = start()
    fleet = Fleet(broker.secure if isinstance(broker, WebBroker) else broker.url, grace=5.0)
    try:
        a, b = fleet("a"), fleet("b")
        inbox = b.mailbox("b")
        for number in range(30):
            a.send("b", Message(kind="x", sender="a", micro=number, meta={"pad": "." * 100_000}))
        broker.close()
        for number in range(30, 40):
            a.send("b", Message(kind="x", sender="a", micro=number))
        broker = start()
        assert [take(inbox, 30).micro for _ in range(40)] == list(range(40))
    finally:
        fleet.close()
        broker.close()


def test_a_broker_that_stays_away_fails_the_inbox(start_mosquitto: Callable[..., Mosquitto]) -> None:
    broker = start_mosquitto()
    fleet = Fleet(broker.url, give_up=0.5)
    a = fleet("a")
    broker.stop()
    with pytest.raises(TransportError, match=r"no broker at .* for 0.5 s"):
        a.mailbox("a").get(10)
    fleet.close()


# --- over a broker: what is refused at the start, in one line ---


def one_line(error: pytest.ExceptionInfo[TransportError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_no_broker_there() -> None:
    with pytest.raises(TransportError, match=r"cannot reach the broker at 127\.0\.0\.1:1: ") as error:
        MqttTransport("mqtt://127.0.0.1:1", run="r", node="a")
    one_line(error)


def test_something_else_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"mqtt://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(TransportError, match="is it a broker's port"):
            MqttTransport(url, run="r", node="a", connect_timeout=0.3)


@contextmanager
def moody(broker: Mosquitto, refusals: int) -> Iterator[str]:
    """The url of a way to the broker that hangs up on the first callers."""
    ends: list[socket.socket] = []

    def copy(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)

    def serve(server: socket.socket) -> None:
        with suppress(OSError):
            for left in itertools.count(refusals, -1):
                caller, _ = server.accept()
                if left > 0:
                    caller.close()
                    continue
                onward = socket.create_connection(("127.0.0.1", broker.port))
                ends.extend((caller, onward))
                for pair in ((caller, onward), (onward, caller)):
                    threading.Thread(target=copy, args=pair, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,), daemon=True)
        thread.start()
        try:
            yield f"mqtt://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(5)
            for end in ends:
                end.close()


def test_a_broker_that_hangs_up_once_is_called_again(mosquitto: Mosquitto) -> None:
    with moody(mosquitto, 2) as url, MqttTransport(url, run="moody", node="a") as transport:
        assert transport.connected


def test_one_that_always_hangs_up_is_given_up_soon(mosquitto: Mosquitto) -> None:
    began = time.monotonic()
    with moody(mosquitto, 100) as url, pytest.raises(TransportError, match=r"hangs up in MQTT 5 or 3\.1\.1: is it a"):
        MqttTransport(url, run="moody", node="a")
    assert time.monotonic() - began < 3


def test_it_falls_back_to_3_1_1_and_says_which(embedded_broker: EmbeddedBroker, mosquitto: Mosquitto) -> None:
    with MqttTransport(embedded_broker.url_v3, run="fallback", node="a") as transport:
        assert transport.version == "3.1.1"
    with MqttTransport(mosquitto.url, run="fallback", node="a") as transport:
        assert transport.version == "5"


def password_file(directory: Path) -> Path:
    path = directory / "passwords"
    subprocess.run(["mosquitto_passwd", "-b", "-c", str(path), "pi", "right"], check=True, capture_output=True)
    return path


def test_wrong_password(
    start_mosquitto: Callable[..., Mosquitto], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = start_mosquitto([f"password_file {password_file(tmp_path)}"], anonymous=False)
    url = broker.url.replace("//", "//pi@")
    secret = tmp_path / "secret"
    for version in ("5", "3.1.1"):
        secret.write_text("wrong\n")
        monkeypatch.setenv("EDGESPLIT_PASSWORD_FILE", str(secret))
        with pytest.raises(TransportError, match="refuses user 'pi'") as error:
            MqttTransport(Access(url, mqtt=version), run="r", node="a")
        assert "wrong" not in one_line(error)
        secret.write_text("right\n")
        MqttTransport(Access(url, mqtt=version), run="r", node="a").close()
    monkeypatch.delenv("EDGESPLIT_PASSWORD_FILE")
    monkeypatch.setenv("EDGESPLIT_PASSWORD", "right")
    MqttTransport(url, run="r", node="a").close()
    with pytest.raises(TransportError, match="refuses a node without a user name"):
        MqttTransport(broker.url, run="r", node="a")


@pytest.mark.parametrize("version", ["5", "3.1.1"])
def test_a_topic_that_an_access_rule_swallows_is_named(
    start_mosquitto: Callable[..., Mosquitto], tmp_path: Path, version: str
) -> None:
    rules = tmp_path / "acl"
    rules.write_text(
        "topic readwrite edgesplit/open/#\n"
        "topic readwrite edgesplit/half/a/#\ntopic readwrite edgesplit/half/b/#\n"
        "topic read edgesplit/half/+/status\ntopic write edgesplit/half/deaf/#\n"
        "topic read edgesplit/shut/#\n"
    )
    broker = start_mosquitto([f"acl_file {rules}"])
    access = Access(broker.url, mqtt=version)
    options = {"connect_timeout": 1.0}
    MqttTransport(access, run="open", node="a", **options).close()
    with pytest.raises(TransportError, match="topic edgesplit/shut/a/in was lost") as error:
        MqttTransport(access, run="shut", node="a", **options)
    one_line(error)
    with MqttTransport(access, run="half", node="a", **options) as a:
        with MqttTransport(access, run="half", node="b", **options):
            a.probe(["b"], 5.0)
        with pytest.raises(TransportTimeout, match=r"'c' \(topic edgesplit/half/c/in\)"):
            a.probe(["c"], 0.5)


def test_a_probe_waits_for_one_that_is_started_again(mosquitto: Mosquitto) -> None:
    run = f"probe-{next(RUNS)}"
    with MqttTransport(mosquitto.url, run=run, node="a") as a:
        with MqttTransport(mosquitto.url, run=run, node="b"):
            status_of(a.mailbox("a"), "b", "online")
        status_of(a.mailbox("a"), "b", "offline")
        later = threading.Timer(2.0, lambda: opened.append(MqttTransport(mosquitto.url, run=run, node="b")))
        opened: list[MqttTransport] = []
        later.start()
        a.probe(["b"], 1.0)  # its second begins when the other is there
        later.join()
        opened[0].close()


@pytest.mark.parametrize("cut", ["a", "b"])
def test_a_probe_waits_for_a_network_that_says_nothing(mosquitto: Mosquitto, cut: str) -> None:
    run = f"probe-{next(RUNS)}"
    relay = Relay(mosquitto.port)
    url = {name: f"mqtt://127.0.0.1:{relay.port}" if name == cut else mosquitto.url for name in "ab"}
    a, b = (MqttTransport(url[name], run=run, node=name, heartbeat=0.2) for name in "ab")
    with a, b:
        status_of(a.mailbox("a"), "b", "online")
        relay.cut()
        later = threading.Timer(5.0, relay.mend)
        later.start()
        a.probe(["b"], 1.5)
        later.join()
    relay.close()


def test_a_packet_limit_is_obeyed_or_named(start_mosquitto: Callable[..., Mosquitto]) -> None:
    values = np.arange(40_000, dtype=np.float32)
    broker = start_mosquitto(["max_packet_size 9000"])
    fleet = Fleet(broker.url)
    a, b = fleet("a"), fleet("b")  # MQTT 5 says how long a packet may be
    assert 8000 < a.chunk_size < 9000
    a.send("b", Message(kind="act", sender="a", arrays=pack({"h": values})))
    np.testing.assert_array_equal(unpack(take(b.mailbox("b")).arrays)["h"], values)
    with pytest.raises(TransportError, match="packet limit"):  # MQTT 3.1.1 does not
        fleet("c", mqtt_version="3.1.1", connect_timeout=1.0)
    assert fleet("d", mqtt_version="3.1.1", max_packet=9000).chunk_size < 9000
    fleet.close()
    with pytest.raises(TransportError, match="500 bytes is too small"):
        MqttTransport(broker.url, run="r", node="a", max_packet=500)
    silent = start_mosquitto(["message_size_limit 9000"])
    with pytest.raises(TransportError, match="packet limit"):
        MqttTransport(silent.url, run="r", node="a", connect_timeout=1.0)


def test_a_broker_that_hangs_up_at_long_packets_gets_shorter_ones(start_mosquitto: Callable[..., Mosquitto]) -> None:
    """MQTT 3.1.1 has no way to say how long a packet may be."""
    values = np.arange(40_000, dtype=np.float32)
    fleet = Fleet(start_mosquitto(["max_packet_size 100000"]).url)
    a, b = fleet("a", mqtt_version="3.1.1"), fleet("b", mqtt_version="3.1.1")
    assert a.chunk_size == SHORTER[0]
    a.send("b", Message(kind="act", sender="a", arrays=pack({"h": values})))
    np.testing.assert_array_equal(unpack(take(b.mailbox("b")).arrays)["h"], values)
    fleet.close()


def test_a_broker_that_comes_back_with_a_shorter_packet_limit_is_told_of(
    start_mosquitto: Callable[..., Mosquitto],
) -> None:
    """What is under way has been cut already, and would end one connection after the other."""
    broker = start_mosquitto(["max_packet_size 100000"])
    fleet = Fleet(broker.url)
    a = fleet("a")
    broker.stop()
    broker.configure(["max_packet_size 30000"])
    broker.start()
    with pytest.raises(TransportError, match=r"takes packets of 30000 bytes now, and 'a' has cut .* old limit back"):
        a.mailbox("a").get(10)
    fleet.close()


@pytest.mark.parametrize("embedded", [False, True])
def test_the_second_process_with_a_name_is_told_and_the_first_goes_on(
    request: pytest.FixtureRequest, embedded: bool
) -> None:
    broker = request.getfixturevalue("embedded_broker" if embedded else "mosquitto")
    fleet = Fleet(broker.url)
    try:
        a, b = fleet("a"), fleet("b")
        inbox = b.mailbox("b")
        status_of(inbox, "a", "online")
        with pytest.raises(TransportError, match="'a' is already in run") as error:
            fleet("a")
        one_line(error)
        for number in range(20):
            a.send("b", Message(kind="x", sender="a", micro=number))
        assert [take(inbox).micro for _ in range(20)] == list(range(20))
        time.sleep(0.7)
        assert list(iter(inbox.poll, None)) == []  # nobody was told that a had gone or come
    finally:
        fleet.close()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"run": "a/b"}, "run name 'a/b'"),
        ({"node": "pi 1"}, "node name 'pi 1'"),
        ({"node": "+"}, "node name"),
        ({"node": "x" * 65}, "node name"),
        ({"prefix": "a/#"}, "topic prefix 'a/#'"),
        ({"url": "http://127.0.0.1"}, "must begin with"),
        ({"url": "mqtt://"}, "must look like"),
        ({"url": "mqtt://127.0.0.1:http"}, "broker url"),
        ({"url": "mqtt://pi:secret@127.0.0.1"}, "EDGESPLIT_PASSWORD_FILE"),
        ({"url": "mqtt://pi:secret@127.0.0.1:99999"}, "broker url"),
        ({"mqtt": "4"}, "mqtt version"),
    ],
)
def test_wrong_arguments(change: dict[str, str], match: str) -> None:
    names = {"run": "r", "node": "a"} | {name: change[name] for name in change if name in ("run", "node")}
    rest = {"url": "mqtt://127.0.0.1:1"} | {name: value for name, value in change.items() if name not in names}
    with pytest.raises(TransportError, match=match) as error:
        MqttTransport(Access(**rest), **names)
    assert "secret" not in one_line(error)


# --- over a broker: nonsense from the network ---


class raw_client:  # noqa: N801 - reads as a function
    """A plain MQTT client, as anybody's."""

    def __init__(self, broker: Mosquitto) -> None:
        self._port = broker.port

    def __enter__(self) -> paho.Client:
        self._client = paho.Client(CallbackAPIVersion.VERSION2)
        self._client.connect("127.0.0.1", self._port)
        self._client.loop_start()
        return self._client

    def __exit__(self, *exc_info: object) -> None:
        self._client.disconnect()
        self._client.loop_stop()


def test_nonsense_is_counted_and_harms_nobody(fleet: Fleet, mosquitto: Mosquitto) -> None:
    a, b = fleet("a"), fleet("b")
    base = f"edgesplit/{fleet.run}"
    body = b"".join(frames.encode(Message(kind="x", sender="evil")))
    run = frames.run_hash(fleet.run)

    def evil(payload: bytes, flags: int, seq: int = 0) -> bytes:
        (chunk,) = frames.split([payload], 100_000, "evil")
        return bytes(frames.seal(chunk, flags, run, "evil", 66, b._boot, seq))

    packets = [b"", b"x", bytes(1000), body, b"es\x01\x01" + bytes(200), evil(body[:-1], Flag.DATA, 1)]
    with raw_client(mosquitto) as client:
        for packet in packets:
            client.publish(f"{base}/b/in", packet).wait_for_publish(5)
        client.publish(f"{base}/b/in", evil(b"", Flag.HELLO, 1))
        client.publish(f"{base}/b/in", evil(b"no message at all, but a whole chunk", Flag.DATA, 1))
        client.publish(f"{base}/b/in", evil(body, Flag.DATA, 2))
        for status in (
            b"x",
            b"[]",
            b'{"state": "up"}',
            b"[" * 4000,
            b"\xff",
            b'{"state":"online","boot":"-1","time":0}',
        ):
            client.publish(f"{base}/evil/status", status).wait_for_publish(5)
        assert take(b.mailbox("b")).sender == "evil"  # its one good message
        a.send("b", Message(kind="x", sender="a", micro=5))
        assert take(b.mailbox("b")).micro == 5
        deadline = time.monotonic() + 15.0  # the statuses come by another connection than a's message
        while b.rejected < 10 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert b.rejected >= 10
    assert b._thread.is_alive()


def test_threads_have_names_and_end(fleet: Fleet) -> None:
    fleet("a")
    assert "edgesplit-mqtt-a" in [thread.name for thread in threading.enumerate()]
    fleet.close()
    assert "edgesplit-mqtt-a" not in [thread.name for thread in threading.enumerate()]
