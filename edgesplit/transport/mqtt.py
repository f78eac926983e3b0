"""The transport over an MQTT broker: a thin shell of one thread around :class:`Endpoint`.

Topics: ``{prefix}/{run}/{node}/in`` for frames, ``{prefix}/{run}/{node}/status`` for the retained status.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from paho.mqtt import client as paho
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from edgesplit.errors import FrameError, TransportError, TransportTimeout, Unreachable
from edgesplit.transport import frames
from edgesplit.transport.access import VERSIONS, Access
from edgesplit.transport.address import unreachable
from edgesplit.transport.base import Inbox, Message
from edgesplit.transport.client import OLD_BROKER, Client, refusal
from edgesplit.transport.endpoint import Announce, Deliver, Effect, Endpoint
from edgesplit.transport.frames import LIMITS, Bytes, Flag, Limits
from edgesplit.transport.key import Key
from edgesplit.transport.lives import MOST_PAUSE_S, Lives
from edgesplit.transport.presence import FRESH, Status
from edgesplit.transport.pump import Pump
from edgesplit.transport.reliable import Publish, Settings

log = logging.getLogger("edgesplit.transport.mqtt")

PACKET = 256 << 10
"""Bytes of an MQTT packet where the broker names no limit, and at most."""

LEAST_CHUNK = 1024
SHORTER = (60 << 10, 15 << 10)
"""Bytes of the chunks that are tried where the broker swallows one of the full size."""

AWAY_S = 120.0
"""How long a probe waits for those that are away, beside its own time."""

MISSED_BEATS = 3
"""So many statuses that do not come, and a probe takes the network to be away."""

KEEPALIVE = 10
CALLS, CALLING_S = 3, 0.2
"""How often a broker that hangs up before it has answered is called, and the pause in between."""

_TAKEN_OVER = "Session taken over"


@dataclass(slots=True)
class _Answers:
    """What the broker has said since the last attempt to connect; None: nothing yet."""

    connack: ReasonCode | None = None
    packet_limit: int = 0
    granted: list[ReasonCode] | None = None
    unsubscribed: bool = False
    lost: str | None = None


@dataclass(slots=True)
class _Name:
    """What is known of the claim to this node's name: has its own status come back, and who else refreshes one."""

    echoed: bool = False
    rival_time: float = -math.inf
    rival_lives: bool = False


