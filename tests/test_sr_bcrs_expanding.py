"""The SR-BCRS kernel that expands A on its way to the registers: what it takes, and exact products on a GPU or the emulated one."""

from __future__ import annotations

import functools
import re
from typing import Any

import emulator
import pytest
from emulator.process import printed
from exact import (
    assert_integers_exact,
    assert_stages_fit,
    assert_takes_16_bits_on_hopper,
    assert_zeros_meet_no_infinity,
    tile_in,
)

from spformat.backends.cuda.runtime.record_products import Tile, room_of
from spformat.backends.cuda.sr_bcrs import mma_fragments
from spformat.backends.cuda.sr_bcrs import spmm_sr_bcrs_expanding_sm90a as expanding
from spformat.formats import SRBCRS

KERNEL = expanding.SpmmSRBCRSExpanding()
tile_of = functools.partial(tile_in, expanding.TILES)


def test_what_it_takes() -> None:
    assert_takes_16_bits_on_hopper(KERNEL, SRBCRS)


@pytest.mark.parametrize("tile", expanding.TILES, ids=str)
def test_stages_fit_a_multiprocessor(tile: Tile) -> None:
    for longest in range(16, mma_fragments.MOST_BYTES + 16, 16):  # records without slots to those without zeros
        room = room_of(longest)
        # Of denser records fewer blocks fit shared memory than registers allow.
        assert_stages_fit(tile, room, tile.resident if longest <= 2048 else 1)
        # The record of a step is not overwritten before its second step is multiplied.
        assert 2 * tile.records(tile.stages(room)) // (tile.rows // mma_fragments.PANEL) - 1 >= tile.stages(room)
    assert len({str(t) for t in expanding.TILES}) == len(expanding.TILES)


