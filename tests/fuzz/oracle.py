"""What a kernel would touch, element by element in plain Python: it judges what ``validate()`` accepts.

Written from docs/formats alone, with none of the scans, converters or array operations it judges. ``touched(f)``
returns the coordinates of the nonzeros of a Format, and raises OutOfRange for any index, pointer, count or code in it
that addresses something outside its target.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from spformat.arrays.dtypes import VALUE_TYPES
from spformat.formats.base import Format

PAD = -1
Places = Iterator[tuple[int, int]]


class OutOfRange(AssertionError):
    """An accepted object holds an index outside the range it may address."""


def touched(f: Format) -> list[tuple[int, int]]:
    """(row, column) of every stored nonzero, in the order of storage, all of them inside the shape."""
    M, K = f.shape
    places = list(_READERS[f.name](f))
    for row, column in places:
        if not (0 <= row < M and 0 <= column < K):
            raise OutOfRange(f"{f.name}: a value stands at ({row}, {column}) of a matrix {f.shape}")
    if len(set(places)) != len(places):
        raise OutOfRange(f"{f.name}: two values at one place")
    return places


def _inside(what: str, value: int, bound: int, pad: bool = False) -> int:
    if not (0 <= value < bound or (pad and value == PAD)):
        raise OutOfRange(f"{what} = {value}, bound {bound}")
    return value


def _nonzero(f: Format) -> Any:
    """A list of bools, one for each value: whether it is a nonzero."""
    row = VALUE_TYPES[f.values.dtype.name]
    raw = f.values.view(row.bits)
    return [v & row.zero_mask != 0 for v in raw.reshape(-1).tolist()]


def _segments(what: str, pointer: Any, count: int, end: int) -> Iterator[tuple[int, range]]:
    """(segment, its items) of a pointer array of ``count`` + 1 entries."""
    p = pointer.tolist()
    if len(p) != count + 1 or p[0] != 0 or p[-1] != end:
        raise OutOfRange(f"{what}: {len(p)} entries from {p[0]} to {p[-1]}, for {count} segments of {end} items")
    for i, (lo, hi) in enumerate(itertools.pairwise(p)):
        if not 0 <= lo <= hi <= end:
            raise OutOfRange(f"{what}[{i}]: {lo} .. {hi} of {end}")
        yield i, range(lo, hi)


def _over(n: int, unit: int) -> int:
    return -(-n // unit)


def _dense(f: Any) -> Places:
    M, K = f.shape
    if f.data.size != M * K:
        raise OutOfRange(f"dense: {f.data.size} elements for {f.shape}")
    return ((i // K, i % K) for i, held in enumerate(_nonzero(f)) if held)


def _csr(f: Any) -> Places:
    held, columns = _nonzero(f), f.indices.tolist()
    for row, items in _segments("indptr", f.indptr, f.shape[0], len(held)):
        for i in items:
            column = _inside(f"indices[{i}]", columns[i], f.shape[1])
            if held[i]:
                yield row, column


def _csc(f: Any) -> Places:
    held, rows = _nonzero(f), f.indices.tolist()
    for column, items in _segments("indptr", f.indptr, f.shape[1], len(held)):
        for i in items:
            row = _inside(f"indices[{i}]", rows[i], f.shape[0])
            if held[i]:
                yield row, column


def _coo(f: Any) -> Places:
    for i, (held, row, column) in enumerate(zip(_nonzero(f), f.row.tolist(), f.col.tolist(), strict=True)):
        row, column = _inside(f"row[{i}]", row, f.shape[0]), _inside(f"col[{i}]", column, f.shape[1])
        if held:
            yield row, column


def _bitmask(f: Any) -> Places:
    (M, K), held = f.shape, _nonzero(f)
    wide = _over(K, 8)
    raw = f.bitmask.reshape(-1).tolist()
    for row, items in _segments("indptr", f.indptr, M, len(held)):
        columns = [8 * y + b for y in range(wide) for b in range(8) if raw[row * wide + y] >> b & 1]
        if len(columns) != len(items):
            raise OutOfRange(f"bitmask: {len(columns)} bits in row {row}, {len(items)} values")
        for i, column in zip(items, columns, strict=True):
            _inside("bit", column, K)
            if held[i]:
                yield row, column


def _blocks(f: Any, listed: Any) -> Places:
    (M, K), (R, C), held = f.shape, f.blocksize, _nonzero(f)
    columns = f.indices.tolist()
    for i, blocks in _segments("indptr", f.indptr, len(listed), len(columns)):
        block_row = _inside(f"block row {i}", listed[i], _over(M, R))
        for b in blocks:
            block_column = _inside(f"indices[{b}]", columns[b], _over(K, C))
            for at in range(R * C):
                if held[b * R * C + at]:
                    yield block_row * R + at // C, block_column * C + at % C


def _bsr(f: Any) -> Places:
    return _blocks(f, range(_over(f.shape[0], f.blocksize[0])))


def _dbsr(f: Any) -> Places:
    return _blocks(f, f.row_ids.tolist())


def _sr_bcrs(f: Any) -> Places:
    (M, K), t, g, held = f.shape, f.vector_length, f.stride, _nonzero(f)
    columns = f.indices.reshape(-1).tolist()
    for tile, groups in _segments("indptr", f.indptr, _over(M, t), len(columns) // g):
        for group in groups:
            for s in range(g):
                column = _inside(f"indices[{group}, {s}]", columns[group * g + s], K, pad=True)
                for r in range(t):
                    if held[(group * t + r) * g + s]:
                        yield tile * t + r, column  # a value under PAD stands in column -1


def _ell_buckets(f: Any) -> Places:
    (M, K), held = f.shape, _nonzero(f)
    rows, columns, source = f.row_ids.tolist(), f.indices.tolist(), f.source.tolist()
    widths = list(f.params().get("widths") or [1 << i for i in range(f.max_width.bit_length())]) * f.column_parts
    live = sum(column != PAD for column in columns)
    seen, direct, split = set(), set(), set()
    at = ell_row = 0
    for width, count, cut in zip(widths, f.rows_per_bucket, f.split_per_bucket, strict=True):
        for i in range(count):
            row = _inside(f"row_ids[{ell_row}]", rows[ell_row], M)
            if i < count - cut and (row in direct or row in split):
                raise OutOfRange(f"row {row} is written by two ELL rows")
            (direct if i < count - cut else split).add(row)
            for slot in range(at, at + width):
                column = _inside(f"indices[{slot}]", columns[slot], K, pad=True)
                origin = _inside(f"source[{slot}]", source[slot], live, pad=True)
                if (column == PAD) != (origin == PAD) or origin in seen:
                    raise OutOfRange(f"source[{slot}] = {origin} beside column {column}")
                if origin != PAD:
                    seen.add(origin)
                if held[slot]:
                    yield row, column
            at, ell_row = at + width, ell_row + 1
    if direct & split or at != len(columns) or ell_row != len(rows):
        raise OutOfRange(f"{at} of {len(columns)} slots, {ell_row} of {len(rows)} ELL rows, {direct & split} in both")


def _vector_nm(f: Any) -> Places:
    (M, K), n, m, L, held = f.shape, f.n, f.m, f.vector_length, _nonzero(f)
    tall = _over(M, f.tile_rows or L) * (f.tile_rows or L)
    wide = _over(K, f.tile_cols or m) * (f.tile_cols or m)
    kept, groups = wide // m * n, tall // L
    place = f.indices.reshape(-1).tolist()
    if len(place) != kept * groups or len(held) != kept * tall:
        raise OutOfRange(f"vector-nm: {len(place)} indices, {len(held)} values for {kept} x {groups}, {kept} x {tall}")
    if f.tile_rows:
        per_group, live = f.tile_rows // L, []
        for tile in f.col_info.reshape(-1, f.tile_cols).tolist():
            for entry in tile:
                _inside("col_info", entry, f.tile_cols, pad=True)
            live.append((*tile, PAD).index(PAD))
        across = wide // f.tile_cols
        for i, rank in enumerate(f.ranks.reshape(-1).tolist()):
            tile_row, w = i // (kept * per_group), i // per_group % kept
            _inside(f"ranks[{i}]", rank, live[tile_row * across + w // (f.tile_cols // m * n)])
    for u in range(kept):
        for row in range(tall):
            position = _inside("indices", place[u * groups + row // L], m)
            if held[u * tall + row]:
                yield row, u // n * m + position


def _two_four(f: Any) -> Places:
    M, K = f.shape
    tall, wide, held, words = _over(M, 32) * 32, _over(K, 64) * 64, _nonzero(f), f.meta.tolist()
    if len(words) != tall * wide // 16 or len(held) != tall * wide // 2:
        raise OutOfRange(f"two-four: {len(words)} words and {len(held)} values for {f.shape}")
    for r in range(tall):
        h, i = r % 16 // 8, r % 8
        for q in range(wide // 16):
            offset = {
                "logical": r * (wide // 16) + q,
                "ldmatrix": (8 * (r // 16) + i) * (wide // 8) + 2 * q + h,
                "fragment": 64 * ((r // 16) * (wide // 64) + q // 4) + 8 * i + 2 * (q % 4) + h,
                "cutlass-sm80": 2 * tall * (q // 2) + 64 * (r // 32) + 8 * i + 4 * (r % 32 // 16) + 2 * (q % 2) + h,
            }[f.meta_order]
            word = words[offset]
            for group in range(4):
                nibble = word >> 4 * group & 15
                if nibble not in (0x4, 0x8, 0x9, 0xC, 0xD, 0xE):
                    raise OutOfRange(f"two-four: nibble {nibble:X} in row {r}")
                for slot, position in enumerate((nibble & 3, nibble >> 2)):
                    if held[r * (wide // 2) + 2 * (4 * q + group) + slot]:
                        yield r, 16 * q + 4 * group + position


_READERS: dict[str, Callable[[Any], Places]] = {
    "dense": _dense, "csr": _csr, "bitmask": _bitmask, "bsr": _bsr, "dbsr": _dbsr, "sr-bcrs": _sr_bcrs,
    "ell-buckets": _ell_buckets, "vector-nm": _vector_nm, "two-four": _two_four, "csc": _csc, "coo": _coo,
}  # fmt: skip
