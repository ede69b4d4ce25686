"""The inner loops: a register tile of C += (items of A) x (rows of B), written as LLVM vectors.

LLVM does not vectorise the plain loop, because numba cannot express that C and B do not overlap. The tile therefore
uses vectors explicitly; LLVM translates 64-byte vectors to those of the machine.

A tile holds ``rows`` x ``vectors`` x 64 bytes of C, and ``ways`` of them side by side: item j goes to the
partial sum j % ways (a fused multiply-add has four cycles of latency), and they are added at the end. The
order of additions is fixed, so equal inputs give equal bits.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils as _cgutils
from numba.core import types
from numba.extending import intrinsic

VECTOR = 64
"""Bytes of a vector."""

cgutils: Any = _cgutils  # without type hints of its own
_INTP = ir.IntType(64)


def _tile(rows: int, vectors: int, ways: int, lanes: int | None = None) -> Any:
    """intrinsic(C, c, ldc, first, vals, v, inc, cols, j, count, P, b, ldb) -> None

    C[c + r*ldc + n] (+)= sum over x < count of vals[v + x*inc + r] * P[b + cols[j + x]*ldb + n]
    for r < rows and n < vectors * lanes; ``first`` starts at zero instead of at C. lanes: by default 64 / itemsize.
    C, vals, P: flat arrays of the accumulator type; cols: int32 or int64.
    """

    def typing(
        context: Any, C: Any, c: Any, ldc: Any, first: Any, vals: Any, v: Any, inc: Any, cols: Any, j: Any,
        count: Any, P: Any, b: Any, ldb: Any,
    ) -> Any:  # fmt: skip
        n = types.intp
        return types.void(C, n, n, types.boolean, vals, n, n, cols, n, n, P, n, n), _Code(rows, vectors, ways, lanes)

    return intrinsic(typing)


class _Code:
    """Writes the LLVM code of one tile."""

    def __init__(self, rows: int, vectors: int, ways: int, lanes: int | None) -> None:
        self.rows, self.vectors, self.ways, self.lanes = rows, vectors, ways, lanes

    def __call__(self, context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, c, ldc, first, _, v, inc, _, j, count, _, b, ldb = args
        pointers = [context.make_array(t)(context, builder, a).data
                    for t, a in zip(signature.args, args, strict=True) if isinstance(t, types.Array)]  # fmt: skip
        c_at, v_at, j_at, p_at = (builder.gep(p, [i]) for p, i in zip(pointers, (c, v, j, b), strict=True))
        m = Vectors(builder, context.get_value_type(signature.args[0].dtype), self.lanes)

        def c_address(r: int, k: int) -> Any:
            return builder.gep(c_at, [builder.add(builder.mul(ldc, _INTP(r)), _INTP(k * m.lanes))])

        places = [(r, k) for r in range(self.rows) for k in range(self.vectors)]
        sums = [{at: cgutils.alloca_once(builder, m.type) for at in places} for _ in range(self.ways)]
        for way, partial in enumerate(sums):
            for at in places:
                start = builder.select(first, m.zero, m.load(c_address(*at))) if way == 0 else m.zero
                builder.store(start, partial[at])

        def add_item(x: Any, partial: dict[tuple[int, int], Any]) -> None:
            column = builder.load(builder.gep(j_at, [x]))
            if column.type.width < 64:
                column = builder.sext(column, _INTP)
            row_of_b = builder.gep(p_at, [builder.mul(column, ldb)])
            bs = [m.load(builder.gep(row_of_b, [_INTP(k * m.lanes)])) for k in range(self.vectors)]
            first_value = builder.gep(v_at, [builder.mul(x, inc)])
            for r in range(self.rows):
                value = m.splat(builder.load(builder.gep(first_value, [_INTP(r)])))
                for k in range(self.vectors):
                    s = partial[r, k]
                    builder.store(m.multiply_add(value, bs[k], builder.load(s)), s)

        whole = builder.sub(count, builder.srem(count, _INTP(self.ways)))
        with cgutils.for_range_slice(builder, _INTP(0), whole, _INTP(self.ways), _INTP) as (x, _):
            for way, partial in enumerate(sums):
                add_item(builder.add(x, _INTP(way)), partial)
        with cgutils.for_range_slice(builder, whole, count, _INTP(1), _INTP) as (x, _):
            add_item(x, sums[0])

        for at in places:
            total = builder.load(sums[0][at])
            for partial in sums[1:]:
                total = m.add(total, builder.load(partial[at]))
            m.store(total, c_address(*at))
        return context.get_dummy_value()


def _scatter_tile(rows: int, vectors: int) -> Any:
    """intrinsic(C, c, ldc, vals, v, inc, cols, j, count, P, b, ldb) -> None

    C[c + cols[j + x]*ldc + n] += sum over r < rows of vals[v + x*inc + r] * P[b + r*ldb + n], for x = 0 .. count-1
    in this order and n < vectors * 64 / itemsize. The rows of B stay in registers.
    C, vals, P: flat arrays of the accumulator type; cols: int32 or int64.
    """

    def typing(
        context: Any, C: Any, c: Any, ldc: Any, vals: Any, v: Any, inc: Any, cols: Any, j: Any, count: Any, P: Any,
        b: Any, ldb: Any,
    ) -> Any:  # fmt: skip
        n = types.intp
        return types.void(C, n, n, vals, n, n, cols, n, n, P, n, n), _ScatterCode(rows, vectors)

    return intrinsic(typing)


class _ScatterCode:
    """Writes the LLVM code of one tile of the transposed product."""

    def __init__(self, rows: int, vectors: int) -> None:
        self.rows, self.vectors = rows, vectors

    def __call__(self, context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, c, ldc, _, v, inc, _, j, count, _, b, ldb = args
        pointers = [context.make_array(t)(context, builder, a).data
                    for t, a in zip(signature.args, args, strict=True) if isinstance(t, types.Array)]  # fmt: skip
        c_at, v_at, j_at, p_at = (builder.gep(p, [i]) for p, i in zip(pointers, (c, v, j, b), strict=True))
        m = Vectors(builder, context.get_value_type(signature.args[0].dtype))
        with builder.if_then(builder.icmp_signed(">", count, _INTP(0))):  # else no row of B may be read
            row_of_b = [builder.gep(p_at, [builder.mul(ldb, _INTP(r))]) for r in range(self.rows)]
            bs = [[m.load(builder.gep(row, [_INTP(k * m.lanes)])) for k in range(self.vectors)] for row in row_of_b]
            with cgutils.for_range_slice(builder, _INTP(0), count, _INTP(1), _INTP) as (x, _):
                column = builder.load(builder.gep(j_at, [x]))
                if column.type.width < 64:
                    column = builder.sext(column, _INTP)
                row_of_c = builder.gep(c_at, [builder.mul(column, ldc)])
                first_value = builder.gep(v_at, [builder.mul(x, inc)])
                values = [m.splat(builder.load(builder.gep(first_value, [_INTP(r)]))) for r in range(self.rows)]
                for k in range(self.vectors):
                    address = builder.gep(row_of_c, [_INTP(k * m.lanes)])
                    total = m.load(address)
                    for r, value in enumerate(values):
                        total = m.multiply_add(value, bs[r][k], total)
                    m.store(total, address)
        return context.get_dummy_value()


class Vectors:
    """Vector instructions for one element type: float, double or i32; by default as many lanes as fill 64 bytes."""

    def __init__(self, builder: Any, element: Any, lanes: int | None = None) -> None:
        self.builder, self.element, self.is_int = builder, element, isinstance(element, ir.IntType)
        self.size = 8 if isinstance(element, ir.DoubleType) else 4
        self.lanes = lanes or VECTOR // self.size
        self.type = ir.VectorType(element, self.lanes)
        self.zero = ir.Constant(self.type, [0] * self.lanes)

    def load(self, address: Any, vector: Any = None, bits: int = 0) -> Any:
        """vector, bits: the type, and the bits of an element, if they are not those of the sums."""
        vector = vector or self.type
        return self.builder.load(self.builder.bitcast(address, vector.as_pointer()), align=bits // 8 or self.size)

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.bitcast(address, self.type.as_pointer()), align=self.size)

    def splat(self, scalar: Any, vector: Any = None) -> Any:
        undefined = ir.Constant(vector or self.type, ir.Undefined)
        one = self.builder.insert_element(undefined, scalar, ir.IntType(32)(0))
        first_lane = ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(one, undefined, first_lane)

    def add(self, x: Any, y: Any) -> Any:
        return self.builder.add(x, y) if self.is_int else self.builder.fadd(x, y)

    def multiply_add(self, x: Any, y: Any, z: Any) -> Any:
        """x*y + z, fused where the machine can; integers wrap."""
        if self.is_int:
            return self.builder.add(self.builder.mul(x, y), z)
        return self._call(f"llvm.fmuladd.{self._name}", self.type, x, y, z)

    def total(self, x: Any) -> Any:
        """The sum of the lanes: one half is added to the other until one lane is left."""
        while x.type.count > 1:
            half = x.type.count // 2
            low, high = (
                self.builder.shuffle_vector(
                    x, x, ir.Constant(ir.VectorType(ir.IntType(32), half), list(range(i, i + half)))
                )
                for i in (0, half)
            )
            x = self.add(low, high)
        return self.builder.extract_element(x, ir.IntType(32)(0))

    def nonzero(self, x: Any) -> Any:
        """A bit for each lane; NaN is not zero."""
        if self.is_int:
            return self.builder.icmp_signed("!=", x, self.zero)
        return self.builder.fcmp_unordered("!=", x, self.zero)

    def chosen(self, index: Any, x: Any, y: Any) -> Any:
        """The lanes of x and y, counted together, that the integers ``index`` name. AVX-512, vectors of 64 bytes."""
        kind = "pd" if self.size == 8 else "d" if self.is_int else "ps"
        return self._call(f"llvm.x86.avx512.vpermi2var.{kind}.512", self.type, x, index, y)

    def expanded(self, x: Any, mask: Any) -> Any:
        """The first lanes of x at the places of the set bits of ``mask``, zeros elsewhere. AVX-512."""
        return self._call(f"llvm.x86.avx512.mask.expand.{self._name}", self.type, x, self.zero, mask)

    @property
    def _name(self) -> str:
        return f"v{self.lanes}{'i' if self.is_int else 'f'}{8 * self.size}"

    def _call(self, name: str, result: Any, *args: Any) -> Any:
        kind = ir.FunctionType(result, [a.type for a in args])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), args)


def _word_columns(context: Any, cols: Any, at: Any, word: Any, first: Any) -> Any:
    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cols, at, word, first = args
        element = context.get_value_type(signature.args[0].dtype)
        lanes = ir.VectorType(element, 8)
        word, first = (builder.trunc(x, element) if element.width < 64 else x for x in (word, first))

        def constant(numbers: Any) -> Any:
            return ir.Constant(lanes, list(numbers))

        def splat(x: Any) -> Any:
            undefined, zeros = ir.Constant(lanes, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), 8), [0] * 8)
            return builder.shuffle_vector(builder.insert_element(undefined, x, ir.IntType(32)(0)), undefined, zeros)

        place = builder.and_(builder.lshr(splat(word), constant(range(0, 16, 2))), constant([3] * 8))
        group = builder.add(splat(first), constant(s // 2 * 4 for s in range(8)))
        data = context.make_array(signature.args[0])(context, builder, cols).data
        address = builder.bitcast(builder.gep(data, [at]), lanes.as_pointer())
        builder.store(builder.add(place, group), address, align=element.width // 8)
        return context.get_dummy_value()

    return types.void(cols, types.intp, types.intp, types.intp), write


word_columns: Any = intrinsic(_word_columns)
"""(cols, at, word, first) -> None: cols[at .. at+7] = columns of the eight values of a 2:4 word whose group

