"""The inner loops of products with few columns of B: sums along a row of A, or down a column of vectors.

In the tiles of ``tiles`` a lane is a column of B, so that a single column would use one lane of sixteen. Here a lane is
an item of A: values of A are loaded as whole vectors and multiplied with as many numbers of B, stored as X[n, k] =
B[k, n]; the lanes are added at the end, in a fixed order. Values narrower than the sums are widened in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba.core import cgutils as _cgutils
from numba.core import types
from numba.extending import intrinsic

from .tiles import Vectors

cgutils: Any = _cgutils  # without type hints of its own
_INTP = ir.IntType(64)
n = types.intp


class _Tile:
    """What the code of all tiles shares: the pointers of the arrays, and ``rows`` x ``columns`` sums of vectors."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any, names: str, lanes: int) -> None:
        self.builder, self.types = builder, dict(zip(names.split(), signature.args, strict=True))
        self.args = dict(zip(names.split(), args, strict=True))
        for name, t in self.types.items():
            if isinstance(t, types.Array):
                self.args[name] = context.make_array(t)(context, builder, self.args[name]).data
        self.m = Vectors(builder, context.get_value_type(self.types["X" if "X" in self.types else "P"].dtype), lanes)

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def at(self, name: str, *offsets: Any) -> Any:
        """The address of an element; an offset is a number or a pair of factors."""
        place = _INTP(0)
        for offset in offsets:
            term = self.builder.mul(*offset) if isinstance(offset, tuple) else offset
            place = self.builder.add(place, term)
        return self.builder.gep(self.args[name], [place])

    def number(self, address: Any) -> Any:
        """The value stored at an address, as the type of the sums."""
        return self.builder.extract_element(self.numbers(address, 1), ir.IntType(32)(0))

    def numbers(self, address: Any, count: int | None = None) -> Any:
        """A vector of ``count`` values stored at an address, by default one for each lane, as the type of the sums."""
        m, builder, stored = self.m, self.builder, self.types["data"].dtype
        count = count or m.lanes
        wanted = ir.VectorType(m.element, count)

        def lanes(kind: Any) -> Any:
            return ir.VectorType(kind, count)

        if stored in (types.float32, types.float64):
            x = m.load(address, lanes(ir.FloatType() if stored == types.float32 else ir.DoubleType()), stored.bitwidth)
        else:
            x = m.load(address, lanes(ir.IntType(stored.bitwidth)), stored.bitwidth)
            if stored == types.int16:  # bfloat16
                wide = lanes(ir.IntType(32))
                x = builder.shl(builder.zext(x, wide), ir.Constant(wide, [16] * count))
                x = builder.bitcast(x, lanes(ir.FloatType()))
            elif stored == types.uint16:  # float16
                x = builder.bitcast(x, lanes(ir.HalfType()))
            else:  # int8
                x = builder.sext(x, wanted) if m.is_int else builder.sitofp(x, wanted)
        return x if x.type == wanted else builder.fpext(x, wanted)

    def sums(self, count: int) -> list[Any]:
        """Variables of vectors, which start at zero."""
        places = [cgutils.alloca_once(self.builder, self.m.type) for _ in range(count)]
        for place in places:
            self.builder.store(self.m.zero, place)
        return places

    def add_product(self, place: Any, x: Any, y: Any, some: Any = None) -> None:
        """place += x * y, in the lanes of ``some`` if given."""
        old = self.builder.load(place)
        new = self.m.multiply_add(x, y, old)
        self.builder.store(new if some is None else self.builder.select(some, new, old), place)

    def store_totals(self, places: list[Any], columns: int) -> None:
        """out[o + r*ldo + c] = the sum of the lanes of place number r*columns + c."""
        for i, place in enumerate(places):
            r, c = divmod(i, columns)
            total = self.m.total(self.builder.load(place))
            self.builder.store(total, self.at("out", self["o"], (self["ldo"], _INTP(r)), _INTP(c)))

    def loop(self, count: Any, step: int = 1) -> Any:
        """``with tile.loop(count) as (x, _)``: x = 0, step, 2*step, .. below count."""
        return cgutils.for_range_slice(self.builder, _INTP(0), count, _INTP(step), _INTP)


