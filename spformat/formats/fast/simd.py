"""Vectors of 64 bytes for the compiled loops: packing or spreading the lanes of a mask, and transposing blocks.

AVX-512 has instructions that pack and spread lanes of 4 bytes or more, and with VBMI2 also smaller ones; ``WIDE`` says
which of them the machine has. On other machines the loops process one value at a time, and do not compile these
functions.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils as _cgutils
from numba.core import types
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

cgutils: Any = _cgutils  # without type hints of its own
VECTOR = 64
"""Bytes of a vector."""


def _features() -> frozenset[str]:
    """What the machine for which numba compiles has, by LLVM's names."""
    config: Any = numba.config
    host: Any = get_host_cpu_features
    features = config.CPU_FEATURES if config.CPU_FEATURES is not None else "" if config.CPU_NAME else host()
    return frozenset(f[1:] for f in features.split(",") if f.startswith("+"))


FEATURES = _features()


def _wide() -> frozenset[int]:
    """The sizes of values, in bytes, that the machine can pack."""
    if not {"avx512f", "avx512bw"} <= FEATURES:
        return frozenset()
    return frozenset({1, 2, 4, 8} if "avx512vbmi2" in FEATURES else {4, 8})


WIDE = _wide()


def _vector(array: Any) -> tuple[Any, int]:
    """(LLVM type of 64 bytes of the elements, lanes)."""
    size = array.dtype.bitwidth // 8
    return ir.VectorType(ir.IntType(8 * size), VECTOR // size), VECTOR // size


def _address(context: Any, builder: Any, kind: Any, array: Any, at: Any, vector: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), vector.as_pointer())


def _moved(builder: Any, how: str, vector: Any, value: Any, mask: Any) -> Any:
    """``value`` with the lanes of ``mask`` packed together ("compress") or spread out ("expand"), the others zero."""
    lanes, name = vector.count, f"llvm.x86.avx512.mask.{how}.v{vector.count}i{vector.element.width}"
    kind = ir.FunctionType(vector, [vector, vector, ir.VectorType(ir.IntType(1), lanes)])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [value, ir.Constant(vector, None), mask])


def _splat(builder: Any, scalar: Any, vector: Any) -> Any:
    start = ir.Constant(vector, ir.Undefined)
    first = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(builder.insert_element(start, scalar, ir.IntType(32)(0)), start, first)


def _nonzero(builder: Any, loaded: Any, zero: Any, vector: Any) -> Any:
    zero = builder.trunc(zero, vector.element) if zero.type.width > vector.element.width else zero
    return builder.icmp_unsigned("!=", builder.and_(loaded, _splat(builder, zero, vector)), ir.Constant(vector, None))


