"""A stranger who may publish to a live node's topics, over a real broker: the run ends as if nobody had."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

from edgesplit.assembly import build_model
from edgesplit.fleet import Threads
from edgesplit.options import options
from edgesplit.session import Session
from edgesplit.task import COORDINATOR
from edgesplit.transport.key import Key
from edgesplit.transport.mqtt import MqttTransport
from tests.brokers import Mosquitto
from tests.cases import RULES, identical, open_session
from tests.fuzz.corpus import OPTIONS, case, recorded
from tests.fuzz.mutants import packets
from tests.system.command import shell

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("one_thread")]
KEY = Key(bytes(range(7, 39)))
HOW = {**OPTIONS, "rounds": 1000, "steps_per_round": 3, "evaluate": {"every": 0}, **RULES["clipped momentum"]}


class Attacker:
    """Listens to all that a run's nodes are sent, and publishes to one of them what can be made of it."""

    def __init__(self, port: int, run: str, victims: Sequence[str], seed: int) -> None:
        self._run, self._victims, self._rng = run, victims, Random(seed)
        self._corpus = list(recorded(signed=True).frames)
        self._client = paho.Client(CallbackAPIVersion.VERSION2)
        self._client.on_message = lambda _client, _data, message: self._heard(message)
        self._client.connect("127.0.0.1", port)
        self._client.subscribe(f"edgesplit/{run}/+/in")
        self._client.loop_start()
        self.published = 0

    def _heard(self, message: paho.MQTTMessage) -> None:
        if len(self._corpus) < 5000 and len(message.payload) > 80:
            self._corpus.append((message.topic.split("/")[-2], bytes(message.payload)))

    def publish(self, count: int) -> None:
        for _, packet in islice(packets(self._rng, self._corpus), count):
            victim = self._victims[self.published % len(self._victims)]
            self._client.publish(f"edgesplit/{self._run}/{victim}/in", packet).wait_for_publish(10.0)
            self.published += 1
            if self.published % 20 == 0:
                self._client.publish(f"edgesplit/{self._run}/{victim}/status", self._rng.choice(STATUSES))
                time.sleep(0.001)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


STATUSES = (b"{", b"x" * 5000, b'{"state": "on"}', b"[]", b'{"state": "online", "boot": "0", "time": 1}')


def test_5000_packets_to_live_nodes_change_nothing(mosquitto: Mosquitto) -> None:
    plan, task = case()
    name = f"hostile-{secrets.token_hex(4)}"
    experiment = options(**{"dtype": "float64", **HOW})
    model = build_model(task, experiment)
    ends: list[MqttTransport] = []

    def connect(node: str) -> MqttTransport:
        ends.append(MqttTransport(mosquitto.url, run=name, node=node, key=KEY))
        return ends[-1]

    transport = connect(COORDINATOR)
    fleet = Threads(connect, lambda assignment: model.kit)
    attacker = Attacker(mosquitto.port, name, ["e1", "c", "d1", COORDINATOR], 5)
    try:
        with Session(plan, task, experiment=experiment, model=model, transport=transport, fleet=fleet) as session:
            thread = threading.Thread(target=attacker.publish, args=(5000,))
            thread.start()
            rounds = 0
            while thread.is_alive() or rounds < 3:
                session.fit(1)
                rounds += 1
            thread.join()
            weights = session.weights()
            rejected = sum(end.rejected for end in ends)
    finally:
        attacker.close()
    assert attacker.published == 5000
    assert rejected > 3000
    with open_session(plan, task, **HOW) as undisturbed:
        undisturbed.fit(rounds)
        assert identical(weights, undisturbed.weights())


def test_a_run_goes_on_without_a_device_whose_data_is_not_finite(tmp_path: Path) -> None:
    """Real processes, which keep their state: only the step that is not finite is done again."""
    with shell(tmp_path) as place:
        usual_run = place.start("run", "experiment.yaml", "local.processes=1", "--name", "usual", "--json")
        limits = ("limits.quarantine_after=2", "limits.device_norm=5", "limits.device_weight=1")
        bad = place.run("run", "experiment.yaml", "task_args.infinite=pi-2", *limits, "--name", "bad", "--json").json
        usual = usual_run.end().json
        lines = [json.loads(line) for line in (place.cwd / "runs" / "bad" / "audit.jsonl").read_text().splitlines()]
    assert list(bad["quarantined"]) == ["pi-2"]
    assert usual["quarantined"] == {}
    assert bad["skipped"] <= 2
    assert abs(bad["accuracy"] - usual["accuracy"]) < 0.1
    assert {line["node"] for line in lines} == {"pi-2"}
    assert [line["what"] for line in lines][-1] == "left out for good after 2 offences"
