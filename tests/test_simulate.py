from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgesplit.codecs import CODECS
from edgesplit.costs import ProfileCosts, UnitCosts
from edgesplit.errors import CodecError, PlanError, ScheduleError
from edgesplit.methods import orders, predict
from edgesplit.methods import simulate as simulate_plan
from edgesplit.plan import Plan, Route, Stage
from edgesplit.schedule import Action, Micro, Step, even_steps
from edgesplit.simulate import Transfer, simulate
from edgesplit.topology import Link, Node, Topology


def chain(*nodes):
    return Plan(
        tuple(f"l{i}" for i in range(len(nodes))),
        (Route(nodes[0], tuple(Stage(node, i, i + 1) for i, node in enumerate(nodes))),),
    )


def ring(nodes, loops):
    return chain(*([f"n{i}" for i in range(nodes)] * loops))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micros"), [(1, 3), (2, 2), (4, 4), (4, 8), (5, 3), (8, 20)])
def test_the_bubble_of_a_chain_is_p_minus_1_over_m(name, stages, micros):
    plan = chain(*(f"n{i}" for i in range(stages)))
    timeline = predict(name, plan, even_steps(plan, micros))
    assert timeline.bubble == pytest.approx((stages - 1) / micros, abs=1e-12)
    assert timeline.makespan == pytest.approx(3 * (micros + stages - 1), abs=1e-12)


@pytest.mark.parametrize("name", ["interleaved", "breadth-first"])
@pytest.mark.parametrize(("nodes", "loops", "micros"), [(2, 2, 4), (4, 2, 8), (4, 4, 8), (3, 2, 9), (4, 3, 4)])
def test_the_bubble_of_a_ring_is_v_times_smaller(name, nodes, loops, micros):
    plan = ring(nodes, loops)
    timeline = predict(name, plan, even_steps(plan, micros))
    assert timeline.bubble == pytest.approx((nodes - 1) / (loops * micros), abs=1e-12)


def test_1f1b_holds_p_minus_r_forwards_and_gpipe_all():
    plan = chain(*"abcd")
    steps = even_steps(plan, 9)
    assert predict("1f1b", plan, steps).peak_live == {"a": 4, "b": 3, "c": 2, "d": 1}
    assert predict("gpipe", plan, steps).peak_live == dict.fromkeys("abcd", 9)


def test_a_u_shape_under_1f1b_neither_serialises_nor_holds_everything():
    for servers in (1, 2, 3):
        plan = chain("d", *(f"s{i}" for i in range(servers)), "d")
        steps = even_steps(plan, 24)

        class Light(UnitCosts):
            """The device's two ends together are as long as a server's part."""

            def seconds(self, node, action):
                return UnitCosts.seconds(self, node, action) * (0.5 if node == "d" else 1.0)

        ours, gpipe = (predict(name, plan, steps, Light()) for name in ("1f1b", "gpipe"))
        assert ours.makespan < 1.15 * gpipe.makespan
        assert ours.peak_live["d"] <= 4 * (servers + 1) < gpipe.peak_live["d"]


@dataclass
class Table:
    """Costs from tables: seconds by (node, op), bytes by kind, and links."""

    times: dict
    sizes: dict = field(default_factory=dict)
    ways: dict = field(default_factory=dict)

    def seconds(self, node, action):
        return self.times.get((node, action.op), 0.0)

    def nbytes(self, kind, stage, micro):
        return self.sizes.get((kind, stage), self.sizes.get(kind, 0.0))

    def hops(self, src, dst):
        return self.ways.get((src, dst), ())


@settings(max_examples=100, deadline=None)
@given(data=st.data(), stages=st.integers(1, 5), micros=st.integers(1, 7))
def test_gpipe_takes_fill_plus_the_two_bottlenecks(data, stages, micros):
    """A theorem (flow shop with identical jobs): S + (Q - 1)(max f + max g) over nodes and directed links."""
    time = st.floats(0.1, 10.0)
    nodes = [f"n{i}" for i in range(stages)]
    plan = chain(*nodes)
    costs = Table({(node, op): data.draw(time) for node in nodes for op in "FB"})
    forward = [costs.times[node, "F"] for node in nodes]
    backward = [costs.times[node, "B"] for node in nodes]
    latencies = 0.0
    for i, (below, above) in enumerate(pairwise(nodes)):
        for kind, stage, src, dst, spent in (
            ("act", i + 1, below, above, forward),
            ("grad", i, above, below, backward),
        ):
            link = Link(src, dst, 8.0, data.draw(time))
            costs.ways[src, dst] = (link,)
            costs.sizes[kind, stage] = 1e6 * data.draw(time)
            spent.append(link.seconds(costs.sizes[kind, stage]) - link.latency_s)
            latencies += link.latency_s
    expected = sum(forward) + sum(backward) + latencies + (micros - 1) * (max(forward) + max(backward))
    assert predict("gpipe", plan, even_steps(plan, micros), costs).makespan == pytest.approx(expected, rel=1e-12)


