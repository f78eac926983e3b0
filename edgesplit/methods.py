"""The table of pipeline methods: a method is a schedule, a cadence of updates and a weight policy, never a runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from edgesplit.costs import Costs, ProfileCosts
from edgesplit.errors import ScheduleError, did_you_mean
from edgesplit.plan import Plan
from edgesplit.schedule import (
    Action,
    Flow,
    Orders,
    Schedule,
    Step,
    add_micro_updates,
    even_steps,
    flow_order,
    halve_backwards,
    merged,
)
from edgesplit.simulate import Timeline
from edgesplit.simulate import simulate as run_orders
from edgesplit.topology import Topology

FEATURES = (
    "every step",
    "replicas",
    "clipping",
    "loss scale",
    "U-shape",
    "looping",
    "unequal shares",
    "split backward",
    "window>1",
)
"""What a method may allow or refuse: the columns of the table."""


def breadth_first(flow: Flow, node: str) -> list[Action]:
    """All forwards stage by stage, then all backwards (GPipe where a node hosts one stage).

    Lamy-Poirier, Breadth-First Pipeline Parallelism, MLSys 2023.
    """
    return merged(flow, node, group=max(len(flow.micros), 1), warmup=2 * len(flow.visits.get(node, ())))


def one_forward_one_backward(flow: Flow, node: str) -> list[Action]:
    """A forward and a backward in turn, after as many forwards as there are workers downstream.

    Every action has a time on paper, and nodes sort by it. Position ``q`` enters at ``spacing * q``; a visit of a node
    takes some units (:meth:`Flow.units`), as a rule one for each node that hosts the stage; a backward comes back as
    long after the route's end as its forward came before it. On a chain of p nodes this is
    1F1B with p - r - 1 warm-up forwards, on a tree (workers downstream - 1) // (nodes that share the stage).

    The times grow along every dependency, so no plan deadlocks: every order is part of one common order.
    (With counts instead, trees deadlock on some unequal shares, and a U-shape runs one micro-batch at a time.)

    Where a route comes back to a node (U-shape) its two stages get in each other's way; half the spacing, so about
    twice the micro-batches in flight, makes up for it. Over 162 simulated U-shapes (1-3 servers, 1-4 devices, 8-32
    micro-batches, with and without latency) this took 1.00 times GPipe's time in the median and 1.14 at most, with
    half its live micro-batches; one micro-batch at a time takes 2.8 times as long.
    """
    spacing = 1 if any(len({s.node for s in path}) < len(path) for path in flow.distinct) else 2
    reach: dict[Any, list[float]] = {}  # path -> time on paper from its start to each stage and to its end
    for path in {flow.paths[visit.position] for visit in flow.visits.get(node, ())}:
        times = [0.0]
        for index, stage in enumerate(path):
            times.append(times[-1] + flow.units(index, stage.node))
        reach[path] = times
    keyed = []
    for position, stage_index in flow.visits.get(node, ()):
        times = reach[flow.paths[position]]
        start, micro = spacing * position, flow.micros[position].micro
        back = start + 2 * times[-1] - times[stage_index] - 1
        # At one time forwards go first, and of those the ones that are further on their way.
        keyed.append((start + times[stage_index], 0, -stage_index, Action("F", stage_index, micro)))
        keyed.append((back, 1, -stage_index, Action("B", stage_index, micro)))
    return [action for *_, action in sorted(keyed)]


def interleaved(flow: Flow, node: str) -> list[Action]:
    """Megatron's interleaved 1F1B: each node of the ring hosts several stages, and a ring's worth passes together.

    Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021.

    Raises:
        ScheduleError: the placement is no ring, or the micro-batches are no multiple of its nodes.
    """
    if not flow.micros:
        return []
    if len(flow.distinct) > 1:
        raise ScheduleError("interleaved carries the micro-batches of one device: use breadth-first for several")
    nodes = [stage.node for stage in flow.paths[0]]
    ring = list(dict.fromkeys(nodes))
    size, loops = len(ring), len(nodes) // len(ring)
    if loops < 2 or nodes != ring * loops:
        raise ScheduleError(
            f"interleaved needs a looping placement, the same nodes in the same order two times or more, "
            f"not {' -> '.join(nodes)}: use 1f1b"
        )
    count = len(flow.micros)
    if count % size:
        nearest = max(size, round(count / size) * size)
        raise ScheduleError(
            f"interleaved on {size} nodes needs a multiple of {size} micro-batches, not {count}: "
            f"the nearest is {nearest}"
        )
    if node not in ring:
        return []
    ahead = 2 * (size - 1 - ring.index(node)) + (loops - 1) * size
    return merged(flow, node, group=size, warmup=ahead)


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the table.

    Attributes:
        schedule: orders a node's forwards and backwards.
        cadence: when a stage updates: once a ``step``, or after each ``micro``-batch.
        policy: which weights a backward uses: the ``latest`` or those of its forward (``stash``).
        window: how far a node looks ahead for a ready action, where the user does not say.
        synchronous: all forwards and backwards of a step use the same weights.
        allows: those of :data:`FEATURES` that may be combined with it.
        note: what it costs and needs, in a line.
        paper: where it is from.
    """

    name: str
    schedule: Schedule
    cadence: Literal["step", "micro"]
    policy: Literal["latest", "stash"]
    window: int
    synchronous: bool
    allows: frozenset[str]
    note: str
    paper: str


