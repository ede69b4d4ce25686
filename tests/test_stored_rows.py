"""Rows of C that start anywhere, stored in long lines: exact products on a GPU or the emulated one."""

from __future__ import annotations

from typing import Any

import emulator
import numpy as np
import pytest
from emulator.process import printed
from exact import assert_exact, hopper, matrix, tile_in
from test_kernels import problem

from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.bsr import spmm_bsr_sm90a, spmm_bsr_stream_sm90a
from spformat.backends.cuda.csr import spmm_csr_expanding_sm90a as expanding
from spformat.formats import BSR, CSR
from spformat.products.problem import PITCH
from spformat.products.tiles import forced

Case = tuple[Any, int, int, int, str]
CASES: list[Case] = [
    # tile (warpgroups, columns, blocks, parts), M, N, elements between rows, values of C
    ((1, 128, 2, 1), 70, 203, 0, "bfloat16"),  # eight lines of 256 bytes fill the memory of a warp
    ((2, 128, 1, 1), 131, 129, 4, "float32"),  # four of 512 do
    ((2, 192, 1, 1), 130, 383, 0, "bfloat16"),
    ((2, 192, 1, 1), 70, 191, 2, "float32"),  # two lines of 96
    ((2, 256, 1, 1), 261, 519, 0, "float16"),  # the last tile has fewer columns than a unit
    ((2, 256, 1, 1), 140, 256, 1, "bfloat16"),  # whole lines only
    ((2, 256, 1, 1), 128, 509, 0, "float32"),
    *(((2, 256, 1, parts), 136, 299, 0, "bfloat16") for parts in range(2, 9)),  # runs of four strips and of two
    ((2, 192, 1, 3), 130, 251, 0, "float16"),
    ((1, 64, 3, 2), 100, 93, 0, "bfloat16"),
    ((1, 64, 3, 2), 100, 93, 0, "float32"),
]


def rows(cp: Any, M: int, N: int, pad: int, first: int, dtype: str) -> tuple[Any, Any]:
    """NaN in memory, and C [M, N] in it from element ``first`` on, ``pad`` elements between its rows."""
    memory = cp.full(first + M * (N + pad) + 40, np.nan, VALUE_TYPES[dtype].numpy)
    return memory, memory[first : first + M * (N + pad)].reshape(M, N + pad)[:, :N]