def tree(devices):
    return Plan(("a", "b"), tuple(Route(f"d{i}", (Stage(f"d{i}", 0, 1), Stage("e", 1, 2))) for i in range(devices)))


def test_links_serve_messages_in_the_order_of_arrival_hop_by_hop():
    plan = tree(2)
    down = {("e", f"d{i}"): (Link("e", f"d{i}", math.inf, 0.0),) for i in range(2)}
    shared = Link("b", "e", 8.0, 0.25)
    up = {
        ("d0", "e"): (Link("d0", "b", 4.0, 0.5), shared),
        ("d1", "e"): (Link("d1", "b", 8.0, 0.5), shared),
    }
    costs = Table({("d0", "F"): 1.0, ("d1", "F"): 1.0, ("e", "F"): 1.0}, {"act": 1e6, "target": 0.0}, up | down)
    timeline = predict("gpipe", plan, even_steps(plan, 1), costs)
    acts = [t for t in timeline.transfers if t.kind == "act"]
    assert acts == [
        Transfer("d0", "b", "act", 1, 0, 1e6, 1.0, 3.0),
        Transfer("d1", "b", "act", 1, 1, 1e6, 1.0, 2.0),
        Transfer("b", "e", "act", 1, 1, 1e6, 2.5, 3.5),  # d1's comes first, though it is the later number
        Transfer("b", "e", "act", 1, 0, 1e6, 3.5, 4.5),
    ]
    forwards = [(str(e.action), e.start) for e in timeline.events if e.node == "e" and e.action.op == "F"]
    assert forwards == [("1F0", 4.75), ("1F1", 5.75)]  # the order's turn, not the arrival's
    assert timeline.link_bytes["b", "e"] == 2e6


def test_a_window_runs_what_is_ready():
    plan = tree(2)
    steps = even_steps(plan, 1)
    costs = Table({("d0", "F"): 5.0, ("d1", "F"): 1.0, ("e", "F"): 1.0, ("e", "B"): 1.0})
    one, two = (predict("gpipe", plan, steps, costs, window=w) for w in (1, 2))
    starts = [{str(e.action): e.start for e in t.events if e.node == "e"} for t in (one, two)]
    assert starts[0]["1F0"] == 5.0
    assert starts[0]["1F1"] == 6.0
    assert starts[1]["1F1"] == 1.0
    assert starts[1]["1F0"] == 5.0


def test_a_window_never_runs_a_forward_before_the_update_it_must_see():
    plan = tree(2)
    steps = even_steps(plan, 3, steps=3)
    costs = Table({("d0", "F"): 5.0, ("d1", "F"): 1.0, ("e", "F"): 1.0, ("e", "B"): 1.0})
    for event in predict("1f1b", plan, steps, costs, window=8).events:
        assert event.version == event.step + (event.action.op == "U")


def test_the_target_is_waited_for():
    plan = chain("d", "e", "c")
    slow = {("d", "c"): (Link("d", "c", 8.0, 0.0),), ("d", "e"): (), ("e", "c"): ()}
    costs = Table(dict.fromkeys((("d", "F"), ("e", "F"), ("c", "F")), 1.0), {"target": 5e6}, slow)
    found = predict("gpipe", plan, even_steps(plan, 1), costs)
    assert next(e.start for e in found.events if str(e.action) == "2F0") == 6.0
    assert found.link_bytes == {("d", "c"): 5e6}
    u_shape = predict("gpipe", chain("d", "e", "d"), even_steps(chain("d", "e", "d"), 1), costs)
    assert u_shape.link_bytes == {}  # labels stay on the device


