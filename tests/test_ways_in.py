"""Every way to a broker: what is wrong with TLS is told in one line, and a WebSocket carries bytes as they are."""

from __future__ import annotations

import base64
import hashlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgesplit.errors import TransportError, TransportTimeout
from edgesplit.transport.access import Access
from edgesplit.transport.address import parse_url
from edgesplit.transport.key import Key
from edgesplit.transport.lives import Lives
from edgesplit.transport.lobby import find_run
from edgesplit.transport.mqtt import MqttTransport
from edgesplit.transport.websocket import BINARY, CLOSE, PING, PONG, WebSocket, WebSocketError
from tests.brokers import Mosquitto, WebBroker, tls_options, with_certificate
from tests.certificates import Authority


def refused(access: Access) -> str:
    """The one line with which a node and the lobby are refused."""
    with pytest.raises(TransportError) as caught:
        MqttTransport(access, run="r", node="a", connect_timeout=3.0)
    with pytest.raises(TransportError) as again:
        find_run(access, "a", timeout=3.0)
    line = str(caught.value)
    assert "\n" not in line
    assert str(again.value) == line
    return line


def test_a_node_and_the_lobby_get_in(mosquitto_tls: Access, web_broker: WebBroker) -> None:
    for access in (mosquitto_tls, web_broker.plain, web_broker.secure):
        with MqttTransport(access, run="ways", node="coordinator"):
            assert find_run(access, "a") == "ways"