def _pack(context: Any, x: Any, at: Any, zero: Any, values: Any, n: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, at, zero, values, n = args
        vector, lanes = _vector(signature.args[0])
        loaded = builder.load(_address(context, builder, signature.args[0], x, at, vector), align=1)
        mask = _nonzero(builder, loaded, zero, vector)
        packed = _moved(builder, "compress", vector, loaded, mask)
        builder.store(packed, _address(context, builder, signature.args[3], values, n, vector), align=1)
        bits = builder.bitcast(mask, ir.IntType(lanes))
        return bits if lanes == 64 else builder.zext(bits, ir.IntType(64))

    return types.uint64(x, at, zero, values, n), code


pack: Any = intrinsic(_pack)
"""(x, at, zero, values, n) -> uint64: the nonzeros of the 64 bytes x[at ..] go to values[n ..], of which 64 bytes are

written whatever they are; bit b of the result says that x[at + b] is one of them. Arrays of one dimension.
"""


def _pack_chosen(context: Any, x: Any, at: Any, zero: Any, bits: Any, values: Any, n: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, at, zero, bits, values, n = args
        vector, lanes = _vector(signature.args[0])
        loaded = builder.load(_address(context, builder, signature.args[0], x, at, vector), align=1)
        plain = builder.select(_nonzero(builder, loaded, zero, vector), loaded, ir.Constant(vector, None))
        some = builder.trunc(bits, ir.IntType(lanes)) if lanes < 64 else bits
        packed = _moved(builder, "compress", vector, plain, builder.bitcast(some, ir.VectorType(ir.IntType(1), lanes)))
        builder.store(packed, _address(context, builder, signature.args[4], values, n, vector), align=1)
        return context.get_dummy_value()

    return types.void(x, at, zero, bits, values, n), code


pack_chosen: Any = intrinsic(_pack_chosen)
"""(x, at, zero, bits, values, n): x[at + b] for every set bit b to values[n ..], -0.0 as +0; 64 bytes are written."""


def _pack_columns(context: Any, bits: Any, count: Any, first: Any, columns: Any, n: Any) -> Any:
    if not isinstance(count, types.IntegerLiteral):
        return None

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits, _, first, columns, n = args
        vector, lanes = _vector(signature.args[3])
        element = vector.element
        base = builder.trunc(first, element) if element.width < 64 else first
        count = signature.args[1].literal_value
        if 1 in WIDE and lanes == 16:  # places as bytes, 64 packed at once
            octets = ir.VectorType(ir.IntType(8), VECTOR)
            some = builder.and_(bits, ir.IntType(64)((1 << count) - 1))
            mask = builder.bitcast(some, ir.VectorType(ir.IntType(1), VECTOR))
            packed = _moved(builder, "compress", octets, ir.Constant(octets, list(range(VECTOR))), mask)

            def store(at: int) -> None:
                part = ir.Constant(ir.VectorType(ir.IntType(32), lanes), list(range(at, at + lanes)))
                places = builder.zext(builder.shuffle_vector(packed, packed, part), vector)
                numbers = builder.add(_splat(builder, base, vector), places)
                place = builder.add(n, ir.IntType(64)(at))
                builder.store(numbers, _address(context, builder, signature.args[3], columns, place, vector), align=1)

            store(0)
            with builder.if_then(builder.icmp_unsigned(">", builder.ctpop(some), ir.IntType(64)(lanes))):
                for at in range(lanes, count, lanes):
                    store(at)
            return context.get_dummy_value()
        for at in range(0, count, lanes):
            some = builder.trunc(builder.lshr(bits, ir.IntType(64)(at)), ir.IntType(lanes))
            lowest = _splat(builder, builder.add(base, element(at)), vector)
            numbers = builder.add(lowest, ir.Constant(vector, list(range(lanes))))
            mask = builder.bitcast(some, ir.VectorType(ir.IntType(1), lanes))
            packed = _moved(builder, "compress", vector, numbers, mask)
            builder.store(packed, _address(context, builder, signature.args[3], columns, n, vector), align=1)
            n = builder.add(n, builder.zext(builder.ctpop(some), ir.IntType(64)))
        return context.get_dummy_value()

    return types.void(bits, count, first, columns, n), code


pack_columns: Any = intrinsic(_pack_columns)
"""(bits, count, first, columns, n): first + b for every set bit b < count to columns[n ..].

``count`` entries are written, or a few more, whatever they are.
"""


def _unpack(context: Any, values: Any, n: Any, bits: Any, out: Any, at: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, n, bits, out, at = args
        vector, lanes = _vector(signature.args[0])
        loaded = builder.load(_address(context, builder, signature.args[0], values, n, vector), align=1)
        some = builder.trunc(bits, ir.IntType(lanes)) if lanes < 64 else bits
        mask = builder.bitcast(some, ir.VectorType(ir.IntType(1), lanes))
        spread = _moved(builder, "expand", vector, loaded, mask)
        builder.store(spread, _address(context, builder, signature.args[3], out, at, vector), align=1)
        return context.get_dummy_value()

    return types.void(values, n, bits, out, at), code


unpack: Any = intrinsic(_unpack)
"""(values, n, bits, out, at): the reverse of ``pack``: 64 bytes of out[at ..], zero where no bit is set."""


def _ones(context: Any, bits: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), code


ones: Any = intrinsic(_ones)
"""(uint64) -> int64: how many bits are set."""


def _transpose(context: Any, x: Any, at: Any, step: Any, out: Any, to: Any, stride: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, at, step, out, to, stride = args
        vector, lanes = _vector(signature.args[0])
        word = ir.IntType(64)
        rows = []
        for r in range(lanes):
            place = builder.add(at, builder.mul(step, word(r)))
            rows.append(builder.load(_address(context, builder, signature.args[0], x, place, vector), align=1))
        indices, d = ir.VectorType(ir.IntType(32), lanes), lanes // 2
        while d:  # exchange the quarters off the diagonal of ever smaller blocks
            upper = ir.Constant(indices, [p if not p & d else lanes + p - d for p in range(lanes)])
            lower = ir.Constant(indices, [p + d if not p & d else lanes + p for p in range(lanes)])
            for i in range(lanes):
                if not i & d:
                    a, b = rows[i], rows[i + d]
                    rows[i], rows[i + d] = builder.shuffle_vector(a, b, upper), builder.shuffle_vector(a, b, lower)
            d //= 2
        for r in range(lanes):
            place = builder.add(to, builder.mul(stride, word(r)))
            builder.store(rows[r], _address(context, builder, signature.args[3], out, place, vector), align=1)
        return context.get_dummy_value()

    return types.void(x, at, step, out, to, stride), code


transpose: Any = intrinsic(_transpose)
"""(x, at, step, out, to, stride): out[to + c*stride + r] = x[at + r*step + c] for r, c < 64 / itemsize; flat arrays."""