def test_updates_wait_for_the_commit_of_the_step_before_or_of_their_own():
    plan = chain("a", "b")
    steps = even_steps(plan, 1, steps=2)

    def updates(**options):
        found = predict("1f1b", plan, steps, **options)
        return [(e.node, e.step, e.start) for e in found.events if e.action.op == "U"]

    # A step: F a 0-1, F b 1-2, B b 2-4, B a 4-6.
    assert updates() == [("b", 0, 4.0), ("a", 0, 6.0), ("b", 1, 10.0), ("a", 1, 12.0)]
    assert updates(commit_s=1.0) == [("b", 0, 4.0), ("a", 0, 6.0), ("b", 1, 10.0), ("a", 1, 12.0)]
    assert updates(commit_s=5.0) == [("b", 0, 4.0), ("a", 0, 6.0), ("b", 1, 11.0), ("a", 1, 12.0)]
    assert updates(commit_s=1.0, wait_commit=True) == [("a", 0, 7.0), ("b", 0, 7.0), ("a", 1, 14.0), ("b", 1, 14.0)]


@pytest.mark.parametrize("stages", [2, 4])
def test_pipedreams_delay_is_the_number_of_stages_downstream(stages):
    plan = chain(*(f"n{i}" for i in range(stages)))
    found = predict("pipedream", plan, even_steps(plan, 5, steps=2), window=1)
    for event in found.events:
        op, stage, micro, _ = event.action
        made = micro + 1 if op == "U" else max(0, micro - (stages - 1 - stage))
        assert event.version == made  # a backward uses its forward's version
    assert found.peak_live == {f"n{i}": stages - i for i in range(stages)}


def test_steps_end_one_after_the_other():
    plan = chain("a", "b")
    found = predict("1f1b", plan, even_steps(plan, 2, steps=3, first=5))
    assert found.step_ends == {5: 9.0, 6: 18.0, 7: 27.0}
    assert [e.start for e in found.events] == sorted(e.start for e in found.events)
    assert found.busy == {"a": 18.0, "b": 18.0}
    assert "bubble 0.500" in str(found)


def test_a_deadlock_shows_where_each_node_is_stuck():
    plan = chain("a", "b")
    steps = even_steps(plan, 2)
    bad = orders("gpipe", plan, steps)
    bad["b"] = [Action.parse(text) for text in ["1F0", "1B0", "1F1", "1B1", "1U1"]]
    simulate(bad, plan, steps)
    bad["a"] = [Action.parse(text) for text in ["0F0", "0B0", "0B1", "0F1", "0U1"]]
    with pytest.raises(ScheduleError) as error:
        simulate(bad, plan, steps)
    assert str(error.value) == (
        "the schedule deadlocks:\n  a at 0B1: 0F0 0B0 [0B1] 0F1 0U1\n  b at 1F1: 1F0 1B0 [1F1] 1B1 1U1"
    )
    long = even_steps(plan, 40)
    bad = orders("gpipe", plan, long)
    bad["b"].insert(0, bad["b"].pop())
    bad["a"].insert(0, bad["a"].pop(-2))
    with pytest.raises(ScheduleError, match=r"a at 0B39$|a at 0B39\n"):
        simulate(bad, plan, long)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b": "1F0 1B0"}, "no node is to run 1B1"),
        ({"b": "1F0 1B0 1B1"}, "no node is to run 1F1"),
        ({"b": "1F0 1F1 1B0"}, "no node is to run 1B1"),
        ({"b": "1F0 1F0 1F1 1B0 1B1"}, "1F0 is in the orders twice"),
        ({"b": "0F0"}, "'b' is to run 0F0, but is not on that stage"),
        ({"b": "1F7"}, "micro-batch is in none of the steps"),
    ],
)
def test_orders_that_are_none(changes, message):
    plan = chain("a", "b")
    steps = even_steps(plan, 2)
    bad = orders("gpipe", plan, steps)
    bad |= {node: [Action.parse(word) for word in text.split()] for node, text in changes.items()}
    with pytest.raises(ScheduleError, match=message):
        simulate(bad, plan, steps)


def test_a_window_of_nothing_is_refused():
    plan = chain("a")
    with pytest.raises(ScheduleError, match="window is 0"):
        predict("1f1b", plan, even_steps(plan, 1), window=0)