CASES = [
    # tile, share of nonzeros, M, K, N, layouts, gap, types, vector_length
    ((2, 16, 3, 1), 0.1, 300, 131, 13, ("col", "row"), 0, "bfloat16", "bfloat16", 8),
    ((2, 16, 3, 8), 0.3, 331, 523, 16, ("row", "col"), 8, "float16", "float16", 4),
    ((1, 16, 4, 1), 0.02, 300, 523, 1, ("row", "row"), 0, "float16", "float16", 8),
    ((1, 16, 6, 3), 0.01, 333, 523, 1, ("row", "row"), 3, "float16", "float32", 16),
    ((1, 16, 6, 8), 0.1, 333, 2060, 1, ("col", "row"), 0, "bfloat16", "bfloat16", 1),
    ((1, 16, 4, 2), 0.1, 333, 524, 1, ("row", "col"), 1, "bfloat16", "bfloat16", 8),
    ((1, 32, 6, 3), 0.3, 333, 523, 27, ("row", "row"), 0, "bfloat16", "bfloat16", 2),
    ((1, 64, 4, 4), 0.1, 100, 523, 64, ("col", "col"), 5, "bfloat16", "bfloat16", 8),
    ((1, 64, 3, 1), 0.1, 100, 523, 64, ("row", "row"), 0, "float16", "float32", 32),
    ((1, 128, 3, 2), 0.1, 100, 264, 140, ("row", "col"), 0, "bfloat16", "bfloat16", 8),
    ((1, 128, 2, 1), 0.1, 333, 264, 140, ("col", "row"), 0, "bfloat16", "bfloat16", 8),
    ((2, 32, 3, 1), 0.2, 131, 264, 24, ("col", "col"), 8, "bfloat16", "bfloat16", 8),
    ((2, 32, 3, 3), 1.0, 136, 640, 32, ("row", "row"), 0, "float16", "float32", 8),
    ((2, 64, 2, 1), 0.1, 200, 141, 72, ("row", "row"), 0, "bfloat16", "bfloat16", 3),
    ((2, 64, 2, 2), 0.5, 128, 800, 40, ("col", "col"), 8, "float16", "float32", 8),
    ((2, 64, 2, 7), 0.005, 130, 200, 64, ("col", "col"), 6, "bfloat16", "bfloat16", 8),
    ((2, 128, 1, 1), 0.1, 264, 523, 136, ("row", "row"), 0, "bfloat16", "bfloat16", 8),
    ((3, 128, 1, 2), 0.3, 331, 528, 203, ("col", "col"), 0, "bfloat16", "bfloat16", 8),
    ((3, 128, 1, 5), 1.0, 20, 523, 203, ("col", "col"), 5, "float16", "float16", 8),
    ((2, 128, 1, 8), 0.0, 17, 70, 100, ("row", "col"), 0, "bfloat16", "bfloat16", 8),
    ((2, 192, 1, 1), 0.02, 331, 1100, 203, ("col", "col"), 0, "bfloat16", "bfloat16", 8),
    ((2, 64, 1, 1), 0.1, 331, 528, 61, ("col", "col"), 0, "bfloat16", "bfloat16", 8),
    ((2, 192, 1, 4), 0.2, 136, 264, 264, ("row", "row"), 8, "float16", "float16", 8),
    ((2, 256, 1, 1), 0.1, 200, 1331, 264, ("row", "row"), 0, "float16", "float16", 8),
    ((2, 256, 1, 3), 1.0, 136, 264, 203, ("col", "col"), 0, "bfloat16", "bfloat16", 8),
    ((3, 128, 1, 1), 0.1, 136, 1, 264, ("col", "row"), 0, "float16", "float32", 8),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{tile_of(*c[0])} {c[1]} {c[4]} {c[5]} t={c[9]}")
def test_integers_are_exact(case: tuple[Any, ...]) -> None:
    assert_integers_exact(KERNEL, SRBCRS, tile_of(*case[0]), *case[1:9], vector_length=case[9])


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize(
    "tile", [(2, 16, 3, 1), (2, 16, 3, 8), (2, 128, 1, 1), (3, 128, 1, 2)], ids=lambda t: str(tile_of(*t))
)
def test_zeros_meet_no_infinity(tile: tuple[int, ...], layout: str) -> None:
    assert_zeros_meet_no_infinity(KERNEL, SRBCRS, tile_of(*tile), layout)


PLANTED = """
from emulator import stand_in
from emulator.planted import plant, three_runs

planted = plant({old!r}, {new!r}, {where})
stand_in.install(90)
import numpy as np
from exact import equal, infinite, matrix, product
from test_sr_bcrs_expanding import KERNEL, SRBCRS, tile_of

rng = np.random.default_rng(0)
x = matrix(rng, 136, 1300, 0.1, "bfloat16")
x[32:64, 256:512] = 0
(B, wanted), a, tile = infinite(rng, x, 72), SRBCRS.from_dense(x), tile_of(2, {cols}, {resident}, {parts})
three_runs(lambda: equal(product(KERNEL, tile, a, B, "bfloat16", ("row", "row"), 0), wanted), planted)
"""
SHARED = 'header="spformat/record_products.cuh"'
OWN = 'source="sr_bcrs/spmm_sr_bcrs_expanding_sm90a.cu"'


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(
    ("cols", "resident", "parts", "where", "old", "new"),
    [
        (16, 3, 1, OWN, "*reinterpret_cast<uint4*>(image + lane * 16) = uint4{};", ""),
        (16, 3, 1, OWN, "slot ? from + slot * 16 : zeros", "from + slot * 16"),
        (16, 3, 4, OWN, "word_of(2 * half + eight)", "word_of(2 * half)"),
        (64, 1, 1, OWN, "column * 16 + step * 8", "column * 16"),
        (256, 1, 1, OWN, "return steps_of(start);", "return 1;"),
        (16, 3, 1, SHARED, "notes[to] = Records::note(start);", "notes[to] = 8;"),
        (64, 1, 1, SHARED, "STEPS == 1 ? STAGES : STAGES / 2 + 1", "1"),
        (16, 3, 4, SHARED, "line * of_line + first", "line * s.steps + first"),
    ],
    ids=["list not empty", "no zeros", "rows", "second step", "one header", "no record", "places", "records of a row"],
)  # fmt: skip
def test_a_planted_defect_is_found(cols: int, resident: int, parts: int, where: str, old: str, new: str) -> None:
    source = PLANTED.format(cols=cols, resident=resident, parts=parts, old=old, new=new, where=where)
    assert re.search("DIFFERENT|another|race|outside|not aligned", printed(source))


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(("cols", "resident", "parts"), [(16, 3, 1), (16, 3, 4), (64, 1, 1), (256, 1, 1)])
def test_without_a_defect_all_is_equal(cols: int, resident: int, parts: int) -> None:
    source = PLANTED.format(cols=cols, resident=resident, parts=parts, old="", new="", where=OWN)
    assert printed(source).split() == ["equal"] * 3