class MqttTransport:
    """One node's connection to the broker of a run.

    Args:
        broker: its url, or the url and how to get in.
        run, node: names, 1 to 64 of ``A-Z a-z 0-9 . _ -``.
        connect_timeout: seconds to wait for each answer of the broker.
        qos: of the frames; they are acknowledged end to end whatever it is.
        max_packet: bytes of a packet that the broker takes, where it takes less than it says.
        heartbeat: seconds between refreshes of the status.
        grace, silence: see :class:`Presence`.
        give_up: seconds without a connection after which the inbox fails.
        key: the run's: frames are signed with it.
        key_required: believe nothing that is not signed with it; otherwise nothing of those that have signed before.
        watch: nodes whose status becomes inbox messages; None: all of the run.

    Raises:
        TransportError: the broker cannot be reached, refuses, or does not let this node's frames through, or the
            node is in the run already.
    """

    def __init__(
        self,
        broker: str | Access,
        *,
        run: str,
        node: str,
        connect_timeout: float = 10.0,
        qos: int = 0,
        max_packet: int | None = None,
        heartbeat: float = 2.0,
        grace: float = 2.0,
        silence: float = 30.0,
        give_up: float = 120.0,
        watch: Sequence[str] | None = None,
        settings: Settings | None = None,
        limits: Limits = LIMITS,
        key: Key | None = None,
        key_required: bool = True,
    ) -> None:
        for what, name in (("run", run), ("node", node)):
            if not frames.valid_name(name):
                raise TransportError(f"{what} name {name!r} must be 1 to 64 of A-Z a-z 0-9 . _ -: it becomes a topic")
        if qos not in (0, 1, 2):
            raise TransportError(f"qos {qos} must be 0, 1 or 2")
        self.node, self.run = node, run
        self._access = broker if isinstance(broker, Access) else Access(broker)
        self._address = self._access.address
        self._qos = qos
        self._timeout, self._heartbeat, self._give_up = connect_timeout, heartbeat, give_up
        self._boot = secrets.randbits(63) + 1
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._progress = threading.Condition(self._lock)
        self._endpoint = Endpoint(
            run,
            node,
            self._boot,
            heartbeat=heartbeat,
            grace=grace,
            silence=silence,
            settings=settings,
            limits=limits,
            key=key,
            key_required=key_required,
        )
        self._inbox = Inbox(node)
        self._inbox.on_room = self._room
        self._reached: set[str] = set()
        self._refused: dict[str, str] = {}
        self._watch = watch
        self._own_topic = self._topic(node)
        self._heard_at = time.monotonic()
        self._closing = threading.Event()
        self._closed = False
        self._open = False  # frames are only answered when it is known that no other process is this node
        self._connected = False
        self._answers = _Answers()
        self._probed = 0  # size of the longest chunk that came back
        self._name = _Name()
        self._lives = Lives(give_up, shared=self._access.shares_ids)
        self.version, self._client = self._connect([self._access.mqtt] if self._access.mqtt else list(VERSIONS))
        try:
            self._subscribe_first()
            self.chunk_size = self._fitting_chunk(max_packet)
            self._probe_own_topic()
            self._claim_name()
        except BaseException as error:
            broke = self._answers.lost is not None and isinstance(error, TransportError)
            self._drop(self._client)
            self._pump.close()
            if broke and self._access.shares_ids:
                raise self._thrown_out() from None
            if broke:
                raise Unreachable(str(error)) from None
            raise
        self._thread = threading.Thread(target=self._network, name=f"edgesplit-mqtt-{node}", daemon=True)
        self._thread.start()

    # What a node calls

    def mailbox(self, node: str) -> Inbox:
        """Return the inbox of this transport's node.

        Raises:
            TransportError: it is another's.
        """
        if node != self.node:
            raise TransportError(f"this transport is {self.node!r}'s: {node!r} needs its own")
        return self._inbox

    def send(self, node: str, *messages: Message) -> None:
        """Queue ``messages`` for ``node``, to travel as one; they are copied, so their arrays may change afterwards.

        Raises:
            FrameError: a message cannot travel.
            TransportError: the transport is closed, or a name is wrong.
        """
        outgoing = self._endpoint.pack(node, messages)
        if node == self.node:
            self._perform(self._endpoint.to_self(outgoing))
            return
        with self._sending:  # one message at a time, but its first chunks are on their way before the last is cut
            for chunk in self._endpoint.cut(node, outgoing, self.chunk_size):
                with self._lock:
                    if self._closed:
                        raise TransportError(f"{outgoing.kind!r} message to {node!r} after the transport was closed")
                    self._perform(self._endpoint.send(node, chunk, time.monotonic()))
                self._pump.published()

    def flush(self, timeout: float) -> None:
        """Wait until everything sent has been acknowledged, by all but the nodes that have left.

        Raises:
            TransportTimeout: naming those that have not.
        """
        with self._lock:
            if not self._progress.wait_for(lambda: not self._endpoint.missing(), timeout):
                names = ", ".join(f"{peer!r} ({count} chunks)" for peer, count in self._endpoint.missing().items())
                raise TransportTimeout(f"after {timeout:g} s {self.node!r} has no acknowledgement from {names}")

    def probe(self, peers: Iterable[str], timeout: float = 10.0) -> None:
        """Make sure that frames reach these nodes and theirs this one; their transports answer by themselves.

        Raises:
            TransportTimeout: naming those that did not answer, and their topics.
        """
        wanted = set(peers) - {self.node}
        with self._lock:
            self._reached -= wanted
            for peer in sorted(wanted):
                self._perform(self._endpoint.hello(peer, time.monotonic()))
            self._pump.ring()
            if not self._wait_for_answers(wanted, timeout):
                silent = sorted(wanted - self._reached)
                for known in silent:
                    if known in self._refused:
                        raise TransportTimeout(f"no way from {self.node!r} to {known!r}: {self._refused[known]}")
                missing = ", ".join(f"{p!r} (topic {self._topic(p)})" for p in silent)
                raise TransportTimeout(
                    f"no answer within {timeout:g} s from {missing}: is it running, and do the broker's rules let "
                    f"{self.node!r} publish there?"
                )

    def _wait_for_answers(self, wanted: set[str], timeout: float) -> bool:
        """Only the time counts in which this node and those that it waits for can be heard, but for their answers."""
        left, longest = timeout, time.monotonic() + timeout + AWAY_S
        while (began := time.monotonic()) < longest and left > 0:
            if self._progress.wait_for(lambda: wanted <= self._reached, min(left, 0.25)):
                return True
            if self._all_heard(wanted - self._reached):
                left -= time.monotonic() - began
        return False

    def _all_heard(self, peers: Iterable[str]) -> bool:
        """Whether the network is there, as far as one can tell: a silent one shows by the statuses that do not come."""
        lately = time.monotonic() - MISSED_BEATS * self._heartbeat
        heard = [self._heard_at, *(seen for peer in peers if (seen := self._endpoint.last_seen(peer)) is not None)]
        return self._connected and min(heard) > lately and not any(map(self._endpoint.away, peers))

    def forget(self, node: str) -> None:
        """Drop what is waiting for a node that will not come back."""
        with self._lock:
            self._endpoint.forget(node)
            self._progress.notify_all()

    def last_seen(self, node: str) -> float | None:
        """When something was last heard of a node, on the clock of ``time.monotonic``; None: never."""
        with self._lock:
            return self._endpoint.last_seen(node)

    @property
    def connected(self) -> bool:
        """Whether the broker can be reached now."""
        return self._connected

    @property
    def rejected(self) -> int:
        """Packets that were dropped because they are not what they should be."""
        return self._endpoint.rejected

    def traffic(self, node: str) -> Mapping[str, int]:
        """Bytes sent so far, by receiver; what is sent again does not count."""
        with self._lock:
            return self._endpoint.traffic()

    def close(self) -> None:
        """Say goodbye, leave the broker, end the thread."""
        with self._lock:
            if self._closed:
                return
            self._perform(self._endpoint.closing(time.time()))
            self._closed = True
            self._closing.set()
            if self._connected:
                # A socket that is closed with something unread resets the connection, and the broker loses what it
                # has not read either: nothing may come any more.
                self._client.unsubscribe([topic for topic, _ in self._topics()])
        self._pump.ring()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # Starting

    def _connect(self, versions: list[str]) -> tuple[str, Client]:
        """Connect in the first of the versions that the broker answers in; one that hangs up is asked again."""
        silent = False
        for attempt in range(CALLS):
            if attempt:
                time.sleep(CALLING_S)
            began = time.monotonic()
            if (connected := self._call(versions)) is not None:
                return connected
            if silent := time.monotonic() - began >= self._timeout:
                break
        what = f"does not answer within {self._timeout:g} s" if silent else "hangs up"
        raise Unreachable(
            f"{self._address} took the connection but {what} in MQTT {' or '.join(versions)}: "
            "is it a broker's port, and the right one for this url?"
        )

    def _call(self, versions: list[str]) -> tuple[str, Client] | None:
        for version in versions:
            client = self._new_client(version)
            self._pump = Pump(client, direct=not (self._address.tls or self._address.websockets))
            answers = self._answers = _Answers()
            try:
                client.connect(self._address.host, self._address.port, KEEPALIVE)
            except (OSError, ValueError, TransportError) as error:
                self._drop(client)
                self._pump.close()
                raise (error if isinstance(error, TransportError) else unreachable(self._address, error)) from None
            self._loop_until(lambda: self._answers.connack is not None)
            if answers.connack is not None and not answers.connack.is_failure:
                return version, client
            self._drop(client)
            self._pump.close()
            if answers.connack is None and (trouble := client.trouble(ask=version == versions[-1])) is not None:
                raise trouble
            reason = answers.connack.getName() if answers.connack is not None else OLD_BROKER
            if reason != OLD_BROKER:
                raise refusal(self._address, reason)
        return None

    def _new_client(self, version: str) -> Client:
        name = self._access.id_of(self.run, self.node, self._boot)
        client = Client(self._access, name, mqtt=version, timeout=self._timeout)
        client.max_inflight_messages_set(1000)
        client.will_set(
            self._topic(self.node, "status"), self._endpoint.status("offline", time.time()), qos=1, retain=True
        )
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_subscribe = self._on_subscribe
        client.on_unsubscribe = self._on_unsubscribe
        client.on_message = self._on_message
        # Without this paho would write to the socket by itself: see Pump.
        client.on_socket_register_write = _nothing
        return client

    def _subscribe_first(self) -> None:
        self._subscribe()
        if not self._loop_until(lambda: self._answers.granted is not None):
            what = self._answers.lost or f"nothing within {self._timeout:g} s"
            raise TransportError(f"the broker at {self._address} does not answer a subscription ({what})")
        for (topic, _), code in zip(self._topics(), self._answers.granted or [], strict=False):
            if code.is_failure:
                raise TransportError(f"the broker does not let {self.node!r} subscribe to {topic} ({code.getName()})")

    def _fitting_chunk(self, max_packet: int | None) -> int:
        limit = min(x for x in (max_packet, self._answers.packet_limit, PACKET) if x)
        size = limit - self._around
        if size < LEAST_CHUNK:
            raise TransportError(f"the broker's packet limit of {limit} bytes is too small: allow 64 KiB or more")
        return size

    @property
    def _around(self) -> int:
        """Bytes of a packet that are not the chunk's, at most."""
        return len(self._topic("x" * 64)) + 16

    def _probe_own_topic(self) -> None:
        """Send chunks to oneself, the longest first: a broker may swallow one without a word, or hang up."""
        sizes = [self.chunk_size, *(s for s in SHORTER if s < self.chunk_size)]
        for longest, size in enumerate(sizes):
            for shorter in sizes[longest:]:
                self._probe(shorter)
            if self._loop_until(lambda: self._probed > 0) or self._answers.lost is None or size == sizes[-1]:
                break
            self._drop(self._client)
            self._pump.close()
            self.version, self._client = self._connect([self.version])
            self._subscribe_first()
        if not self._probed:
            what = (
                "the broker closed the connection"
                if self._answers.lost
                else f"it did not come within {self._timeout:g} s"
            )
            raise TransportError(
                f"a packet of {sizes[-1]} bytes from {self.node!r} to itself on topic {self._topic(self.node)} was "
                f"lost ({what}): an access rule or a packet limit of the broker swallows it"
            )
        self.chunk_size = self._probed  # packets keep their order: the first to come is the longest that passes

    def _probe(self, size: int) -> None:
        (chunk,) = frames.split([bytes(size - frames.header_size(self.node))], size, self.node)
        # Without a MAC: who else would believe it.
        data = frames.seal(chunk, Flag.PROBE, self._endpoint.run_hash, self.node, self._boot, self._boot)
        self._client.publish(self._topic(self.node), data, qos=self._qos)

    def _claim_name(self) -> None:
        """Make sure that no other process is this node. The first status on the topic wins."""
        name = self._name
        if name.rival_time >= time.time() - FRESH:
            # It may be a dead process's, kept by the broker: a living one refreshes it.
            self._loop_until(lambda: name.rival_lives, 2.5 * self._heartbeat)
        if not name.rival_lives:
            self._announce(self._endpoint.announce(time.monotonic(), time.time()))
            self._loop_until(lambda: name.echoed)
        if name.rival_lives:
            raise TransportError(
                f"node {self.node!r} is already in run {self.run!r} (another process refreshes its status): "
                "stop that one, or give this node or run another name"
            )
        if not name.echoed:
            raise TransportError(
                f"the status of {self.node!r} on topic {self._topic(self.node, 'status')} did not come back: "
                "an access rule of the broker swallows it"
            )
        self._connected = self._open = True
        self._lives.began(time.monotonic())

    def _loop_until(self, done: Callable[[], bool], timeout: float | None = None) -> bool:
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        while not done():
            left = deadline - time.monotonic()
            if left <= 0 or self._answers.lost is not None or not self._pump.turn(min(left, 0.1)):
                break
        return done()

    # The network thread

    def _network(self) -> None:
        while not self._closing.is_set():
            try:
                if not self._pump.turn(self._work(time.monotonic())):
                    self._reconnect()
            except Exception:  # whatever it was, the others must still be served
                log.exception("network thread of %s", self.node)
        with self._lock:
            deadline = time.monotonic() + 2.0  # close() has queued its goodbye by now
        while self._connected and not self._answers.unsubscribed and time.monotonic() < deadline:
            if not self._pump.turn(0.05):
                break
        self._drop(self._client)
        self._pump.close()

    def _work(self, now: float) -> float:
        """Do what is due; returns for how many seconds nothing else will be."""
        with self._lock:
            if self._closed:
                return 0.0
            self._perform(self._endpoint.tick(now, time.time()))
            return max(0.0, self._endpoint.next_deadline() - now)

    def _reconnect(self) -> None:
        """Connect again, subscribe, and go on where it stopped; until it works, is refused, or takes too long."""
        self._connected = False
        if self._answers.lost == _TAKEN_OVER:
            self._inbox.fail(TransportError(f"another client has taken the place of {self.node!r} at the broker"))
            self._closing.wait()  # coming back would throw out the other, which would come back too
        self._lives.ended(time.monotonic())
        since, pause = time.monotonic(), self._lives.pause
        while not self._connected and not self._closing.wait(pause):
            if time.monotonic() - since > self._give_up and not self._inbox.failed:
                self._inbox.fail(TransportError(f"no broker at {self._address} for {self._give_up:g} s"))
            if self._lives.hopeless(time.monotonic()):
                self._inbox.fail(self._thrown_out())
                self._closing.wait()
            pause = min(2 * pause, MOST_PAUSE_S)
            answers = self._answers = _Answers()
            try:
                with self._pump.writing:
                    self._client.reconnect()
            except (OSError, ValueError, TransportError):
                continue
            self._loop_until(lambda: self._answers.connack is not None)
            if answers.connack is not None and answers.connack.is_failure:
                self._inbox.fail(refusal(self._address, answers.connack.getName()))
            elif 0 < answers.packet_limit < self.chunk_size + self._around:
                self._inbox.fail(self._shrunk(answers.packet_limit))
                self._closing.wait()  # what is under way has been cut for longer packets, and would end each connection
            elif answers.connack is not None:
                self._lives.began(time.monotonic())
                self._subscribe()
                if self._loop_until(lambda: self._answers.granted is not None):
                    self._resume(time.monotonic())
                else:
                    self._lives.ended(time.monotonic())

    def _shrunk(self, limit: int) -> TransportError:
        return TransportError(
            f"the broker at {self._address} takes packets of {limit} bytes now, and {self.node!r} has cut its messages "
            f"for {self.chunk_size + self._around}: give the broker its old limit back, or start the run again"
        )

    def _thrown_out(self) -> TransportError:
        name = self._access.id_of(self.run, self.node, self._boot)
        hint = "is another client using this id? put {boot} into the pattern of client ids, or stop the other"
        if not self._access.shares_ids:
            hint = "look at the broker's log: an access rule or a limit may do that"
        return TransportError(
            f"the broker at {self._address} lets client {name!r} in and closes the connection at once: {hint}"
        )

    def _resume(self, now: float) -> None:
        with self._lock:
            if self._closed:
                return
            self._connected = True
            self._perform(self._endpoint.reconnected(now, time.time()))

    def _subscribe(self) -> None:
        self._client.subscribe(self._topics())

    def _topics(self) -> list[tuple[str, int]]:
        watched = ["+"] if self._watch is None else sorted({self.node, *self._watch})
        return [(self._topic(self.node), self._qos), *((self._topic(name, "status"), 0) for name in watched)]

    def _topic(self, node: str, what: str = "in") -> str:
        return self._access.topic(self.run, node, what)

    def _perform(self, effects: Iterable[Effect]) -> None:
        """Act on what the endpoint says; with the lock held, so that packets keep their order."""
        for effect in effects:
            if isinstance(effect, Publish):
                if self._connected and self._qos == 0:
                    self._client.post(self._topic(effect.peer), effect.data)
                elif self._connected:
                    self._client.publish(self._topic(effect.peer), effect.data, qos=self._qos)
            elif isinstance(effect, Deliver):
                if effect.message.kind == "refused":
                    self._refused[effect.message.sender] = str(effect.message.meta["reason"])
                self._inbox.put(effect.message, effect.size)
            elif isinstance(effect, Announce):
                if self._connected:
                    self._announce(effect)
            else:
                self._reached.add(effect.peer)

    def _announce(self, effect: Announce) -> None:
        self._client.publish(self._topic(self.node, "status"), effect.data, qos=0, retain=effect.retain)

    # paho's callbacks

    def _on_connect(self, _c: paho.Client, _u: Any, _f: Any, code: ReasonCode, properties: Properties | None) -> None:
        self._answers.packet_limit = getattr(properties, "MaximumPacketSize", 0)
        self._answers.connack = code

    def _on_disconnect(self, _c: paho.Client, _u: Any, _f: Any, code: ReasonCode, _p: Properties | None) -> None:
        self._answers.lost = code.getName()
        self._connected = False

    def _on_subscribe(self, _c: paho.Client, _u: Any, _m: int, codes: list[ReasonCode], _p: Any) -> None:
        self._answers.granted = codes

    def _on_unsubscribe(self, _c: paho.Client, _u: Any, _m: int, _codes: list[ReasonCode], _p: Any) -> None:
        self._answers.unsubscribed = True

    def _on_message(self, _c: paho.Client, _u: Any, message: paho.MQTTMessage) -> None:
        """Nothing that the network brings may end the thread."""
        try:
            self._client.quick_ack()
            self._heard_at = time.monotonic()
            if message.topic == self._own_topic:
                self._frame(message.payload)
            else:
                self._heard(message)
        except FrameError as error:
            log.debug("%s dropped a packet: %s", self.node, error)
        except Exception:
            self._endpoint.rejected += 1
            log.exception("%s could not take a packet", self.node)

    def _frame(self, payload: Bytes) -> None:
        frame = self._endpoint.parse(payload)
        if frame.sender == self.node:
            if frame.flags & Flag.PROBE and frame.boot == self._boot and not self._probed:
                self._probed = len(payload)
            return
        if not self._open:
            return
        if frame.flags & Flag.DATA and self._inbox.full(frame.sender):
            frame = frame._replace(flags=frame.flags & ~Flag.DATA)  # it is sent again when the inbox was read
        with self._lock:
            if not self._closed:
                self._perform(self._endpoint.received(frame, time.monotonic()))
                self._progress.notify_all()

    def _room(self, sender: str) -> None:
        """The inbox, which was full of a node's messages, has been read."""
        with self._lock:
            if not self._closed:
                self._perform(self._endpoint.room(sender))
        self._pump.ring()

    def _heard(self, message: paho.MQTTMessage) -> None:
        if not message.payload:
            return  # a cleared status
        name, status = message.topic.split("/")[-2], self._endpoint.read(bytes(message.payload))
        if name == self.node:
            self._heard_own(status, message.retain)
        elif frames.valid_name(name):
            with self._lock:
                now, wall = time.monotonic(), time.time()
                self._perform(self._endpoint.heard(name, status, message.retain, now, wall))
                self._progress.notify_all()

    def _heard_own(self, status: Status, retained: bool) -> None:
        if status.boot == self._boot:
            self._name.echoed |= status.state == "online"
        elif status.state == "online" and not self._name.echoed:
            self._name.rival_lives |= not retained
            self._name.rival_time = status.time

    @staticmethod
    def _drop(client: paho.Client) -> None:
        """End a client without its will, and let go of it: its sockets close when nobody holds it."""
        if client.is_connected():
            client.disconnect()
            for _ in range(20):
                if client.loop(0.05) != paho.MQTT_ERR_SUCCESS:
                    break
        client.on_connect = client.on_disconnect = client.on_subscribe = None
        client.on_unsubscribe = client.on_message = None
        client.on_socket_register_write = None


def _nothing(_client: paho.Client, _userdata: Any, _sock: Any) -> None:
    return