def layer(name, seconds, cut):
    f, i, w = seconds
    return {"name": name, "forward_s": f, "input_grad_s": i, "weight_grad_s": w, "cut_bytes": cut}


PROFILE = {
    "gflops": 100.0,
    "target_bytes": 8,
    "layers": [
        layer("l0", (1.0, 2.0, 3.0), {"x": 4000}),
        layer("l1", (0.5, 0.25, 0.125), {"x": 400, "mask": 80}) | {"cut_dtypes": {"mask": "int64"}},
        layer("l2", (2.0, 2.0, 2.0), {}),
    ],
}
HOME = Topology.of(
    [
        Node(name="c", tier="cloud", gflops=400.0),
        Node(name="e", tier="edge", parent="c", up_mbps=80, down_mbps=40, latency_ms=4),
        Node(name="d", tier="device", parent="e", gflops=10.0, up_mbps=8, down_mbps=16, latency_ms=2),
    ]
)
STEPS = [Step(0, (Micro(0, "d", 0, 10), Micro(1, "d", 10, 14)), {})]


def test_costs_of_actions_follow_samples_layers_and_speed():
    costs = ProfileCosts(chain("d", "e", "c"), STEPS, PROFILE, HOME)
    assert costs.seconds("d", Action.parse("0F0")) == 10 * 1.0 * 10  # ten samples, ten times slower
    assert costs.seconds("d", Action.parse("0F1")) == 4 * 1.0 * 10
    assert costs.seconds("d", Action.parse("0B1")) == 4 * 3.0 * 10  # nobody wants the gradient of the model's input
    assert costs.seconds("d", Action.parse("0I1")) == 0.0
    assert costs.seconds("e", Action.parse("1B0")) == pytest.approx(3.75)  # no gflops: as measured
    assert costs.seconds("e", Action.parse("1I0")) == pytest.approx(2.5)
    assert costs.seconds("c", Action.parse("2F0")) == pytest.approx(20 / 4)
    assert costs.seconds("c", Action.parse("2U1")) == 0.0


def test_costs_of_messages_follow_codec_direction_and_dtype():
    plan = chain("d", "e", "c")
    raw = ProfileCosts(plan, STEPS, PROFILE, HOME)
    assert [raw.nbytes("act", s, 0) for s in (1, 2)] == [40000, 4800]
    assert [raw.nbytes("grad", s, 1) for s in (0, 1)] == [16000, 1600]  # an integer mask has no gradient
    assert raw.nbytes("target", 2, 1) == 32
    coded = ProfileCosts(plan, STEPS, PROFILE, HOME, {"up": "fp16", "down": "int8"})
    assert [coded.nbytes("act", s, 0) for s in (1, 2)] == [20000, 10 * (400 * CODECS["fp16"].ratio("float32") + 80)]
    assert coded.nbytes("grad", 0, 1) == 16000 * CODECS["int8"].ratio("float32")
    assert coded.nbytes("target", 2, 0) == 80
    u_shape = ProfileCosts(chain("d", "e", "d"), STEPS, PROFILE, HOME, {"up": "fp16"})
    assert [u_shape.nbytes("act", s, 0) for s in (1, 2)] == [20000, 4800]  # the second one goes down, raw


def test_a_plan_is_simulated_with_what_it_carries():
    plan = chain("d", "e", "c")
    carried = Plan(plan.layers, plan.routes, HOME.to_dict(), PROFILE)
    found = simulate_plan(carried, method="gpipe", micros=1, samples=10)
    hop = 0.002 + 40000 * 8e-6 / 8
    assert next(e.start for e in found.events if str(e.action) == "1F0") == pytest.approx(100 + hop)
    assert simulate_plan(plan, method="gpipe", micros=4).bubble == pytest.approx(0.5)


def test_costs_refuse_what_does_not_fit():
    with pytest.raises(PlanError, match="profile is of 3 layers"):
        ProfileCosts(chain("d", "e"), STEPS, PROFILE, HOME)
    with pytest.raises(CodecError, match="codec 'fp15' is not known"):
        ProfileCosts(chain("d", "e", "c"), STEPS, PROFILE, HOME, {"up": "fp15"})
    with pytest.raises(CodecError, match="not 'left'"):
        ProfileCosts(chain("d", "e", "c"), STEPS, PROFILE, HOME, {"left": "raw"})