def test_the_files_may_come_from_the_environment(mosquitto_tls: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CA", mosquitto_tls.ca), ("CERT", mosquitto_tls.cert), ("CERT_KEY", mosquitto_tls.cert_key)):
        monkeypatch.setenv(f"EDGESPLIT_{name}", str(value))
    MqttTransport(mosquitto_tls.url, run="ways", node="a").close()
    monkeypatch.setenv("EDGESPLIT_CERT_KEY", "gone.key")
    assert refused(Access(mosquitto_tls.url)).startswith("EDGESPLIT_CERT_KEY: cannot read 'gone.key': No such file")


# --- the broker's certificate ---


def test_a_ca_that_is_not_trusted(mosquitto_tls: Access, tmp_path: Path) -> None:
    line = refused(Access(mosquitto_tls.url))
    assert "shows a certificate that this system does not trust" in line
    assert "--ca or EDGESPLIT_CA" in line
    other = Authority(tmp_path, "other").ca
    assert f"shows a certificate that --ca {str(other)!r} does not vouch for" in refused(
        replace(mosquitto_tls, ca=str(other))
    )


@pytest.mark.parametrize(
    ("dates", "words"),
    [
        ({"since": -3, "until": -2}, "shows a certificate that has expired"),
        ({"since": 2, "until": 3}, "not valid yet: is this machine's clock right?"),
    ],
)
def test_a_certificate_at_the_wrong_time(
    start_mosquitto: Callable[..., Mosquitto], authority: Authority, dates: dict[str, int], words: str
) -> None:
    broker = start_mosquitto(tls_options(authority, f"dated{dates['since']}", **dates))
    assert words in refused(with_certificate(authority, broker.url))


def test_a_certificate_of_another_host(start_mosquitto: Callable[..., Mosquitto], authority: Authority) -> None:
    broker = start_mosquitto(tls_options(authority, "elsewhere", "broker.example"))
    line = refused(with_certificate(authority, broker.url))
    assert "shows a certificate of another host" in line
    assert "'127.0.0.1'" in line


# --- the client's certificate ---


def test_a_client_certificate_is_demanded(mosquitto_tls: Access) -> None:
    line = refused(replace(mosquitto_tls, cert=None, cert_key=None))
    assert "demands a certificate of its clients" in line
    assert "--cert and --cert-key" in line


def test_a_client_certificate_is_refused(mosquitto_tls: Access, authority: Authority, tmp_path: Path) -> None:
    expired = authority.sign("late", since=-3, until=-2)
    strange = Authority(tmp_path, "strange").sign("stranger")
    for cert, key in (expired, strange):
        line = refused(replace(mosquitto_tls, cert=cert, cert_key=key))
        assert f"refuses the certificate of --cert {cert!r}" in line


def test_files_that_are_wrong(mosquitto_tls: Access, authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.sign("mine")
    _, other = authority.sign("theirs")
    locked = authority.sign("locked", secret=b"word")
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    gone = str(tmp_path / "gone.key")
    cases = [
        ((cert, gone), f"--cert-key: cannot read {gone!r}: No such file or directory"),
        ((gone, key), f"--cert: cannot read {gone!r}: No such file or directory"),
        ((cert, other), f"--cert-key {other!r} is not the key of the certificate {cert!r}"),
        (locked, f"--cert-key {locked[1]!r} is encrypted: write it without a passphrase"),
        ((cert, str(nonsense)), "are not a certificate and a private key in PEM format"),
        ((cert, None), "does not hold a certificate and its private key: name the key with --cert-key"),
        ((None, key), f"--cert-key is {key!r}, but no certificate is named: add --cert"),
    ]
    for (one, two), words in cases:
        assert words in refused(replace(mosquitto_tls, cert=one, cert_key=two))
    assert "holds no certificates in PEM format" in refused(replace(mosquitto_tls, ca=str(nonsense)))
    assert f"--ca: cannot read {str(tmp_path)!r}: Is a directory" in refused(replace(mosquitto_tls, ca=str(tmp_path)))
    together = tmp_path / "both.pem"
    together.write_text(Path(cert).read_text() + Path(key).read_text())
    MqttTransport(replace(mosquitto_tls, cert=str(together), cert_key=None), run="ways", node="both").close()


# --- the wrong scheme ---


def test_tls_where_there_is_none_and_the_other_way_round(mosquitto: Mosquitto, mosquitto_tls: Access) -> None:
    line = refused(Access(mosquitto.url.replace("mqtt", "mqtts"), ca=mosquitto_tls.ca))
    assert line == (
        f"{mosquitto.address} took the connection but hangs up when asked for TLS: is it the right port for this url?"
    )
    with pytest.raises(TransportError, match=r"hangs up .* is it a broker's port, and the right one for this url"):
        MqttTransport(mosquitto_tls.url.replace("mqtts", "mqtt"), run="r", node="a")


def test_what_has_no_effect_is_refused() -> None:
    with pytest.raises(TransportError, match=r"^ca has no effect over mqtt://: use mqtts://, or remove it$"):
        Access("mqtt://host", ca="ca.pem")
    with pytest.raises(TransportError, match=r"^cert-key has no effect over ws://: use wss://, or remove it$"):
        Access("ws://host", cert_key="me.key")


def test_a_web_server_that_is_no_broker(mosquitto: Mosquitto) -> None:
    def serve(server: socket.socket) -> None:
        for _ in range(2):
            caller, _ = server.accept()
            caller.recv(4096)
            caller.sendall(b"HTTP/1.1 404 Not Found\r\nConnection: close\r\n\r\n")
            caller.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        line = refused(Access(f"ws://127.0.0.1:{server.getsockname()[1]}/mq"))
    assert "it answers 'HTTP/1.1 404 Not Found' to path /mq: is the path of the url right?" in line
    assert "hangs up when asked for a WebSocket" in refused(Access(mosquitto.url.replace("mqtt", "ws")))


# --- the names that a broker's rules demand ---


def test_client_ids_and_topics() -> None:
    access = Access("mqtt://host", prefix="site/a", client_id="{prefix}.{node}")
    assert access.id_of("run-1", "pi-1", 255) == "site-a.pi-1"
    assert access.topic("run-1", "pi-1", "in") == "site/a/run-1/pi-1/in"
    assert access.shares_ids
    assert Access("mqtt://host").id_of("run-1", "pi-1", 255) == "edgesplit-run-1-pi-1-ff"
    assert not Access("mqtt://host").shares_ids


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("{nod}", r"\{nod\} is none of \{prefix\}, \{run\}, \{node\}, \{boot\} \(did you mean 'node'\?\)"),
        ("{node!r}", r"\{node\} is none of"),
        ("{node:>3}", r"\{node\} is none of"),
        ("{node.__class__}", "is none of"),
        ("{node", "client id '{node': "),
        ("{run}", r"is the same for every node, and a broker keeps only one: put \{node\} into it"),
        ("fixed", "is the same for every node"),
    ],
)
def test_patterns_that_are_none(pattern: str, words: str) -> None:
    with pytest.raises(TransportError, match=words):
        Access("mqtt://host", client_id=pattern)


def test_options_of_a_node_say_it_again() -> None:
    access = Access("mqtts://host", ca="ca.pem", cert="me.pem", cert_key="me.key", prefix="a/b", mqtt="5")
    assert access.options() == [
        "--ca", "ca.pem", "--cert", "me.pem", "--cert-key", "me.key", "--topic-prefix", "a/b", "--mqtt", "5",
    ]  # fmt: skip
    assert Access("mqtt://host").options() == []


