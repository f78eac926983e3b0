"""A discrete-event run of orders on a clock of its own: dry run, deadlock check, prediction.

Nodes and directed links are resources. Events are taken in the order of their time from one heap (as vTrain does), so
that links and brokers shared by many routes serve their messages in the order of arrival.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from edgesplit.costs import Costs, Hop, UnitCosts
from edgesplit.errors import ScheduleError
from edgesplit.plan import Plan
from edgesplit.schedule import Action, Event, Orders, Step

_COMMIT = "\0commit"
_SHOWN = 40  # actions of a stuck node's order that an error message prints


class Transfer(NamedTuple):
    """A message on a link from ``start`` to ``end`` in seconds (it arrives the link's latency later)."""

    src: str
    dst: str
    kind: str
    stage: int
    micro: int
    nbytes: float
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a simulated run did.

    Attributes:
        events: actions by start time.
        transfers: messages on links, by start time.
        makespan: seconds from 0 to the end of the last event.
        peak_live: node -> most forwards that waited for their backward at one time.
    """

    events: list[Event]
    transfers: list[Transfer]
    makespan: float
    peak_live: dict[str, int]

    @property
    def busy(self) -> dict[str, float]:
        """Node -> seconds it computed."""
        busy: dict[str, float] = {}
        for event in self.events:
            busy[event.node] = busy.get(event.node, 0.0) + event.end - event.start
        return busy

    @property
    def bubble(self) -> float:
        """Idle time of the nodes over their busy time: (p - 1) / m for 1F1B on p equal nodes."""
        busy = self.busy
        total = sum(busy.values())
        return (self.makespan * len(busy) - total) / total if total else 0.0

    @property
    def link_bytes(self) -> dict[tuple[str, str], float]:
        """Directed link -> bytes it carried."""
        carried: dict[tuple[str, str], float] = {}
        for t in self.transfers:
            carried[t.src, t.dst] = carried.get((t.src, t.dst), 0.0) + t.nbytes
        return carried

    def __str__(self) -> str:
        busy = self.busy
        lines = [f"{self.makespan:.6g} s, bubble {self.bubble:.3f}, {len(self.events)} actions"]
        width = max((len(node) for node in self.peak_live), default=0)
        for node, live in self.peak_live.items():
            share = busy.get(node, 0.0) / self.makespan if self.makespan else 0.0
            lines.append(f"{node:<{width}}  busy {share:6.1%}  live {live}")
        lines += [f"{src} -> {dst}  {nbytes / 1e6:.6g} MB" for (src, dst), nbytes in self.link_bytes.items()]
        return "\n".join(lines)

    @property
    def step_ends(self) -> dict[int, float]:
        """Global step -> when its last action ended."""
        ends: dict[int, float] = {}
        for event in self.events:
            ends[event.step] = max(ends.get(event.step, 0.0), event.end)
        return dict(sorted(ends.items()))


class _Message(NamedTuple):
    kind: str
    stage: int
    micro: int
    nbytes: float
    hops: Sequence[Hop]


_Edge = tuple[int, _Message | None]


@dataclass(slots=True)
class _Graph:
    """Actions as numbers: what each waits for (a count) and what its end releases."""

    node: list[str] = field(default_factory=list)
    action: list[Action] = field(default_factory=list)
    step: list[int] = field(default_factory=list)
    needs: list[int] = field(default_factory=list)
    after: list[list[_Edge]] = field(default_factory=list)
    order: dict[str, list[int]] = field(default_factory=dict)

    def add(self, node: str, action: Action, step: int) -> int:
        self.node.append(node)
        self.action.append(action)
        self.step.append(step)
        self.needs.append(0)
        self.after.append([])
        return len(self.node) - 1

    def edge(self, before: int, after: int, message: _Message | None = None) -> None:
        self.after[before].append((after, message))
        self.needs[after] += 1


def simulate(
    orders: Orders,
    plan: Plan,
    steps: Sequence[Step],
    costs: Costs | None = None,
    *,
    window: int = 1,
    synchronous: bool = True,
    stash: bool = False,
    commit_s: float | None = None,
    wait_commit: bool = False,
) -> Timeline:
    """Run ``orders`` and return when everything happens.

    Args:
        costs: by default a forward takes 1 second, a backward 2, the rest nothing.
        window: a node runs the first *ready* action among the next ``window`` of its order (updates do not count).
        synchronous: a ``U`` waits for all that comes before it in the order, and an ``F`` for all updates before it.
            Asynchronous: a ``U`` waits for its own backward, an ``F`` for no update.
        stash: backwards use their forward's weight version, not the newest (only the events' ``version`` differs).
        commit_s: seconds from a step's last backward anywhere to its commit's arrival, which ``U`` of the next step
            waits for. None: no commits.
        wait_commit: ``U`` of the same step waits for the commit as well (clipping, loss scale, ``every: step``).

    Raises:
        ScheduleError: the orders deadlock; names the action at which each node is stuck.
    """
    if window < 1:
        raise ScheduleError(f"window is {window}: a node needs at least 1 action to choose from")
    costs = costs or UnitCosts()
    graph = _build(orders, plan, steps, costs, synchronous)
    if commit_s is not None:
        _add_commits(graph, wait_commit)
    return _Run(graph, costs, window, commit_s or 0.0, synchronous, stash).run()


def _build(orders: Orders, plan: Plan, steps: Sequence[Step], costs: Costs, synchronous: bool) -> _Graph:
    graph = _Graph()
    step_of = {m.micro: step.step for step in steps for m in step.micros}
    paths = {m.micro: plan.path(m.device, m.route) for step in steps for m in step.micros}
    done: dict[Action, int] = {}
    for node, actions in orders.items():
        ids = graph.order.setdefault(node, [])
        for action in actions:
            if action.micro not in step_of:
                raise ScheduleError(f"{node!r} is to run {action}, whose micro-batch is in none of the steps")
            ids.append(graph.add(node, action, step_of[action.micro]))
            if action.op == "U":
                continue
            path = paths[action.micro]
            if action.stage >= len(path) or path[action.stage].node != node:
                raise ScheduleError(f"{node!r} is to run {action}, but is not on that stage of its route")
            if action in done:
                raise ScheduleError(f"{action} is in the orders twice ({graph.node[done[action]]!r} and {node!r})")
            done[action] = ids[-1]
    hops: dict[tuple[str, str], Sequence[Hop]] = {}

    def link(before: int, after: int, kind: str) -> None:
        src, dst, action = graph.node[before], graph.node[after], graph.action[after]
        if src == dst:
            graph.edge(before, after)
            return
        if (src, dst) not in hops:
            hops[src, dst] = costs.hops(src, dst)
        nbytes = costs.nbytes(kind, action.stage, action.micro)
        graph.edge(before, after, _Message(kind, action.stage, action.micro, nbytes, hops[src, dst]))

    def find(*wanted: Action) -> int:
        for action in wanted:
            if action in done:
                return done[action]
        raise ScheduleError(f"no node is to run {wanted[0]}, which other actions wait for")

    for action, after in done.items():
        op, stage, micro, part = action
        last = len(paths[micro]) - 1
        if op == "F":
            if stage > 0:
                link(find(Action("F", stage - 1, micro, part)), after, "act")
            if stage == last and last > 0:
                link(find(Action("F", 0, micro, part)), after, "target")
            # What runs forward must run back; find raises where it does not.
            find(Action("B", stage, micro, part), Action("W", stage, micro, part))
        elif op == "W":
            graph.edge(find(Action("I", stage, micro, part)), after)
        else:
            graph.edge(find(Action("F", stage, micro, part)), after)
            if stage < last:
                link(find(Action("B", stage + 1, micro, part), Action("I", stage + 1, micro, part)), after, "grad")
    if not synchronous:
        for order in graph.order.values():
            _gate_updates(graph, order)
    return graph


def _gate_updates(graph: _Graph, order: Sequence[int]) -> None:
    """Asynchronous: ``U`` waits for its own backward only."""
    backward = {graph.action[i][1:3]: i for i in order if graph.action[i].op in "BW"}
    for i in order:
        if graph.action[i].op == "U" and graph.action[i][1:3] in backward:
            graph.edge(backward[graph.action[i][1:3]], i)


def _add_commits(graph: _Graph, wait_commit: bool) -> None:
    """Add a commit a step, which its backwards release and which releases updates; it is on no node's order."""
    steps = sorted(set(graph.step))
    actions = list(enumerate(zip(graph.action, graph.step, strict=True)))
    commits = {step: graph.add(_COMMIT, Action("U", 0, 0), step) for step in steps}
    before = dict(zip(steps[1:], steps, strict=False))
    for i, (action, step) in actions:
        if action.op in "BW":
            graph.edge(i, commits[step])
        elif action.op == "U":
            if step in before:
                graph.edge(commits[before[step]], i)
            if wait_commit:
                graph.edge(commits[step], i)