def _intrinsic(names: str, lanes: int, arrays: str, write: Callable[[_Tile], None]) -> Any:
    """A function of compiled code with arguments of these names; those in ``arrays`` are arrays, others integers."""
    known = arrays.split()

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        write(_Tile(context, builder, signature, args, names, lanes))
        return context.get_dummy_value()

    def typing(_: Any, *given: Any) -> Any:
        kinds = [t if name in known else n for name, t in zip(names.split(), given, strict=True)]
        return types.void(*kinds), code

    names_of_arguments = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("context", *names.split())]
    typing.__signature__ = Signature(names_of_arguments)  # type: ignore[attr-defined]  # numba reads it
    return intrinsic(typing)


def dots(rows: int, columns: int, lanes: int) -> Any:
    """out[o + r*ldo + c] = sum over segments s and k < count of data[v + s*segment + r*row + k] * X[x + c*ldx + at + k]

    with at = starts[s0 + s]; ``count`` is a multiple of ``lanes``.
    """

    def write(t: _Tile) -> None:
        sums = t.sums(rows * columns)
        with t.loop(t["segments"]) as (s, _):
            start = t.builder.load(t.at("starts", t["s0"], s))
            with t.loop(t["count"], lanes) as (k, _):
                xs = [t.m.load(t.at("X", t["x"], start, k, (t["ldx"], _INTP(c)))) for c in range(columns)]
                for r in range(rows):
                    values = t.numbers(t.at("data", t["v"], k, (s, t["segment"]), (t["row"], _INTP(r))))
                    for c in range(columns):
                        t.add_product(sums[r * columns + c], values, xs[c])
        t.store_totals(sums, columns)

    names = "out o ldo data v row segment starts s0 segments count X x ldx"
    return _intrinsic(names, lanes, "out data starts X", write)


def widened(lanes: int) -> Any:
    """out[o + k] = data[v + k], k < count, a multiple of ``lanes``: stored values as the type of the sums."""

    def write(t: _Tile) -> None:
        with t.loop(t["count"], lanes) as (k, _):
            t.m.store(t.numbers(t.at("data", t["v"], k)), t.at("X", t["o"], k))

    return _intrinsic("X o data v count", lanes, "X data", write)


def rows_of_columns(rows: int, width: int) -> Any:
    """out[o + r*width + c] (+)= sum over s < segments and k < count of

    data[v + s*segment + r*row + k] * P[cols[j + s*count + k]*width + c], c < width; ``first`` starts at zero instead of
    at out. cols: int64; data: of the type of the sums.
    """

    def write(t: _Tile) -> None:
        address = [t.at("out", t["o"], _INTP(r * width)) for r in range(rows)]
        sums = t.sums(rows)
        with t.builder.if_then(t.builder.icmp_signed("==", t["first"], _INTP(0))):
            for place, where in zip(sums, address, strict=True):
                t.builder.store(t.m.load(where), place)
        with t.loop(t["segments"]) as (s, _), t.loop(t["count"]) as (k, _):
            column = t.builder.load(t.at("cols", t["j"], (s, t["count"]), k))
            x = t.m.load(t.at("P", (column, _INTP(width))))
            for r, place in enumerate(sums):
                value = t.builder.load(t.at("data", t["v"], (s, t["segment"]), k, (t["row"], _INTP(r))))
                t.add_product(place, t.m.splat(value), x)
        for place, where in zip(sums, address, strict=True):
            t.m.store(t.builder.load(place), where)

    names = "out o first data v row segment segments cols j count P"
    return _intrinsic(names, width, "out data cols P", write)


