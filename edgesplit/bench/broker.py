"""A broker of the benchmark's own: mosquitto where it is installed, else the embedded one."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from edgesplit.errors import TransportError
from edgesplit.transport.broker import EmbeddedBroker

# The shell waits for the end of its stdin, which comes when this process ends in whatever way, and ends the broker.
_GUARD = '"$@" & read line; kill $!; wait'
_STARTING_S = 10.0


@contextlib.contextmanager
def own_broker() -> Iterator[tuple[str, str]]:
    """Run a broker on the loopback interface; give its name and url.

    Raises:
        TransportError: it does not start.
    """
    if _mosquitto() is not None:
        with own_mosquitto() as found:
            yield found
        return
    with EmbeddedBroker() as broker:
        yield "embedded", broker.url


@contextlib.contextmanager
def own_mosquitto() -> Iterator[tuple[str, str]]:
    """Run a mosquitto on the loopback interface; give its name and url.

    Raises:
        TransportError: it is not installed, or does not start.
    """
    found = _mosquitto()
    if found is None:
        raise TransportError("mosquitto is not installed: apt install mosquitto, or its like")
    with tempfile.TemporaryDirectory(prefix="edgesplit-bench-") as folder:
        port = _free_port()
        config = Path(folder) / "mosquitto.conf"
        # As root it would become a user that cannot read the folder.
        user = "user root\n" if os.geteuid() == 0 else ""
        config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nset_tcp_nodelay true\n{user}")
        guard = subprocess.Popen(
            ["sh", "-c", _GUARD, "sh", found, "-c", str(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C goes to this process, which ends it last
        )
        try:
            _wait_for(port)
            yield _version(found), f"mqtt://127.0.0.1:{port}"
        finally:
            if guard.stdin is not None:
                guard.stdin.close()
            guard.wait()


def _mosquitto() -> str | None:
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


def _version(mosquitto: str) -> str:
    lines = subprocess.run([mosquitto, "-h"], capture_output=True, text=True, check=False).stdout.splitlines()
    return lines[0] if lines else "mosquitto"


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + _STARTING_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise TransportError(f"mosquitto does not listen on port {port} of 127.0.0.1: {error}") from None
            time.sleep(0.01)
        else:
            return


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
