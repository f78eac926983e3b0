"""How an array becomes bytes on a link, and back.

Array data is little-endian and C-contiguous. Integer, boolean and complex arrays always travel ``raw``, and so does a
float array that a codec would not make smaller; :attr:`Packed.codec` says what was done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from edgesplit.errors import CodecError, did_you_mean

Array = np.ndarray[Any, Any]


class Packed(NamedTuple):
    """An encoded array: what travels.

    Attributes:
        codec: the codec's name, see :data:`CODECS`.
        dtype: numpy's name of the decoded dtype (``float32``), or ``bfloat16``.
        shape: of the decoded array.
        data: the encoded bytes.
    """

    codec: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview


BFLOAT16 = "bfloat16"
"""numpy has no such dtype: its arrays are the 16 bits of each number, as ``uint16``."""

_FLOATS = frozenset({"float16", "float32", "float64", BFLOAT16})
_ITEMSIZES: dict[str, int] = {
    **{name: np.dtype(name).itemsize for name in ("bool", "float16", "float32", "float64", "complex64", "complex128")},
    **{f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)},
    BFLOAT16: 2,
}

MAX_DIMS = 32
MAX_BYTES = 1 << 40


@dataclass(frozen=True, slots=True)
class Codec:
    """One way to write the numbers of a float array.

    Attributes:
        name: its key in :data:`CODECS`.
        itemsize: bytes of one encoded number; 0: as many as the array's own.
        error: the greatest error of one number: relative to the number, for ``int8`` to its channel's largest.
    """

    name: str
    itemsize: int
    error: float
    _to_bytes: Callable[[Array], bytes | memoryview]
    _from_bytes: Callable[[memoryview, tuple[int, ...]], Array]

    def encode(self, array: Array, dtype: str | None = None) -> Packed:
        """Encode an array of any shape.

        Args:
            array: bool, integer, float or complex; with ``raw`` a contiguous one is not copied.
            dtype: ``"bfloat16"`` where ``array`` holds its bits as ``uint16``; else the array's own.

        Raises:
            CodecError: the dtype cannot travel (objects, strings).
        """
        name = _dtype_name(array, dtype)
        shape = tuple(array.shape)
        if not self.applies(name):
            return Packed("raw", name, shape, _bytes_of(array))
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            return Packed(self.name, name, shape, self._to_bytes(_bf16_to_float(array) if name == BFLOAT16 else array))

    def decode(self, packed: Packed) -> Array:
        """Return the array in its original dtype and shape; it may be read-only and share memory with ``packed``.

        A ``bfloat16`` array comes back as its bits (``uint16``).

        Raises:
            CodecError: codec, dtype, shape and length of the data do not belong together.
        """
        if packed.codec != self.name:
            raise CodecError(f"array was encoded by {packed.codec!r}: decode it with that codec, not {self.name!r}")
        data = _checked(packed)
        sent, here = _dtypes(packed.dtype)
        if not math.prod(packed.shape):
            return np.empty(packed.shape, here)
        if self.name == "raw":
            return np.frombuffer(data, sent).reshape(packed.shape).astype(here, copy=False)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            values = self._from_bytes(data, packed.shape)
            return float_to_bf16(values) if packed.dtype == BFLOAT16 else values.astype(packed.dtype, copy=False)

    def ratio(self, dtype: str) -> float:
        """Encoded bytes over raw bytes of a large array of this dtype."""
        return (self.itemsize / _itemsize(dtype)) if self.applies(dtype) else 1.0

    def applies(self, dtype: str) -> bool:
        """Whether arrays of this dtype are encoded; otherwise they travel raw."""
        return dtype in _FLOATS and 0 < self.itemsize < _itemsize(dtype)


def encoded_size(codec: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Return how many bytes an encoded array has; allocates nothing.

    Raises:
        CodecError: an unknown codec or dtype, a codec that does not apply to the dtype, or an impossible shape.
    """
    if codec not in CODECS:
        raise CodecError(f"codec {codec!r} is not known{did_you_mean(codec, CODECS)}: use one of {', '.join(CODECS)}")
    if len(shape) > MAX_DIMS:
        raise CodecError(f"shape has {len(shape)} dimensions, more than {MAX_DIMS}")
    if any(type(size) is not int or size < 0 for size in shape):
        raise CodecError(f"shape {shape} is not made of whole numbers from 0")
    itemsize = _itemsize(dtype)
    if math.prod(max(size, 1) for size in shape) * itemsize > MAX_BYTES:
        raise CodecError(f"{dtype} array of shape {shape} is larger than {MAX_BYTES} bytes")
    count = math.prod(shape)
    if codec == "raw":
        return count * itemsize
    if not CODECS[codec].applies(dtype):
        raise CodecError(f"codec {codec!r} does not apply to {dtype}: such arrays travel raw")
    return count * CODECS[codec].itemsize + (4 * _channels(shape) if codec == "int8" else 0)


def pack(arrays: Mapping[str, Array], codec: str = "raw") -> dict[str, Packed]:
    """Encode named arrays with one codec; the values of integer and boolean ones never change."""
    if codec not in CODECS:
        raise CodecError(f"codec {codec!r} is not known{did_you_mean(codec, CODECS)}: use one of {', '.join(CODECS)}")
    return {name: CODECS[codec].encode(array) for name, array in arrays.items()}


def unpack(arrays: Mapping[str, Packed]) -> dict[str, Array]:
    """Decode named arrays; they may be read-only and share memory with the message.

    Raises:
        CodecError: naming the array that cannot be decoded.
    """
    decoded = {}
    for name, packed in arrays.items():
        if packed.codec not in CODECS:
            raise CodecError(f"array {name!r}: codec {packed.codec!r} is not known")
        try:
            decoded[name] = CODECS[packed.codec].decode(packed)
        except CodecError as error:
            raise CodecError(f"array {name!r}: {error}") from None
    return decoded


