"""The CSR kernel that expands A on its way to the registers: what it takes, and exact products on a GPU or the emulated one."""

from __future__ import annotations

import functools
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
    hopper,
    product,
    tile_in,
)
from test_kernels import problem

from spformat.backends.cuda.csr import spmm_csr_expanding_sm90a as expanding
from spformat.backends.cuda.runtime.record_products import Tile, room_of
from spformat.formats import CSR
from spformat.products.problem import Problem
from spformat.products.roofline import device_of

KERNEL = expanding.SpmmCSRExpanding()
tile_of = functools.partial(tile_in, expanding.TILES)


def tiles_of(p: Problem) -> dict[str, Tile]:
    """The tiles that are considered for a problem, by name."""
    return {str(t): t for t in KERNEL.options(p)}


def test_what_it_takes() -> None:
    assert_takes_16_bits_on_hopper(KERNEL, CSR)


@pytest.mark.parametrize("tile", expanding.TILES, ids=str)
def test_stages_fit_a_multiprocessor(tile: Tile) -> None:
    for longest in range(16, 4 * 4096 + 32, 16):  # records without items to those without zeros
        room = room_of(longest)
        # Of denser records fewer blocks fit shared memory than registers allow.
        assert_stages_fit(tile, room, tile.resident if longest <= 4 * 2048 else 1)
    assert len({str(t) for t in expanding.TILES}) == len(expanding.TILES)


