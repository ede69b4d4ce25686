"""Compiled code of the threads of ``team``: pieces of a loop are taken and computed without Python and its lock.

The threads share a board (``board``). A product is open while word OPEN holds its number. A thread that wants to help
first counts itself in word INSIDE and then looks again whether the product is still open, and the caller closes it
before it waits for INSIDE to be zero. So no thread reads the operands of a product that has returned.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils as _cgutils
from numba.core import types
from numba.extending import intrinsic

from ...formats.fast.numba_cache import compiled, compiled_for
from .board import (
    ASLEEP,
    AWAKE,
    CALLER,
    CORES,
    COUNT,
    DATA,
    FUNCTION,
    INSIDE,
    OPEN,
    SPIN,
    STATES,
    TAKEN,
    THREADS,
    WOKEN,
    WORDS,
)

Array = Any

cgutils: Any = _cgutils  # without type hints of its own
_WORD, _INT = ir.IntType(64), ir.IntType(32)
_BYTES = ir.IntType(8).as_pointer()
_PIECE = ir.FunctionType(ir.VoidType(), [_BYTES, _WORD, _WORD])
"""(operands, number of a piece, number of a thread) -> None."""
_HINT = "llvm.x86.sse2.pause" if platform.machine() in ("x86_64", "AMD64") else ""
n = types.intp


def _words(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return context.make_array(signature.args[0])(context, builder, args[0]).data


def _of_libc(builder: Any, name: str, result: Any, *args: Any) -> Any:
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _read(context: Any, board: Any, at: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = builder.gep(_words(context, builder, signature, args), [args[1]])
        return builder.load_atomic(address, "seq_cst", 8)

    return n(board, n), code


def _write(context: Any, board: Any, at: Any, word: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = builder.gep(_words(context, builder, signature, args), [args[1]])
        builder.store_atomic(args[2], address, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(board, n, n), code


def _changed(how: str) -> Any:
    def typing(context: Any, board: Any, at: Any, word: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address = builder.gep(_words(context, builder, signature, args), [args[1]])
            return builder.atomic_rmw(how, address, args[2], "seq_cst")

        return n(board, n, n), code

    return intrinsic(typing)


def _pause(context: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _HINT:
            _of_libc(builder, _HINT, ir.VoidType())
        return context.get_dummy_value()

    return types.void(), code


def _nanoseconds(context: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        time = cgutils.alloca_once(builder, ir.ArrayType(_WORD, 2))
        seconds = builder.bitcast(time, _WORD.as_pointer())
        _of_libc(builder, "clock_gettime", _INT, _INT(1), seconds)  # CLOCK_MONOTONIC
        rest = builder.load(builder.gep(seconds, [_WORD(1)]))
        return builder.add(builder.mul(builder.load(seconds), _WORD(10**9)), rest)

    return n(), code


def _core(context: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sext(_of_libc(builder, "sched_getcpu", _INT), _WORD)

    return n(), code


def _sleep(context: Any, microseconds: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _of_libc(builder, "usleep", _INT, builder.trunc(args[0], _INT))
        return context.get_dummy_value()

    return types.void(n), code


def _semaphore(name: str) -> Any:
    def typing(context: Any, board: Any, at: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address = builder.gep(_words(context, builder, signature, args), [args[1]])
            _of_libc(builder, name, _INT, builder.bitcast(address, _BYTES))
            return context.get_dummy_value()

        return types.void(board, n), code

    return intrinsic(typing)


def _leave(context: Any, place: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.ArrayType(_WORD, CORES // 64)
        cores = cgutils.alloca_once(builder, kind)
        words, size = builder.bitcast(cores, _WORD.as_pointer()), _WORD(CORES // 8)
        got = _of_libc(builder, "sched_getaffinity", _INT, _of_libc(builder, "getpid", _INT), size, words)
        inside = builder.icmp_unsigned("<", args[0], _WORD(CORES))
        with builder.if_then(builder.and_(builder.icmp_signed("==", got, _INT(0)), inside)):
            word = builder.gep(words, [builder.lshr(args[0], _WORD(6))])
            bit = builder.shl(_WORD(1), builder.and_(args[0], _WORD(63)))
            builder.store(builder.and_(builder.load(word), builder.not_(bit)), word)
            _of_libc(builder, "sched_setaffinity", _INT, _INT(0), size, words)  # refused if no core is left
        return context.get_dummy_value()

    return types.void(n), code


read: Any = intrinsic(_read)
write: Any = intrinsic(_write)
add, swap = _changed("add"), _changed("xchg")
"""(board, at, word) -> the word that was there before; words are read and written in one order for all threads."""
pause: Any = intrinsic(_pause)
nanoseconds: Any = intrinsic(_nanoseconds)
core: Any = intrinsic(_core)
sleep: Any = intrinsic(_sleep)
wait, post = _semaphore("sem_wait"), _semaphore("sem_post")
"""(board, at): of the semaphore at this word."""
leave: Any = intrinsic(_leave)
"""(core): keep the thread off a core. A scheduler that puts it where the caller runs makes both wait."""


def _prepare(context: Any, board: Any, bounds: Any, loop: Any, given: Any) -> Any:
    wanted = loop.get_call_type(context, (n, n, n, *given.types), {})

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, bounds, _, operands = args
        kinds, compiled_loop = signature.args, signature.args[2].dispatcher.overloads[wanted.args]
        context.active_code_library.add_linking_library(compiled_loop.library)
        record = ir.LiteralStructType([_WORD.as_pointer(), operands.type])
        place = cgutils.alloca_once(builder, record)
        ends = context.make_array(kinds[1])(context, builder, bounds).data
        for k, value in enumerate((ends, operands)):
            builder.store(value, cgutils.gep_inbounds(builder, place, 0, k))

        function = ir.Function(builder.module, _PIECE, builder.module.get_unique_name("piece"))
        function.linkage = "internal"
        b = ir.IRBuilder(function.append_basic_block("entry"))
        data, piece, thread = function.args
        own = b.bitcast(data, record.as_pointer())
        ends, members = (b.load(cgutils.gep_inbounds(b, own, 0, k)) for k in range(2))
        lo, hi = (b.load(b.gep(ends, [x])) for x in (piece, b.add(piece, _WORD(1))))
        parts = cgutils.unpack_tuple(b, members, len(kinds[3].types))
        context.call_internal_no_propagate(b, compiled_loop.fndesc, wanted, [lo, hi, thread, *parts])
        b.ret_void()

        words = _words(context, builder, signature, args)
        for at, pointer in ((FUNCTION, function), (DATA, place)):
            builder.store(builder.ptrtoint(pointer, _WORD), builder.gep(words, [_WORD(at)]))
        return context.get_dummy_value()

    return types.void(board, bounds, loop, given), code


prepare: Any = intrinsic(_prepare)
"""(board, bounds, loop, operands): ``call`` then computes loop(bounds[i], bounds[i+1], thread, *operands) of a piece i,