def two_of_one_id(broker: Mosquitto, mqtt: str) -> tuple[MqttTransport, MqttTransport, list[str]]:
    """Two runs' nodes with one client id, after their fight; and what the losers say."""
    access = Access(broker.url, client_id="{node}", mqtt=mqtt)
    first = MqttTransport(access, run="one", node="pi", heartbeat=0.2)
    second = MqttTransport(access, run="two", node="pi", heartbeat=0.2)
    said: list[str] = []
    deadline = time.monotonic() + 15
    while not said and time.monotonic() < deadline:
        for transport in (first, second):
            try:
                transport.mailbox("pi").get(0.1)
            except TransportTimeout:
                continue
            except TransportError as error:
                said.append(str(error))
    return first, second, said


@pytest.mark.parametrize("mqtt", ["5", "3.1.1"])
def test_of_two_clients_with_one_id_one_stops(mosquitto: Mosquitto, mqtt: str) -> None:
    first, second, said = two_of_one_id(mosquitto, mqtt)
    try:
        (line,) = said
        # Under MQTT 5 a broker may name the reason; mosquitto 2.0.11 closes the connection without it.
        if line != "another client has taken the place of 'pi' at the broker":
            assert line.startswith(f"the broker at {mosquitto.address} lets client 'pi' in and closes the connection")
            assert "is another client using this id? put {boot} into the pattern" in line
        wait_until(lambda: first.connected + second.connected == 1)
        time.sleep(1.0)
        assert first.connected + second.connected == 1  # the other is left in peace
    finally:
        first.close()
        second.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_restart_under_the_same_id_takes_the_dead_ones_place(mosquitto: Mosquitto) -> None:
    access = Access(mosquitto.url, client_id="{prefix}-{node}", prefix="site/a")
    for _ in range(2):
        with MqttTransport(access, run="restart", node="pi", heartbeat=0.2) as pi:
            pi._client.raw.shutdown(2)  # gone without a word
            wait_until(lambda pi=pi: pi.connected)


def test_short_lives() -> None:
    ours, foreign = Lives(30.0, shared=False), Lives(30.0, shared=True)
    pauses = []
    for number in range(8):
        for lives in (ours, foreign):
            lives.began(float(number))
            lives.ended(number + 0.5)
        pauses.append(foreign.pause)
        assert foreign.hopeless(number + 0.5) == (number >= 4)
        assert not ours.hopeless(number + 0.5)
    assert pauses == [0.05] * 5 + [0.1, 0.2, 0.4]
    assert ours.hopeless(30.0)
    ours.began(30.0)
    ours.ended(33.0)  # that was no short one
    assert not ours.hopeless(100.0)
    assert ours.pause == 0.05


def test_a_broker_that_is_killed_again_and_again_has_not_hung_up() -> None:
    lives = Lives(30.0, shared=False)
    for number in range(20):
        lives.began(45.0 * number)
        lives.ended(45.0 * number + 1.0)
        assert not lives.hopeless(45.0 * number + 44.0)


# --- the key ---


def test_neighbours_of_which_one_has_the_key_are_both_told_why(mosquitto: Mosquitto) -> None:
    access = Access(mosquitto.url)
    with (
        MqttTransport(access, run="keys", node="a", key=Key(bytes(32))) as a,
        MqttTransport(access, run="keys", node="b") as b,
    ):
        with pytest.raises(TransportTimeout, match=r"^no way from 'b' to 'a': it takes signed frames only: start this"):
            b.probe(["a"], 1.0)
        with pytest.raises(
            TransportTimeout, match=r"^no way from 'a' to 'b': its frames are not signed: start it with"
        ):
            a.probe(["b"], 6.0)
    with (
        MqttTransport(access, run="same", node="a", key=Key(bytes(32))) as a,
        MqttTransport(access, run="same", node="b", key=Key(bytes(32))) as b,
    ):
        a.probe(["b"], 10.0)
        assert a.chunk_size == b.chunk_size > 200_000


# --- a WebSocket ---


class Server:
    """The other end, by hand."""

    def __init__(self) -> None:
        self.sock, ours = socket.socketpair()
        for end in (self.sock, ours):
            end.settimeout(5)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        thread = threading.Thread(target=self._shake_hands)
        thread.start()
        self.client = WebSocket(ours, parse_url("ws://host/mq"))
        thread.join()
        ours.setblocking(False)
        self._unread = b""

    def _shake_hands(self) -> None:
        asked = b""
        while not asked.endswith(b"\r\n\r\n"):
            asked += self.sock.recv(4096)
        assert asked.startswith(b"GET /mq HTTP/1.1\r\nHost: host:80\r\n")
        (key,) = (line.split(b": ")[1] for line in asked.split(b"\r\n") if line.startswith(b"Sec-WebSocket-Key"))
        accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
        head = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nSEC-WEBSOCKET-ACCEPT: %b\r\n\r\n" % accept
        self.sock.sendall(head + message(b"first"))

    def read(self, size: int) -> bytes:
        while len(self._unread) < size:
            self._unread += self.sock.recv(1 << 16)
        found, self._unread = self._unread[:size], self._unread[size:]
        return found

    def message(self) -> tuple[int, bytes]:
        """The client's next message."""
        opcode, short = self.read(2)
        assert opcode & 0x80
        assert short & 0x80
        size = {126: 2, 127: 8}.get(short & 127, 0)
        length = int.from_bytes(self.read(size)) if size else short & 127
        mask, data = self.read(4), self.read(length)
        return opcode & 15, bytes(byte ^ mask[at % 4] for at, byte in enumerate(data))


