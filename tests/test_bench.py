"""The benchmarks' structure and arithmetic, and one short comparison with the peer; nothing here judges a time."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch

from edgesplit.assembly import build_model
from edgesplit.bench import emulated, overhead, shared, versus
from edgesplit.bench.broker import own_broker
from edgesplit.bench.figures import Figure, machine, median_figure, report, spread
from edgesplit.bench.tasks import BATCH, KEPT, SHARED, SMALL_CNN, SMALL_CNN_CUT, SMALL_CNN_IMAGE, Batches
from edgesplit.costs import LayerTimes
from edgesplit.errors import PlanError, RunError
from edgesplit.plan import Plan, Route, Stage
from edgesplit.sharing import with_peers
from edgesplit.topology import Topology
from edgesplit.transport.mqtt import MqttTransport

DOCS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"


# -- figures


@pytest.mark.parametrize(
    ("least", "most", "bound", "good", "bad"),
    [
        (0.98, 1.08, "0.98 to 1.08", 1.08, 1.081),
        (None, 1.5, "at most 1.5", -3.0, 1.6),
        (2, None, "at least 2", 2.0, 1.9),
    ],
)
def test_a_bound_is_said_and_kept(least, most, bound, good, bad):
    for value, ok in ((good, True), (bad, False)):
        shown = Figure("x", value, "ratio", least, most).to_json()
        assert shown == {"name": "x", "value": value, "unit": "ratio", "bound": bound, "ok": ok}


def test_not_a_number_is_not_ok():
    assert not Figure("x", float("nan"), "ratio", most=1.5).ok


def test_spread_is_the_median_within_its_quartiles():
    values = [5.0, 1.0, 4.0, 2.0, 3.0, 9.0]
    low, middle, high = spread(values)
    assert middle == median(values)
    assert sum(v <= low for v in values) >= 2
    assert sum(v >= high for v in values) >= 2
    assert spread([7.0]) == (7.0, 7.0, 7.0)
    with pytest.raises(RunError, match="nothing was measured"):
        spread([])
    assert median_figure("x", values, most=3.0).to_json()["quartiles"] == [low, high]


def test_the_report_is_what_every_bench_prints():
    made = report([Figure("a_b", 1.0, "ratio", most=2)], {"broker": "b"}, machine(), 9)
    assert set(made) == {"figures", "details", "machine", "versions", "repeats"}
    assert json.loads(json.dumps(made)) == made
    assert made["machine"]["cores"] >= 1
    assert {"edgesplit", "torch", "python"} <= set(made["versions"])


def test_the_documented_figures_are_those_that_are_measured():
    names = [f.name for f in emulated.figures(*[{case.name: [1.0] for case in emulated.CASES}] * 2)]
    names += [versus.figure(method, [1.0], [1.0]).name for method in versus.METHODS]
    names += [f.name for f in [*shared.share_figures(1.0, [1.0], [1.0]), *shared.killed_figures([1.0], [1.0])]]
    names += [f.name for f in overhead.overhead_figures([1.0], [1.0])]
    text = DOCS.read_text(encoding="utf-8")
    assert names == [name for name in names if f"`{name}`" in text]
    assert len(names) == len(set(names)) == 10


# -- nodes that share, and what keeping costs


def test_what_four_edges_can_do_and_what_was_made_of_it():
    model = build_model(SHARED, shared.options(["edge"], 1))
    plan = shared.make_plan(model, shared.UNEQUAL)
    forward_and_backward = 1.5 * shared.UNEQUAL["edge-1"] / (BATCH / shared.MICROS)  # a forward is half a backward
    assert shared.capacity(plan) == pytest.approx(2 / forward_and_backward)
    assert with_peers(plan, ["edge"]).peers == (shared.EDGES,)
    on, off = shared.share_figures(8.0, [7.7, 7.6, 7.8], [4.0])
    assert (on.value, on.ok, off.value, off.bound) == (7.7 / 8.0, True, 0.5, "none")
    (left,) = shared.killed_figures([4.0, 4.0], [2.7, 2.4])
    assert left.value == pytest.approx(0.85)
    assert not left.ok


def test_the_overhead_is_the_median_of_the_pairs():
    (figure,) = overhead.overhead_figures([1.02, 2.2, 1.0], [1.0, 2.0, 1.0])
    assert figure.value == pytest.approx(0.02)
    assert figure.ok
    assert not overhead.overhead_figures([1.04], [1.0])[0].ok


# -- the emulated chain


def a_plan() -> Plan:
    layers = [{"name": n, "forward_s": 1e-3, "input_grad_s": 2e-3, "weight_grad_s": 1e-3} for n in "abcd"]
    profile = {
        "gflops": 50.0,
        "input_bytes": 8.0,
        "target_bytes": 8.0,
        "layers": [layer | {"cut_bytes": {"x": 1000.0}} for layer in layers],
    }
    topology = Topology.of(emulated.NODES, broker_at=emulated.BROKER_AT)
    route = Route("pi", (Stage("pi", 0, 1), Stage("edge", 1, 2), Stage("cloud", 2, 4)))
    return Plan(tuple("abcd"), (route,), topology=topology.to_dict(), profile=profile)


def test_nodes_get_the_speed_at_which_their_slowest_action_takes_what_it_is_to():
    slowest = {"pi": 0.06, "edge": 0.05, "cloud": 0.02}
    plan = emulated.slowed(a_plan(), slowest, 6)
    times = LayerTimes(plan.profile, Topology.from_dict(plan.topology))
    for stage in plan.routes[0].stages:
        took = [6 * times.seconds(stage.node, op, stage.start, stage.stop) for op in "FB"]
        assert max(took) == pytest.approx(slowest[stage.node])
    with pytest.raises(PlanError, match="profile"):
        emulated.slowed(replace(a_plan(), profile=None), slowest, 6)


def test_the_slowest_action_is_within_what_the_bound_is_for():
    assert 0.02 <= max(emulated.SLOWEST_S.values()) <= 0.06


def test_predicted_steps_are_those_of_the_steady_state():
    slowest = emulated.SLOWEST_S
    plan = emulated.slowed(a_plan(), slowest, BATCH // emulated.MICROS)
    steps = {case.name: emulated.predicted_steps(plan, case) for case in emulated.CASES}
    for found in steps.values():
        assert len(found) == emulated.STEPS
        assert found == pytest.approx([found[0]] * len(found))
    sequential = steps.pop(emulated.SEQUENTIAL)[0]
    # One micro-batch of the whole batch: every action after the other, and the messages between. On the device a
    # backward takes as long as a forward here, elsewhere three times as long.
    actions = emulated.MICROS * (2 * slowest["pi"] + 4 / 3 * (slowest["edge"] + slowest["cloud"]))
    messages = 2 * (BATCH * 1000 * 8e-6 / 200 + 0.004) + 2 * (BATCH * 1000 * 8e-6 / 400 + 0.008)
    assert sequential == pytest.approx(actions + messages)
    assert all(emulated.MICROS * max(slowest.values()) < found[0] < sequential for found in steps.values())


def test_judged_leaves_out_the_first_steps_of_any_run():
    assert emulated.judged({step: float(step) for step in range(40, 40 + emulated.WARM + 2)}) == [43.0, 44.0]


def test_measured_is_compared_with_predicted_step_by_step():
    predicted = {"gpipe": [1.0, 2.0, 4.0], "1f1b": [1.0] * 3, "sequential": [4.0] * 3}
    measured = {"gpipe": [1.1, 2.0, 4.2], "1f1b": [1.0] * 3, "sequential": [5.0] * 3}
    found = {figure.name: figure for figure in emulated.figures(predicted, measured)}
    assert found["emulated_step_measured_over_simulated_gpipe"].value == pytest.approx(1.05)
    assert found["emulated_step_measured_over_simulated_gpipe"].ok
    assert found["emulated_speedup_measured_over_simulated_1f1b"].value == pytest.approx(1.25)
    assert not found["emulated_speedup_measured_over_simulated_1f1b"].ok


# -- beside torch.distributed.pipelining


def test_a_pairs_ratio_is_of_the_same_time():
    figure = versus.figure("1f1b", [2.0, 30.0, 4.0], [1.0, 20.0, 4.0])
    assert (figure.value, figure.quartiles, figure.bound) == (1.5, (1.25, 1.75), "at most 1.5")


def test_different_work_is_not_compared():
    versus.check_same_work([2.0, 1.0001, 0.5], [2.0, 1.0])
    with pytest.raises(RunError, match=r"in step 1 our loss is 1\.1 and the peer's 1"):
        versus.check_same_work([2.0, 1.1], [2.0, 1.0])
    with pytest.raises(RunError, match="did not do the same"):
        versus.check_same_work([float("nan")], [2.0])


def test_batches_repeat_and_fit_the_model():
    batches = Batches(SMALL_CNN_IMAGE, 0)
    assert len(list(batches)) == KEPT
    x, target = batches.of_step(KEPT + 1)
    again = Batches(SMALL_CNN_IMAGE, 0).of_step(1)
    assert torch.equal(x, again[0])
    assert torch.equal(target, again[1])
    model = SMALL_CNN.model()
    assert SMALL_CNN.loss(model(x), target).dim() == 0
    assert len(model[:SMALL_CNN_CUT](x)) == BATCH


@pytest.mark.system
def test_the_peer_takes_the_same_steps_as_one_process(tmp_path):
    torch.manual_seed(0)
    model, batches, losses = SMALL_CNN.model(), Batches(SMALL_CNN_IMAGE, 0), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(3):
        x, target = batches.of_step(step)
        optimizer.zero_grad()
        loss = SMALL_CNN.loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    peer = versus.Peer("1f1b", tmp_path)
    try:
        seconds, found = peer.block(3)
    finally:
        peer.close()
    assert found == pytest.approx(losses, rel=1e-4)
    assert len(seconds) == 2
    assert min(seconds) > 0


@pytest.mark.system
def test_a_rank_that_ends_is_said(tmp_path):
    peer = versus.Peer("no-such-schedule", tmp_path)
    try:
        with pytest.raises(RunError, match=r"rank . of torch\.distributed\.pipelining ended: .*no-such-schedule"):
            peer.block(1)
    finally:
        peer.close()


@pytest.mark.system
@pytest.mark.mosquitto
def test_the_broker_ends_with_the_process_that_started_it():
    with own_broker() as (name, url):
        assert "mosquitto" in name
        MqttTransport(url, run="r", node="a").close()
    code = (
        "import sys, time\n"
        "from edgesplit.bench.broker import own_broker\n"
        "with own_broker() as (name, url):\n"
        "    print(url, flush=True)\n"
        "    time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    port = child.stdout.readline().strip().rpartition(":")[2]
    child.kill()
    child.communicate()
    assert goes_away(int(port))


def goes_away(port: int) -> bool:
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            return True
        time.sleep(0.1)
    return False