def assert_stored(plan: Any, B: Any, x: Any, N: int, pad: int, dtype: str) -> None:
    """From several elements of 16 bytes on; nothing but C is written."""
    cp = hopper()
    aligned = cp.zeros((B.shape[0], -(-N // PITCH) * PITCH), B.dtype)[:, :N]
    aligned[...] = cp.asarray(B)
    for first in (0, 1, 5, 7):
        memory, C = rows(cp, x.shape[0], N, pad, first, dtype)
        plan(aligned, out=C)
        assert_exact(C.get(), x, B)
        C[...] = np.nan
        assert cp.isnan(memory.astype(np.float32)).all(), "wrote outside C"


def of_csr(case: Case) -> None:
    tile, M, N, pad, dtype = case
    hopper()
    rng = np.random.default_rng(M + N)
    x = matrix(rng, M, 200, 0.2, "bfloat16")
    B, a = rng.integers(-3, 4, (200, N)).astype(x.dtype), CSR.from_dense(x)
    kernel = expanding.SpmmCSRExpanding()
    plan = kernel.plan_with(a.to("cuda"), problem(a, N, dtype, ("row", "row"), 90), tile_in(expanding.TILES, *tile))
    assert_stored(plan, B, x, N, pad, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_of_a_csr(case: Case) -> None:
    of_csr(case)


BLOCKS = [
    # kernel, height of blocks, tile, N
    (spmm_bsr_stream_sm90a, 64, "64x192x64 2 resident", 387),  # four lines of 384 bytes at a time
    (spmm_bsr_sm90a, 16, "64x256x64", 301),  # warpgroups put their columns together
    (spmm_bsr_sm90a, 32, "32x128x64", 251),
    (spmm_bsr_sm90a, 64, "128x256x64", 519),
]


def of_blocks(number: int) -> None:
    module, height, tile, N = BLOCKS[number]
    hopper()
    rng = np.random.default_rng(N)
    keep = np.repeat(np.repeat(rng.random((5, 4)) < 0.6, height, 0), height, 1)
    x = (keep * rng.integers(-3, 4, keep.shape))[: -height // 2].astype(VALUE_TYPES["bfloat16"].numpy)
    B, a = rng.integers(-3, 4, (x.shape[1], N)).astype(x.dtype), BSR.from_dense(x, blocksize=(height, height))
    p = problem(a, N, "bfloat16", ("row", "row"), 90)
    for option in module.KERNEL.options(p):
        with forced(module.KERNEL.name, str(option)):
            plan = module.KERNEL.plan(a.to("cuda"), p)
        if plan.tile == tile:
            break
    assert plan.tile == tile
    assert_stored(plan, B, x, N, 0, "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=[f"blocks of {x[1]}, {x[2]}" for x in BLOCKS])
def test_rows_of_blocks(number: int) -> None:
    of_blocks(number)


PLANTED = """
from emulator import stand_in
from emulator.planted import plant, three_runs

planted = plant({old!r}, {new!r}, header={headers})
stand_in.install(90)
from test_stored_rows import CASES, of_blocks, of_csr

three_runs(lambda: {call} is None, planted)
"""
EXPANDING = ("spformat/record_products.cuh", "spformat/expanding.cuh", "spformat/staged_store.cuh")


def planted(call: str, old: str, new: str, headers: tuple[str, ...]) -> str:
    """What three runs with a defect printed."""
    return printed(PLANTED.format(call=call, old=old, new=new, headers=headers))


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(
    ("case", "old", "new"),
    [
        (4, "n >= 0 && n + E <= whole", "n >= 0 && n <= whole"),
        (4, "n >= 0 && n + E <= whole", "n + E <= whole"),
        (4, "k < there * ends; k", "k < 0; k"),
        (5, "line[over ? turned(place) : place]", "line[place]"),
        (4, "(start + l * pitch) % E", "start % E"),
        (1, "ROWS == 8 || g / ROWS == begin / ROWS", "true"),
        (3, "(acc + WIDTH / 2, scratch, c, ldc, row, col + WIDTH, M, N)", "(acc, scratch, c, ldc, row, col + WIDTH, M, N)"),
        (7, "owner = i / OWN;", "owner = i % Parts;"),
        (8, "own < count; own", "own + RUN < count; own"),
        (9, "sums + 8 * r, ", "sums, "),
    ],
    ids=["behind C", "before C", "no ends", "not turned", "one start", "rows of others", "the same sums", "other owners",
         "the last run", "one strip"],
)  # fmt: skip
def test_a_planted_defect_is_found(case: int, old: str, new: str) -> None:
    assert "equal" not in planted(f"of_csr(CASES[{case}])", old, new, EXPANDING).split()


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(
    ("number", "old", "new"),
    [
        (1, "Together ? 128 * WN : 128;", "128;"),
        (1, "i / 8 * (WgRows * WgCols * 2)", "0"),
        (2, "boxes = raw + (staging + b * BoxBytes", "boxes = raw + (mine + b * BoxBytes"),
    ],
    ids=["no common barrier", "the first columns", "the own columns"],
)
def test_a_planted_defect_in_blocks_is_found(number: int, old: str, new: str) -> None:
    """Without a common barrier some orders of threads give the right result."""
    assert planted(f"of_blocks({number})", old, new, ()).split() != ["equal"] * 3


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize("call", ["of_csr(CASES[1])", "of_csr(CASES[4])", "of_csr(CASES[8])", "of_blocks(1)"])
def test_without_a_defect_all_is_equal(call: str) -> None:
    assert printed(PLANTED.format(call=call, old="", new="", headers=EXPANDING)).split() == ["equal"] * 3
