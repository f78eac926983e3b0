"""A bare MQTT client for looking at a broker: what it grants, what comes back, and what does not."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Self

from paho.mqtt import client as paho
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from edgesplit.errors import TransportError, TransportTimeout
from edgesplit.transport.access import Access
from edgesplit.transport.address import unreachable
from edgesplit.transport.client import Client, refusal

KEEPALIVE = 30
CLOSED = "the broker closed the connection"


class Got(NamedTuple):
    """A message that came; ``at`` in seconds since the epoch."""

    topic: str
    payload: bytes
    retained: bool
    at: float


class Caller:
    """One connection without any of the transport's reliability: what the broker does is what is seen.

    Args:
        access: the broker, and how to get in.
        version: ``"5"`` or ``"3.1.1"``; no other is tried.
        client_id: unique at the broker.
        timeout: seconds to wait for each of the broker's answers.
        no_delay: small packets do not wait on this side (TCP_NODELAY).
        quick_ack: what comes is acknowledged by TCP at once, where the system can (TCP_QUICKACK).
        answer: called in the network thread with every message, instead of keeping it for :meth:`take`.

    Attributes:
        packet_limit: Maximum Packet Size of CONNACK in bytes; 0: none was named.
        lost: why the connection has ended; None: it has not.

    Raises:
        TransportError: no connection comes about; says why.
    """

    def __init__(
        self,
        access: Access,
        version: str,
        client_id: str,
        *,
        timeout: float = 10.0,
        no_delay: bool = True,
        quick_ack: bool = True,
        answer: Callable[[Caller, Got], None] | None = None,
    ) -> None:
        self.version = version
        self.packet_limit = 0
        self.lost: str | None = None
        self._access, self._address, self._timeout = access, access.address, timeout
        self._quick_ack, self._answer = quick_ack, answer
        self._got: queue.SimpleQueue[Got | None] = queue.SimpleQueue()
        self._heard = threading.Condition()
        self._connack: ReasonCode | None = None
        self._granted: dict[int, str | None] = {}
        self._acknowledged: dict[int, str | None] = {}
        self._client = self._new_client(client_id)
        try:
            self._client.connect(self._address.host, self._address.port, KEEPALIVE)
        except (OSError, ValueError) as error:
            self.close()
            raise unreachable(self._address, error) from None
        except TransportError:
            self.close()
            raise
        if self._client.raw is not None and not no_delay:
            self._client.raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
        self._client.loop_start()
        self._enter()

    def subscribe(self, topic: str) -> str | None:
        """Subscribe; return why it was refused, or None.

        Raises:
            TransportTimeout: the broker does not answer.
        """
        _, number = self._client.subscribe(topic, qos=1)
        return self._answered(self._granted, number, f"the subscription to {topic}")

    def unsubscribe(self, topic: str) -> None:
        """Take back a subscription, without waiting for the answer."""
        self._client.unsubscribe(topic)

    def publish(self, topic: str, payload: bytes | bytearray, *, qos: int = 0, retain: bool = False) -> None:
        """Send without asking what became of it."""
        self._client.publish(topic, payload, qos=qos, retain=retain)

    def ask(self, topic: str, payload: bytes, *, retain: bool = False) -> str | None:
        """Publish with QoS 1; return why the broker says that it refuses, or None. Under 3.1.1 it never says.

        Raises:
            TransportTimeout: the broker does not acknowledge it.
        """
        number = self._client.publish(topic, payload, qos=1, retain=retain).mid
        return self._answered(self._acknowledged, number, f"the message to {topic}")

    def take(self, timeout: float) -> Got | None:
        """Return the next message; None: none came within ``timeout`` seconds, or the connection has ended."""
        if self.lost is not None and self._got.empty():
            return None
        try:
            return self._got.get(timeout=max(timeout, 0.0))
        except queue.Empty:
            return None

    def close(self) -> None:
        """Leave the broker; may be called twice."""
        self._client.disconnect()
        self._client.loop_stop()
        # The callbacks hold this object, which holds the client, whose sockets close when nobody holds it.
        self._client.on_connect = self._client.on_disconnect = self._client.on_subscribe = None
        self._client.on_publish = self._client.on_message = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _new_client(self, client_id: str) -> Client:
        client = Client(self._access, client_id, mqtt=self.version, timeout=self._timeout)
        client.on_connect, client.on_disconnect = self._on_connect, self._on_disconnect
        client.on_subscribe, client.on_publish = self._on_subscribe, self._on_publish
        client.on_message = self._on_message
        return client

    def _enter(self) -> None:
        with self._heard:
            self._heard.wait_for(lambda: self._connack is not None or self.lost is not None, self._timeout)
        if self._connack is not None and not self._connack.is_failure:
            return
        self.close()
        if self._connack is not None:
            raise refusal(self._address, self._connack.getName())
        what = "hangs up" if self.lost else f"does not answer within {self._timeout:g} s"
        if (trouble := self._client.trouble(ask=True)) is not None:
            raise trouble
        raise TransportError(f"{self._address} took the connection but {what} in MQTT {self.version}")

    def _answered(self, answers: dict[int, str | None], number: int | None, what: str) -> str | None:
        if number is None:
            return CLOSED
        with self._heard:
            if not self._heard.wait_for(lambda: number in answers or self.lost is not None, self._timeout):
                raise TransportTimeout(f"the broker at {self._address} did not answer {what} in {self._timeout:g} s")
            return answers.pop(number) if number in answers else CLOSED

    # paho's callbacks, in its network thread

    def _on_connect(self, _c: paho.Client, _u: Any, _f: Any, code: ReasonCode, properties: Properties | None) -> None:
        with self._heard:
            self.packet_limit = getattr(properties, "MaximumPacketSize", 0)
            self._connack = code
            self._heard.notify_all()

    def _on_disconnect(self, _c: paho.Client, _u: Any, _f: Any, code: ReasonCode, _p: Properties | None) -> None:
        with self._heard:
            self.lost = code.getName()
            self._heard.notify_all()
        self._got.put(None)

    def _on_subscribe(self, _c: paho.Client, _u: Any, number: int, codes: list[ReasonCode], _p: Any) -> None:
        with self._heard:
            self._granted[number] = next((code.getName() for code in codes if code.is_failure), None)
            self._heard.notify_all()

    def _on_publish(self, _c: paho.Client, _u: Any, number: int, code: ReasonCode, _p: Any) -> None:
        with self._heard:
            self._acknowledged[number] = code.getName() if code.is_failure else None
            self._heard.notify_all()

    def _on_message(self, _c: paho.Client, _u: Any, message: paho.MQTTMessage) -> None:
        if self._quick_ack:
            self._client.quick_ack()
        got = Got(message.topic, bytes(message.payload), message.retain, time.time())
        if self._answer is None:
            self._got.put(got)
        else:
            self._answer(self, got)