def items(width: int) -> Any:
    """out[o + c] (+)= sum over k < count of data[v + k] * P[cols[v + k]*width + c], c < width.

    ``first`` starts at zero instead of at out. Item k is added to partial sum k % 4: a multiply-add takes four cycles.
    """

    def write(t: _Tile) -> None:
        b, m = t.builder, t.m
        sums, where = t.sums(4), t.at("out", t["o"])
        with b.if_then(b.icmp_signed("==", t["first"], _INTP(0))):
            b.store(m.load(where), sums[0])

        def add(k: Any, place: Any) -> None:
            column = b.load(t.at("cols", t["v"], k))
            column = b.sext(column, _INTP) if column.type.width < 64 else column
            value = m.splat(t.number(t.at("data", t["v"], k)))
            t.add_product(place, value, m.load(t.at("P", (column, _INTP(width)))))

        whole = b.and_(t["count"], _INTP(-4))
        with t.loop(whole, 4) as (k, _):
            for way, place in enumerate(sums):
                add(b.add(k, _INTP(way)), place)
        with cgutils.for_range_slice(b, whole, t["count"], _INTP(1), _INTP) as (k, _):
            add(k, sums[0])
        low, high = (m.add(b.load(sums[i]), b.load(sums[i + 1])) for i in (0, 2))
        m.store(m.add(low, high), where)

    return _intrinsic("out o first data v cols count P", width, "out data cols P", write)


def gathered(lanes: int) -> Any:
    """out[o] = sum over k < count of data[v + k] * X[cols[j + k]]; float32 sums, cols int32; needs AVX-512."""

    def write(t: _Tile) -> None:
        b, m, half = t.builder, t.m, ir.IntType(32)
        sums = t.sums(1)
        indices, every = ir.VectorType(half, lanes), ir.VectorType(ir.IntType(1), lanes)
        kind = ir.FunctionType(m.type, [m.type, ir.IntType(8).as_pointer(), indices, every, half])
        gather = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.mask.gather.dps.512")
        base = b.bitcast(t["X"], ir.IntType(8).as_pointer())
        whole = b.and_(t["count"], _INTP(-lanes))
        with t.loop(whole, lanes) as (k, _):
            columns = m.load(t.at("cols", t["j"], k), indices, 32)
            xs = b.call(gather, [m.zero, base, columns, ir.Constant(every, [1] * lanes), half(m.size)])
            t.add_product(sums[0], t.numbers(t.at("data", t["v"], k)), xs)
        # The rest one by one, because vectors past the last row would be past the end of the arrays.
        rest = cgutils.alloca_once_value(b, m.total(b.load(sums[0])))
        with cgutils.for_range_slice(b, whole, t["count"], _INTP(1), _INTP) as (k, _):
            column = b.sext(b.load(t.at("cols", t["j"], k)), _INTP)
            product = b.fmul(t.number(t.at("data", t["v"], k)), b.load(t.at("X", column)))
            b.store(b.fadd(b.load(rest), product), rest)
        b.store(b.load(rest), t.at("out", t["o"]))

    return _intrinsic("out o data v cols j count X", lanes, "out data cols X", write)


def columns_of_vectors(vectors: int, columns: int, lanes: int) -> Any:
    """out[o + c*ldo + r] += sum over u < count of data[v + u*step + r] * X[x + c*ldx + cols[j + u]], r < vectors*lanes.

    cols: int64.
    """

    def write(t: _Tile) -> None:
        places = [(k, c) for k in range(vectors) for c in range(columns)]
        address = [t.at("out", t["o"], (t["ldo"], _INTP(c)), _INTP(k * lanes)) for k, c in places]
        sums = t.sums(len(places))
        for place, where in zip(sums, address, strict=True):
            t.builder.store(t.m.load(where), place)
        with t.loop(t["count"]) as (u, _):
            column = t.builder.load(t.at("cols", t["j"], u))
            values = [t.numbers(t.at("data", t["v"], (u, t["step"]), _INTP(k * lanes))) for k in range(vectors)]
            xs = [t.m.splat(t.builder.load(t.at("X", t["x"], column, (t["ldx"], _INTP(c))))) for c in range(columns)]
            for place, (k, c) in zip(sums, places, strict=True):
                t.add_product(place, values[k], xs[c])
        for place, where in zip(sums, address, strict=True):
            t.m.store(t.builder.load(place), where)

    names = "out o ldo data v step cols j count X x ldx"
    return _intrinsic(names, lanes, "out data cols X", write)


