"""The rounds of a run, on the coordinator: steps, aggregation, what the nodes hold, and where the run stands."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgesplit.attendance import Attendance
from edgesplit.codecs import Packed, pack, unpack
from edgesplit.conductor import Asked, Conductor
from edgesplit.data import GIVEN_EPOCH
from edgesplit.effects import StepDone
from edgesplit.errors import ExperimentError, RunError
from edgesplit.experiment import Experiment
from edgesplit.federated import Federation, Group, Reply, Request
from edgesplit.holding import Arrays, Held, Names, read, spread
from edgesplit.logbook import Progress
from edgesplit.plan import Plan
from edgesplit.recovery import Line, Point, Standing
from edgesplit.replanning import moved
from edgesplit.replicas import Judgement, groups_of, judge_all, mean_of, must_be_equal
from edgesplit.sheets import Agenda, Draft, Share, evaluation
from edgesplit.transport.base import Message

HOURS_S = 10.0
"""Between two looks at the clock while all devices are outside their hours."""

MOST_BATCHES, MOST_SAMPLES = 1_000_000, 1_000_000
"""Batches that a device may say it has in an epoch, and samples in one."""


@dataclass(frozen=True)
class RoundDone:
    """A round that has ended. ``loss`` is the weighted mean over its steps, ``seconds`` its training time."""

    number: int
    steps: int
    loss: float
    samples: int
    seconds: float
    skipped: int
    metrics: Mapping[str, float] = field(default_factory=dict)


class Training:
    """Drives a fleet that has joined.

    Args:
        conductor: reaches it.
        plan: the routes.
        experiment: the resolved options.
        names: of parameters and buffers by layer.
        federation: aggregates replicas between rounds (``every: round``).
        params, buffers: the model's initial weights by name.
        on_step: called with each step that ends.
    """

    def __init__(
        self,
        conductor: Conductor,
        plan: Plan,
        experiment: Experiment,
        names: Names,
        federation: Federation | None,
        params: Arrays,
        buffers: Arrays,
        *,
        on_step: Callable[[StepDone], None] = lambda done: None,
    ) -> None:
        self.conductor, self.experiment, self.names = conductor, experiment, names
        self.params, self.buffers = params, buffers
        self.on_step = on_step
        self.attendance = Attendance({})
        self._out: list[str] | None = None  # devices that take no part in the round that was begun
        self.held: dict[str, Held] = {}
        self._judgement = Judgement()  # of this round
        self._whole = False  # they were fetched with the optimizers' state
        self.agenda: Agenda | None = None
        self.test_sizes: dict[str, list[int]] = {}
        self._ended: list[StepDone] = []  # of the round that a resumed run was in
        self.participation: dict[str, int] = {}
        self.federation = federation
        self._group(plan)
        self._given: dict[str, Arrays] = {}  # what each node held when the weights were last given out, if it is known
        conductor.coordinator.spare = self._spare

    @property
    def plan(self) -> Plan:
        """The plan of the moment: without the nodes that were left out."""
        return self.conductor.coordinator.plan

    def _group(self, plan: Plan) -> None:
        """Find the replicated layers; until the round's end they are those of its beginning."""
        self._groups = groups_of(plan)
        self._shared = {key: g for key, g in self._groups.items() if len(g[1]) > 1 and self._takes_part(g[1])}

    def _takes_part(self, nodes: Sequence[str]) -> bool:
        """Whether ``federation.tiers`` lets these replicas be aggregated (default: all)."""
        tiers = self.experiment.federation.tiers
        if tiers is None:
            return True
        tier_of = self.plan.tiers()
        return all(tier_of.get(node) in tiers for node in nodes)

    # -- weights

    def load(self) -> None:
        """Give every node its layers: the model's weights."""
        given = {node: self._initial(node) for node in self.plan.nodes()}
        self._load_all(given, loss_scale=self.conductor.coordinator.loss_scale.value)
        self._given = given

    def take_up(
        self,
        load: int,
        held: Mapping[str, Arrays] | None,
        progress: Progress | None,
        standing: Standing,
        number: int = 1,
        last: tuple[int, int] = (0, 0),
    ) -> None:
        """Go on with a run that has stopped: where the nodes have kept it, or where its round began.

        Args:
            load: how often weights had been given out.
            held: what the nodes held then; None: the initial weights.
            progress: how far it had come since; None: not known.
            standing: the coordinator's at that point.
            number: of the round.
            last: the last term and the next number of a micro-batch, as far as they are known.
        """
        agenda = self.drawn
        self._given = {n: dict(held[n]) if held else self._initial(n) for n in self.plan.nodes()}
        line = Line(Point(load, agenda.step - 1), standing)
        if progress is not None and progress.base == line.base:
            trial = Agenda(agenda.sizes, agenda.lr, dict(agenda.done), agenda.step)
            self._out = progress.out
            line = progress.line({draft.step: draft for draft in self.drafts(number, trial)})
            self._ended = list(progress.done)
        self.conductor.resume(line, *last)

    def _initial(self, node: str) -> Arrays:
        params, buffers = self.names.of(self.plan.layers_of(node))
        arrays = {f"param/{name}": self.params[name] for name in params}
        return arrays | {f"buffer/{name}": self.buffers[name] for name in buffers}

    def _spare(self, node: str) -> dict[str, Packed] | None:
        """What a node held when the weights were last given out; None where its optimizer's state is not known."""
        return (
            pack(self.names.own(self.plan.layers_of(node), self._given[node]), "raw") if node in self._given else None
        )

    @property
    def _may_leave_out(self) -> bool:
        """Whether a node can be left out in the middle of anything: the others are then given all that they held."""
        return self.experiment.on_lost == "continue" or self.experiment.limits.quarantine_after is not None

    def fetch(self, *, optimizer: bool) -> None:
        """Ask every node for what it holds."""
        optimizer = optimizer or self._may_leave_out
        replies = self.conductor.ask("fetch", {node: ({"optimizer": optimizer}, {}) for node in self.plan.nodes()})
        layers, model = self.plan.layers_of, (self.params, self.buffers)
        self.held = {node: read(reply, layers(node), self.names, *model) for node, reply in replies.items()}
        self._whole = optimizer

    # -- rounds

    def devices(self, number: int) -> list[str]:
        """The devices of a round: all, or ``data.per_round`` of them chosen by seed and round."""
        devices = [route.device for route in self.plan.routes]
        count = self.experiment.data.per_round
        if count is None:
            return devices
        if count > (known := len(self.conductor.coordinator.wanted.routes)):
            raise ExperimentError(f"data.per_round is {count}, but there are {known} devices: lower it")
        key = hashlib.blake2b(f"devices/{self.experiment.seed}/{number}".encode(), digest_size=16).digest()
        chosen = np.random.Generator(np.random.Philox(key=np.frombuffer(key, "<u8"))).permutation(len(devices))[:count]
        return [devices[i] for i in sorted(chosen)]

    def drafts(self, number: int, agenda: Agenda) -> list[Draft]:
        """Draw up the steps of a round, without the devices that take no part in it."""
        e = self.experiment
        here = [device for device in self.devices(number) if device not in (self._out or ())]
        return agenda.round(here, steps=e.steps_per_round, epochs=e.epochs_per_round)

    def _attend(self, number: int) -> None:
        """Decide who takes part in a round; where all are outside their hours, wait."""
        if not self.attendance or self._out is not None:  # a resumed round is that which was begun
            return
        waited = False
        while True:
            devices = self.devices(number)
            out = self.attendance.out(devices)
            if len(out) < len(devices) or not all("hours" in why for why in out.values()):
                break
            if not waited:
                self.conductor.say(f"round {number} waits: all devices are outside their hours")
            waited = True
            self.conductor.idle(HOURS_S)
        for line in self.attendance.news(number, out):
            self.conductor.say(line)
        self._out = sorted(out)
        self.conductor.note({"out": self._out})

    def total_steps(self, rounds: int) -> int:
        """How many steps a run of so many rounds has."""
        agenda = self.drawn
        trial = Agenda(agenda.sizes)
        for number in range(1, rounds + 1):
            self.drafts(number, trial)
        return trial.step

    @property
    def drawn(self) -> Agenda:
        """What was handed out so far. Raises RunError before the fleet has joined."""
        if self.agenda is None:
            raise RunError("the fleet has not joined yet")
        return self.agenda

    def round(self, number: int, drafts: Sequence[Draft] | None = None, *, optimizer: bool = False) -> RoundDone:
        """Train a round and make the replicas one.

        Args:
            number: from 1.
            drafts: its steps; None: as the experiment says.
            optimizer: fetch optimizer state too, for a checkpoint.
        """
        if drafts is None:
            self._attend(number)
            drafts = self.drafts(number, self.drawn)
        done, self._ended = self._ended, []
        left = drafts[len(done) :]
        seconds = 0.0

        def train(requests: list[Request]) -> list[Reply]:
            nonlocal seconds
            start = time.perf_counter()
            for step in self.conductor.steps(left):
                done.append(step)
                self.on_step(step)
            seconds = time.perf_counter() - start
            self.fetch(optimizer=optimizer or self.experiment.federation.optimizer_state == "average")
            self._judge(drafts)
            return [self._reply(request) for request in requests if request.node in self.held]

        if self.federation is not None and self._shared:
            results = self.federation.run_round(number, self.groups(), train)
            self._distribute({key: dict(result.arrays) for key, result in results.items()})
        else:
            train([])
            self._distribute({})
        self._out = None
        self.attendance.spent(self.conductor.spent() if self.attendance else {})
        missed = self.conductor.coordinator.missed
        took_part = {device for draft in drafts for device in draft.shares if draft.step not in missed.get(device, {})}
        for device in took_part:
            self.participation[device] = self.participation.get(device, 0) + 1
        return _summary(number, done, seconds)

    def groups(self) -> dict[str, Group]:
        """The replicated layers with their current weights, as the strategies see them."""
        groups = {}
        for key, (layers, nodes) in self._shared.items():
            params, _ = self.names.of(layers)
            if params:
                groups[key] = Group(nodes, {name: self.params[name] for name in params})
        return groups

    def _reply(self, request: Request) -> Reply:
        layers, _ = self._groups[request.group]
        params, _ = self.names.of(layers)
        held = self.held[request.node]
        if (judged := self._judgement.judged.get((request.group, request.node))) is not None:
            return Reply(request.node, request.group, judged.arrays, judged.weight)
        return Reply(request.node, request.group, held.part("param", params), held.weights.get(layers[0], 0.0))

    def _judge(self, drafts: Sequence[Draft]) -> None:
        """Where there are limits: look at what devices have made of their replicas."""
        self._judgement = Judgement()
        limits, held = self.experiment.limits, self.held
        if limits.quarantine_after is None and limits.device_norm is None:
            return
        devices = {route.device for route in self.plan.routes}
        if self.experiment.federation.every == "step":
            self._judgement = must_be_equal(self._shared, held, self.names, devices)
        else:
            samples = {d: sum(draft.shares[d].samples for draft in drafts if d in draft.shares) for d in devices}
            factor = limits.device_weight
            most = {device: count * factor for device, count in samples.items()} if factor is not None else {}
            self._judgement = judge_all(
                self._shared, held, self.names, self.params, norm=limits.device_norm, most=most, devices=devices
            )
        for node, (what, value) in self._judgement.offences.items():
            self.conductor.offend(node, what, value)

    def _distribute(self, results: Mapping[str, Arrays]) -> None:
        """Take the round's result as the model, and give replicas what has changed."""
        changed: dict[str, Arrays] = {node: {} for node in self.held}
        for key, (layers, all_nodes) in self._groups.items():
            nodes = [node for node in all_nodes if node in self.held]
            params, buffers = self.names.of(layers)
            new = results.get(key) or self.held[self._judgement.as_most.get(key, nodes[0])].part("param", params)
            self.params |= new
            if key in results:
                self._change(changed, nodes, "param", new)
            self._average_buffers(changed, key, layers, nodes, buffers)
            if key in results and self.experiment.federation.optimizer_state == "average":
                self._change(changed, nodes, "optimizer", self._average(key, layers, nodes, "optimizer", params))
        for node, arrays in changed.items():
            self.held[node].arrays |= arrays
        reset = self._reset(results)
        missed = {device: dict(steps) for device, steps in self.conductor.coordinator.missed.items()}
        before, after = self.plan, self.conductor.coordinator.next_plan()
        if after.routes == before.routes:
            after = before
        else:
            changed = self._change_plan(after, changed)
        if self._give_out(changed, reset, after, other=after is not before):
            self.conductor.coordinator.missed = missed  # what was done again counts for nothing
        self._group(self.plan)
        self._given = {n: dict(self.held[n].arrays) for n in self.plan.nodes() if n in self.held} if self._whole else {}

    def _give_out(self, changed: Mapping[str, Arrays], reset: Sequence[int], plan: Plan, *, other: bool) -> bool:
        """Give the nodes of a plan what has changed, or all that they held where that may not be what they have now.

        If nodes are left out meanwhile, steps are done again without them; if some are back by this plan, steps that
        are done again are done with them. What has changed would come onto other weights than it is of.

        Returns:
            Whether they were given all.
        """
        asked: Asked = {
            n: ({"reset_round": True, "reset_optimizer": [*reset]}, pack(a, "raw")) for n, a in changed.items()
        }
        same = self.plan is plan and not (other and self._may_leave_out)
        replies = self.conductor.ask("load", asked) if same else {}
        whole = not replies
        while not replies:
            mine = {
                node: self.names.own(self.plan.layers_of(node), self.held[node].arrays) for node in self.plan.nodes()
            }
            replies = self._load_all(mine)
        return whole

    def _load_all(self, arrays: Mapping[str, Arrays], **meta: Any) -> Mapping[str, Message]:
        """Give every node all that it holds."""
        told = {n: {"reset_round": True, "reset_optimizer": [*self.plan.layers_of(n)], **meta} for n in arrays}
        return self.conductor.ask("load", {node: (told[node], pack(part, "raw")) for node, part in arrays.items()})

    def adopt_plan(self) -> bool:
        """Between two rounds: work by the plan that is wanted, as far as its nodes are there. Return whether it is new.

        Only the layers that change hands are sent, with their optimizers' state.
        """
        if self.conductor.coordinator.next_plan().routes == self.plan.routes:
            return False
        if not self.held:  # before the first round
            self.held = {node: Held(dict(arrays)) for node, arrays in self._given.items()}
            self._whole = True
        self._distribute({})
        return True

    def _fetch_state(self, layers: set[int]) -> None:
        """Ask for the optimizers' state of these layers, of one node each, where it was not fetched."""
        if self._whole or not layers:
            return
        replicas = self.plan.replicas()
        holders: dict[str, list[int]] = {}
        for layer in sorted(layers):
            holder = next((node for node in replicas[layer] if node in self.held), None)
            if holder is not None:
                holders.setdefault(holder, []).append(layer)
        asked: Asked = {node: ({"optimizer": True, "layers": mine}, {}) for node, mine in holders.items()}
        for node, reply in self.conductor.ask("fetch", asked).items():
            found = Held(unpack(reply.arrays)).part("optimizer")
            self.held[node].arrays |= {f"optimizer/{name}": array for name, array in found.items()}

    def _change_plan(self, plan: Plan, changed: Mapping[str, Arrays]) -> dict[str, Arrays]:
        """Tell everybody another plan; return what each has to be given: of layers that it had, what has changed."""
        before, coordinator = self.plan, self.conductor.coordinator
        self._fetch_state({layer for layers in moved(before, plan).values() for layer in layers})
        whole = {node: held.arrays for node, held in self.held.items()}
        # Until all have their new layers, a node that crashes has the round done again, by the new plan.
        self._given = spread(self._given, plan, self.names) if self._given else {}
        told = coordinator.take_plan(plan)
        replies = self.conductor.ask("assign", {node: ({**meta, "again": True}, {}) for node, meta in told.items()})
        self._learn(replies)
        self.held = {node: Held(arrays) for node, arrays in spread(whole, plan, self.names).items()}
        give = {}
        for node, layers in moved(before, plan).items():
            params, buffers = self.names.of(layers)
            new = self.held[node]
            give[node] = {f"param/{name}": self.params[name] for name in params}
            give[node] |= {f"buffer/{name}": array for name, array in new.part("buffer", buffers).items()}
            give[node] |= {f"optimizer/{name}": array for name, array in new.part("optimizer", params).items()}
            new.arrays |= give[node]
            give[node] |= {name: array for name, array in changed.get(node, {}).items() if name in new.arrays}
        return give

    def _learn(self, replies: Mapping[str, Message]) -> None:
        """Learn the data of devices that are new to the run."""
        for device, reply in replies.items():
            if device not in self.drawn.sizes and reply.meta.get("sizes"):
                self.drawn.sizes[device], self.test_sizes[device] = sizes_of(reply, "train"), sizes_of(reply, "test")

    def _reset(self, results: Mapping[str, Arrays]) -> list[int]:
        """Return the layers whose optimizers start anew: under ``reset`` those that were aggregated."""
        if self.experiment.federation.optimizer_state != "reset":
            return []
        layers = [layer for key in results for layer in self._groups[key][0]]
        gone = set(self.names.of(layers)[0])
        for held in self.held.values():
            kept = {
                f"optimizer/{name}": array
                for name, array in held.part("optimizer").items()
                if name.rpartition("//")[0] not in gone
            }
            held.arrays = {n: a for n, a in held.arrays.items() if not n.startswith("optimizer/")} | kept
        return layers

    @staticmethod
    def _change(changed: dict[str, Arrays], nodes: Sequence[str], kind: str, arrays: Arrays) -> None:
        for node in nodes:
            changed[node] |= {f"{kind}/{name}": array for name, array in arrays.items()}

    def _average_buffers(
        self,
        changed: dict[str, Arrays],
        key: str,
        layers: Sequence[int],
        nodes: Sequence[str],
        buffers: Sequence[str],
    ) -> None:
        if not buffers:
            return
        if len(nodes) == 1:
            self.buffers |= self.held[nodes[0]].part("buffer", buffers)
            return
        mean = self._average(key, layers, nodes, "buffer", buffers)
        self.buffers |= mean
        if self.experiment.federation.buffers == "average" and key in self._shared:
            self._change(changed, nodes, "buffer", mean)

    def _average(
        self, key: str, layers: Sequence[int], nodes: Sequence[str], kind: str, names: Sequence[str]
    ) -> Arrays:
        judged = {node: self._judgement.judged.get((key, node)) for node in nodes}
        weights = {n: one.weight if one else self.held[n].weights.get(layers[0], 0.0) for n, one in judged.items()}
        return mean_of(key, {node: self.held[node].part(kind, names) for node in nodes}, weights)

    def adopt(self) -> None:
        """Take what was fetched as the model (of replicas the first), after steps driven by hand."""
        for layers, nodes in self._groups.values():
            params, buffers = self.names.of(layers)
            self.params |= self.held[nodes[0]].part("param", params)
            self.buffers |= self.held[nodes[0]].part("buffer", buffers)

    # -- evaluation on the devices

    def evaluate_devices(self) -> dict[str, float]:
        """Run the devices' own test sets through the pipeline: ``device/<name>/<metric>`` -> value."""
        here = {route.device for route in self.plan.routes}
        sizes = {device: batches for device, batches in self.test_sizes.items() if batches and device in here}
        if not sizes:
            raise ExperimentError("no device has a test set: Task.test gave None for all of them")
        totals: dict[tuple[str, str], tuple[float, float]] = {}
        drafts = list(evaluation(sizes, self.drawn.step))
        for done in self.conductor.steps(drafts, evaluate=True):
            for device, metrics in done.metrics.items():
                for name, (value, count) in metrics.items():
                    before = totals.get((device, name), (0.0, 0.0))
                    totals[device, name] = before[0] + value, before[1] + count
        return {f"device/{device}/{name}": v / c for (device, name), (v, c) in totals.items() if c}


