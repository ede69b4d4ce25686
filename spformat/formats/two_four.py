"""2:4 structured sparsity: two values of every four, and 4 bits that say which.  Spec: docs/formats/two-four.md.

Group g of a row keeps columns 4g+i0 and 4g+i1, i0 < i1; nibble = i0 + 4*i1; a 16-bit word holds the nibbles
of 16 columns, lowest group in the lowest bits. The metadata words lie in one of four orders, all
permutations of the same words; values lie row-major in every order.

    row 0   1 . . 2 | . . . 3      data 1 2 0 3      nibbles C C
    row 1   . 4 . . | . . . .      data 0 4 0 0      nibbles 4 4
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ..arrays import scans
from ..arrays.dtypes import bits, nonzero_mask
from ..arrays.library import Array, ceil_div, is_cupy, namespace, on_own_device, round_up
from ..arrays.magnitudes import magnitude_keys
from ..arrays.segments import largest_in_windows
from ..errors import IndexBoundsError, PatternError, StructureError
from .base import VALUE, Format, RowChunks, array, param
from .csr import CSR
from .hooks import Condition, Counts, Groups, Pattern, percent
from .meta_orders import META_ORDERS, order_view, reorder_meta

ROW_CHUNK = 1 << 20
"""Dense elements that the host processes at a time."""

ROWS, COLS = 32, 64
"""Every order pads to these multiples, so that orders are permutations of the same words."""

# The nibble of a group, by its nonzero mask x (bit i = column 4g+i). If a group has fewer than two nonzeros, the lowest
# free positions are stored, too, with value +0, so that equal matrices have equal bytes. 0 = the group is refused.
#        x   0    1    2    3    4    5    6    7    8    9    10   11   12   13   14   15
_NIBBLE = (0x4, 0x4, 0x4, 0x4, 0x8, 0x8, 0x9, 0x0, 0xC, 0xC, 0xD, 0x0, 0xE, 0x0, 0x0, 0x0)
NIBBLE = np.array(_NIBBLE, np.uint8)
NIBBLES = sum(n << 4 * i for i, n in enumerate(_NIBBLE))
"""All 16 nibbles in one number, that of nonzero mask 0 in the lowest bits, for compiled loops and kernels."""
LEGAL = np.isin(np.arange(16), (0x4, 0x8, 0x9, 0xC, 0xD, 0xE))
"""The nibbles with i0 < i1: the only ones PTX defines for ordered metadata."""


@functools.cache
def _word_tables() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Three tables for checking a whole word at a time: (bool[65536], uint16[65536], uint16[256]).

    The first says whether all four nibbles of a word are legal. Let h be 2 bits that say which of the two slots of a
    group have a nonzero (bit 0: the first slot). Bit 4g+h of the second table, indexed by the word, is set if nibble g
    of the word is the canonical one for h. Bit 4g+h of the third table, indexed by the 8 bits that say which slots of
    four groups have a nonzero, is set if those of group g are h.
    """
    nibble, used, groups = np.arange(16)[:, None], np.arange(4), range(4)
    mask = (used & 1) << (nibble & 3) | (used >> 1) << (nibble >> 2)
    fits = ((LEGAL[:, None] & (NIBBLE[mask] == nibble)) << used).sum(axis=1)
    word, slots = np.arange(1 << 16), np.arange(1 << 8)
    legal = np.all([LEGAL[word >> 4 * g & 15] for g in groups], axis=0)
    allowed = sum(fits[word >> 4 * g & 15] << 4 * g for g in groups)
    pattern = sum(1 << (4 * g + (slots >> 2 * g & 3)) for g in groups)
    return legal, np.asarray(allowed, np.uint16), np.asarray(pattern, np.uint16)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class TwoFour(Format):
    """2:4 values and metadata for the sparse tensor cores; other values than those of 16 bits have few kernels."""

    name, version, tie_rank = "two-four", 1, 4
    torch_layout, selective = "semi_structured", True
    value_dtypes = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")
    paper = "PTX ISA, mma.sp sparse matrix storage; formats per NVIDIA's sm_80 and later"

    meta_order: str = param("choice", choices=META_ORDERS, default="ldmatrix", doc="order of the metadata words")
    data: Array = array(VALUE, "Mp", "Kp/2", doc="data[r, 2g], data[r, 2g+1]: the values of group g, ascending column")
    meta: Array = array("uint16", "Mp*Kp/16", doc="one word per row and 16 columns, in meta_order")

    @property
    def padded_shape(self) -> tuple[int, int]:
        """(Mp, Kp)."""
        return round_up(self.shape[0], ROWS), round_up(self.shape[1], COLS)

    def dims(self) -> dict[str, int]:
        Mp, Kp = self.padded_shape
        return {"Mp": Mp, "Kp/2": Kp // 2, "Mp*Kp/16": Mp * Kp // 16}

    @classmethod
    def array_specs(
        cls, shape: tuple[int, int], dtype: np.dtype[Any], nnz: int, params: dict[str, Any]
    ) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        Mp, Kp = round_up(shape[0], ROWS), round_up(shape[1], COLS)
        return {"data": (dtype, (Mp, Kp // 2)), "meta": (np.dtype(np.uint16), (Mp * Kp // 16,))}

    @classmethod
    def edge_name(cls, dtype: Any) -> str:
        """Edges of "two-four" are for 16-bit values; others have names of their own, such as "two-four:8-bit"."""
        return cls.name if dtype.itemsize == 2 else f"{cls.name}:{8 * dtype.itemsize}-bit"

    @classmethod
    def row_chunks(cls, params: dict[str, Any]) -> RowChunks | None:
        # cutlass-sm80 keeps the words of all rows side by side.
        return None if params["meta_order"] == "cutlass-sm80" else RowChunks(ROWS)

    @classmethod
    def pattern(cls, params: dict[str, Any]) -> Pattern:
        return Groups(2, 4)

    @classmethod
    def covered(cls, a: CSR, params: dict[str, Any], conditions: tuple[Condition, ...]) -> Array:
        """The two largest magnitudes of every four columns, the lower column first among equals, NaN largest of all."""
        group = a.rows() * ceil_div(a.shape[1], 4) + a.indices // 4
        return largest_in_windows(magnitude_keys(a.data), group, 2)

    @classmethod
    def fits(cls, counts: Counts, params: dict[str, Any]) -> bool:
        return counts.bad_groups == 0

    @classmethod
    def candidates(cls, counts: Counts) -> tuple[dict[str, Any], ...]:
        return ({},) if counts.nnz and cls.fits(counts, {}) else ()

    @classmethod
    def remark(cls, counts: Counts, params: dict[str, Any]) -> str:
        if not counts.nnz:
            return "there are no nonzeros to have a pattern"
        some = "every group of four has at most two nonzeros"
        return some if cls.fits(counts, {}) else f"only {percent(counts.two_four_share)} of the groups of four fit 2:4"

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        return tuple({"meta_order": order} for order in META_ORDERS)

    @on_own_device
    def with_meta_order(self, order: str) -> TwoFour:
        """The same matrix with its metadata words in another order; values are shared, not copied."""
        params = self.resolve_params({"meta_order": order})
        if params == self.params():
            return self
        meta = reorder_meta(self.meta, self.padded_shape, self.meta_order, order)
        construct = TwoFour.trusted if self.is_validated else TwoFour
        return construct(shape=self.shape, **params, data=self.data, meta=meta)

    def _words(self, rows: slice) -> Array:
        """uint16[rows, Kp/16]: the metadata words of some rows (multiples of 32) in logical order."""
        Mp, Kp = self.padded_shape
        tiles = {"logical": 1, "cutlass-sm80": 32}.get(self.meta_order, 16)
        view = order_view(self.meta, (Mp, Kp), self.meta_order)
        return view[rows.start // tiles : -(-rows.stop // tiles)].reshape(rows.stop - rows.start, Kp // 16)

    def nibbles(self, rows: slice) -> Array:
        """uint8[rows, Kp/4]: the nibble of every group of some rows (multiples of 32)."""
        words, xp = self._words(rows), namespace(self.meta)
        shifts = xp.asarray([0, 4, 8, 12], np.uint16)
        return (
            ((words[:, :, None] >> shifts) & np.uint16(15)).astype(np.uint8).reshape(words.shape[0], 4 * words.shape[1])
        )

    def _row_chunks(self) -> Iterator[slice]:
        Mp, Kp = self.padded_shape
        return scans.chunks(Mp if Kp else 0, self.data, round_up(max(1, ROW_CHUNK // max(1, Kp)), ROWS))

    def _columns(self, rows: slice) -> Array:
        """int64[rows, Kp/2]: the column of every value slot."""
        nib = self.nibbles(rows).astype(np.int64)
        xp = namespace(nib)
        base = xp.arange(nib.shape[1], dtype=np.int64) * 4
        return xp.stack((base + (nib & 3), base + (nib >> 2)), axis=2).reshape(nib.shape[0], -1)

    # ---------------------------------------------------------------- checking

    def check_memory(self) -> None:
        M, K = self.shape
        xp = namespace(self.data)
        legal, legal_word = xp.asarray(LEGAL), xp.asarray(_word_tables()[0])
        for s in self._row_chunks():
            if bool(legal_word[self._words(s)].all()):  # synchronize!
                continue
            nib = self.nibbles(s)
            offenders = scans.first_true(~legal[nib])
            if offenders:
                row, group = scans.place(offenders[0], nib.shape)
                self._bad_nibble(s.start + row, group, int(nib[row, group]), "one of 4 8 9 C D E", offenders[1])
        part = self.data[M:]
        scans.zero_in(self, "data", part, f"in rows >= {M}", lambda i: (i[0] + M, i[1]))
        first = 2 * (K // 4)
        for s in self._row_chunks() if K % COLS else ():
            tail = self.data[s, first:]
            outside = nonzero_mask(xp.ascontiguousarray(tail)) & (self._columns(s)[:, first:] >= K)
            offenders = scans.first_true(outside)
            if offenders:
                row, slot = scans.place(offenders[0], outside.shape)
                at = (s.start + row, first + slot)
                value = float(self.data[at])
                scans.fail(self, IndexBoundsError, "data", at, value, f"0 in columns >= {K}", count=offenders[1])

    def _bad_nibble(self, row: int, group: int, got: int, expected: str, count: int) -> None:
        message = f"two-four: meta: row {row}, group {group}: expected nibble {expected}, got 0x{got:X}"
        more = f" ({count} such)" if count > 1 else ""
        raise PatternError(message + more, array="meta", index=(row, group), value=got, expected=expected, count=count)

    def check_canonical(self) -> None:
        xp = namespace(self.data)
        nibble_of, (_, allowed, pattern) = xp.asarray(NIBBLE), map(xp.asarray, _word_tables())
        for s in self._row_chunks():
            words = self._words(s)
            slots = xp.packbits(nonzero_mask(self.data[s]).reshape(-1), bitorder="little").reshape(words.shape)
            if bool((allowed[words] & pattern[slots] == pattern[slots]).all()):  # synchronize!
                continue
            nib = self.nibbles(s)
            nonzero = nonzero_mask(self.data[s]).reshape(*nib.shape, 2).view(np.uint8)
            mask = (nonzero[..., 0] << (nib & 3)) | (nonzero[..., 1] << (nib >> 2))
            wanted = nibble_of[mask]
            offenders = scans.first_true(wanted != nib)
            if offenders:
                row, group = scans.place(offenders[0], nib.shape)
                want = f"0x{int(wanted[row, group]):X} for the values it holds"
                self._bad_nibble(s.start + row, group, int(nib[row, group]), want, offenders[1])
        scans.negative_zero_free(self, "data")

    # ---------------------------------------------------------------- converting

    @classmethod
    def _from_dense(cls, x: Array, **params: Any) -> Self:
        step = round_up(max(1, ROW_CHUNK // max(1, x.shape[1])), ROWS)
        chunks = [x] if is_cupy(x) else (x[i : i + step] for i in range(0, x.shape[0], step))
        return cls._encode(x.shape, iter(chunks), x, params["meta_order"])

    @classmethod
    def encoded(
        cls, shape: tuple[int, int], order: str, data: Array, meta: Array, refused: tuple[int, int, int]
    ) -> Self:
        """The matrix whose arrays an edge has filled; StructureError if groups were refused.

        refused: (how many groups have more than two nonzeros, the first of them as row * Kp/4 + group, its nonzeros).
        """
        count, first, nonzeros = refused
        if count:
            _refuse(count, divmod(first, data.shape[1] // 2), nonzeros)
        return cls.unchecked(shape=shape, meta_order=order, data=data, meta=meta)

    @classmethod
    def empty_arrays(cls, x: Array) -> tuple[Array, Array]:
        """(data [Mp, Kp/2], meta [Mp*Kp/16]) for a matrix like x [M, K], not filled."""
        Mp, Kp = round_up(x.shape[0], ROWS), round_up(x.shape[1], COLS)
        return namespace(x).empty((Mp, Kp // 2), x.dtype), namespace(x).empty(Mp * Kp // 16, np.uint16)

    @classmethod
    def _from_csr(cls, a: CSR, **params: Any) -> Self:
        M, K = a.shape
        step = M if is_cupy(a.data) else round_up(max(1, ROW_CHUNK // max(1, K)), ROWS)
        return cls._encode(a.shape, _dense_row_chunks(a, step), a.data, params["meta_order"])

    @classmethod
    def _encode(cls, shape: tuple[int, int], chunks: Iterator[Array], like: Array, order: str) -> Self:
        """Encode dense row chunks, whose heights are multiples of 32 except the last; StructureError if they do not
        fit."""
        xp, (M, K) = namespace(like), shape
        Mp, Kp = round_up(M, ROWS), round_up(K, COLS)
        data = xp.zeros((Mp, Kp // 2), bits(like).dtype)
        words = xp.full((Mp, Kp // 16), 0x4444, np.uint16)
        nibble_of, start = xp.asarray(NIBBLE), 0
        count, first, nonzeros = 0, None, 0
        base = xp.arange(Kp // 4 if M else 0, dtype=np.int64) * 4
        for chunk in chunks if M and K else ():
            rows = chunk.shape[0]
            padded = bits(chunk)
            if Kp != K:
                padded = xp.zeros((rows, Kp), data.dtype)
                padded[:, :K] = bits(chunk)
            nonzero = nonzero_mask(padded.view(like.dtype)).view(np.uint8).reshape(rows, Kp // 4, 4)
            mask = nonzero[..., 0] | nonzero[..., 1] << 1 | nonzero[..., 2] << 2 | nonzero[..., 3] << 3
            nib = nibble_of[mask]
            bad = scans.first_true(nib == 0)
            if bad:
                if first is None:
                    row, group = scans.place(bad[0], nib.shape)
                    first, nonzeros = (start + row, group), int(mask[row, group]).bit_count()
                count += bad[1]
            elif count == 0:
                at = base + (xp.arange(rows, dtype=np.int64) * Kp)[:, None]
                out = data[start : start + rows].reshape(rows, Kp // 4, 2)
                flat = padded.reshape(-1)
                out[..., 0] = flat[at + (nib & 3)]
                out[..., 1] = flat[at + (nib >> 2)]
                n = nib.reshape(rows, Kp // 16, 4).astype(np.uint16)
                words[start : start + rows] = n[..., 0] | n[..., 1] << 4 | n[..., 2] << 8 | n[..., 3] << 12
            start += rows
        if count:
            _refuse(count, first, nonzeros)
        data[~nonzero_mask(data.view(like.dtype))] = 0  # a kept -0.0 becomes +0
        meta = reorder_meta(words.reshape(-1), (Mp, Kp), "logical", order)
        return cls.trusted(shape=(M, K), meta_order=order, data=data.view(like.dtype), meta=meta)

    def _to_csr(self) -> CSR:
        parts = [(xp_rows, cols, s) for s in self._row_chunks() for xp_rows, cols in [self._live(s)]]
        xp = namespace(self.data)
        if not parts:
            return CSR.from_dense(xp.zeros(self.shape, self.dtype))
        rows = xp.concatenate([r for r, _, _ in parts])
        cols = xp.concatenate([c for _, c, _ in parts])
        values = bits(self.data)[nonzero_mask(self.data)].view(self.dtype)
        return CSR.from_coordinates(self.shape, rows, cols, values)

    def _live(self, s: slice) -> tuple[Array, Array]:
        """(row, column) int64 of the nonzeros of some rows, row-major."""
        xp = namespace(self.data)
        row, slot = xp.nonzero(nonzero_mask(self.data[s]))  # synchronize!
        return row + s.start, self._columns(s)[row, slot]

    def _to_dense(self) -> Array:
        out = self.empty_dense()
        for s in self._row_chunks():
            rows, cols = self._live(s)
            bits(out)[rows, cols] = bits(self.data)[s][nonzero_mask(self.data[s])]
        return out


def _dense_row_chunks(a: CSR, step: int) -> Iterator[Array]:
    """The rows of a CSR as dense chunks [<= step, K], each decoded when the iterator reaches it."""
    xp, (M, K) = namespace(a.data), a.shape
    for i in range(0, M, max(1, step)):
        stop = min(M, i + step)
        lo, hi = int(a.indptr[i]), int(a.indptr[stop])  # synchronize!
        part = CSR.trusted(
            shape=(stop - i, K),
            indptr=(a.indptr[i : stop + 1] - a.indptr[i]).astype(np.int32 if hi - lo < 2**31 else np.int64),
            indices=a.indices[lo:hi],
            data=a.data[lo:hi],
        )
        chunk = xp.zeros((stop - i, K), a.dtype)
        bits(chunk)[part.rows(), part.indices] = bits(part.data)
        yield chunk


def _refuse(count: int, first: Any, nonzeros: int) -> None:
    raise StructureError(
        f"two-four: {count} group(s) of four columns hold more than 2 nonzeros; first: row {first[0]}, "
        f"group {first[1]} (columns {4 * first[1]}..{4 * first[1] + 3}) holds {nonzeros}, limit 2. "
        "To drop the smallest values, apply preprocess.masks.magnitude_nm(w, 2, 4), or convert --prune magnitude",
        unit="group", count=count, first=first, found=nonzeros, limit=2, hint="preprocess.masks.magnitude_nm",
    )  # fmt: skip
