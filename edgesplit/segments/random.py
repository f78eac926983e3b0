"""Which elements a random mask keeps: a pure function of who draws and for which sample.

A mask is keyed by (run seed, the random module's name in the original model, number of the call, global step, device,
position of the sample in the device's batch), so it is the same for every cut, every micro-batch size, in torch and
in ONNX, and when a forward is repeated. The bits come from Philox4x64-10 (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011).
"""

from __future__ import annotations

import hashlib
import json
import math

import numpy as np
import numpy.typing as npt

from edgesplit.segments.base import Samples

Mask = npt.NDArray[np.bool_]


def keep_mask(seed: int, name: str, call: int, step: int, device: str, position: int, count: int, p: float) -> Mask:
    """Return one sample's mask, bool of shape ``(count,)``, True where an element is kept.

    Args:
        seed: the run's.
        name: the random module's name in the original model.
        call: how many masks this module has drawn before in this forward.
        step: the global step.
        device: whose batch the sample is in.
        position: of the sample in that batch.
        count: elements of the mask.
        p: probability that an element is dropped.
    """
    samples = Samples(seed, step, ((device, position, position + 1),))
    mask: Mask = keep_masks(name, call, samples, count, p)[0]
    return mask


def keep_masks(name: str, call: int, samples: Samples, count: int, p: float) -> Mask:
    """Return the masks of all ``samples`` in their order, bool of shape ``(samples, count)``."""
    total = sum(stop - start for _, start, stop in samples.parts)
    words = np.empty((total, -(-count // 2)), np.uint64)
    generator = np.random.Philox(key=0)
    state = generator.state
    row = 0
    for device, start, stop in samples.parts:
        state["state"]["key"] = _key(samples.seed, name, call, samples.step, device)
        for position in range(start, stop):
            # The position is the counter's highest word: 2**192 blocks of four words each before samples could meet.
            state["state"]["counter"] = np.array([0, 0, 0, position], np.uint64)
            generator.state = state
            words[row] = generator.random_raw(words.shape[1])
            row += 1
    draws = words.astype("<u8", copy=False).view("<u4")[:, :count]
    threshold = math.ceil(p * 2**32)
    if threshold >= 2**32:
        return np.zeros((total, count), np.bool_)
    keep: Mask = draws >= np.uint32(threshold)
    return keep


def _key(seed: int, name: str, call: int, step: int, device: str) -> npt.NDArray[np.uint64]:
    text = json.dumps([seed, name, call, step, device])
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)