def two_four(rows: int, columns: int, lanes: int) -> Any:
    """out[o + r*ldo + c] = row i + r of a 2:4 matrix times column c of B; needs AVX-512.

    A step takes ``lanes`` values, whose columns are among 2*lanes. Their places are in the word, or two words for
    sixteen lanes, at w = row_offset[i + r] + (q >> shift)*outer + (q & low)*inner in step q, the second word ``pair``
    further on. Fillers of a group, which are zero, are not multiplied.
    """

    def write(t: _Tile) -> None:
        b, m = t.builder, t.m
        word = ir.IntType(m.size * 8)
        codes = ir.VectorType(word, lanes)
        sums = t.sums(rows * columns)
        offsets = [b.load(t.at("row_offset", t["i"], _INTP(r))) for r in range(rows)]
        with t.loop(t["steps"]) as (q, _):
            place = b.add(b.mul(b.ashr(q, t["shift"]), t["outer"]), b.mul(b.and_(q, t["low"]), t["inner"]))
            xs = [
                [m.load(t.at("X", t["x"], (q, _INTP(2 * lanes)), (t["ldx"], _INTP(c)), _INTP(h * lanes)))
                 for h in range(2)] for c in range(columns)
            ]  # fmt: skip
            for r in range(rows):
                bits = b.zext(b.load(t.at("meta", offsets[r], place)), word)
                if lanes == 16:
                    other = b.zext(b.load(t.at("meta", offsets[r], place, t["pair"])), word)
                    bits = b.or_(bits, b.shl(other, word(16)))
                shifts = ir.Constant(codes, list(range(0, 2 * lanes, 2)))
                within = b.and_(b.lshr(m.splat(bits, codes), shifts), ir.Constant(codes, [3] * lanes))
                index = b.or_(within, ir.Constant(codes, [p // 2 * 4 for p in range(lanes)]))
                values = t.numbers(t.at("data", t["v"], (q, _INTP(lanes)), (t["row"], _INTP(r))))
                some = m.nonzero(values)
                for c in range(columns):
                    t.add_product(sums[r * columns + c], values, m.chosen(index, *xs[c]), some)
        t.store_totals(sums, columns)

    names = "out o ldo data v row meta row_offset i steps shift outer low inner pair X x ldx"
    return _intrinsic(names, lanes, "out data meta row_offset X", write)


def bitmask(rows: int, columns: int, lanes: int, *, at_the_end: bool) -> Any:
    """out[o + r*ldo + c] = rows i .. of a bitmask matrix times column c of B; needs AVX-512.

    ``mask`` is flat, with ``row`` bytes for each row of A, and the values of row i + r start at indptr[i + r]. A vector
    is read past the last value of a row. at_the_end: where this may be past the end of the array, values from number
    ``base`` on are read from ``tail``, whose first is that number.
    """

    def write(t: _Tile) -> None:
        b, m = t.builder, t.m
        some = ir.IntType(lanes)
        sums = t.sums(rows * columns)
        nexts = [cgutils.alloca_once(b, _INTP) for _ in range(rows)]
        for r, place in enumerate(nexts):
            first = b.load(t.at("indptr", t["i"], _INTP(r)))
            b.store(first if first.type == _INTP else b.sext(first, _INTP), place)
        with t.loop(t["steps"]) as (q, _):
            spread = []
            for r in range(rows):
                place = t.at("mask", (b.add(t["i"], _INTP(r)), t["row"]), (q, _INTP(lanes // 8)))
                bits = b.load(b.bitcast(place, some.as_pointer()), align=1)
                mask = b.bitcast(bits, ir.VectorType(ir.IntType(1), lanes))
                j = b.load(nexts[r])
                address = t.at("data", j)
                if at_the_end:
                    inside = b.icmp_signed("<", j, t["base"])
                    address = b.select(inside, address, t.at("tail", b.sub(j, t["base"])))
                spread.append((m.expanded(t.numbers(address), mask), mask))
                b.store(b.add(j, b.zext(b.ctpop(bits), _INTP)), nexts[r])
            for c in range(columns):
                x = m.load(t.at("X", t["x"], (q, _INTP(lanes)), (t["ldx"], _INTP(c))))
                for r, (values, mask) in enumerate(spread):
                    t.add_product(sums[r * columns + c], values, x, mask)
        t.store_totals(sums, columns)

    names = "out o ldo data tail base indptr mask row i steps X x ldx"
    return _intrinsic(names, lanes, "out data tail indptr mask X", write)