as long as the function that called ``prepare`` has not returned.
"""


def _call(context: Any, board: Any, piece: Any, thread: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = _words(context, builder, signature, args)
        function, data = (builder.load(builder.gep(words, [_WORD(at)])) for at in (FUNCTION, DATA))
        arguments = builder.inttoptr(data, _BYTES), args[1], args[2]
        builder.call(builder.inttoptr(function, _PIECE.as_pointer()), arguments)
        return context.get_dummy_value()

    return types.void(board, n, n), code


call: Any = intrinsic(_call)


@compiled
def take_pieces(board: Array, product: int, thread: int) -> None:
    """Compute the pieces that no other thread took. A thread begins with its share: it is in its cache from before."""
    count = board[COUNT]
    first = count * thread // board[THREADS]
    for i in range(first, first + count):
        piece = i if i < count else i - count
        if board[TAKEN + piece] != product and swap(board, TAKEN + piece, product) != product:
            call(board, piece, thread)


@compiled
def attend(board: Array, thread: int) -> None:
    """Help with every product, for ever. Needs no lock of Python, neither to wake up nor to take pieces.

    For board[SPIN] nanoseconds after a product the thread does not sleep: waking it takes as long as a small product.
    """
    state, last, avoided = STATES + WORDS * thread, 0, -1
    while True:
        if board[CALLER] != avoided:
            avoided = board[CALLER]
            leave(avoided)
        write(board, state, AWAKE)
        since = nanoseconds()
        while True:
            for _ in range(16):
                product = read(board, OPEN)
                if product != 0 and product != last:
                    add(board, INSIDE, 1)
                    if read(board, OPEN) == product:
                        last = product
                        if thread < board[THREADS]:
                            take_pieces(board, product, thread)
                            since = nanoseconds()
                    add(board, INSIDE, -1)
                pause()
            if nanoseconds() - since > read(board, SPIN) or board[CALLER] == core():
                break
        write(board, state, ASLEEP)
        while read(board, state) == ASLEEP:  # a signal may end the wait
            wait(board, state + 1)


@compiled
def wake(board: Array, threads: int) -> None:
    """Wake the threads 1 .. threads-1 that sleep."""
    for thread in range(1, threads):
        state = STATES + WORDS * thread
        if read(board, state) == ASLEEP:
            write(board, state, WOKEN)
            post(board, state + 1)


@functools.cache
def shared(loop: Any, name: str) -> Callable[..., None]:
    """(board, product, threads, bounds, operands): loop(lo, hi, thread, *operands) for all pieces of ``bounds``.

    name: of the loop, for the cache of compiled code. One piece is computed without any other thread.
    """

    @compiled_for(name)
    def run(board: Array, product: int, threads: int, bounds: Array, operands: Any) -> None:
        if bounds.size == 2:
            loop(bounds[0], bounds[1], 0, *operands)
        else:
            prepare(board, bounds, loop, operands)
            wake(board, threads)
            board[COUNT], board[THREADS], board[CALLER] = bounds.size - 1, threads, core()
            write(board, OPEN, product)
            take_pieces(board, product, 0)
            write(board, OPEN, 0)
            tries = 0
            while read(board, INSIDE) != 0:
                pause()
                tries += 1
                if tries > 5000:  # a thread lost its core in the middle of a piece
                    sleep(20)

    return run
