"""Vector n:m in exact float32 with operands by the copy engine: what it takes, exact products on a GPU or the emulated one."""

from __future__ import annotations

import re
from typing import Any

import emulator
import numpy as np
import pytest
from emulator.process import printed
from exact import Array, assert_exact, equal, infinite, product
from test_kernels import matrix, problem

from spformat.backends.cuda.vector_nm import spmm_vector_nm_sm90 as copied
from spformat.backends.cuda.vector_nm.spmm_vector_nm import SpmmVectorNM
from spformat.backends.cuda.vector_nm.spmm_vector_nm_sm90 import Tile
from spformat.backends.cuda.vector_nm.vector_nm_tiles import Pattern
from spformat.formats import VectorNM
from spformat.products.problem import Problem
from spformat.products.roofline import shared_limit

KERNEL = copied.SpmmVectorNMSm90()
SMALL = Tile(2, 1, 3, 32), Tile(2, 1, 2, 32), Tile(1, 1, 2, 1), Tile(2, 2, 2, 32), Tile(1, 2, 3, 32, quads=4)
"""Shapes of warps, stages and sums that a test can wait for."""
CASES = (
    (16, 32, 32, (70, 300)), (4, 32, 32, (128, 515)), (3, 8, 8, (33, 161)), (5, 7, 64, (130, 400)),
    (30, 160, 16, (64, 401)), (1, 1, 24, (40, 70)),
)  # fmt: skip
"""n, m, vector length, and a shape that fills neither tiles nor windows."""


def small(n: int, m: int, length: int, shape: tuple[int, int]) -> tuple[VectorNM, Array]:
    x = matrix(np.random.default_rng(n), "vector-nm", {"n": n, "m": m, "vector_length": length}, "float32", shape)
    return VectorNM.from_dense(x, n=n, m=m, vector_length=length), x


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"sm": 80}, "needs sm_90 (TMA), got sm_80"),
        (
            {"a_dtype": "bfloat16", "b_dtype": "bfloat16", "out_dtype": "bfloat16"},
            "a.dtype must be one of float32, got bfloat16",
        ),
        ({"params": (("n", 2), ("m", 4), ("vector_length", 4))}, "vector_length must be a multiple of 8"),
        ({"params": (("n", 60), ("m", 200), ("vector_length", 8))}, "two stages of 60:200 windows must fit"),
    ],
)
def test_a_refusal_names_what_it_got(changes: dict[str, Any], part: str) -> None:
    p = problem(small(*CASES[0])[0], 64, "float32", ("row", "row"), 90)
    assert KERNEL.unsupported(p) == []
    assert any(part in reason for reason in KERNEL.unsupported(p.changed(**changes)))


@pytest.mark.parametrize(
    ("n", "tile", "us"),
    [
        (16, "128x128x64 8x16", 1403),
        (12, "128x128x64 8x16", 1069),
        (8, "256x128x128 8x16", 727),
        (4, "256x128x128 8x16", 396),
    ],
)
def test_the_fastest_of_the_measured_tiles_is_chosen(n: int, tile: str, us: float) -> None:
    """us: of 4096 x 4096 x 4096 on an H100, 2026-11-26 (decision 0045)."""
    params, size = (("n", n), ("m", 32), ("vector_length", 32)), 4096
    p = Problem.product("vector-nm", params, size, size, size, size * size * n // 32, *["float32"] * 3)
    p = p.changed(device="cuda", sm=90, board="NVIDIA H100 80GB HBM3")
    assert str(KERNEL.best(p).tile) == tile
    assert 0.8 * us < KERNEL.expected_us(p) < 1.2 * us
    assert KERNEL.expected_us(p) < SpmmVectorNM().expected_us(p)
    assert not KERNEL.by_name_only


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}:{c[1]} L={c[2]}")
@pytest.mark.parametrize("tile", [*SMALL, *copied.TILES], ids=lambda t: f"{t} {t.stages}")
def test_exact_products(tile: Tile, case: tuple[int, int, int, tuple[int, int]]) -> None:
    a, x = small(*case)
    if not tile.fits(Pattern(*x.shape, *case[:3]), shared_limit(90)):
        pytest.skip("too little shared memory")
    for columns, layouts, pad in ((72, ("row", "row"), 4), (13, ("row", "col"), 3), (200, ("col", "row"), 0)):
        B = np.random.default_rng(columns).integers(-3, 4, (x.shape[1], columns)).astype(x.dtype)
        assert_exact(product(KERNEL, tile, a, B, "float32", layouts, pad), x, B)


