"""The embedded broker: it ends with its parent, names its ports, and is started again where it serves nobody."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edgesplit.errors import TransportError
from edgesplit.transport import broker as broker_module
from edgesplit.transport.access import Access
from edgesplit.transport.base import Message
from edgesplit.transport.broker import EmbeddedBroker, connect_packet
from edgesplit.transport.mqtt import MqttTransport

ROOT = Path(__file__).parents[1]


def test_the_embedded_broker_ends_with_its_parent() -> None:
    code = (
        "import sys, time\nfrom edgesplit.transport.broker import EmbeddedBroker\n"
        "broker = EmbeddedBroker()\nprint(broker.port, flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    port = int(parent.stdout.readline())
    url = f"mqtt://127.0.0.1:{port}"
    MqttTransport(url, run="r", node="a").close()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while True:
        try:
            MqttTransport(url, run="r", node="a", connect_timeout=1.0).close()
        except TransportError:
            break
        assert time.monotonic() < deadline, "the child is still there"
        time.sleep(0.05)


def test_a_port_in_use_is_named(embedded_broker: EmbeddedBroker) -> None:
    with pytest.raises(TransportError, match=f"cannot use port {embedded_broker.port}"):
        EmbeddedBroker(embedded_broker.port)


def test_a_free_port_that_another_takes_first_is_chosen_anew(
    embedded_broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([(embedded_broker.port, 1), *[broker_module._free_ports() for _ in range(2)]])
    monkeypatch.setattr(broker_module, "_free_ports", lambda: next(free))
    with EmbeddedBroker() as broker:
        assert broker.port != embedded_broker.port


def test_without_iotcore_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "iotcore", None)
    with pytest.raises(TransportError, match=r"pip install 'edgesplit\[broker\]'"):
        EmbeddedBroker()


@pytest.mark.parametrize("version", ["3.1.1", "5"])
def test_one_that_hangs_up_on_its_clients_is_started_again(version: str, caplog: pytest.LogCaptureFixture) -> None:
    level = 4 if version == "3.1.1" else 5
    with EmbeddedBroker() as broker:
        port = broker.port_v3 if level == 4 else broker.port
        access = Access(f"mqtt://127.0.0.1:{port}", mqtt=version)
        with MqttTransport(access, run="r", node="a") as a, MqttTransport(access, run="r", node="b") as b:
            _exchange(a, b, 0)
            _poison(port, level)
            assert _hangs_up(port, level)
            _wait_until(lambda: not _hangs_up(port, level))
            _exchange(a, b, 1)
    assert "hangs up on its clients: it was started again" in caplog.text


def test_one_that_died_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    with (
        EmbeddedBroker() as broker,
        MqttTransport(broker.url, run="r", node="a") as a,
        MqttTransport(broker.url, run="r", node="b") as b,
    ):
        _exchange(a, b, 0)
        broker._broker._process.kill()
        _exchange(a, b, 1)
    assert "has died: it was started again" in caplog.text


def test_one_that_is_silent_is_left_alone(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "CALL_S", 0.0)
    monkeypatch.setattr(broker_module, "ANSWER_S", 0.1)
    with EmbeddedBroker() as broker:
        process = broker._broker._process
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.0)
        process.send_signal(signal.SIGCONT)
        _wait_until(lambda: not _hangs_up(broker.port, 5))
        assert broker._broker._process is process
    assert not caplog.text


def _exchange(a: MqttTransport, b: MqttTransport, seq: int) -> None:
    """Send a message each way and wait for it."""
    for src, dst, sender, receiver in ((a, b, "a", "b"), (b, a, "b", "a")):
        src.send(receiver, Message(kind="hello", sender=sender, meta={"seq": seq}))
        inbox = dst.mailbox(receiver)
        while (message := inbox.get(30.0)).kind == "status":
            pass
        assert message.meta == {"seq": seq}


def _poison(port: int, level: int) -> None:
    """Be a client that is gone before the broker has answered, again and again under one id."""
    for _ in range(100):
        with socket.create_connection(("127.0.0.1", port)) as call:
            call.sendall(connect_packet("gone", level))
            call.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _hangs_up(port: int, level: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 5.0) as call:
            call.sendall(connect_packet("caller", level))
            return not call.recv(1)
    except OSError:
        return True


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
