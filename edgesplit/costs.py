"""What an action and a message cost, from a profile, a plan, a topology and the links' codecs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from edgesplit.codecs import CODECS
from edgesplit.errors import CodecError, PlanError, did_you_mean
from edgesplit.plan import Plan
from edgesplit.schedule import Action, Step
from edgesplit.topology import Link, Topology


class Hop(Protocol):
    """A directed link (:class:`edgesplit.topology.Link`): one message at a time, first come, first served."""

    @property
    def src(self) -> str:
        """Where it begins."""
        ...

    @property
    def dst(self) -> str:
        """Where it ends."""
        ...

    @property
    def mbps(self) -> float:
        """10^6 bits a second; infinite: no limit."""
        ...

    @property
    def latency_s(self) -> float:
        """Seconds from a message's last bit leaving to its arrival."""
        ...


class Costs(Protocol):
    """What actions and messages cost."""

    def seconds(self, node: str, action: Action) -> float:
        """Seconds that ``action`` takes on ``node``."""
        ...

    def nbytes(self, kind: str, stage: int, micro: int) -> float:
        """Encoded bytes of the ``act``, ``grad`` or ``target`` message that is *for* ``stage``."""
        ...

    def hops(self, src: str, dst: str) -> Sequence[Hop]:
        """Links that a message passes one after the other; none: it arrives at once."""
        ...


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Costs of a pipeline on paper: one time an op, and a link of its own between any two nodes (or none).

    Attributes:
        forward, backward: seconds of a visit; ``I`` and ``W`` take half of a backward each.
        update: seconds of a ``U``.
        latency: seconds of a message; links never fill up.
    """

    forward: float = 1.0
    backward: float = 2.0
    update: float = 0.0
    latency: float = 0.0

    def seconds(self, node: str, action: Action) -> float:
        """The op's time, alike on all nodes."""
        if action.op == "F":
            return self.forward
        if action.op == "U":
            return self.update
        return self.backward if action.op == "B" else self.backward / 2

    def nbytes(self, kind: str, stage: int, micro: int) -> float:
        """Nothing."""
        return 0.0

    def hops(self, src: str, dst: str) -> Sequence[Hop]:
        """One link of the given latency."""
        return (_Wire(src, dst, float("inf"), self.latency),) if self.latency else ()


class _Wire(NamedTuple):
    src: str
    dst: str
    mbps: float
    latency_s: float


def _read(thing: Any, key: str, default: Any = None) -> Any:
    """A value of a profile's part, which is an object or, inside a plan, a mapping of plain JSON values."""
    found = thing.get(key) if isinstance(thing, Mapping) else getattr(thing, key, None)
    return default if found is None else found


class LayerTimes:
    """Seconds per sample of any run of layers on any node.

    Args:
        profile: a profile or its JSON: ``layers`` with ``forward_s``, ``input_grad_s`` and ``weight_grad_s`` in
            seconds per sample, and ``gflops`` of the machine that it was measured on.
        topology: a node's ``gflops`` scales the profile's seconds; where either is unknown they stay as measured.
    """

    def __init__(self, profile: Any, topology: Topology) -> None:
        layers = _read(profile, "layers", ())
        self._sums = {
            key: [0.0, *accumulate(float(_read(layer, key, 0.0)) for layer in layers)]
            for key in ("forward_s", "input_grad_s", "weight_grad_s")
        }
        self._first_input_grad = self._sums["input_grad_s"][1] if layers else 0.0
        self._gflops = _read(profile, "gflops")
        self._topology = topology

    def scale(self, node: str) -> float:
        """How many times slower ``node`` is than the machine of the profile."""
        found = self._topology.nodes.get(node)
        if not self._gflops or found is None or not found.gflops:
            return 1.0
        return float(self._gflops) / found.gflops

    def seconds(self, node: str, op: str, start: int, stop: int) -> float:
        """Seconds per sample of ``op`` over layers ``start`` to ``stop`` on ``node``; an update takes none."""

        def total(key: str) -> float:
            return self._sums[key][stop] - self._sums[key][start]

        spent = 0.0
        if op == "F":
            spent = total("forward_s")
        if op in "BI":  # nobody needs the gradient of the model's own input
            spent += total("input_grad_s") - (self._first_input_grad if start == 0 < stop else 0.0)
        if op in "BW":
            spent += total("weight_grad_s")
        return spent * self.scale(node)