def one_step(step: int, batches: Mapping[str, tuple[int, int]], lr: float) -> Draft:
    """A step over batches given by hand: device -> (number of the batch given, samples)."""
    return Draft(step, {device: Share(GIVEN_EPOCH, index, samples) for device, (index, samples) in batches.items()}, lr)


def sizes_of(reply: Message, part: str) -> list[int]:
    """Return the samples in each batch that a device says it has. Raises RunError where it says something else."""
    sizes = (reply.meta.get("sizes") or {}).get(part)
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise RunError(f"{reply.sender!r} did not say how many samples it has: run the same version everywhere")
    if len(sizes) > MOST_BATCHES or max(sizes, default=0) > MOST_SAMPLES:
        raise RunError(
            f"{reply.sender!r} says that it has {len(sizes)} batches of up to {max(sizes)} samples: "
            f"at most {MOST_BATCHES} of {MOST_SAMPLES} are taken"
        )
    return sizes


def _summary(number: int, done: Sequence[StepDone], seconds: float) -> RoundDone:
    counted = [step for step in done if step.applied and step.weight]
    weight = sum(step.weight for step in counted)
    loss = sum(step.loss * step.weight for step in counted) / weight if weight else float("nan")
    samples = sum(step.samples for step in done)
    return RoundDone(number, len(done), loss, samples, seconds, sum(not step.applied for step in done))
