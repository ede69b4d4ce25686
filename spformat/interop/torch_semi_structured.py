"""torch's SparseSemiStructuredTensor (CUTLASS backend) to and from ``TwoFour``, bit for bit, on the same device.

    packed   float16 | bfloat16 [M, K/2]   pairs of values, row-major: the ``data`` of two-four
    meta     int16[M, K/16]                the words of ``meta_order="cutlass-sm80"``

M is a multiple of 32 and K of 64, so that nothing is padded. Nibbles mean the same in both formats. But if a group has
fewer than two nonzeros, torch fills it up with other positions than two-four. So both directions write the bytes that
the receiver would write for the dense matrix. Tensors of cuSPARSELt have values and metadata in one opaque buffer,
which only torch can read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.dtypes import bits
from ..arrays.library import Array, current_device, namespace
from ..arrays.torch_tensors import array_to_torch, import_torch, torch_to_array
from ..errors import ArrayError, PatternError, StructureError, UsageError
from ..formats.meta_orders import META_ORDERS, order_view
from ..formats.two_four import COLS, ROWS, TwoFour

ORDER = META_ORDERS[3]
DTYPES = ("float16", "bfloat16")

# The nibble that torch stores for the nonzero mask of a group (bit i = column 4g+i); two-four has another table.
#         x   0    1    2    3    4    5    6    7    8    9    10   11   12   13   14   15
_TORCH = (0xE, 0x8, 0x9, 0x4, 0xE, 0x8, 0x9, 0x0, 0xE, 0xC, 0xD, 0x0, 0xE, 0x0, 0x0, 0x0)
_16, _MAGNITUDE = np.uint64(16), np.uint16(0x7FFF)


def from_semi_structured(t: Any) -> TwoFour:
    """The matrix of a ``SparseSemiStructuredTensorCUTLASS``, in meta_order "cutlass-sm80"; nothing is shared.

    UsageError for cuSPARSELt's tensors and for anything else, ArrayError and PatternError as ``unpack``.
    """
    if getattr(t, "BACKEND", None) != "cutlass" or t.packed is None or t.meta is None:
        kind = getattr(t, "BACKEND", type(t).__name__)
        raise UsageError(
            f"expected a SparseSemiStructuredTensorCUTLASS with packed and meta, got {kind}; convert(t.to_dense(), "
            "'two-four') reads any of torch's"
        )
    shape = tuple(int(n) for n in t.shape)
    return unpack(torch_to_array(t.packed), torch_to_array(t.meta), (shape[0], shape[1]))


def to_semi_structured(a: TwoFour) -> Any:
    """A ``SparseSemiStructuredTensorCUTLASS`` with the bytes that torch writes for the dense matrix; no memory is
    shared.

    It multiplies on a GPU only. StructureError if M is not a multiple of 32 or K is not a multiple of 64.
    """
    kind = import_torch().sparse.SparseSemiStructuredTensorCUTLASS
    packed, meta = (array_to_torch(x) for x in pack(a))
    return kind(a.shape, packed=packed, meta=meta, packed_t=None, meta_t=None, compressed_swizzled_bitmask=None)


def unpack(packed: Array, meta: Array, shape: tuple[int, int]) -> TwoFour:
    """The matrix [M, K] of ``packed`` and ``meta`` (numpy or CuPy), encoded again with the table of two-four.

    The positions of a group may be in either order. Equal positions are accepted if at most one value is nonzero.
    ArrayError for dtypes and shapes that disagree, PatternError for two nonzeros of a group at one position.
    """
    (M, K), xp = shape, namespace(packed)
    _check_shape(shape, ArrayError)
    _check_array("packed", packed, DTYPES, (M, K // 2))
    _check_array("meta", meta, ("int16", "uint16"), (M, K // 16))
    with current_device(packed):
        pairs = bits(xp.ascontiguousarray(packed)).reshape(M, K // 4, 2)
        words = xp.ascontiguousarray(meta).view(np.uint16).reshape(-1)
        words = order_view(words, shape, ORDER).reshape(M, K // 16)
        nibbles = (words[:, :, None] >> xp.asarray([0, 4, 8, 12], np.uint16) & np.uint16(15)).reshape(M, K // 4)
        clash = ((nibbles & 3) == nibbles >> 2) & ((pairs & _MAGNITUDE) != 0).all(axis=2)
        count = int(clash.sum())  # synchronize!
        if count:
            row, group = divmod(int(clash.reshape(-1).argmax()), K // 4)
            got = int(nibbles[row, group])
            expected = "two different positions for two values"
            raise PatternError(
                f"meta: row {row}, group {group}: expected {expected}, got nibble 0x{got:X} ({count} such)",
                array="meta", index=(row, group), value=got, expected=expected, count=count,
            )  # fmt: skip
        dense = _groups(pairs, nibbles).view(np.uint16).reshape(M, K).view(packed.dtype)
        return TwoFour.from_dense(dense, meta_order=ORDER)


def pack(a: TwoFour) -> tuple[Array, Array]:
    """(packed [M, K/2], meta int16[M, K/16]) as torch writes them for the dense matrix; new arrays.

    UsageError for another format, StructureError for values of other than 16 bits, and when M is not a multiple of 32
    or K not one of 64.
    """
    if not isinstance(a, TwoFour):
        raise UsageError(f"expected a TwoFour, got {type(a).__name__}; use convert(x, 'two-four')")
    if a.dtype.itemsize != 2:
        message = f"torch's semi-structured tensors have values of 16 bits, got {a.dtype.name}"
        raise StructureError(message, unit="dtype", found=a.dtype.name)
    a.ensure_valid()
    (M, K), xp = a.shape, namespace(a.data)
    _check_shape(a.shape, StructureError)
    with current_device(a.data):
        pairs = bits(a.data).reshape(M, K // 4, 2)
        nibbles = a.nibbles(slice(0, M))
        groups = _groups(pairs, nibbles)
        nonzero = (pairs != 0).view(np.uint8)
        mask = nonzero[..., 0] << (nibbles & 3) | nonzero[..., 1] << (nibbles >> 2)
        kept = xp.asarray(np.array(_TORCH, np.uint8))[mask].astype(np.uint64)
        packed = xp.empty_like(pairs)
        packed[..., 0] = (groups >> (kept & np.uint64(3)) * _16).astype(np.uint16)
        packed[..., 1] = (groups >> (kept >> np.uint64(2)) * _16).astype(np.uint16)
        shifts = xp.asarray([0, 4, 8, 12], np.uint64)
        words = (kept.reshape(M, K // 16, 4) << shifts).sum(axis=2).astype(np.uint16)
        meta = xp.empty(M * K // 16, np.uint16)
        target = order_view(meta, a.shape, ORDER)
        target[...] = words.reshape(target.shape)
        return packed.reshape(M, K // 2).view(a.dtype), meta.view(np.int16).reshape(M, K // 16)


def _groups(pairs: Array, nibbles: Array) -> Array:
    """uint64[M, K/4]: the four values of each group, the lowest column in the lowest bits; -0.0 as +0."""
    values = namespace(pairs).where((pairs & _MAGNITUDE) != 0, pairs, np.uint16(0)).astype(np.uint64)
    places = nibbles.astype(np.uint64)
    first = values[..., 0] << (places & np.uint64(3)) * _16
    return first | values[..., 1] << (places >> np.uint64(2)) * _16


def _check_shape(shape: tuple[int, int], error: type[ArrayError] | type[StructureError]) -> None:
    if shape[0] % ROWS or shape[1] % COLS:
        expected = f"expected M a multiple of {ROWS} and K of {COLS}"
        raise error(f"semi-structured: {expected}, got {shape}; torch has no padding")


def _check_array(name: str, x: Array, dtypes: tuple[str, ...], shape: tuple[int, int]) -> None:
    if x.dtype.name not in dtypes or x.shape != shape:
        expected = f"{' or '.join(dtypes)} of shape {shape}"
        raise ArrayError(f"{name}: expected {expected}, got {x.dtype} of shape {x.shape}", array=name)