def _synchronous(name: str, schedule: Schedule, refuses: set[str], note: str, paper: str) -> Method:
    return Method(name, schedule, "step", "latest", 1, True, frozenset(FEATURES) - refuses, note, paper)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        _synchronous(
            "gpipe",
            breadth_first,
            {"looping"},
            "all forwards, then all backwards; every micro-batch is live at once",
            "Huang et al., NeurIPS 2019",
        ),
        _synchronous(
            "breadth-first",
            breadth_first,
            set(),
            "GPipe over several stages a node, stage by stage; best on slow links, every micro-batch is live at once",
            "Lamy-Poirier, MLSys 2023",
        ),
        _synchronous(
            "1f1b",
            one_forward_one_backward,
            {"looping"},
            "a forward and a backward in turn; no more live micro-batches than workers downstream",
            "Narayanan et al., SOSP 2019 (with a flush)",
        ),
        _synchronous(
            "interleaved",
            interleaved,
            {"every step", "replicas", "U-shape", "unequal shares"},
            "1F1B over several stages a node on a ring; a smaller bubble for as many times the messages",
            "Narayanan et al., SC 2021",
        ),
        Method(
            "pipedream",
            one_forward_one_backward,
            "micro",
            "stash",
            2,
            False,
            frozenset({"replicas", "U-shape", "unequal shares", "split backward", "window>1"}),
            "1F1B without flushes, an update a micro-batch; keeps a weight version for each live micro-batch",
            "Harlap et al., arXiv 1806.03377",
        ),
    )
}


def method_of(name: str | Method) -> Method:
    """Return the row called ``name``.

    Raises:
        ScheduleError: there is none.
    """
    if isinstance(name, Method):
        return name
    if name not in METHODS:
        raise ScheduleError(f"no method is called {name!r}{did_you_mean(name, METHODS)}; known: {', '.join(METHODS)}")
    return METHODS[name]


def table() -> list[dict[str, Any]]:
    """The methods as rows of plain values, a bool for each of :data:`FEATURES`."""
    return [
        {
            "name": m.name,
            "synchronous": m.synchronous,
            "cadence": m.cadence,
            "policy": m.policy,
            "window": m.window,
            **{feature: feature in m.allows for feature in FEATURES},
            "note": m.note,
            "paper": m.paper,
        }
        for m in METHODS.values()
    ]


_WHY = {
    "every step": "it has no moment at which all replicas have finished the same step",
    "clipping": "it has no moment at which the whole model's gradient norm is known",
    "loss scale": "it has no moment at which a step can be skipped everywhere",
    "looping": "its order is for one stage a node",
    "replicas": "its ring has one device",
    "U-shape": "its ring passes every node equally often",
    "unequal shares": "its ring has one device",
    "split backward": "it needs the whole backward at once",
    "window>1": "its order is fixed",
}

_INSTEAD = {"looping": "breadth-first", "replicas": "1f1b", "U-shape": "1f1b", "unequal shares": "1f1b"}


def wanted(plan: Plan, options: Mapping[str, Any]) -> list[str]:
    """Those of :data:`FEATURES` that a plan and options ask for, in their order.

    Args:
        options: any of ``every`` (``round`` or ``step``), ``clip_norm``, ``loss_scale`` (None or ``off``: none),
            ``split_backward``, ``window``, and ``micros`` (micro-batches a device: a number, or device -> number).
    """
    kinds = {_shape([stage.node for stage in route.stages]) for route in plan.routes}
    holders: dict[int, set[str]] = {}
    for stage in chain.from_iterable(route.stages for route in plan.routes):
        for layer in range(stage.start, stage.stop):
            holders.setdefault(layer, set()).add(stage.node)
    micros = options.get("micros")
    asked = {
        "every step": options.get("every", "round") == "step",
        "replicas": any(len(nodes) > 1 for nodes in holders.values()),
        "clipping": options.get("clip_norm") is not None,
        "loss scale": options.get("loss_scale") not in (None, "off"),
        "U-shape": "U-shape" in kinds,
        "looping": "looping" in kinds,
        "unequal shares": isinstance(micros, Mapping) and len(set(micros.values())) > 1,
        "split backward": bool(options.get("split_backward")),
        "window>1": (options.get("window") or 1) > 1,
    }
    return [feature for feature in FEATURES if asked[feature]]


def _shape(nodes: Sequence[str]) -> str:
    if len(set(nodes)) == len(nodes):
        return "plain"
    return "U-shape" if nodes[0] == nodes[-1] and len(set(nodes)) == len(nodes) - 1 else "looping"


