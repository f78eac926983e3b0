from __future__ import annotations

import pytest

from edgesplit.errors import ScheduleError
from edgesplit.methods import FEATURES, METHODS, check, order_of, orders, table
from edgesplit.plan import Plan, Route, Stage
from edgesplit.schedule import even_steps
from edgesplit.simulate import simulate


def plan_of(*paths):
    layers = max(map(len, paths))
    return Plan(
        tuple(f"l{i}" for i in range(layers)),
        tuple(
            Route(path[0], tuple(Stage(n, i, layers if i == len(path) - 1 else i + 1) for i, n in enumerate(path)))
            for path in paths
        ),
    )


CHAIN, RING = plan_of("dec"), plan_of("dede")
ASKS = {
    "every step": (plan_of("ac", "bc"), {"every": "step"}),
    "replicas": (plan_of("ac", "bc"), {}),
    "clipping": (CHAIN, {"clip_norm": 1.0}),
    "loss scale": (CHAIN, {"loss_scale": "dynamic"}),
    "U-shape": (plan_of("ded"), {}),
    "looping": (RING, {}),
    "unequal shares": (plan_of("ac", "bc"), {"micros": {"a": 3, "b": 1}}),
    "split backward": (CHAIN, {"split_backward": True}),
    "window>1": (CHAIN, {"window": 4}),
}
TABLE = """
                every replicas clipping loss  U-shape looping unequal split    window
                step                    scale                 shares  backward
gpipe           yes   yes      yes      yes   yes     -       yes     yes      yes
breadth-first   yes   yes      yes      yes   yes     yes     yes     yes      yes
1f1b            yes   yes      yes      yes   yes     -       yes     yes      yes
interleaved     -     -        yes      yes   -       yes     -       yes      yes
pipedream       -     yes      -        -     yes     -       yes     yes      yes
"""
CELLS = [
    (name, feature, cell == "yes")
    for name, *cells in map(str.split, TABLE.splitlines()[3:])
    for feature, cell in zip(FEATURES, cells, strict=True)
]


@pytest.mark.parametrize(("name", "feature", "allowed"), CELLS)
def test_every_cell_of_the_table(name, feature, allowed):
    plan, options = ASKS[feature]
    if not allowed:
        with pytest.raises(ScheduleError, match=rf"'{name}' does not go with .*'{feature}'"):
            check(name, plan, options)
        return
    if name == "interleaved":
        plan = RING
    check(name, plan, options)
    method, micros = METHODS[name], options.get("micros", 2)
    steps = even_steps(plan, micros, steps=2)
    found = orders(
        name,
        plan,
        steps,
        split_backward=options.get("split_backward", False),
        update_all=options.get("every") == "step",
    )
    simulate(found, plan, steps, window=options.get("window", method.window), synchronous=method.synchronous)


def test_the_table_as_data():
    rows = {row["name"]: row for row in table()}
    assert list(rows) == list(METHODS)
    assert [(n, f, rows[n][f]) for n, f, _ in CELLS] == CELLS
    assert {name: row["window"] for name, row in rows.items() if not row["synchronous"]} == {"pipedream": 2}
    assert {row["window"] for row in rows.values() if row["synchronous"]} == {1}
    assert rows["pipedream"]["policy"] == "stash"
    assert rows["pipedream"]["cadence"] == "micro"
    assert all(row["note"] and row["paper"] for row in rows.values())


def test_a_refusal_says_why_and_what_else():
    with pytest.raises(ScheduleError) as error:
        check("pipedream", CHAIN, {"clip_norm": 1.0, "loss_scale": 1024})
    assert str(error.value) == (
        "method 'pipedream' does not go with 'clipping' and 'loss scale': it has no moment at which the whole model's "
        "gradient norm is known; use '1f1b'"
    )
    with pytest.raises(ScheduleError, match="its order is for one stage a node; use 'breadth-first'"):
        orders("1f1b", RING, even_steps(RING, 2))


def test_what_is_off_is_not_asked_for():
    off = {"every": "round", "clip_norm": None, "loss_scale": "off", "split_backward": False, "window": None}
    check("pipedream", CHAIN, off | {"micros": 3})


@pytest.mark.parametrize(("micros", "nearest"), [(1, 3), (2, 3), (4, 3), (5, 6), (7, 6), (8, 9)])
def test_interleaved_names_the_nearest_number_of_micro_batches(micros, nearest):
    plan = plan_of("abcabc")
    message = f"interleaved on 3 nodes needs a multiple of 3 micro-batches, not {micros}: the nearest is {nearest}"
    with pytest.raises(ScheduleError, match=message):
        orders("interleaved", plan, even_steps(plan, micros))
    with pytest.raises(ScheduleError, match=message):
        check("interleaved", plan, {"micros": micros})
    check("interleaved", plan, {"micros": nearest})


@pytest.mark.parametrize("path", ["abc", "abcab", "abcacb"])
def test_interleaved_needs_a_ring(path):
    plan = plan_of(path)
    with pytest.raises(ScheduleError, match=f"looping placement.*not {' -> '.join(path)}"):
        orders("interleaved", plan, even_steps(plan, 3))


def test_interleaved_is_for_one_device():
    plan = plan_of("acac", "bcbc")
    with pytest.raises(ScheduleError, match="its ring has one device"):
        orders("interleaved", plan, even_steps(plan, 2))


def test_an_unknown_method_names_the_nearest():
    with pytest.raises(ScheduleError, match=r"no method is called 'gpip' \(did you mean 'gpipe'\?\)"):
        order_of("gpip", CHAIN, [], "d")


def test_every_node_has_an_order_even_an_empty_one():
    plan = plan_of("ac", "bc")
    assert orders("1f1b", plan, even_steps(plan, {"a": 1}))["b"] == []
    assert orders("pipedream", plan, []) == {"a": [], "b": [], "c": []}
