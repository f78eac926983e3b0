from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgesplit.errors import ScheduleError
from edgesplit.methods import breadth_first, one_forward_one_backward, order_of, orders
from edgesplit.plan import Plan, Route, Stage
from edgesplit.schedule import (
    Action,
    Flow,
    Micro,
    Step,
    even_steps,
    halve_backwards,
    merge,
    merged,
    step_order,
    updated_layers,
)


def chain(*nodes):
    """One route, a layer a stage."""
    return Plan(
        tuple(f"l{i}" for i in range(len(nodes))),
        (Route(nodes[0], tuple(Stage(node, i, i + 1) for i, node in enumerate(nodes))),),
    )


def text(actions):
    return " ".join(map(str, actions))


def written(order):
    """The pictures leave out updates."""
    return text(a for a in order if a.op != "U")


@given(st.sampled_from("FBIWU"), st.integers(0, 99), st.integers(0, 10**9), st.integers(0, 9))
def test_an_action_prints_and_parses_back(op, stage, micro, part):
    action = Action(op, stage, micro, part)
    assert Action.parse(str(action)) == action


def test_how_an_action_prints():
    assert str(Action("F", 2, 0)) == "2F0"
    assert str(Action("B", 2, 0, 1)) == "2B0.1"


@pytest.mark.parametrize("wrong", ["", "F0", "2X0", "2F", "2F0.", "-1F0", "2F0 ", "2F0.1.2"])
def test_what_is_no_action(wrong):
    with pytest.raises(ScheduleError, match="is not an action"):
        Action.parse(wrong)


def test_merge():
    forwards, backwards = [Action("F", 0, m) for m in range(4)], [Action("B", 0, m) for m in range(4)]
    assert text(merge(forwards, backwards, 0)) == "0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3"
    assert text(merge(forwards, backwards, 2)) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert text(merge(forwards, backwards, 9)) == "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3"


def test_gpipe_is_the_picture():
    plan = chain("a", "b", "c", "d")
    found = orders("gpipe", plan, even_steps(plan, 4))
    assert {node: text(order) for node, order in found.items()} == {
        "a": "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3 0U3",
        "b": "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3 1U3",
        "c": "2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3 2U3",
        "d": "3F0 3F1 3F2 3F3 3B0 3B1 3B2 3B3 3U3",
    }


def test_1f1b_of_4_stages_and_8_micro_batches_is_the_picture():
    plan = chain("a", "b", "c", "d")
    found = orders("1f1b", plan, even_steps(plan, 8))
    assert {node: text(order) for node, order in found.items()} == {
        "a": "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7 0U7",
        "b": "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1F7 1B5 1B6 1B7 1U7",
        "c": "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2B5 2F7 2B6 2B7 2U7",
        "d": "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7 3U7",
    }


def test_interleaved_is_megatrons_picture():
    plan = chain(*"abab")
    found = orders("interleaved", plan, even_steps(plan, 4))
    assert {node: written(order) for node, order in found.items()} == {
        "a": "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "b": "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    }


@pytest.mark.parametrize(("nodes", "loops", "groups"), [(2, 2, 3), (3, 2, 2), (4, 2, 2), (4, 3, 1), (3, 4, 3)])
def test_interleaved_follows_megatrons_closed_form(nodes, loops, groups):
    """The k-th virtual forward runs chunk (k mod pv) // p, the backward v - 1 - that; warm-up as Megatron's."""
    plan = chain(*([f"n{i}" for i in range(nodes)] * loops))
    count = nodes * groups
    total = count * loops
    for rank in range(nodes):
        ahead = min(2 * (nodes - rank - 1) + (loops - 1) * nodes, total)

        def virtual(op, k, rank=rank):
            group, within = divmod(k, nodes * loops)
            chunk = within // nodes if op == "F" else loops - 1 - within // nodes
            return Action(op, chunk * nodes + rank, group * nodes + within % nodes)

        expected = [virtual("F", k) for k in range(ahead)]
        for k in range(total - ahead):
            expected += [virtual("F", ahead + k), virtual("B", k)]
        expected += [virtual("B", k) for k in range(total - ahead, total)]
        order = order_of("interleaved", plan, even_steps(plan, count), f"n{rank}")
        assert [a for a in order if a.op != "U"] == expected


def test_breadth_first_runs_a_nodes_stages_one_after_the_other():
    plan = chain(*"abab")
    found = orders("breadth-first", plan, even_steps(plan, 3))
    assert {node: text(order) for node, order in found.items()} == {
        "a": "0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 2U2 0B0 0B1 0B2 0U2",
        "b": "1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 3U2 1B0 1B1 1B2 1U2",
    }


def test_1f1b_on_a_u_shape_is_the_picture():
    plan = chain("d", "e", "d")
    found = orders("1f1b", plan, even_steps(plan, 5))
    assert {node: text(order) for node, order in found.items()} == {
        "d": "0F0 0F1 2F0 0F2 2F1 0F3 2B0 2F2 0F4 2B1 2F3 2B2 0B0 2F4 2B3 0B1 2B4 2U4 0B2 0B3 0B4 0U4",
        "e": "1F0 1F1 1F2 1F3 1B0 1F4 1B1 1B2 1B3 1B4 1U4",
    }


@given(st.integers(1, 8), st.integers(1, 20))
def test_1f1b_on_a_chain_is_the_merge_with_group_1(stages, micros):
    plan = chain(*(f"n{i}" for i in range(stages)))
    flow = Flow(plan, even_steps(plan, micros))
    for rank in range(stages):
        assert one_forward_one_backward(flow, f"n{rank}") == merged(flow, f"n{rank}", 1, stages - rank - 1)


