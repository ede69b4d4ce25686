"""The sparse layouts of compressed-tensors 0.5 - 0.14, which no maintained release can read.

A sparse parameter is a group of entries ``P.<array>``. P is the parameter without ``.weight`` (releases 0.9 - 0.14),
or its full name (up to 0.8.1, which packed biases and norms too).

    sparse-bitmask       compressed   VALUE[nnz]                values in row-major order
                         bitmask      uint8[rows, cdiv(cols, 8)]  bit b of byte y is column 8y+b
                         row_offsets  int64[rows]               first value of each row (no final total; redundant)
                         shape        int64[2]
    sparse-24-bitmask    compressed   VALUE[rows, cols/2]       two values of every four columns, zeros included
                         bitmask      as above, two bits in every four
                         shape        int64[2, 1]

Their producer stored the two largest of every four values, even if more were nonzero; the file does not show which
values were lost. ``marlin-24`` is permuted for one kernel; it is recognised and refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from ..arrays.dtypes import VALUE_TYPES, bits, value_type
from ..arrays.library import Array, ceil_div
from ..arrays.segments import offsets_from_counts
from ..errors import ArrayError, FormatError, PatternError, PointerError, StructureError, UsageError
from ..formats.bitmask import Bitmask
from ..formats.declare import MAX_DIMENSION
from ..formats.two_four import TwoFour
from ..limits import check_bytes

BITMASK, TWO_FOUR = "sparse-bitmask", "sparse-24-bitmask"

_PARAMETER = re.compile(r"(weight|bias)\w*|\w+_(scale|zero_point)")
"""The last component of a full parameter name; a name that does not match is a module without its ``.weight``."""


@dataclass(frozen=True)
class Group:
    """The entries of one packed parameter."""

    name: str
    """The name of the dense parameter."""
    layout: str
    """BITMASK or TWO_FOUR."""
    entries: Mapping[str, str]
    """Array ("compressed", "bitmask", "shape" and perhaps "row_offsets") -> entry in the file."""


def find_groups(names: Iterable[str]) -> tuple[Group, ...]:
    """The packed parameters among the entries of a whole checkpoint, in the order of their first arrays.

    All other names are dense tensors. FormatError for a group that is not complete, and for marlin-24.
    """
    present = dict.fromkeys(names)
    groups = []
    for name in present:
        prefix, _, array = name.rpartition(".")
        if array == "weight_packed" and {f"{prefix}.scale_packed", f"{prefix}.meta"} <= present.keys():
            raise FormatError(
                f"{prefix}: marlin-24 is permuted for one GPU kernel and cannot be read; start from the checkpoint "
                "it was made of",
                tensor=f"{prefix}.weight",
            )  # fmt: skip
        if array != "compressed":
            continue
        entries = {a: f"{prefix}.{a}" for a in ("compressed", "bitmask", "row_offsets", "shape")}
        entries = {a: entry for a, entry in entries.items() if entry in present}
        missing = [a for a in ("bitmask", "shape") if a not in entries]
        if missing:
            raise FormatError(f"{name}: expected {prefix}.{missing[0]} beside it, got no such entry", tensor=prefix)
        full = _PARAMETER.fullmatch(prefix.rpartition(".")[2])
        layout = BITMASK if "row_offsets" in entries else TWO_FOUR
        groups.append(Group(prefix if full else f"{prefix}.weight", layout, MappingProxyType(entries)))
    return tuple(groups)


def dense_shape(shape: Array) -> tuple[int, ...]:
    """The shape of the dense tensor, from the entry ``shape`` in either of its forms. FormatError unless 1-D or 2-D."""
    sizes = tuple(int(n) for n in shape.reshape(-1)) if shape.dtype.kind in "iu" else ()
    if len(sizes) not in (1, 2) or not all(0 <= n <= MAX_DIMENSION for n in sizes):
        got = f"{shape.dtype} {shape.reshape(-1)[:8].tolist()}"
        raise FormatError(f"shape: expected one or two ints in 0 .. 2^48-1, got {got}", array="shape")
    return sizes


def decode(layout: str, arrays: Mapping[str, Array], *, value_dtype: Any = None) -> Bitmask | TwoFour:
    """The matrix of a group. Every value has its bits; stored zeros are dropped, and -0.0 becomes +0.0.

    layout: ``Group.layout``. arrays: the arrays of the group, on the host. A tensor of one dimension becomes a matrix
    of one row. value_dtype: the type of the values, if the file states I8 but the model is FP8 (``fp8_in_int8``).

    sparse-24-bitmask gives a TwoFour if it takes their type, else a Bitmask. Numbers that a layout
    states twice are compared. Raises ArrayError (dtypes, shapes), PointerError (row_offsets), PatternError (bits),
    FormatError (shape), LimitError.
    """
    shape = dense_shape(arrays["shape"])
    M, K = (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1])
    if layout == TWO_FOUR and K % 4:
        raise FormatError(f"shape: expected columns in fours for {TWO_FOUR}, got {K}; its groups straddle rows")
    values = _values(arrays["compressed"], value_dtype)
    check_bytes(M * K * values.dtype.itemsize, f"dense tensor of shape {shape}")
    packed = arrays["bitmask"]
    wide = ceil_div(K, 8)
    if packed.dtype != np.uint8 or packed.size != M * wide or (packed.ndim > 1 and packed.shape[-1] != wide):
        got = f"{packed.dtype} of shape {packed.shape}"
        raise ArrayError(f"bitmask: expected uint8 of shape ({M}, {wide}), got {got}", array="bitmask")
    mask = np.unpackbits(np.ascontiguousarray(packed).reshape(M, wide), axis=1, bitorder="little").view(np.bool_)
    if mask[:, K:].any():
        row = int(mask[:, K:].any(axis=1).argmax())
        raise PatternError(f"bitmask: expected no bit beyond column {K - 1}, got one in row {row}", array="bitmask")
    mask = mask[:, :K]
    if layout == TWO_FOUR:
        _check_two_of_four(mask, values, (M, K))
    else:
        _check_counts(mask, values, arrays["row_offsets"])
    dense = np.zeros((M, K), values.dtype)
    bits(dense)[mask] = bits(values).reshape(-1)
    if layout == TWO_FOUR and values.dtype.name in TwoFour.value_dtypes:
        return TwoFour.from_dense(dense)
    return Bitmask.from_dense(dense)


def encode(a: Bitmask | TwoFour) -> dict[str, Array]:
    """The arrays of the group that stores ``a``: sparse-bitmask for a Bitmask, sparse-24-bitmask for a TwoFour.

    This is a legacy layout, only for software that is pinned to compressed-tensors before 0.15.
    UsageError for another format, StructureError for a TwoFour whose K is not a multiple of 4.
    """
    if not isinstance(a, (Bitmask, TwoFour)):
        raise UsageError(f"expected a Bitmask or TwoFour, got {type(a).__name__}; use convert(x, 'bitmask')")
    a = a.ensure_valid().to("cpu")
    M, K = a.shape
    if isinstance(a, Bitmask):
        return {
            "compressed": a.data,
            "bitmask": a.bitmask,
            "row_offsets": a.indptr[:-1].astype(np.int64),
            "shape": np.array([M, K], np.int64),
        }
    if K % 4:
        raise StructureError(
            f"sparse-24-bitmask: expected K to be a multiple of 4, got {K}; write a Bitmask instead",
            unit="column", found=K, hint="bitmask",
        )  # fmt: skip
    nibbles = a.nibbles(slice(0, a.padded_shape[0]))[:M, : K // 4]
    groups = np.left_shift(1, nibbles & 3) | np.left_shift(1, nibbles >> 2)  # 4 bits each
    if groups.shape[1] % 2:
        groups = np.pad(groups, ((0, 0), (0, 1)))
    return {
        "compressed": np.ascontiguousarray(a.data[:M, : K // 2]),
        "bitmask": (groups[:, ::2] | groups[:, 1::2] << 4).astype(np.uint8),
        "shape": np.array([[M], [K]], np.int64),
    }


def entry_names(parameter: str, arrays: Iterable[str]) -> dict[str, str]:
    """Array -> entry, as releases 0.9 - 0.14 name it: without the ``.weight`` of the parameter."""
    prefix = parameter.removesuffix(".weight")
    return {a: f"{prefix}.{a}" for a in arrays}


def fp8_in_int8(config: Mapping[str, Any]) -> bool:
    """Whether the config.json of a model says that its 8-bit weights are floats; the file may state another dtype."""
    quantization = _object(config.get("quantization_config")) or _object(config.get("compression_config"))
    groups = _object(quantization.get("config_groups")).values()
    weights = [_object(_object(g).get("weights")) for g in groups]
    return any(w.get("num_bits") == 8 and w.get("type") == "float" for w in weights)


def _object(value: Any) -> Mapping[str, Any]:
    """``value`` if it is a JSON object; else an empty one, because a config.json may contain anything."""
    return value if isinstance(value, dict) else {}


def _values(compressed: Array, value_dtype: Any) -> Array:
    if compressed.dtype.name not in VALUE_TYPES:
        takes = ", ".join(VALUE_TYPES)
        raise ArrayError(f"compressed: expected one of {takes}, got {compressed.dtype}", array="compressed")
    compressed = np.ascontiguousarray(compressed)
    if value_dtype is None:
        return compressed
    row = value_type(value_dtype)
    if row.numpy.itemsize != compressed.dtype.itemsize:
        got = f"{compressed.dtype}, {compressed.dtype.itemsize} bytes each"
        raise ArrayError(f"compressed: expected values as wide as {row.name}, got {got}", array="compressed")
    return compressed.view(row.numpy)


def _check_counts(mask: Array, values: Array, row_offsets: Array) -> None:
    got = row_offsets.reshape(-1)
    if got.dtype.kind not in "iu" or got.size != mask.shape[0]:  # before memory is allocated for every row
        raise ArrayError(
            f"row_offsets: expected {mask.shape[0]} integers, got {got.dtype} of shape {row_offsets.shape}",
            array="row_offsets",
        )  # fmt: skip
    counts = mask.sum(axis=1, dtype=np.int64)
    total = int(counts.sum())
    if values.shape != (total,):
        raise ArrayError(
            f"compressed: expected {total} values, as many as bits are set, got shape {values.shape}",
            array="compressed",
        )  # fmt: skip
    expected = offsets_from_counts(counts)[:-1]
    wrong = np.flatnonzero(got != expected)
    if wrong.size:
        i = int(wrong[0])
        raise PointerError(
            f"row_offsets[{i}]: expected {expected[i]}, the bits set in the rows before, got {got[i]}",
            array="row_offsets", index=i, value=int(got[i]), expected=int(expected[i]), count=int(wrong.size),
        )  # fmt: skip


def _check_two_of_four(mask: Array, values: Array, shape: tuple[int, int]) -> None:
    M, K = shape
    if values.size != M * K // 2:
        raise ArrayError(
            f"compressed: expected {M * K // 2} values, two of every four, got shape {values.shape}",
            array="compressed",
        )  # fmt: skip
    bits_set = mask.reshape(-1, 4).sum(axis=1, dtype=np.uint8)
    wrong = np.flatnonzero(bits_set != 2)
    if wrong.size:
        row, group = divmod(int(wrong[0]), K // 4)
        raise PatternError(
            f"bitmask: row {row}, group {group}: expected 2 bits in four columns, got {bits_set[wrong[0]]}",
            array="bitmask", index=(row, group), value=int(bits_set[wrong[0]]), expected=2, count=int(wrong.size),
        )  # fmt: skip