def float_to_bf16(values: Array) -> Array:
    """Round floats to the nearest bfloat16 (ties to even); returns its bits as ``uint16``. A NaN stays a NaN."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # The carry of the rounding would turn a NaN's payload into an infinity or a zero.
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.asarray(np.where(is_nan, quiet, rounded)).astype(np.uint16)


def _bf16_to_float(bits: Array) -> Array:
    return np.asarray((bits.astype(np.uint32) << np.uint32(16)).view(np.float32))


def _dtype_name(array: Array, dtype: str | None) -> str:
    own = _name_of(array.dtype)
    name = dtype or own
    if name == BFLOAT16:
        if own != "uint16":
            raise CodecError(f"bfloat16 is given as its bits in uint16, not as {own}")
    elif name not in _ITEMSIZES or name != own:
        raise CodecError(f"{own} array cannot be sent as {name}: use bool, integers, floats or complex")
    return name


@cache
def _name_of(dtype: np.dtype[Any]) -> str:
    """``dtype.name``, which numpy makes anew each time."""
    return dtype.name


def _itemsize(dtype: str) -> int:
    try:
        return _ITEMSIZES[dtype]
    except KeyError:
        raise CodecError(f"dtype {dtype!r} cannot travel{did_you_mean(dtype, _ITEMSIZES)}") from None


def _channels(shape: tuple[int, ...]) -> int:
    return shape[1] if len(shape) >= 2 else 1


@cache
def _dtypes(name: str) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """How numbers of a known dtype lie in a message, and how they do on this machine."""
    sent = np.dtype("uint16" if name == BFLOAT16 else name).newbyteorder("<")
    return sent, sent.newbyteorder("=")


_known_size = lru_cache(maxsize=1024)(encoded_size)
"""The same arrays come in every step."""


def _checked(packed: Packed) -> memoryview:
    """Return the data as a flat view of bytes after checking its length."""
    whole = all(type(length) is int for length in packed.shape)  # to a cache 1.0 is 1
    size = (_known_size if whole else encoded_size)(packed.codec, packed.dtype, packed.shape)
    data = memoryview(packed.data)
    if data.nbytes != size:
        raise CodecError(
            f"{packed.dtype} array of shape {packed.shape} in {packed.codec} takes {size} bytes, got {data.nbytes}"
        )
    return data if data.format == "B" and data.ndim == 1 else data.cast("B")


def _bytes_of(array: Array) -> memoryview:
    """A view of the array's bytes; copies only what is not contiguous little-endian."""
    flat = np.asarray(array, array.dtype.newbyteorder("<"), order="C").reshape(-1)
    return flat.view(np.uint8).data


def _fp16_to_bytes(array: Array) -> memoryview:
    return _bytes_of(array.astype("<f2"))


def _fp16_from_bytes(data: memoryview, shape: tuple[int, ...]) -> Array:
    return np.frombuffer(data, "<f2").reshape(shape)


def _bf16_to_bytes(array: Array) -> memoryview:
    return _bytes_of(float_to_bf16(array))


def _bf16_from_bytes(data: memoryview, shape: tuple[int, ...]) -> Array:
    return _bf16_to_float(np.frombuffer(data, "<u2")).reshape(shape)


def _per_channel(scales: Array, shape: tuple[int, ...]) -> Array:
    return scales.reshape((1, -1) + (1,) * (len(shape) - 2)) if len(shape) >= 2 else scales.reshape(())


def _int8_to_bytes(array: Array) -> bytes:
    """Symmetric, with a scale for each channel of axis 1.

    A channel with a NaN or an infinity gets the scale NaN and so decodes to NaN throughout: the receiver must see that
    the step is not finite.
    """
    values = array.astype(np.float32) if array.dtype.itemsize < 4 else array
    axes = tuple(axis for axis in range(values.ndim) if axis != 1) if values.ndim >= 2 else None
    scales = np.asarray(np.max(np.abs(values), axis=axes, initial=0.0) / 127.0).astype(np.float32).reshape(-1)
    scales = np.where(np.isfinite(scales), scales, np.float32(np.nan))
    divisors = np.where(scales > 0, scales, np.float32(1.0))
    scaled = np.rint(values / _per_channel(divisors, values.shape))
    # Where the scale is NaN so may be the quotient: its cast to an integer would differ between processors.
    scaled = np.where(np.isfinite(_per_channel(scales, values.shape)), scaled, 0.0)
    return b"".join((_bytes_of(scales.astype("<f4")), _bytes_of(np.clip(scaled, -127, 127).astype(np.int8))))


def _int8_from_bytes(data: memoryview, shape: tuple[int, ...]) -> Array:
    head = 4 * _channels(shape)
    scales = np.frombuffer(data[:head], "<f4").astype(np.float32)
    return np.asarray(np.frombuffer(data[head:], np.int8).reshape(shape) * _per_channel(scales, shape))


def _raw_from_bytes(data: memoryview, shape: tuple[int, ...]) -> Array:
    return np.frombuffer(data, np.uint8)


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("raw", 0, 0.0, _bytes_of, _raw_from_bytes),
        Codec("fp16", 2, 2.0**-11, _fp16_to_bytes, _fp16_from_bytes),
        Codec("bf16", 2, 2.0**-8, _bf16_to_bytes, _bf16_from_bytes),
        Codec("int8", 1, 0.5 / 127, _int8_to_bytes, _int8_from_bytes),
    )
}
"""Codec by name: ``raw`` exact, ``fp16`` (overflows to infinity beyond 65,504), ``bf16``, ``int8`` per channel."""
