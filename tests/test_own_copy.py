"""A B whose lines start anywhere, copied by the blocks of the product: exact products on a GPU or the emulated one."""

from __future__ import annotations

import emulator
import numpy as np
import pytest
from emulator.process import printed
from exact import assert_exact, hopper, matrix, tile_in
from test_kernels import Guarded, problem

from spformat.backends.cuda.csr import spmm_csr_expanding_sm90a as expanding
from spformat.backends.cuda.runtime import own_copy
from spformat.backends.cuda.runtime.launch import Operands
from spformat.backends.cuda.runtime.record_products import Tile
from spformat.formats import CSR
from spformat.products.roofline import H200

KERNEL = expanding.SpmmCSRExpanding()

Case = tuple[tuple[int, int, int, int], int, int, int, str, int]
CASES: list[Case] = [
    # tile (warpgroups, columns, blocks, parts), M, K, N, layout of B, elements between its lines
    ((1, 16, 6, 2), 70, 70, 3, "row", 0),  # a unit of 16 bytes holds parts of several rows
    ((1, 16, 6, 8), 130, 600, 11, "row", 0),
    ((1, 64, 3, 2), 300, 131, 57, "row", 3),
    ((1, 64, 4, 4), 100, 523, 61, "col", 0),
    ((2, 32, 3, 3), 131, 331, 27, "col", 5),
    ((2, 128, 1, 8), 264, 523, 203, "row", 0),
    ((2, 128, 1, 1), 264, 523, 203, "row", 0),  # a launch of its own
    ((2, 256, 1, 3), 136, 264, 251, "row", 1),
    ((1, 16, 6, 2), 5000, 130, 13, "row", 0),  # more blocks than copy
]


def several(case: Case, first: int = 1) -> None:
    """Products of one plan with several B, one after the other, that start at several elements of their memory."""
    cp = hopper()
    tile, M, K, N, layout, pad = case
    rng = np.random.default_rng(N)
    x = matrix(rng, M, K, 0.1, "bfloat16")
    a = CSR.from_dense(x)
    plan = KERNEL.plan_with(
        a.to("cuda"), problem(a, N, "bfloat16", (layout, "row"), 90), tile_in(expanding.TILES, *tile)
    )
    lines, along = (K, N) if layout == "row" else (N, K)
    for at in (first, 0, first):
        B = rng.integers(-3, 4, (K, N)).astype(x.dtype)
        memory = cp.full(at + lines * (along + pad), np.nan, x.dtype)
        there = memory[at:].reshape(lines, along + pad)[:, :along]
        there[...] = cp.asarray(B if layout == "row" else B.T)
        guarded = Guarded(cp, (M, N), x.dtype, "row", 0)
        plan(there if layout == "row" else there.T, out=guarded.out)
        assert guarded.intact(), "wrote outside C"
        assert_exact(guarded.out.get(), x, B)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("first", [1, 7])
def test_products_one_after_the_other_are_exact(case: Case, first: int) -> None:
    several(case, first)


@pytest.mark.gpu
@pytest.mark.parametrize(("parts", "launches"), [(1, 2), (2, 1)])
def test_with_parts_of_k_the_blocks_copy(parts: int, launches: int) -> None:
    cp = hopper()
    x = matrix(np.random.default_rng(0), 70, 140, 0.3, "bfloat16")
    a, B, C = CSR.from_dense(x), cp.ones((140, 11), x.dtype), cp.empty((70, 11), x.dtype)
    p, tile = problem(a, 11, "bfloat16", ("row", "row"), 90), tile_in(expanding.TILES, 1, 16, 6, parts)
    prepared = KERNEL.prepared_with(a.to("cuda"), p, tile)
    assert len(prepared.prepare(Operands(B.data.ptr, C.data.ptr, 11, 11, 11, 0))) == launches


@pytest.mark.parametrize("tile", [t for t in expanding.TILES if t.parts > 1], ids=str)
def test_blocks_that_copy_run_at_one_time(tile: Tile) -> None:
    """However many clusters there are: DBSR has tiles without blocks, which do not count where parts are chosen."""
    for clusters in (1, 5, 22, 1000):
        blocks = own_copy.copying(clusters, tile.parts, tile.resident, H200)
        assert 0 < blocks <= min(clusters, H200.clusters(tile.parts, tile.resident)) * tile.parts
        assert blocks <= H200.processors
        assert blocks == H200.processors or blocks % tile.parts == 0


@pytest.mark.gpu
def test_a_launch_keeps_the_memory_of_its_copy() -> None:
    cp = hopper()
    x = matrix(np.random.default_rng(0), 70, 140, 0.3, "bfloat16")
    a, B, C = CSR.from_dense(x), cp.ones((140, 11), x.dtype), cp.empty((70, 11), x.dtype)
    p, tile = problem(a, 11, "bfloat16", ("row", "row"), 90), tile_in(expanding.TILES, 1, 16, 6, 2)
    (bound,) = KERNEL.prepared_with(a.to("cuda"), p, tile).prepare(Operands(B.data.ptr, C.data.ptr, 11, 11, 11, 0))
    (packed,) = (x for x in bound._tail if isinstance(x, own_copy.Packed))
    mapped = bound._tail[0]
    for place, least in ((packed.place, 4), (mapped.address, 2 * 140 * 16)):
        start = place.buffer.array.data.ptr
        assert start <= place <= start + place.buffer.array.nbytes - least


PLANTED = """
from emulator import stand_in
from emulator.planted import plant, three_runs

planted = plant({old!r}, {new!r}, header=("spformat/record_products.cuh", "spformat/own_copy.cuh"))
stand_in.install(90)
from test_own_copy import CASES, several

three_runs(lambda: several(CASES[{case}]) is None, planted)
"""


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(
    ("case", "old", "new"),
    [
        (1, "there = count >= shares_;", "there = true;"),
        (1, "*count_ = 0;", ";"),
        (1, "for (u32 share = 0; share < shares_; ++share) copy_share<1>(share, lane, 32);", ";"),
        (2, "bytes[e] = static_cast<u32>(at) & 15;", "bytes[e] = 0;"),
        (1, "single |= 1u << e;", ";"),
        (3, "BCol ? b_n : b_k", "b_k"),
    ],
    ids=["no wait", "count stays", "missing parts", "not shifted", "ends left out", "layout"],
)
def test_a_planted_defect_is_found(case: int, old: str, new: str) -> None:
    assert "DIFFERENT" in printed(PLANTED.format(case=case, old=old, new=new))


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize("case", range(4))
def test_without_a_defect_all_is_equal(case: int) -> None:
    assert printed(PLANTED.format(case=case, old="", new="")).split() == ["equal"] * 3