@pytest.mark.gpu
def test_infinities_of_rows_that_are_not_needed_do_not_matter() -> None:
    a, x = small(*CASES[1])
    B, wanted = infinite(np.random.default_rng(1), x, 60)
    assert equal(product(KERNEL, SMALL[0], a, B, "float32", ("row", "row"), 0), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", SMALL[:3], ids=lambda t: f"{t} {t.stages}")
def test_the_last_k_tile_keeps_no_values_of_the_ones_before(tile: Tile) -> None:
    """An infinite value that stayed in shared memory would be multiplied by zero: NaN where C is infinite."""
    x = np.abs(small(4, 32, 32, (64, 32 * 8 + 1))[1])
    x[0, x[0] != 0] = np.inf
    a, B = VectorNM.from_dense(x, n=4, m=32, vector_length=32), np.ones((x.shape[1], 8), x.dtype)
    got = product(KERNEL, tile, a, B, "float32", ("row", "row"), 0)
    assert (got[0] == np.inf).all()
    assert_exact(got[1:], x[1:], B)


@pytest.mark.gpu
def test_a_file_that_pads_k_to_whole_tiles_has_k_tiles_without_columns() -> None:
    x = small(14, 32, 8, (33, 1030))[1]
    a = VectorNM.from_dense(x, n=14, m=32, vector_length=8, tile_rows=16, tile_cols=128)
    assert a.data.shape[0] * 32 // 14 > 1030 + 64
    B = np.random.default_rng(1).integers(-3, 4, (1030, 24)).astype(x.dtype)
    assert_exact(product(KERNEL, SMALL[1], a, B, "float32", ("row", "row"), 0), x, B)


PLANTED = """
from emulator import stand_in
from emulator.planted import plant, three_runs

planted = plant({old!r}, {new!r}, source="vector_nm/spmm_vector_nm_sm90.cu")
stand_in.install(90)
import numpy as np
from exact import equal, product
from test_vector_nm_sm90 import KERNEL, SMALL, small

a, x = small({n}, 32, 32, (64, 32 * 40 + {more}))
B = np.random.default_rng(1).integers(-3, 4, (x.shape[1], 72)).astype(x.dtype)
wanted = x @ B
three_runs(lambda: equal(product(KERNEL, SMALL[{tile}], a, B, "float32", ("row", "row"), 0), wanted), planted)
"""


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(
    ("n", "more", "tile", "old", "new"),
    [
        (16, 0, 1, "        barrier::wait(ring.barriers + at * 8, static_cast<u32>(turn) / STAGES % 2);\n", ""),
        (16, 0, 1, "R::WARPS - 1) {  // the last warp: nobody waits here\n                barrier::wait(empty + at * 8, static_cast<u32>(turn) / STAGES % 2);", "0) {"),
        (4, 0, 1, "(turn + STAGES) % (2 * STAGES) * record_bytes", "turn % (2 * STAGES) * record_bytes"),
        (4, 0, 1, "s.tile_kept * LINE_A +", "(s.tile_kept - 1) * LINE_A +"),
        (16, 3, 1, "zero[i] = 0;\n        zero", "zero[i] = 0x7F800000;\n        zero"),
    ],
    ids=[
        "copies not waited for", "copies too early", "record in use", "bytes", "row of zeros",
    ],
)  # fmt: skip
def test_a_planted_defect_is_found(n: int, more: int, tile: int, old: str, new: str) -> None:
    said = printed(PLANTED.format(n=n, more=more, tile=tile, old=old, new=new))
    assert re.search("DIFFERENT|another|in flight|mbarrier|deadlock|outside", said), said


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(("n", "more", "tile"), [(16, 3, 1), (4, 0, 3), (4, 3, 4)])
def test_without_a_defect_all_is_equal(n: int, more: int, tile: int) -> None:
    assert printed(PLANTED.format(n=n, more=more, tile=tile, old="", new="")).split() == ["equal"] * 3
