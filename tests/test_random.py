"""Masks from Philox: against the cipher written out in Python, and golden values that other runtimes can use."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgesplit.segments.base import Samples
from edgesplit.segments.random import keep_mask, keep_masks

WORD = 2**64 - 1


def philox(key: tuple[int, int], counter: list[int]) -> list[int]:
    """Philox4x64-10 as in the paper."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (b >> 64) ^ c1 ^ k0, b & WORD, (a >> 64) ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & WORD, (k1 + 0xBB67AE8584CAA73B) & WORD
    return [c0, c1, c2, c3]


def by_hand(seed: int, name: str, call: int, step: int, device: str, position: int, count: int, p: float) -> list[bool]:
    text = json.dumps([seed, name, call, step, device]).encode()
    key = int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")
    halves: list[int] = []
    block = 0
    while len(halves) < count:
        block += 1  # numpy counts up before its first block
        for word in philox((key & WORD, key >> 64), [block, 0, 0, position]):
            halves += [word & 0xFFFFFFFF, word >> 32]
    return [half >= p * 2**32 for half in halves[:count]]


def test_golden_values() -> None:
    assert (
        "".join("01"[int(k)] for k in keep_mask(0, "drop", 0, 0, "pi-1", 0, 40, 0.5))
        == "0100101111110001010011011010001101010001"
    )
    assert (
        "".join("01"[int(k)] for k in keep_mask(7, "encoder.0.dropout", 3, 1200, "gw-ä", 31, 40, 0.1))
        == "1111111110101111111110111111111110111111"
    )


@given(
    st.integers(0, 2**63),
    st.text(max_size=20),
    st.integers(0, 2**20),
    st.integers(0, 2**40),
    st.text(max_size=10),
    st.integers(0, 2**32),
    st.integers(1, 60),
    st.floats(0, 1),
)
def test_equals_the_cipher(
    seed: int, name: str, call: int, step: int, device: str, position: int, count: int, p: float
) -> None:
    mask = keep_mask(seed, name, call, step, device, position, count, p)
    assert mask.dtype == np.bool_
    assert mask.tolist() == by_hand(seed, name, call, step, device, position, count, p)


def test_a_batch_of_masks_is_each_samples_own_in_order() -> None:
    samples = Samples(3, 9, (("b", 4, 7), ("a", 0, 2)))
    masks = keep_masks("m", 2, samples, 33, 0.3)
    alone = [keep_mask(3, "m", 2, 9, d, i, 33, 0.3) for d, i in [("b", 4), ("b", 5), ("b", 6), ("a", 0), ("a", 1)]]
    np.testing.assert_array_equal(masks, alone)


def test_every_part_of_the_key_counts() -> None:
    base = (1, "m", 0, 5, "a", 2)
    changed = [
        (2, *base[1:]),
        (1, "n", *base[2:]),
        (1, "m", 1, *base[3:]),
        (*base[:3], 6, "a", 2),
        (*base[:4], "b", 2),
        (*base[:5], 3),
    ]
    masks = {keep_mask(*key, 200, 0.5).tobytes() for key in [base, *changed]}
    assert len(masks) == 7


@pytest.mark.parametrize(("p", "kept"), [(0.0, 1.0), (1.0, 0.0)])
def test_the_ends_of_p(p: float, kept: float) -> None:
    assert keep_mask(0, "m", 0, 0, "a", 0, 1000, p).mean() == kept


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_dropped_is_p(p: float) -> None:
    masks = keep_masks("m", 0, Samples(0, 0, (("a", 0, 100),)), 1000, p)
    assert 1 - masks.mean() == pytest.approx(p, abs=0.005)
    rows = 1 - masks.mean(axis=1)
    assert abs(rows - p).max() < 0.07