class _Run:
    """The state of a simulation: what is free, what is ready, and the heap of what ends or arrives next."""

    def __init__(
        self, graph: _Graph, costs: Costs, window: int, commit_s: float, synchronous: bool, stash: bool
    ) -> None:
        self.graph, self.window, self.commit_s = graph, window, commit_s
        self.synchronous, self.stash = synchronous, stash
        self.seconds = costs.seconds
        self.now = 0.0
        self.heap: list[tuple[float, int, int, _Message | None, int]] = []  # time, tie-break, action, message, hop
        self.pushed = 0
        self.started = bytearray(len(graph.node))
        self.head = dict.fromkeys(graph.order, 0)
        self.idle = set(graph.order)
        self.live = dict.fromkeys(graph.order, 0)
        self.peak = dict.fromkeys(graph.order, 0)
        self.versions: dict[tuple[str, int], int] = {}
        self.forward_version: dict[tuple[str, Action], int] = {}
        self.free: dict[tuple[str, str], float] = {}
        self.events: list[Event] = []
        self.transfers: list[Transfer] = []

    def run(self) -> Timeline:
        heap, graph = self.heap, self.graph
        changed = dict.fromkeys(graph.order)
        while True:
            for node in changed:
                if node in self.idle:
                    self.start_next(node)
            if not heap:
                break
            changed = {}
            self.now = heap[0][0]
            while heap and heap[0][0] == self.now:  # all that happens now, before anyone chooses
                _, _, i, message, hop = heapq.heappop(heap)
                if message is not None:
                    self.carry(i, message, hop, changed)
                    continue
                self.finish(i, changed)
                for target, sent in graph.after[i]:
                    if sent is None:
                        self.release(target, changed)
                    else:
                        self.carry(target, sent, 0, changed)
        if len(self.events) < sum(map(len, graph.order.values())):
            raise ScheduleError(_stuck(graph, self.started))
        self.events.sort(key=lambda e: (e.start, e.node, e.end))
        self.transfers.sort(key=lambda t: (t.start, t.src, t.dst))
        return Timeline(self.events, self.transfers, max((e.end for e in self.events), default=0.0), self.peak)

    def push(self, time: float, i: int, message: _Message | None = None, hop: int = 0) -> None:
        self.pushed += 1
        heapq.heappush(self.heap, (time, self.pushed, i, message, hop))

    def start_next(self, node: str) -> None:
        """Start the first ready action among the next ``window`` that have not started."""
        order, started, needs = self.graph.order[node], self.started, self.graph.needs
        at = self.head[node]
        while at < len(order) and started[order[at]]:
            at += 1
        self.head[node] = at
        looked = 0
        updating: float = math.inf  # the earliest step whose update must come first
        first = at
        while at < len(order) and looked < self.window:
            i = order[at]
            if not started[i]:
                op, step = self.graph.action[i].op, self.graph.step[i]
                blocked = self.synchronous and ((op == "F" and updating < step) or (op == "U" and at != first))
                if not needs[i] and not blocked:
                    self.start(node, i)
                    return
                looked += op != "U"
                updating = min(updating, step) if op == "U" else updating
            at += 1

    def start(self, node: str, i: int) -> None:
        action = self.graph.action[i]
        end = self.now + self.seconds(node, action)
        self.started[i] = 1
        self.idle.remove(node)
        self.push(end, i)
        self.events.append(Event(node, action, self.now, end, self.graph.step[i], self.version(node, action)))

    def version(self, node: str, action: Action) -> int:
        version = self.versions.get((node, action.stage), 0)
        if action.op == "U":
            version += 1
            self.versions[node, action.stage] = version
        elif action.op == "F":
            self.live[node] += 1
            self.peak[node] = max(self.peak[node], self.live[node])
            if self.stash:
                self.forward_version[node, action] = version
        elif self.stash:
            version = self.forward_version[node, action._replace(op="F")]
        return version

    def finish(self, i: int, changed: dict[str, None]) -> None:
        node = self.graph.node[i]
        if node == _COMMIT:
            return
        self.idle.add(node)
        changed[node] = None
        if self.graph.action[i].op in "BW":
            self.live[node] -= 1

    def carry(self, target: int, message: _Message, hop: int, changed: dict[str, None]) -> None:
        """Put a message that is at its ``hop``-th link on it (first come, first served), or deliver it."""
        if hop == len(message.hops):
            self.release(target, changed)
            return
        link = message.hops[hop]
        key = (link.src, link.dst)
        start = max(self.now, self.free.get(key, 0.0))
        self.free[key] = end = start + message.nbytes * 8e-6 / link.mbps
        self.transfers.append(Transfer(*key, message.kind, message.stage, message.micro, message.nbytes, start, end))
        self.push(end + link.latency_s, target, message, hop + 1)

    def release(self, target: int, changed: dict[str, None]) -> None:
        """Count off one of the things that an action waits for."""
        graph = self.graph
        graph.needs[target] -= 1
        if graph.node[target] != _COMMIT:
            changed[graph.node[target]] = None
        elif not graph.needs[target]:
            self.push(self.now + self.commit_s, target)


def _stuck(graph: _Graph, started: bytearray) -> str:
    """Say where each node stands; its whole order where that is short."""
    lines = []
    for node, order in graph.order.items():
        left = [i for i in order if not started[i]]
        if not left:
            continue
        at = graph.action[left[0]]
        if len(order) > _SHOWN:
            lines.append(f"{node} at {at}")
        else:
            shown = (f"[{graph.action[i]}]" if i == left[0] else str(graph.action[i]) for i in order)
            lines.append(f"{node} at {at}: {' '.join(shown)}")
    return "the schedule deadlocks:\n  " + "\n  ".join(lines)
