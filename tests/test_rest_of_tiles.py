"""Tiles of C that are left over when as many as run at one time have run: a launch of their own, in parts of K."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from exact import assert_exact, assert_integers_exact, matrix, product
from test_kernels import problem

from spformat.backends.cuda.bitmask.spmm_bitmask_expanding_sm90a import SpmmBitmaskExpanding
from spformat.backends.cuda.bsr.spmm_bsr_expanding_sm90a import SpmmBSRExpanding
from spformat.backends.cuda.csr.spmm_csr_expanding_sm90a import SpmmCSRExpanding
from spformat.backends.cuda.runtime import expanding
from spformat.backends.cuda.runtime.record_products import RecordProducts
from spformat.backends.cuda.sr_bcrs.spmm_sr_bcrs_expanding_sm90a import SpmmSRBCRSExpanding
from spformat.formats import BSR, CSR, SRBCRS, Bitmask
from spformat.products.roofline import device_of

KERNELS: tuple[tuple[RecordProducts, Any, dict[str, Any]], ...] = (
    (SpmmCSRExpanding(), CSR, {}),
    (SpmmBitmaskExpanding(), Bitmask, {}),
    (SpmmSRBCRSExpanding(), SRBCRS, {"vector_length": 8, "stride": 16}),
    (SpmmBSRExpanding(), BSR, {"blocksize": (16, 16)}),
)
by_name = pytest.mark.parametrize(("kernel", "fmt", "params"), KERNELS, ids=[k.name for k, *_ in KERNELS])


def two_of_six(tiles: int, *_: Any) -> int:
    """In place of ``expanding.rest_of``: what is left of rounds of four tiles, so that few tiles have a rest."""
    return tiles % 4 if tiles > 4 else 0


def assert_rests_are_exact(kernel: RecordProducts, fmt: Any, params: dict[str, Any], name: str, layout: str) -> None:
    """Products of three by two tiles, of which two are left over, in both types, with aligned lines and others."""
    tile = named(kernel, name)
    rows, columns = 2 * tile.rows + 9, 2 * tile.cols
    assert expanding.rest_of(3 * 2, tile, None) == 2, "a test without a rest shows nothing"  # type: ignore[arg-type]
    for K, N, dtype, out in ((331, columns - 5, "bfloat16", "bfloat16"), (264, columns, "float16", "float32")):
        assert_integers_exact(kernel, fmt, tile, 0.3, rows, K, N, (layout, layout), 3, dtype, out, **params)


def named(kernel: RecordProducts, name: str) -> Any:
    (tile,) = (t for t in kernel.tiles if str(t) == name)
    return tile


@by_name
def test_what_is_considered(kernel: RecordProducts, fmt: Any, params: dict[str, Any]) -> None:
    p = problem(fmt.from_dense(np.ones((64, 64), np.float16), **params), 512, "float16", ("col", "col"), 90)
    device = device_of(p)
    p = p.changed(K=4096)
    for M, left, parts in (
        (128 * 33, 0, 1),
        (128 * 36, 12, 8),
        (128 * 41, 32, 3),
        (128 * 49, 64, 2),
        (128 * 60, 108, 1),
    ):
        tiles = M // 128 * 4
        q = p.changed(M=M, nnz=M * 400)
        rest = [t for t in kernel.options(q) if t.rest_parts > 1 and t.extent == "128x128"]
        assert expanding.rest_of(tiles, named(kernel, "128x128"), device) == left
        assert [t.rest_parts for t in rest] == ([parts] if parts > 1 else [])
        for t in rest:
            steps, of_all = (kernel.terms.index(name) for name in ("steps", "steps of all blocks"))
            quantities, whole = kernel.quantities(q, t, device), kernel.quantities(q, named(kernel, "128x128"), device)
            assert quantities[steps] == quantities[of_all] == 64 + -(-64 // parts)
            assert whole[steps] == whole[of_all] == 128
    few = kernel.options(p.changed(M=128 * 20, nnz=1 << 20))  # 80 tiles of 128x128
    assert not [t for t in few if t.rest_parts > 1 and t.extent == "128x128"]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize(
    "name", ["64x64, 4 blocks rest in parts 3", "128x16, 3 blocks rest in parts 8", "192x128 rest in parts 2"]
)
@by_name
def test_integers_are_exact(
    kernel: RecordProducts, fmt: Any, params: dict[str, Any], name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expanding, "rest_of", two_of_six)
    assert_rests_are_exact(kernel, fmt, params, name, layout)


@pytest.mark.gpu
@by_name
def test_a_plan_fits_its_launches_to_the_columns(
    kernel: RecordProducts, fmt: Any, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer columns no tiles are left over, or another number of them."""
    monkeypatch.setattr(expanding, "rest_of", two_of_six)
    tile = named(kernel, "64x64, 4 blocks rest in parts 3")
    x = matrix(np.random.default_rng(5), 150, 200, 0.3, "float16")
    for N in (64, 128, 192):  # 3, 6 and 9 tiles
        B = np.random.default_rng(N).integers(-3, 4, (200, N)).astype(np.float16)
        assert_exact(product(kernel, tile, fmt.from_dense(x, **params), B, "float16", ("col", "col"), 0), x, B)