def check(method: str | Method, plan: Plan, options: Mapping[str, Any] | None = None) -> None:
    """Refuse what the method's row does not allow; see :func:`wanted` for ``options``.

    Raises:
        ScheduleError: names what is refused, and why.
    """
    method = method_of(method)
    refused = [feature for feature in wanted(plan, options or {}) if feature not in method.allows]
    if refused:
        feature = refused[0]
        raise ScheduleError(
            f"method {method.name!r} does not go with {' and '.join(map(repr, refused))}: "
            f"{_WHY[feature]}; use {_INSTEAD.get(feature, '1f1b')!r}"
        )
    micros = (options or {}).get("micros")
    if method.schedule is interleaved and isinstance(micros, int) and plan.routes:
        _check_ring(plan, micros)


def _check_ring(plan: Plan, micros: int) -> None:
    """Let the schedule itself refuse a number of micro-batches."""
    interleaved(Flow(plan, even_steps(plan, micros)), plan.routes[0].device)


def orders(
    method: str | Method,
    plan: Plan,
    steps: Sequence[Step],
    *,
    split_backward: bool = False,
    update_all: bool = False,
) -> Orders:
    """Return the order of every node of the plan for the steps of a sheet.

    Args:
        split_backward: each ``B`` becomes ``I`` and ``W``.
        update_all: nodes update at the end of steps whose micro-batches did not pass them too (``every: step``).

    Raises:
        ScheduleError: the method does not go with the plan, the options, or these micro-batches.
    """
    method = method_of(method)
    check(method, plan, {"split_backward": split_backward, "every": "step" if update_all else "round"})
    nodes = dict.fromkeys(stage.node for route in plan.routes for stage in route.stages)
    flows = [(Flow(plan, part), part) for part in _parts(method, steps)]
    return {node: _order(method, plan, flows, node, split_backward, update_all) for node in nodes}


def order_of(
    method: str | Method,
    plan: Plan,
    steps: Sequence[Step],
    node: str,
    *,
    split_backward: bool = False,
    update_all: bool = False,
) -> list[Action]:
    """The order of one node, as in :func:`orders`."""
    method = method_of(method)
    check(method, plan, {"split_backward": split_backward, "every": "step" if update_all else "round"})
    flows = [(Flow(plan, part), part) for part in _parts(method, steps)]
    return _order(method, plan, flows, node, split_backward, update_all)


def _parts(method: Method, steps: Sequence[Step]) -> list[Sequence[Step]]:
    """What flows without a flush: a step, or the whole sheet."""
    return [[step] for step in steps] if method.synchronous else [steps]


def _order(
    method: Method,
    plan: Plan,
    flows: Sequence[tuple[Flow, Sequence[Step]]],
    node: str,
    split_backward: bool,
    update_all: bool,
) -> list[Action]:
    actions: list[Action] = []
    for flow, steps in flows:
        if method.cadence == "step":
            actions += flow_order(
                method.schedule, flow, plan, steps, node, split_backward=split_backward, update_all=update_all
            )
        else:
            passes = method.schedule(flow, node)
            actions += add_micro_updates(halve_backwards(passes) if split_backward else passes)
    return actions


def predict(
    method: str | Method,
    plan: Plan,
    steps: Sequence[Step],
    costs: Costs | None = None,
    *,
    window: int | None = None,
    split_backward: bool = False,
    update_all: bool = False,
    commit_s: float | None = None,
    wait_commit: bool = False,
) -> Timeline:
    """Simulate the orders of ``method``; ``window`` None is the method's own. See :func:`edgesplit.simulate.simulate`.

    Raises:
        ScheduleError: the method does not go with the plan or the options.
    """
    method = method_of(method)
    return run_orders(
        orders(method, plan, steps, split_backward=split_backward, update_all=update_all),
        plan,
        steps,
        costs,
        window=method.window if window is None else window,
        synchronous=method.synchronous,
        stash=method.policy == "stash",
        commit_s=commit_s,
        wait_commit=wait_commit,
    )


def simulate(
    plan: Plan,
    *,
    method: str | Method = "1f1b",
    micros: int | Mapping[str, int] = 1,
    samples: int = 1,
    steps: int = 1,
    window: int | None = None,
    split_backward: bool = False,
    codecs: Mapping[str, str] | None = None,
) -> Timeline:
    """Simulate some steps of a plan, with the costs of the profile and topology that it carries.

    A plan without them runs with a forward of 1 second, a backward of 2, and messages that take no time.

    Args:
        micros: micro-batches of a device in a step, or device -> number.
        samples: of a micro-batch.
        steps: how many.
        codecs: of activations and gradients on links ``up`` (to a higher tier) and ``down``.

    Raises:
        ScheduleError: the method does not go with the plan or the options.
    """
    check(method, plan, {"micros": micros, "window": window, "split_backward": split_backward})
    sheet = even_steps(plan, micros, samples, steps=steps)
    costs = None
    if plan.profile is not None and plan.topology is not None:
        costs = ProfileCosts(plan, sheet, plan.profile, Topology.from_dict(plan.topology), codecs)
    return predict(method, plan, sheet, costs, window=window, split_backward=split_backward)