of sixteen starts at column ``first``.
"""


def _bfloat16(context: Any, code: Any) -> Any:
    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(args[0], word), word(16)), ir.FloatType())

    return types.float32(types.int16), write


bfloat16: Any = intrinsic(_bfloat16)
"""(int16) -> float32: the number whose bfloat16 bits these are."""


def _lowest_bit(context: Any, word: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(0))

    return types.int64(types.uint64), code


lowest_bit: Any = intrinsic(_lowest_bit)
"""(uint64) -> int64: the place of the lowest set bit; 64 for zero."""

OCT = _tile(8, 2, 1)
"""Eight rows that share their columns: two reads of B and eight values for sixteen multiply-adds."""
QUAD = _tile(4, 1, 1)
"""Four rows that share their columns: every row of B read serves four."""
PAIR = _tile(1, 2, 2)
SINGLE = _tile(1, 1, 4)
NARROW = {width: _tile(1, 1, 4, width) for width in (1, 2, 4, 8)}
"""One row, and fewer columns than a vector has lanes."""
SCATTER_QUAD = _scatter_tile(4, 1)
"""Four rows that share their columns: every row of C that is read and written takes four terms."""
SCATTER_PAIR = _scatter_tile(1, 2)
SCATTER_SINGLE = _scatter_tile(1, 1)
