"""What each layer of a chain costs: the profile that planners and the simulator read. Measured elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from edgesplit.errors import PlanError

_PER_SAMPLE = ("forward_s", "input_grad_s", "weight_grad_s", "flops", "stash_bytes")
_TEXT = ("name", "dtype")
_WHOLE = ("param_bytes", "trainable_bytes", "batch", "samples")


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """One layer's costs, for :attr:`Profile.samples` samples where they grow with them.

    Attributes:
        name: the layer's.
        forward_s, input_grad_s, weight_grad_s: seconds of the forward, and of the gradients of its inputs and of its
            parameters; 0 where there is none to compute.
        flops: floating point operations of the forward (matrix products and convolutions).
        param_bytes: of its parameters; does not grow with samples.
        trainable_bytes: of those that are trained, which have gradients and optimizer state.
        cut_bytes: bytes of each array that leaves it, by name.
        grad_bytes: bytes of the gradients that come back to it over a cut behind it.
        stash_bytes: bytes kept from forward to backward, an upper bound: arrays that two layers keep count for both.
    """

    name: str
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    flops: float
    param_bytes: int
    trainable_bytes: int
    cut_bytes: Mapping[str, float]
    grad_bytes: float
    stash_bytes: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A chain's costs on one thread of one machine.

    Attributes:
        layers: in the chain's order.
        input_bytes, target_bytes: of the data of ``samples`` samples.
        dtype: of the arithmetic, ``float32`` for example.
        batch: samples in the batch that was measured.
        gflops: what a large matrix product of ``dtype`` reaches on one thread of the measuring machine.
        samples: how many samples the layers' seconds and bytes are for: as measured, one.
    """

    layers: tuple[LayerProfile, ...]
    input_bytes: float
    target_bytes: float
    dtype: str
    batch: int
    gflops: float
    samples: int = 1

    def for_samples(self, samples: int) -> Profile:
        """Return the profile of a micro-batch of so many samples.

        Raises:
            PlanError: fewer than one.
        """
        if samples < 1:
            raise PlanError(f"a micro-batch of {samples} samples has no profile: give at least 1")
        factor = samples / self.samples
        return replace(
            self,
            layers=tuple(_times(layer, factor) for layer in self.layers),
            input_bytes=self.input_bytes * factor,
            target_bytes=self.target_bytes * factor,
            samples=samples,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self) | {
            "layers": [asdict(layer) | {"cut_bytes": dict(layer.cut_bytes)} for layer in self.layers]
        }

    @classmethod
    def from_json(cls, value: Any) -> Profile:
        """Build the profile from :meth:`to_json`'s value.

        Raises:
            PlanError: a key that is missing or not known, or a value of the wrong kind.
        """
        values = _checked(value, cls, "profile")
        if not isinstance(values["layers"], list) or not values["layers"]:
            raise PlanError("profile's layers must be a list of at least one")
        layers = [_checked(layer, LayerProfile, f"profile's layer {i}") for i, layer in enumerate(values["layers"])]
        names = [layer["name"] for layer in layers]
        if len(set(names)) != len(names):
            raise PlanError("profile's layers must have different names")
        return cls(**values | {"layers": tuple(LayerProfile(**layer) for layer in layers)})


def _times(layer: LayerProfile, factor: float) -> LayerProfile:
    grown: dict[str, Any] = {key: getattr(layer, key) * factor for key in (*_PER_SAMPLE, "grad_bytes")}
    return replace(layer, cut_bytes={name: size * factor for name, size in layer.cut_bytes.items()}, **grown)


def _checked(value: Any, kind: type, what: str) -> dict[str, Any]:
    known = {item.name for item in fields(kind)}
    if not isinstance(value, Mapping) or set(value) != known:
        keys = ", ".join(sorted(map(str, value))) if isinstance(value, Mapping) else type(value).__name__
        raise PlanError(f"{what} has {keys or 'nothing'}: it must have exactly {', '.join(sorted(known))}")
    for key, item in value.items():
        if key in _TEXT:
            good = isinstance(item, str) and item != ""
        elif key in _WHOLE:
            good = type(item) is int and item >= (1 if key in ("batch", "samples") else 0)
        elif key == "cut_bytes":
            good = isinstance(item, Mapping) and all(isinstance(n, str) and _number(size) for n, size in item.items())
        else:
            good = key == "layers" or _number(item)
        if not good:
            raise PlanError(f"{what} has {key} {item!r}, which is not what it must be: measure it anew")
    return dict(value)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
