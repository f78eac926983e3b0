"""Codecs: what comes out is what went in, within each codec's bound and at its stated size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgesplit.codecs import CODECS, Packed, encoded_size, pack, unpack
from edgesplit.errors import CodecError

SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6)
FLOATS = st.sampled_from(["float16", "float32", "float64"])
EXACT = st.sampled_from(["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])


def values_of(dtype: str, limit: float = 1e4) -> st.SearchStrategy[np.ndarray]:
    elements = {"min_value": -limit, "max_value": limit, "allow_nan": False, "allow_infinity": False}
    return hnp.arrays(dtype, SHAPES, elements=elements)


def roundtrip(codec: str, array: np.ndarray, dtype: str | None = None) -> np.ndarray:
    packed = CODECS[codec].encode(array, dtype)
    packed = packed._replace(data=bytes(packed.data))  # as after a network
    decoded = CODECS[packed.codec].decode(packed)
    assert decoded.shape == array.shape
    assert decoded.dtype == array.dtype
    assert len(packed.data) == encoded_size(packed.codec, packed.dtype, packed.shape)
    return decoded


@given(EXACT.flatmap(lambda dtype: hnp.arrays(dtype, SHAPES)), st.sampled_from(list(CODECS)))
@settings(deadline=None, max_examples=60)
def test_integer_and_boolean_arrays_are_exact_whatever_the_codec(array: np.ndarray, codec: str) -> None:
    assert CODECS[codec].encode(array).codec == "raw"
    np.testing.assert_array_equal(roundtrip(codec, array), array)


@given(FLOATS.flatmap(lambda dtype: hnp.arrays(dtype, SHAPES)))
@settings(deadline=None, max_examples=60)
def test_raw_keeps_every_bit(array: np.ndarray) -> None:
    assert roundtrip("raw", array).tobytes() == array.tobytes()


@given(FLOATS.flatmap(values_of), st.sampled_from(["fp16", "bf16"]))
@settings(deadline=None, max_examples=60)
def test_half_precision_equals_torch_and_is_within_its_bound(array: np.ndarray, codec: str) -> None:
    decoded = roundtrip(codec, array)
    if array.dtype == np.float16:  # not smaller, so it is not touched
        np.testing.assert_array_equal(decoded, array)
        return
    half = torch.float16 if codec == "fp16" else torch.bfloat16
    source = array if codec == "fp16" else array.astype(np.float32)
    oracle = torch.tensor(source).to(half).to(torch.float64).numpy()
    np.testing.assert_array_equal(decoded.astype(np.float64), oracle)
    assert np.all(np.abs(decoded.astype(float) - array) <= CODECS[codec].error * np.abs(array) + 2.0**-24)


@given(FLOATS.flatmap(values_of))
@settings(deadline=None, max_examples=60)
def test_int8_is_within_half_a_scale_of_its_channel(array: np.ndarray) -> None:
    decoded = roundtrip("int8", array).astype(np.float64)
    original = array.astype(np.float64)
    channels = np.moveaxis(original, 1, 0) if array.ndim >= 2 else original[None]
    largest = np.array([np.max(np.abs(channel), initial=0.0) for channel in channels])
    shape = (1, -1) + (1,) * (array.ndim - 2) if array.ndim >= 2 else ()
    unit = np.finfo(array.dtype).eps
    bound = largest.reshape(shape) * (CODECS["int8"].error + unit) * 1.001 + 1e-37
    if array.dtype == np.float16:
        bound = bound + 2.0**-24
    assert np.all(np.abs(decoded - original) <= bound)


def test_int8_has_a_scale_for_each_channel_of_axis_1() -> None:
    array = np.array([[1.0, 1000.0], [-0.5, 127.0]], np.float32)
    np.testing.assert_allclose(roundtrip("int8", array), [[1.0, 1000.0], [-64 / 127, 16 * 1000 / 127]], rtol=1e-6)


@pytest.mark.parametrize("codec", list(CODECS))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_what_is_not_finite_arrives_as_not_finite(codec: str, bad: float, dtype: str) -> None:
    array = np.ones((3, 2, 4), dtype)
    array[1, 0, 2] = bad
    decoded = roundtrip(codec, array)
    assert not np.isfinite(decoded[1, 0, 2])
    assert np.isnan(decoded[1, 0, 2]) or not np.isnan(bad)
    np.testing.assert_array_equal(decoded[:, 1], array[:, 1])  # other channels do not suffer


def test_every_nan_stays_one_in_bf16() -> None:
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001, 0x7FC00000], np.uint32)
    assert np.all(np.isnan(roundtrip("bf16", bits.view(np.float32))))


@given(hnp.arrays(np.uint16, SHAPES), st.sampled_from(list(CODECS)))
@settings(deadline=None, max_examples=60)
def test_bfloat16_travels_as_its_bits(bits: np.ndarray, codec: str) -> None:
    packed = CODECS[codec].encode(bits, "bfloat16")
    assert packed.dtype == "bfloat16"
    decoded = CODECS[packed.codec].decode(packed)
    assert decoded.dtype == np.uint16
    if codec != "int8":
        np.testing.assert_array_equal(decoded, bits)


@pytest.mark.parametrize("codec", list(CODECS))
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64", "bool"])
def test_the_stated_ratio_is_the_size(codec: str, dtype: str) -> None:
    array = np.ones((512, 16, 16), dtype)
    size = len(CODECS[codec].encode(array).data)
    assert size / array.nbytes == pytest.approx(CODECS[codec].ratio(dtype), rel=0.01)


def test_raw_does_not_copy_and_any_layout_arrives() -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    packed = CODECS["raw"].encode(array)
    assert np.shares_memory(np.frombuffer(packed.data, np.uint8), array)
    assert np.shares_memory(CODECS["raw"].decode(packed), array)
    for odd in (array.transpose(2, 0, 1), array[:, ::-1], array.astype(">f4"), array[:, :, :0], array[0, 0, 0:1][0]):
        odd = np.asarray(odd)
        np.testing.assert_array_equal(unpack(pack({"a": odd}))["a"], odd)


@pytest.mark.parametrize(
    "packed",
    [
        Packed("zip", "float32", (1,), b"0000"),
        Packed("raw", "float32", (1,), b"000"),
        Packed("raw", "float32", (-1,), b""),
        Packed("raw", "object", (1,), b"00000000"),
        Packed("raw", "float128", (1,), b"0" * 16),
        Packed("int8", "int64", (1,), b"00000"),
        Packed("fp16", "float16", (1,), b"00"),
        Packed("int8", "float32", (2, 3), b"0" * 17),
        Packed("raw", "int8", (1,) * 33, b"0"),
        Packed("raw", "int8", (0, 1 << 62), b""),
        Packed("raw", "int8", (1 << 62, 1 << 62), b""),
        Packed("raw", "int8", (1.0,), b"0"),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_belong_together_is_a_codec_error(packed: Packed) -> None:
    with pytest.raises(CodecError):
        unpack({"a": packed})


def test_a_shape_of_numbers_that_are_not_whole_is_none_though_the_same_whole_ones_were_seen() -> None:
    unpack({"a": Packed("raw", "int8", (1,), b"0")})
    with pytest.raises(CodecError):
        unpack({"a": Packed("raw", "int8", (1.0,), b"0")})  # type: ignore[arg-type]


def test_what_cannot_travel_is_a_codec_error() -> None:
    for array in (np.array(["a"]), np.array([object()]), np.zeros(2, "datetime64[s]"), np.zeros(2, np.longdouble)):
        with pytest.raises(CodecError):
            pack({"a": array})
    with pytest.raises(CodecError, match="did you mean 'fp16'"):
        pack({}, "fp1")
    with pytest.raises(CodecError, match="uint16"):
        CODECS["raw"].encode(np.zeros(2, np.float32), "bfloat16")
