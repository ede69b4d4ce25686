"""The Bitmask kernel that expands A on its way to the registers: what it takes, and exact products on a GPU or the emulated one."""

from __future__ import annotations

import re
from typing import Any

import emulator
import numpy as np
import pytest
from emulator.process import printed
from exact import (
    assert_integers_exact,
    assert_stages_fit,
    assert_takes_16_bits_on_hopper,
    assert_zeros_meet_no_infinity,
)
from test_kernels import problem

import spformat as sf
from spformat.backends.cuda.bitmask import spmm_bitmask_expanding_sm90a as expanding
from spformat.backends.cuda.runtime.record_products import Tile
from spformat.formats import Bitmask

KERNEL = expanding.SpmmBitmaskExpanding()


def test_what_it_takes() -> None:
    assert_takes_16_bits_on_hopper(KERNEL, Bitmask)


@pytest.mark.parametrize("tile", expanding.TILES, ids=str)
def test_stages_fit_a_multiprocessor(tile: Tile) -> None:
    for room in range(256, 2432, 128):  # records without values to those without zeros
        assert_stages_fit(tile, room, tile.resident)
    assert len({str(t) for t in expanding.TILES}) == len(expanding.TILES)


CASES = [
    # tile, share of nonzeros, M, K, N, layouts, gap, types
    ((2, 16, 3, 1), 0.5, 300, 131, 13, ("col", "row"), 0, "bfloat16", "bfloat16"),
    ((2, 16, 3, 8), 0.3, 331, 523, 16, ("row", "col"), 8, "float16", "float16"),
    ((2, 32, 3, 1), 0.7, 131, 264, 24, ("col", "col"), 8, "bfloat16", "bfloat16"),
    ((2, 32, 3, 3), 1.0, 136, 640, 32, ("row", "row"), 0, "float16", "float32"),
    ((2, 64, 2, 1), 0.5, 200, 141, 72, ("row", "row"), 0, "bfloat16", "bfloat16"),
    ((2, 64, 2, 2), 0.5, 128, 800, 40, ("col", "col"), 8, "float16", "float32"),
    ((2, 64, 2, 7), 0.05, 130, 200, 64, ("col", "col"), 6, "bfloat16", "bfloat16"),
    ((2, 128, 1, 1), 0.5, 264, 523, 136, ("row", "row"), 0, "bfloat16", "bfloat16"),
    ((3, 128, 1, 2), 0.5, 331, 528, 203, ("col", "col"), 0, "bfloat16", "bfloat16"),
    ((3, 128, 1, 5), 1.0, 20, 523, 203, ("col", "col"), 5, "float16", "float16"),
    ((2, 128, 1, 8), 0.0, 17, 70, 100, ("row", "col"), 0, "bfloat16", "bfloat16"),
    ((2, 192, 1, 1), 0.5, 331, 528, 203, ("col", "col"), 0, "bfloat16", "bfloat16"),
    ((2, 64, 1, 1), 0.5, 331, 528, 61, ("col", "col"), 0, "bfloat16", "bfloat16"),
    ((2, 192, 1, 4), 0.8, 136, 264, 264, ("row", "row"), 8, "float16", "float16"),
    ((2, 256, 1, 1), 0.5, 331, 528, 203, ("col", "col"), 0, "bfloat16", "bfloat16"),
    ((2, 256, 1, 3), 0.3, 136, 1300, 264, ("row", "row"), 8, "float16", "float32"),
    ((1, 16, 6, 2), 0.5, 100, 523, 1, ("row", "row"), 0, "float16", "float16"),
    ((1, 16, 4, 1), 0.5, 100, 523, 1, ("col", "col"), 3, "bfloat16", "bfloat16"),
    ((1, 32, 6, 1), 0.5, 100, 523, 27, ("row", "row"), 0, "bfloat16", "bfloat16"),
    ((1, 64, 4, 4), 0.5, 333, 523, 61, ("col", "col"), 0, "bfloat16", "bfloat16"),
    ((1, 128, 3, 2), 0.5, 100, 264, 140, ("row", "col"), 0, "float16", "float16"),
    ((3, 128, 1, 1), 0.5, 136, 1, 264, ("col", "row"), 0, "float16", "float32"),
    # steps along K that begin and end before the loop of two steps, and after one of them
    *(
        ((2, 192, 1, 1), 0.5, 136, 64 * steps - 3, 190, ("col", "col"), 0, "bfloat16", "bfloat16")
        for steps in range(1, 6)
    ),
    ((1, 64, 3, 1), 0.5, 131, 320, 61, ("row", "col"), 0, "bfloat16", "bfloat16"),
    ((1, 128, 2, 3), 0.5, 131, 700, 125, ("col", "row"), 4, "float16", "float16"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{Tile(*c[0])} {c[1]} {c[4]} {c[5]}")
def test_integers_are_exact(case: tuple[Any, ...]) -> None:
    assert_integers_exact(KERNEL, Bitmask, Tile(*case[0]), *case[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize(
    "tile", [(2, 16, 3, 1), (2, 16, 3, 8), (2, 128, 1, 1), (3, 128, 1, 2)], ids=lambda t: str(Tile(*t))
)
def test_zeros_meet_no_infinity(tile: tuple[int, ...], layout: str) -> None:
    assert_zeros_meet_no_infinity(KERNEL, Bitmask, Tile(*tile), layout)


PLANTED = """
from emulator import stand_in
from emulator.planted import plant, three_runs

planted = plant({old!r}, {new!r}, header=("spformat/record_products.cuh", "spformat/expanding.cuh"))
stand_in.install(90)
import numpy as np
from exact import equal, infinite, matrix, product
from test_bitmask_expanding import KERNEL, Bitmask, Tile

rng = np.random.default_rng(0)
x = matrix(rng, 136, 3000, 0.5, "bfloat16")
(B, wanted), a, tile = infinite(rng, x, 72), Bitmask.from_dense(x), Tile(2, {cols}, {resident}, {parts})
three_runs(lambda: equal(product(KERNEL, tile, a, B, "bfloat16", ("row", "row"), 0), wanted), planted)
"""


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(
    ("cols", "resident", "parts", "old", "new", "text"),
    [
        (
            16,
            3,
            1,
            "barrier::wait(full + 8 * stage, number / STAGES & 1);",
            "",
            "more arrivals at an mbarrier|not aligned|outside|DIFFERENT",
        ),
        (16, 3, 1, "barrier::wait(empty + 8 * stage, number / STAGES - 1 & 1);", ";", "more arrivals"),
        (16, 3, 1, "all + b_bytes", "all + b_bytes - 16", "bytes missing|DIFFERENT"),
        (16, 3, 1, "start = end, end = following;", "start = end;", "outside|DIFFERENT"),
        (16, 3, 1, "wgmma::wait<0>();", "", "DIFFERENT|in flight"),
        (64, 1, 1, "wgmma::wait<0>();", "", "DIFFERENT|in flight"),
        (64, 1, 1, "wgmma::wait<1>(), ", "", "DIFFERENT|in flight|arrivals"),
        (64, 1, 1, "multiply(even, k + 1);", "multiply(odd, k + 1);", "DIFFERENT"),
        (256, 1, 1, "barrier::wait(empty + 8 * stage, number / STAGES - 1 & 1);", ";", "more arrivals"),
        (256, 1, 1, "take_registers<WG == 2 ? 240", "take_registers<WG == 2 ? 248", "setmaxnreg.inc to 248 registers"),
        (16, 3, 1, "redo(warp, row, n0 + (__ffs(not_finite) - 1) * STRIP, STRIP);", ";", "DIFFERENT"),
        (16, 3, 4, "redo(of_warp, row, col, 16 * RUN);", ";", "DIFFERENT"),
        (16, 3, 4, "barrier::wait_cluster(bar, 0);", "", "DIFFERENT|still uses its shared memory"),
        (16, 3, 4, "cluster::wait();\n#pragma unroll", "#pragma unroll", "not initialised|DIFFERENT"),
        (64, 1, 1, "fetch_b(first);", "fetch_b(first + 1);", "DIFFERENT|deadlock"),
    ],
    ids=[
        "copy not waited for",
        "stage not free",
        "bytes",
        "next record",
        "product",
        "product, ahead",
        "product before",
        "registers of a step",
        "stage not free, wide",
        "registers handed over",
        "infinity",
        "infinity, in parts",
        "sums of others",
        "stages of others",
        "first tile of B",
    ],
)
def test_a_planted_defect_is_found(cols: int, resident: int, parts: int, old: str, new: str, text: str) -> None:
    assert re.search(text, printed(PLANTED.format(cols=cols, resident=resident, parts=parts, old=old, new=new)))


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(("cols", "resident", "parts"), [(16, 3, 1), (16, 3, 4), (64, 1, 1), (256, 1, 1)])
def test_without_a_defect_all_is_equal(cols: int, resident: int, parts: int) -> None:
    assert printed(PLANTED.format(cols=cols, resident=resident, parts=parts, old="", new="")).split() == ["equal"] * 3


def test_it_is_chosen_for_a_hundred_columns() -> None:
    a = Bitmask.from_dense(np.ones((16, 64), np.float16))
    p = problem(a, 100, "float16", ("col", "col"), 90).changed(M=4096, K=4096, nnz=4096 * 2048)
    assert sf.explain(p).chosen == KERNEL.name
    assert sf.explain(p.changed(n=1)).chosen != KERNEL.name