class ProfileCosts:
    """Costs of the actions and messages of some steps; what :func:`edgesplit.simulate.simulate` takes.

    Args:
        plan: the routes.
        steps: whose micro-batches, each with its own number of samples.
        profile: as in :class:`LayerTimes`; its layers' ``cut_bytes`` are the raw bytes per sample of the arrays that
            a cut behind the layer carries, by name (``cut_dtypes``: their dtypes, float32 where absent), and its
            ``target_bytes`` those of a target.
        topology: the links.
        codecs: of activations and gradients on links ``up`` (to a higher tier) and ``down``; raw where absent.
            Targets always travel raw, and so do integer and boolean arrays.

    Raises:
        PlanError: the profile is not of the plan's layers.
        CodecError: a codec or a direction is not known.
    """

    def __init__(
        self,
        plan: Plan,
        steps: Sequence[Step],
        profile: Any,
        topology: Topology,
        codecs: Mapping[str, str] | None = None,
    ) -> None:
        self._layers: Sequence[Any] = _read(profile, "layers", ())
        names = tuple(_read(layer, "name") for layer in self._layers)
        if names != plan.layers:
            raise PlanError(
                f"the profile is of {len(names)} layers {_ends(names)}, the plan of {len(plan.layers)} "
                f"{_ends(plan.layers)}: profile this model"
            )
        self._codecs = {"up": "raw", "down": "raw", **(codecs or {})}
        for direction, codec in self._codecs.items():
            if direction not in ("up", "down"):
                raise CodecError(f"links go 'up' and 'down', not {direction!r}")
            if codec not in CODECS:
                raise CodecError(f"codec {codec!r} is not known{did_you_mean(codec, CODECS)}")
        self._micros = {micro.micro: micro for step in steps for micro in step.micros}
        self._paths = {number: plan.path(micro.device, micro.route) for number, micro in self._micros.items()}
        self._times = LayerTimes(profile, topology)
        self._topology = topology
        self._rank = {tier: rank for rank, tier in enumerate(topology.tier_order)}
        self._target_bytes = float(_read(profile, "target_bytes", 0.0))
        self._seconds: dict[tuple[str, str, int, int], float] = {}

    def seconds(self, node: str, action: Action) -> float:
        """Seconds that ``action`` takes on ``node``."""
        if action.op == "U":
            return 0.0
        micro = self._micros[action.micro]
        _, start, stop = self._paths[action.micro][action.stage]
        key = (node, action.op, start, stop)
        if key not in self._seconds:
            self._seconds[key] = self._times.seconds(*key)
        return self._seconds[key] * (micro.stop - micro.start)

    def nbytes(self, kind: str, stage: int, micro: int) -> float:
        """Encoded bytes of the message that is for ``stage``."""
        found = self._micros[micro]
        samples = found.stop - found.start
        if kind == "target":
            return samples * self._target_bytes
        path = self._paths[micro]
        lower, upper = (path[stage - 1], path[stage]) if kind == "act" else (path[stage], path[stage + 1])
        src, dst = (lower, upper) if kind == "act" else (upper, lower)
        codec = CODECS[self._codecs[self._direction(src.node, dst.node)]]
        layer = self._layers[lower.stop - 1]
        dtypes = _read(layer, "cut_dtypes", {})
        total = 0.0
        for name, nbytes in _read(layer, "cut_bytes", {}).items():
            dtype = dtypes.get(name, "float32")
            if kind == "act" or "float" in dtype:  # only floats have a gradient
                total += nbytes * codec.ratio(dtype)
        return samples * total

    def hops(self, src: str, dst: str) -> tuple[Link, ...]:
        """The topology's links from ``src`` to ``dst``, by way of the broker."""
        return self._topology.hops(src, dst)

    def _direction(self, src: str, dst: str) -> str:
        """Where both are of one tier the message goes on, so up."""
        nodes = self._topology.nodes
        return "down" if self._rank[nodes[dst].tier] < self._rank[nodes[src].tier] else "up"


def _ends(names: Sequence[Any]) -> str:
    return f"({names[0]} .. {names[-1]})" if names else "(none)"
