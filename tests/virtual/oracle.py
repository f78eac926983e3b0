"""What a run must come to: every replica's weights, computed step by step in one process."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from edgesplit.plan import Plan
from edgesplit.sheets import Draft, Share
from tests.virtual.fleet import MASK, Case, initial, loss_of, number, push, square_of, through, updated, weight_of


def present(draft: Draft) -> dict[str, Share]:
    """The devices that have samples in a step."""
    return {device: share for device, share in draft.shares.items() if share.samples}


class Oracle:
    """Every replica's weights, updated step by step by the rules of DESIGN's "What a step computes"."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.scale = replace(case.scale)
        self.weights = {(n, la): initial(la) for la, nodes in case.plan.replicas().items() for n in nodes}
        self.total: dict[tuple[str, int], float] = defaultdict(float)
        self.use(case.plan)

    def use(self, plan: Plan) -> None:
        """Go on by another plan."""
        self.plan = plan
        self.shared = {la: nodes for la, nodes in plan.replicas().items() if len(nodes) > 1}

    def pieces(self, samples: int) -> list[tuple[int, int]]:
        """Near-equal, the larger first; or of a given size."""
        size, parts = self.case.cutting.micro_batch_size, self.case.cutting.micros
        if size is not None:
            return [(a, min(a + size, samples)) for a in range(0, samples, size)]
        parts = min(parts or 1, samples)
        lengths = [samples // parts + (i < samples % parts) for i in range(parts)]
        return [(sum(lengths[:i]), sum(lengths[: i + 1])) for i in range(parts)]

    def run(self, device: str, epoch: int, index: int, start: int, stop: int) -> tuple[int, list[tuple[str, int, int]]]:
        """Return the output of a micro-batch, and (node, layer, input) on the way."""
        x, passed = number("x", device, epoch, index, start, stop), []
        for node, first, end in self.plan.route(device).stages:
            for layer in range(first, end):
                passed.append((node, layer, x))
                x = through(layer, self.weights[node, layer], x)
        return x, passed

    def updates(self, drafts: Sequence[Draft]) -> Counter[tuple[str, int, int]]:
        """How many micro-batches' updates an asynchronous method makes, by (node, step, layer)."""
        wanted: Counter[tuple[str, int, int]] = Counter()
        for draft in drafts:
            for device, share in present(draft).items():
                for node, start, stop in self.plan.route(device).stages:
                    for layer in range(start, stop):
                        wanted[node, draft.step, layer] += len(self.pieces(share.samples))
        return wanted

    def push(self, drafts: Sequence[Draft]) -> None:
        """Make an asynchronous method's updates: what they add up to is the same in any order."""
        for draft in drafts:
            for device, share in present(draft).items():
                for start, stop in self.pieces(share.samples):
                    where = (device, share.epoch, share.index, start, stop)
                    for node, layer, _ in self.run(*where)[1]:
                        self.weights[node, layer] = (self.weights[node, layer] + push(draft.step, layer, *where)) & MASK

    def evaluate(self, draft: Draft) -> dict[str, tuple[float, float]]:
        found = {}
        for device, share in present(draft).items():
            totals = [0.0, 0.0]
            for start, stop in self.pieces(share.samples):
                where = (device, share.epoch, share.index, start, stop)
                totals[0] += self.run(*where)[0] % 101
                totals[1] += weight_of(*where)
            found[device] = (totals[0], totals[1])
        return found

    def step(self, draft: Draft, clip: float) -> tuple[bool, float, float, float]:
        """Train a step. Returns whether it counts, its loss sum and weight, and the global norm."""
        grads: dict[tuple[str, int], int] = {}
        weights: dict[tuple[str, int], float] = defaultdict(float)
        loss = total = 0.0
        nodes = {stage.node for device in present(draft) for stage in self.plan.route(device).stages}
        for device, share in present(draft).items():
            for start, stop in self.pieces(share.samples):
                where = (device, share.epoch, share.index, start, stop)
                output, passed = self.run(*where)
                gradient = loss_of(output, number("y", *where))
                loss += gradient % 997
                total += weight_of(*where)
                for node, layer, x in reversed(passed):
                    if layer not in self.case.frozen:
                        grads[node, layer] = (grads.get((node, layer), 0) + gradient * x) & MASK
                    gradient = (gradient * (2 * self.weights[node, layer] + 1)) & MASK
                    weights[node, layer] += weight_of(*where)
        if self.case.every_step and nodes:
            nodes |= {node for holders in self.shared.values() for node in holders}
        if nodes & self.case.poison.get(draft.step, frozenset()):
            self.scale.note(finite=False)
            return False, loss, total, math.nan
        norm = self.norm(grads, weights)
        if nodes:
            self.scale.note(finite=True)
        if self.case.every_step:
            for layer, holders in self.shared.items():
                whole = [grads[n, layer] for n in holders if (n, layer) in grads]
                weight = sum(weights[n, layer] for n in holders)
                for n in holders:
                    if whole:
                        grads[n, layer] = sum(whole) & MASK
                    weights[n, layer] = weight
        for key, gradient in grads.items():
            if weights[key]:
                self.weights[key] = updated(self.weights[key], gradient, weights[key], draft.lr, clip)
        for key, weight in weights.items():
            self.total[key] += weight
        return True, loss, total, norm

    def norm(self, grads: Mapping[tuple[str, int], int], weights: Mapping[tuple[str, int], float]) -> float:
        square = 0.0
        for layer, holders in self.plan.replicas().items():
            total = sum(weights.get((n, layer), 0.0) for n in holders)
            if not total:
                continue
            if self.case.every_step and layer in self.shared:  # one without weight adds its gradient all the same
                whole = sum(grads[n, layer] for n in holders if (n, layer) in grads) & MASK
                square += (whole / total / self.scale.value) ** 2
            else:
                held = [n for n in holders if (n, layer) in grads]
                square += sum(weights[n, layer] * square_of(grads[n, layer]) for n in held) / total
        return math.sqrt(square)

    def aggregate(self) -> dict[int, int]:
        """A layer's replicas become one, a mix in which each counts by its weight; the round's weights begin anew."""
        mixed = {}
        for layer, nodes in self.shared.items():
            mixed[layer] = mix([(self.total[n, layer], self.weights[n, layer]) for n in nodes])
            self.weights |= {(n, layer): mixed[layer] for n in nodes}
        self.total.clear()
        return mixed


def mix(held: Sequence[tuple[float, int]]) -> int:
    return sum((int(weight) + 1) * (2 * i + 1) * value for i, (weight, value) in enumerate(held)) & MASK