@pytest.mark.parametrize(("devices", "edges"), [(2, 1), (4, 2), (10, 2), (12, 3), (100, 10)])
def test_1f1b_on_an_even_tree_warms_up_by_workers_downstream_over_those_of_the_stage(devices, edges):
    plan = Plan(
        ("a", "b", "c"),
        tuple(
            Route(f"d{i}", (Stage(f"d{i}", 0, 1), Stage(f"e{i % edges}", 1, 2), Stage("c", 2, 3)))
            for i in range(devices)
        ),
    )
    flow = Flow(plan, even_steps(plan, 4))
    ahead = {"d0": (devices + edges) // devices, "e0": edges // edges, "c": 0}
    for node, warmup in ahead.items():
        assert one_forward_one_backward(flow, node) == merged(flow, node, 1, warmup)


def test_positions_not_numbers_make_groups():
    plan = chain("a", "b")
    shifted = Step(7, tuple(Micro(100 + i, "a", i, i + 1) for i in range(3)), {})
    assert text(step_order(breadth_first, plan, shifted, "b")) == "1F100 1F101 1F102 1B100 1B101 1B102 1U102"
    assert text(step_order(one_forward_one_backward, plan, shifted, "b")) == "1F100 1B100 1F101 1B101 1F102 1B102 1U102"


def test_a_backward_in_halves_sends_upstream_first():
    plan = chain("a", "b")
    steps = even_steps(plan, 2)
    assert text(order_of("1f1b", plan, steps, "a", split_backward=True)) == "0F0 0F1 0I0 0W0 0I1 0W1 0U1"
    assert text(order_of("1f1b", plan, steps, "b", split_backward=True)) == "1F0 1I0 1W0 1F1 1I1 1W1 1U1"
    assert text(halve_backwards([Action("B", 1, 4, 2)])) == "1I4.2 1W4.2"


def test_a_layer_under_two_stages_belongs_to_the_later_one():
    short = Route("d0", (Stage("d0", 0, 2), Stage("e", 2, 5)))
    long = Route("d1", (Stage("d1", 0, 1), Stage("m", 1, 3), Stage("e", 3, 5)))
    plan = Plan(tuple("abcde"), (short, long))
    assert updated_layers(plan, "e") == {1: {2}, 2: {3, 4}}
    steps = [Step(0, (Micro(0, "d1", 0, 1), Micro(1, "d0", 0, 1)), {})]
    # Layers 3 and 4 get their last gradient from 1B1, so 2U waits for it; layer 2 is stage 1's alone.
    assert text(order_of("gpipe", plan, steps, "e")) == "1F1 2F0 2B0 1B1 1U1 2U1"
    # Without d0's micro-batch nothing touches layer 2.
    alone = [Step(0, (Micro(0, "d1", 0, 1),), {})]
    assert text(order_of("gpipe", plan, alone, "e")) == "2F0 2B0 2U0"
    assert text(order_of("gpipe", plan, alone, "e", update_all=True)) == "2F0 2B0 1U0 2U0"
    # A device that sits the step out updates only where its replicas' gradients are its own.
    assert order_of("gpipe", plan, alone, "d0") == []
    assert text(order_of("gpipe", plan, alone, "d0", update_all=True)) == "0U0"


def test_the_update_of_a_step_names_the_last_micro_batch_of_the_step_whoever_ran_it():
    plan = Plan(("a", "b"), tuple(Route(d, (Stage(d, 0, 1), Stage("e", 1, 2))) for d in ("d0", "d1")))
    steps = [Step(0, (Micro(0, "d0", 0, 1), Micro(1, "d1", 0, 1)), {}), Step(1, (Micro(2, "d0", 0, 1),), {})]
    found = orders("1f1b", plan, steps)
    assert text(found["d0"]) == "0F0 0B0 0U1 0F2 0B2 0U2"
    assert text(found["d1"]) == "0F1 0B1 0U1"
    assert text(found["e"]) == "1F0 1B0 1F1 1B1 1U1 1F2 1B2 1U2"


def test_pipedream_flows_over_the_steps_and_updates_after_each_backward():
    plan = chain("a", "b")
    found = orders("pipedream", plan, even_steps(plan, 2, steps=2))
    assert {node: text(order) for node, order in found.items()} == {
        "a": "0F0 0F1 0B0 0U0 0F2 0B1 0U1 0F3 0B2 0U2 0B3 0U3",
        "b": "1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2 1F3 1B3 1U3",
    }


def test_plain_federated_learning_is_one_stage():
    plan = chain("a")
    assert text(order_of("1f1b", plan, even_steps(plan, 2), "a")) == "0F0 0B0 0F1 0B1 0U1"
    assert text(order_of("gpipe", plan, even_steps(plan, 2), "a")) == "0F0 0F1 0B0 0B1 0U1"


def test_even_steps_deal_by_share():
    plan = Plan(("a",), tuple(Route(d, (Stage(d, 0, 1),)) for d in ("d0", "d1", "d2")))
    first, second = even_steps(plan, {"d0": 4, "d1": 2}, samples=3, steps=2)
    assert [m.device for m in first.micros] == ["d0", "d1", "d0", "d0", "d1", "d0"]
    assert [m.micro for m in second.micros] == [6, 7, 8, 9, 10, 11]
    assert first.micros[2] == Micro(2, "d0", 3, 6)
    assert set(first.batches) == {"d0", "d1"}


def test_a_micro_batch_without_a_route_is_refused():
    plan = chain("a", "b")
    with pytest.raises(ScheduleError, match="micro-batch 5 is of device 'x', which has no route"):
        orders("1f1b", plan, [Step(0, (Micro(5, "x", 0, 1),), {})])