def message(data: bytes, opcode: int = BINARY) -> bytes:
    """As a server sends it."""
    length = len(data)
    if length < 126:
        return bytes([0x80 | opcode, length]) + data
    if length < 1 << 16:
        return bytes([0x80 | opcode, 126]) + length.to_bytes(2) + data
    return bytes([0x80 | opcode, 127]) + length.to_bytes(8) + data


@pytest.fixture
def web() -> Iterator[Server]:
    server = Server()
    yield server
    server.client.close()
    server.sock.close()


def send_all(client: WebSocket, data: bytes) -> None:
    """As paho does: the same packet again until it is taken as a whole."""
    while True:
        try:
            assert client.send(data) == len(data)
        except BlockingIOError:
            continue
        return


def test_messages_arrive_whole_however_little_the_system_takes(web: Server) -> None:
    sizes = [0, 1, 3, 125, 126, 65535, 65536, 300_001, 2]
    packets = [random.Random(size).randbytes(size) for size in sizes]
    thread = threading.Thread(target=lambda: [send_all(web.client, packet) for packet in packets])
    thread.start()
    assert [web.message() for _ in sizes] == [(BINARY, packet) for packet in packets]
    thread.join()


def test_what_came_with_the_handshake_is_there(web: Server) -> None:
    assert web.client.pending() == 5
    assert web.client.recv(2) + web.client.recv(100) == b"first"
    assert web.client.pending() == 0
    with pytest.raises(BlockingIOError):
        web.client.recv(1)


def test_a_ping_is_answered_before_the_next_message(web: Server) -> None:
    web.sock.sendall(message(b"are you there", PING) + message(b"x"))
    assert web.client.recv(5) == b"first"
    assert web.client.recv(5) == b"x"
    web.client.send(b"y")
    assert [web.message(), web.message()] == [(PONG, b"are you there"), (BINARY, b"y")]


@pytest.mark.parametrize(
    "sent",
    [message(b"", CLOSE), message(b"x", 1), message(b"x" * 126, PING), b"\x82\x81masked", b"\xc2\x01x"],
    ids=["close", "text", "long-ping", "masked", "compressed"],
)
def test_what_ends_the_connection(web: Server, sent: bytes) -> None:
    assert web.client.recv(5) == b"first"
    web.sock.sendall(sent)
    assert web.client.recv(5) == b""


def test_a_server_that_does_not_agree() -> None:
    for answer in (b"HTTP/1.1 101 Fine\r\nSec-WebSocket-Accept: nonsense\r\n\r\n", b"nonsense\r\n\r\n", b"x" * 40_000):
        ours, theirs = socket.socketpair()
        ours.settimeout(5)
        theirs.sendall(answer)
        theirs.shutdown(socket.SHUT_WR)
        with ours, theirs, pytest.raises(WebSocketError, match="path /mqtt"):
            WebSocket(ours, parse_url("ws://host"))


@given(
    st.lists(st.tuples(st.sampled_from([0, BINARY, PING, PONG]), st.binary(max_size=120)), max_size=12),
    st.lists(st.integers(1, 9), min_size=1, max_size=20),
)
@example([(BINARY, bytes(120))] * 12, [9, 1])  # now one end is ahead by all that the system takes, now the other
@settings(deadline=None, max_examples=60)
def test_any_cutting_of_the_stream_gives_the_same_bytes(parts: list[tuple[int, bytes]], sizes: list[int]) -> None:
    server = Server()
    server.sock.setblocking(False)  # where the client is behind, it is its turn: nobody else takes what is on its way
    stream = b"".join(message(data, opcode) for opcode, data in parts)
    expected = b"first" + b"".join(data for opcode, data in parts if opcode < CLOSE)
    found, at, turn = b"", 0, 0
    try:
        while at < len(stream) or len(found) < len(expected):
            size, turn = sizes[turn % len(sizes)], turn + 1
            with suppress(BlockingIOError):
                at += server.sock.send(stream[at : at + size])
            with suppress(BlockingIOError):
                found += server.client.recv(sizes[-turn % len(sizes)])
        assert found == expected
    finally:
        server.client.close()
        server.sock.close()
