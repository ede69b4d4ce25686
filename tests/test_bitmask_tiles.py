"""Tiles of the Bitmask kernel for few columns: what ``choose`` promises, and exact products with each kind.

The matrices of test_kernels.py are small, so that a block has one row tile there; here blocks have up to eight.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from test_kernels import LAYOUTS, Guarded, on_device, problem

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.bitmask import bitmask_records
from spformat.backends.cuda.bitmask.spmm_bitmask_tc import SpmmBitmaskTensor, Tile, choose
from spformat.backends.cuda.runtime.record_products import room_of
from spformat.formats import Bitmask
from spformat.products import rates
from spformat.products.problem import Problem
from spformat.products.roofline import shared_limit

SHARED = 232_448
LONGEST = 2304
"""Bytes that a record without zeros is given."""


@pytest.mark.parametrize("sms", [1, 108, 132])
@pytest.mark.parametrize("n", [1, 8, 16, 32, 64, 4096])
def test_chosen_tiles_fit(n: int, sms: int) -> None:
    for M, room, smem in itertools.product(
        (0, 1, 17, 2112, 2113, 4096, 14336, 10**6), (256, 1408, LONGEST), (SHARED, 101_376)
    ):
        t = choose(M, n, room, sms, smem)
        where = f"M={M} n={n} room={room} sms={sms} smem={smem}: {t}"
        assert t.smem(room) <= smem, where
        assert t.cols == min(64, max(8, n)), where
        assert t.warps <= 28, where
        assert t.parts == 1 or t.ranges < 16, where  # one named barrier each, and barrier 0
        assert -(-M // t.rows) <= sms * max(1, -(-M // (128 * sms))), where  # as few rounds as 128 rows a block allow


@pytest.mark.parametrize("layouts", [("col", "col"), ("row", "row")])
def test_few_columns_have_constants_of_their_own(layouts: tuple[str, str]) -> None:
    kernel = SpmmBitmaskTensor()
    p = problem(Bitmask.from_dense(np.ones((64, 64), np.float16)), 24, "float16", layouts, 90)
    known = rates.constants(kernel.name, kernel.terms, p)
    assert known
    few, more = (kernel.variant(p.changed(n=n), kernel.best(p).tile) for n in (16, 24))
    assert (few[0], *more) == (f"{more[0]}, to 16 columns", *few[1:])
    assert known.of(few)[0] < known.of(more)[0]


def test_records_are_counted_in_32_bits() -> None:
    """Refused before records are built: a record has 144 bytes and its values, counted in pieces of 16 bytes."""
    p = Problem.product(
        "bitmask", (), 2**20, 2**16, 16, 2**32, "bfloat16", "bfloat16", "bfloat16", "row", "row", "cuda", sm=90
    )
    assert not SpmmBitmaskTensor().unsupported(p)
    assert any("64 GiB" in r for r in SpmmBitmaskTensor().unsupported(p.changed(nnz=2**35)))
    empty = p.changed(M=2**25, K=2**14, nnz=0)  # 9 pieces each of 2^29
    assert any("64 GiB" in r for r in SpmmBitmaskTensor().unsupported(empty))


TILES = (
    Tile(2, 16, 1, 16, 2), Tile(1, 16, 7, 4, 3), Tile(1, 8, 8, 3, 3), Tile(1, 32, 3, 6, 3), Tile(1, 64, 4, 4, 2),
    Tile(3, 32, 2, 2, 2), Tile(5, 16, 1, 1, 2),
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_is_exact(tile: Tile) -> None:
    """Ragged shapes, no zeros, nothing but zeros, lines of B aligned and not; the same bits every time."""
    cp = pytest.importorskip("cupy")
    sm = int(cp.cuda.Device().compute_capability)
    rng, kernel, tried = np.random.default_rng(2), SpmmBitmaskTensor(), set()
    bf16 = VALUE_TYPES["bfloat16"].numpy
    for case, ((M, K), density) in enumerate(
        itertools.product(((1, 1), (17, 63), (331, 523), (259, 1000)), (0, 0.4, 1))
    ):
        x = rng.choice([-3, -2, -1, 1, 2, 3], (M, K)) * (rng.random((M, K)) < density)
        a: Any = sf.convert(x.astype(bf16), "bitmask").to("cuda")
        for i, n in enumerate((1, 5, 17, 24, 70)):
            layouts, pad = LAYOUTS[(case + i) % 4], (0, 3, 8)[(case + i) % 3]
            B = rng.integers(-2, 3, (K, n))
            wanted = (x @ B).astype(bf16)
            dev = on_device(cp, B.astype(bf16), layouts[0], pad)
            guarded = Guarded(cp, (M, n), bf16, layouts[1], pad)
            p = problem(a, n, "bfloat16", layouts, sm)
            if tile.smem(room_of(bitmask_records.records(a, p).longest)) > shared_limit(sm):
                continue  # never chosen there: see test_chosen_tiles_fit
            tried.add(density)
            plan = kernel.plan_with(a, p, tile)
            for _ in range(2):
                guarded.out.fill(float("nan"))
                plan(dev, out=guarded.out)
                got = guarded.out.get()
                bad = np.argwhere(got.astype(np.float32) != wanted.astype(np.float32))
                assert not len(bad), (
                    f"{M}x{K} density {density} n={n} {layouts} pad={pad}: {len(bad)} wrong, first {bad[0]}"
                )
            assert guarded.intact()
    assert tried >= ({0, 0.4, 1} if sm == 90 else {0})