@pytest.mark.parametrize("n", [1, 24, 200, 768, 4000])
def test_all_clusters_run_at_one_time(n: int) -> None:
    p = problem(CSR.from_dense(np.ones((16, 64), np.float16)), n, "float16", ("col", "col"), 90)
    parts = []
    for M in (768, 4096, 14336):
        q = p.changed(M=M, K=4096, nnz=M * 400)
        for tile in KERNEL.options(q):
            tiles = -(-M // tile.rows) * -(-n // tile.cols)
            assert tile.parts == 1 or tiles <= device_of(q).clusters(tile.parts, tile.resident), str(tile)
            parts.append(tile.parts)
    assert (max(parts) > 1) == (n < 4000)


def test_a_multiprocessor_with_few_blocks_has_few_steps_to_share() -> None:
    p = problem(CSR.from_dense(np.ones((16, 64), np.float16)), 64, "float16", ("col", "col"), 90)
    p = p.changed(K=4096, nnz=1 << 20, M=1024)
    device, steps = device_of(p), KERNEL.terms.index("steps of all blocks")
    tiles = tiles_of(p)
    few = KERNEL.quantities(p, tiles["64x64, 3 blocks parts 8"], device)
    assert few[steps] == 8 * 2  # of 16 clusters of 8 blocks 15 have multiprocessors of their own
    assert few[KERNEL.terms.index("steps")] == 8
    more = KERNEL.quantities(p, tiles["64x32, 6 blocks parts 8"], device)
    assert more[steps] == 8 * 3
    many = p.changed(M=1 << 16, nnz=1 << 26)  # 1,024 tiles: more than run at one time
    assert KERNEL.quantities(many, tiles_of(many)["64x64, 3 blocks"], device)[steps] == 64 * 8


CASES = [
    # tile, share of nonzeros, M, K, N, layouts, gap, types
    ((2, 16, 3, 1), 0.1, 300, 131, 13, ("col", "row"), 0, "bfloat16", "bfloat16"),
    ((2, 16, 3, 8), 0.3, 331, 523, 16, ("row", "col"), 8, "float16", "float16"),
    ((1, 16, 4, 1), 0.02, 300, 523, 1, ("row", "row"), 0, "float16", "float16"),
    ((1, 16, 6, 3), 0.1, 333, 523, 1, ("row", "row"), 3, "float16", "float32"),
    ((1, 16, 6, 8), 0.1, 333, 523, 1, ("col", "row"), 0, "bfloat16", "bfloat16"),
    ((1, 16, 4, 2), 0.1, 333, 524, 1, ("row", "col"), 1, "bfloat16", "bfloat16"),
    ((1, 32, 6, 3), 0.3, 333, 523, 27, ("row", "row"), 0, "bfloat16", "bfloat16"),
    ((1, 64, 4, 4), 0.1, 100, 523, 64, ("col", "col"), 5, "bfloat16", "bfloat16"),
    ((1, 64, 3, 1), 0.1, 100, 523, 64, ("row", "row"), 0, "float16", "float32"),
    ((1, 128, 3, 2), 0.1, 100, 264, 140, ("row", "col"), 0, "bfloat16", "bfloat16"),
    ((1, 128, 2, 1), 0.1, 333, 264, 140, ("col", "row"), 0, "bfloat16", "bfloat16"),
    ((2, 32, 3, 1), 0.2, 131, 264, 24, ("col", "col"), 8, "bfloat16", "bfloat16"),
    ((2, 32, 3, 3), 1.0, 136, 640, 32, ("row", "row"), 0, "float16", "float32"),
    ((2, 64, 2, 1), 0.1, 200, 141, 72, ("row", "row"), 0, "bfloat16", "bfloat16"),
    ((2, 64, 2, 2), 0.5, 128, 800, 40, ("col", "col"), 8, "float16", "float32"),
    ((2, 64, 2, 7), 0.05, 130, 200, 64, ("col", "col"), 6, "bfloat16", "bfloat16"),
    ((2, 128, 1, 1), 0.1, 264, 523, 136, ("row", "row"), 0, "bfloat16", "bfloat16"),
    ((3, 128, 1, 2), 0.3, 331, 528, 203, ("col", "col"), 0, "bfloat16", "bfloat16"),
    ((3, 128, 1, 5), 1.0, 20, 523, 203, ("col", "col"), 5, "float16", "float16"),
    ((2, 128, 1, 8), 0.0, 17, 70, 100, ("row", "col"), 0, "bfloat16", "bfloat16"),
    ((2, 192, 1, 1), 0.1, 331, 528, 203, ("col", "col"), 0, "bfloat16", "bfloat16"),
    ((2, 64, 1, 1), 0.1, 331, 528, 61, ("col", "col"), 0, "bfloat16", "bfloat16"),
    ((2, 192, 1, 4), 0.2, 136, 264, 264, ("row", "row"), 8, "float16", "float16"),
    ((2, 256, 1, 1), 0.1, 200, 331, 264, ("row", "row"), 0, "float16", "float16"),
    ((2, 256, 1, 1), 0.1, 515, 70, 517, ("row", "row"), 0, "bfloat16", "bfloat16"),  # C too large for single values
    ((2, 256, 1, 3), 1.0, 136, 264, 203, ("col", "col"), 0, "bfloat16", "bfloat16"),
    ((3, 128, 1, 1), 0.1, 136, 1, 264, ("col", "row"), 0, "float16", "float32"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{tile_of(*c[0])} {c[1]} {c[4]} {c[5]}")
def test_integers_are_exact(case: tuple[Any, ...]) -> None:
    assert_integers_exact(KERNEL, CSR, tile_of(*case[0]), *case[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize(
    "tile", [(2, 16, 3, 1), (2, 16, 3, 8), (2, 128, 1, 1), (3, 128, 1, 2)], ids=lambda t: str(tile_of(*t))
)
def test_zeros_meet_no_infinity(tile: tuple[int, ...], layout: str) -> None:
    assert_zeros_meet_no_infinity(KERNEL, CSR, tile_of(*tile), layout)


@pytest.mark.gpu
def test_a_stored_zero_meets_infinity() -> None:
    """It is an item as any other: times infinity it is NaN, as in the reference."""
    hopper()
    x = np.ones((20, 70), np.float16)
    a = CSR.from_dense(x)
    data = a.data.copy()
    data[5] = 0
    stored = CSR(shape=a.shape, indptr=a.indptr, indices=a.indices, data=data)
    B = np.ones((70, 16), np.float16)
    B[5, 3] = np.inf
    got = product(KERNEL, tile_of(2, 16, 3, 1), stored, B, "float16", ("row", "row"), 0)
    assert np.isnan(got[0, 3])
    assert np.isinf(got[1:, 3]).all()
    assert (np.delete(got, 3, axis=1) == np.delete(stored.to_dense() @ np.ones((70, 16), np.float16), 3, axis=1)).all()


PLANTED = """
from emulator import stand_in
from emulator.planted import plant, three_runs

planted = plant({old!r}, {new!r}, header="spformat/{header}.cuh")
stand_in.install(90)
import numpy as np
from exact import equal, infinite, matrix, product
from test_csr_expanding import CSR, KERNEL, tile_of

rng = np.random.default_rng(0)
x = matrix(rng, 136, 816, 0.2, "bfloat16")
(B, wanted), a, tile = infinite(rng, x, 72), CSR.from_dense(x), tile_of(2, {cols}, {resident}, {parts})
three_runs(lambda: equal(product(KERNEL, tile, a, B, "bfloat16", ("row", "row"), 0), wanted), planted)
"""
"""test_bitmask_expanding.py plants defects in the code that this kernel and the one for bitmask share."""


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(
    ("cols", "resident", "parts", "old", "new", "text"),
    [
        (16, 3, 1, "*own = uint4{};", "", "DIFFERENT"),
        (16, 3, 1, "i < pieces; i += 32", "i < 32 && i < pieces; i += 32", "DIFFERENT"),
        (16, 3, 4, "place(four.z), ", "", "DIFFERENT"),
        (64, 1, 1, "column % 2 * 2", "0", "DIFFERENT"),
        (16, 3, 1, "if (row_of(item) != i % 16) continue;", "", "DIFFERENT"),
        (16, 3, 1, "while (count > 1 && items[count - 1] == items[count - 2]) --count;", "", "DIFFERENT"),
    ],
    ids=["image not zero", "long records", "an item left out", "places", "rows", "repeated items"],
)
def test_a_planted_defect_is_found(cols: int, resident: int, parts: int, old: str, new: str, text: str) -> None:
    source = PLANTED.format(cols=cols, resident=resident, parts=parts, old=old, new=new, header="csr_records")
    assert re.search(text, printed(source))


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(("cols", "resident", "parts"), [(16, 3, 1), (16, 3, 4), (64, 1, 1), (256, 1, 1)])
def test_without_a_defect_all_is_equal(cols: int, resident: int, parts: int) -> None:
    source = PLANTED.format(cols=cols, resident=resident, parts=parts, old="", new="", header="csr_records")
    assert printed(source).split() == ["equal"] * 3
