"""Sums of parts in one launch: what the kernel takes, its table of tasks, and exact products on a GPU or the emulated one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import emulator
import numpy as np
import pytest
from test_kernels import Guarded, on_device

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.sum import spmm_sum
from spformat.backends.cuda.sum.structured import STATIC, blocks_of_tiles
from spformat.backends.cuda.sum.sum_work import CHUNK, RowTiles, scattered, tasks
from spformat.formats.base import Format
from spformat.products.problem import Operand, Problem, itemsize
from spformat.products.roofline import SHARED_KB, shared_limit

KERNEL = spmm_sum.SpmmSum()
PAIRS = {
    "bsr_csr": ("bsr:32x32,density>=0.4", "csr"),
    "bsr_ell": ("bsr:16x8,density>=0.4", "ell-buckets:widths=4"),
    "dbsr_csr": ("dbsr:32x32,density>=0.4", "csr"),
    "two_four_csr": ("two-four", "csr"),
    "two_four_ell": ("two-four", "ell-buckets:widths=3"),
    "ell_ell": ("ell-buckets:widths=2", "ell-buckets:widths=16"),
    "csr_csr": ("csr:row_length>=8", "csr"),
    "odd_blocks_ell_csr": ("bsr:5x7,density>=0.4", "ell-buckets:widths=4", "csr"),
    "high_blocks_csr": ("bsr:96x24,density>=0.4", "csr"),
}
BUILT = ("bsr_csr", "two_four_csr", "ell_ell")
SHAPES = ((70, 130, 40), (33, 65, 136), (1, 200, 1), (129, 1, 9), (200, 97, 267))
EVERY_TYPE = ("float32", "float16", "bfloat16")


def integers(
    shape: tuple[int, int], dtype: str, seed: int, block: tuple[int, int] = (32, 32), density: float = 0.1
) -> np.ndarray[Any, Any]:
    """A scatter of small integers, dense blocks, a full row and an empty one; column 5 has no nonzero."""
    rng = np.random.default_rng(seed)
    M, K = shape
    keep = rng.random(shape) < density
    keep |= np.kron(rng.random((-(-M // block[0]), -(-K // block[1]))) < 0.2, np.ones(block, bool))[:M, :K]
    keep[M // 2] = True
    keep[M // 3] = False
    keep[:, 5:6] = False
    return np.where(keep, rng.choice([-3, -2, -1, 1, 2, 3], shape), 0).astype(VALUE_TYPES[dtype].numpy)


def described(s: Format, n: int, out: str = "", **more: Any) -> Problem:
    """The problem of a product of a sum on a GPU that need not exist."""
    dtype = s.dtype.name
    return Problem.product(
        s.name, (), *s.shape, n, s.stored, dtype, dtype, out or dtype, device="cuda", sm=90,
        parts=Operand.of(s, "cuda").parts, **more,
    )  # fmt: skip


# ------------------------------------------------------------------ without a GPU


def test_it_is_not_chosen_and_says_why() -> None:
    s = sf.decompose(integers((64, 64), "float16", 0), *PAIRS["bsr_csr"])
    p = described(s, 64)
    assert not KERNEL.unsupported(p)
    trace = sf.explain(p)
    assert {a.kernel for a in trace.answers if a} == {
        "cuda.spmm_sum_rows",
        "composed.sum_of_parts",
        "cuda.expand_then_dense",
    }
    (own,) = (a for a in trace.answers if a.kernel == KERNEL.name)
    assert str(own) == (
        "cuda.spmm_sum: mostly slower than its parts one after the other (decision 0034); it runs only where a call names it, with "
        "backend='cuda.spmm_sum'"
    )
    assert KERNEL.name not in [a.kernel for a in sf.explain(p, backend="cuda").answers if a]
    assert sf.explain(p, backend=KERNEL.name).chosen == KERNEL.name


@pytest.mark.parametrize(
    ("rules", "dtype", "text"),
    [
        (("bsr:32x32,density>=0.4", "two-four", "csr"), "float16", "takes one part in bsr, dbsr or two-four, got bsr, two-four"),
        (("bsr:32x32,density>=0.4", "bitmask"), "float16", r"not part 1 \(bitmask\)"),
        (("bsr:32x32,density>=0.4", "dbsr:1x1"), "float16", "takes one part in bsr, dbsr or two-four, got bsr, dbsr"),
        (PAIRS["bsr_csr"], "float64", "a.dtype must be one of float32, float16, bfloat16"),
    ],
)  # fmt: skip
def test_what_it_does_not_take_is_refused(rules: tuple[str, ...], dtype: str, text: str) -> None:
    p = described(sf.decompose(integers((64, 64), dtype, 0), *rules), 64)
    assert re.search(text, "; ".join(KERNEL.unsupported(p)))


@pytest.mark.parametrize("sm", SHARED_KB)
def test_shared_memory_suffices_on_every_architecture(sm: int) -> None:
    for rules in PAIRS.values():
        for dtype in EVERY_TYPE:
            s = sf.decompose(integers((200, 97), dtype, 0, (16, 8)), *rules)
            for n in (1, 64, 65, 5000):
                p = described(s, n).changed(sm=sm, M=s.shape[0] * 1000)
                tile = spmm_sum.tile_for(p)
                depth = CHUNK if rules[0] == "two-four" else 32
                assert tile.smem(itemsize(dtype), depth) <= shared_limit(sm) - STATIC


def test_the_prediction_is_less_than_the_composed_sum_where_launches_count() -> None:
    for dtype in EVERY_TYPE:
        s = sf.decompose(integers((768, 768), dtype, 0, density=0.02), *PAIRS["bsr_csr"])
        p = described(s, 128)
        assert 6 <= KERNEL.expected_us(p) < sf.explain(p, backend="composed").expected_us
    for rules in PAIRS.values():
        for shape in ((64, 64), (0, 64), (64, 0)):
            x = integers(shape, "float16", 0) if min(shape) else np.zeros(shape, np.float16)
            assert 0 < KERNEL.expected_us(described(sf.decompose(x, *rules), 8)) < 50


@pytest.mark.parametrize("budget", [1, 7, 64, 10**6])
@pytest.mark.parametrize("width", [1, 5, 64])
def test_tasks_cover_every_block_and_item_once(budget: int, width: int) -> None:
    rng = np.random.default_rng(budget + width)
    blocks, items = (rng.integers(0, 40, 50) * (rng.random(50) < 0.7) for _ in range(2))
    items[7] = 5000
    first_item = np.concatenate(([0], np.cumsum(items)))
    table, cuts, pieces = tasks(np.cumsum(blocks) - blocks, blocks, width, first_item, budget)
    tile, cut = table[:, 3] & 0xFFFFFFFF, table[:, 3] >> 32
    counts, item_counts = table[:, 2] & 0xFFFFFFFF, table[:, 2] >> 32
    for t in range(50):
        mine = table[tile == t]
        mine = mine[np.lexsort((mine[:, 1], mine[:, 0]))]
        at, item = (np.cumsum(blocks) - blocks)[t], first_item[t]
        for first, first_i, count, _ in mine:
            assert (first, first_i) == (at, item)
            at, item = at + (count & 0xFFFFFFFF), item + (count >> 32)
        assert (at, item) == (np.cumsum(blocks)[t], first_item[t + 1])
        assert len(mine) >= 1
    work = counts * width + item_counts
    assert work[cut < 0].max(initial=0) <= 2 * budget
    assert work[cut >= 0].max(initial=0) <= budget + width
    assert (cut[:pieces] >= 0).all()
    assert (cut[pieces:] == -1).all()
    assert (np.diff(work[pieces:]) <= 0).all()
    assert cuts[:, 1].sum() == pieces
    for number, (first, count) in enumerate(cuts):
        assert (cut[first : first + count] == number).all()
        assert len(set(tile[first : first + count])) == 1


def test_items_lie_tile_after_tile() -> None:
    x = integers((50, 90), "float16", 3)
    parts = [sf.convert(np.where(np.arange(90) % 2 == i, x, 0).astype(np.float16), "csr") for i in (0, 1)]
    for tiles in (RowTiles(50, 20, 16), RowTiles(50, 5, 16), RowTiles(50, 16, 16)):
        items = scattered(parts, tiles)
        got = np.zeros_like(x)
        for tile in range(tiles.number):
            mine = slice(items.first[tile], items.first[tile + 1])
            row0 = tile // tiles.in_block * tiles.height + tile % tiles.in_block * tiles.rows
            assert (np.diff(items.places[mine].astype(int)) >= 0).all()
            got[row0 + items.places[mine], items.columns[mine]] = items.values[mine].view(np.float16)
        np.testing.assert_array_equal(got, x)
    items, got = scattered(parts, RowTiles(50, 32, 32), 2), np.zeros_like(x)
    for group in range(4):
        mine = slice(items.first[group], items.first[group + 1])
        row, column = np.divmod(items.places[mine].astype(int), CHUNK)
        got[group // 2 * 32 + row, group % 2 * CHUNK + column] = items.values[mine].view(np.float16)
    np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize("text", ["bsr:24x8", "dbsr:24x8"])
def test_blocks_of_tiles(text: str) -> None:
    x = integers((100, 40), "float32", 1, (24, 8), 0)
    x[24:48] = 0
    part = sf.convert(x, text)
    first, count = blocks_of_tiles(part, RowTiles(100, 24, 16))
    wanted = [(x[r : r + 24].reshape(-1, 5, 8) != 0).any((0, 2)).sum() for r in range(0, 100, 24)]
    assert count.tolist() == np.repeat(wanted, 2).tolist()
    assert first[count > 0].tolist() == np.repeat(np.cumsum(wanted) - wanted, 2)[count > 0].tolist()


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(
    "chosen", [f"exact and {p} and float32" for p in BUILT] + ["exact and bsr_csr and float16", "cut"]
)
def test_on_the_emulated_device(chosen: str) -> None:
    """Tests for a GPU, below, in a process of its own: few, as each instance takes seconds to build. The others:
    ``make emulate``."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "emulator.plugin",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
        __file__,
    ]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([*command, "-k", chosen], capture_output=True, text=True, check=False, env=env, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"[1-9]\d* passed", done.stdout.splitlines()[-1]), done.stdout


# ------------------------------------------------------------------ on a GPU


@pytest.fixture(scope="module")
def cp() -> Any:
    return pytest.importorskip("cupy")


def product(
    cp: Any, s: Format, B: np.ndarray[Any, Any], layouts: tuple[str, str], out: str, pad: int,
    kernel: str = KERNEL.name, **epilogue: Any,
) -> Any:  # fmt: skip
    """C on the host, after checks: the guards are intact, and a second call gives the same bits."""
    guarded = Guarded(cp, (s.shape[0], B.shape[1]), VALUE_TYPES[out].numpy, layouts[1], pad)
    b, old = on_device(cp, B, layouts[0], pad), epilogue.pop("old", None)
    results = []
    for _ in range(3):
        guarded.out.fill(float("nan"))
        if old is not None:
            guarded.out[...] = cp.asarray(old)
        sf.spmm(s, b, guarded.out, kernel, **epilogue)
        results.append(guarded.out.get())
    assert guarded.intact()
    assert all(
        (np.ascontiguousarray(r).view(np.uint8) == np.ascontiguousarray(results[0]).view(np.uint8)).all()
        for r in results
    )
    return results[0].astype(np.float64)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", EVERY_TYPE)
@pytest.mark.parametrize("pair", PAIRS)
def test_products_are_exact(pair: str, dtype: str, cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = PAIRS[pair]
    for i, (M, K, n) in enumerate(SHAPES):
        monkeypatch.setattr(spmm_sum, "LEAST_WORK", (512, 8)[i % 2])  # the second: most tiles are cut
        x = integers((M, K), dtype, i)
        s, layouts = sf.decompose(x, *rules), (("row", "col")[i // 2 % 2], ("row", "col")[i % 2])
        B = np.random.default_rng(i).integers(-2, 3, (K, n)).astype(x.dtype)
        wanted = x.astype(np.float64) @ B.astype(np.float64)
        if pair in ("ell_ell", "csr_csr"):
            B[5:6] = np.inf  # no nonzero uses it; blocks and 2:4 multiply their zeros
        for out, pad in ((dtype, (0, 3, 8)[i % 3]), ("float32", 8))[: 2 if i == 0 else 1]:
            got = product(cp, s.to("cuda"), B, layouts, out, pad)
            np.testing.assert_array_equal(got, wanted.astype(VALUE_TYPES[out].numpy).astype(np.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("pair", ["bsr_csr", "two_four_csr", "ell_ell"])
def test_alpha_beta_and_bias(pair: str, cp: Any) -> None:
    x = integers((70, 97), "float32", 4)
    s, rng = sf.decompose(x, *PAIRS[pair]).to("cuda"), np.random.default_rng(4)
    B, old, bias = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((97, 33), (70, 33), (70,)))
    for alpha, beta, added in ((2, 0, None), (0.5, -2, bias), (1, 1, None), (0, 1, bias)):
        given = {"alpha": alpha, "beta": beta, "bias": None if added is None else cp.asarray(added)}
        for layout in ("row", "col"):
            got = product(cp, s, B, ("row", layout), "float32", 3, old=old if beta else None, **given)
            plain = alpha * (x.astype(np.float64) @ B) + beta * old
            np.testing.assert_array_equal(got, plain + (0 if added is None else added[:, None]))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(0, 40), (40, 0), (40, 70)])
def test_empty_matrices(shape: tuple[int, int], cp: Any) -> None:
    for rules in PAIRS.values():
        s = sf.decompose(np.zeros(shape, np.float32), *rules).to("cuda")
        for n in (0, 3):
            B = np.full((shape[1], n), np.inf if rules[0][:3] == "ell" else 1, np.float32)
            assert (product(cp, s, B, ("row", "row"), "float32", 0) == np.zeros((shape[0], n))).all()


@pytest.mark.gpu
def test_a_long_row_is_cut_into_tasks(cp: Any) -> None:
    x = np.zeros((40, 9000), np.float32)
    x[3] = np.random.default_rng(0).integers(-2, 3, 9000)
    x[32:, :64] = 1
    s = sf.decompose(x, "bsr:8x32,density>=0.9", "csr").to("cuda")
    B = np.random.default_rng(1).integers(-2, 3, (9000, 70)).astype(np.float32)
    plan = sf.plan(s, 70, backend=KERNEL.name)
    assert int(plan.tile.split(", ")[1].split()[0]) >= 5 + 4
    np.testing.assert_array_equal(product(cp, s, B, ("row", "row"), "float32", 0), x.astype(np.float64) @ B)


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["two-four", "bsr:8x8", "ell-buckets"])
def test_a_stored_zero_may_lie_over_a_value_of_another_part(text: str, cp: Any) -> None:
    """It is no element of the sum, so that parts stay disjoint."""
    x = np.zeros((40, 72), np.float32)
    x[:, ::3] = integers((40, 24), "float32", 8, density=1)
    rows, columns = (i.ravel() for i in np.indices(x.shape))
    rest = np.where(columns % 3 == 1, 7 * (x[rows, columns - 1] != 0), 0).astype(np.float32)
    zeros = sf.CSR.from_coordinates(x.shape, rows, columns, rest).validate()
    assert zeros.nnz == x.size
    s = sf.Sum.from_parts([sf.convert(x, text), zeros])
    B = np.random.default_rng(8).integers(-2, 3, (72, 40)).astype(np.float32)
    wanted = (x.astype(np.float64) + rest.reshape(x.shape)) @ B
    np.testing.assert_array_equal(product(cp, s.to("cuda"), B, ("row", "row"), "float32", 0), wanted)


@pytest.mark.gpu
def test_a_grid_that_is_cut_off_walks_the_columns(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 65535 column tiles a block computes several; here beyond two."""
    monkeypatch.setattr(spmm_sum, "MAX_GRID_Y", 2)
    monkeypatch.setattr(spmm_sum, "LEAST_WORK", 16)
    for pair in BUILT:
        x = integers((70, 97), "float32", 7)
        B = np.random.default_rng(7).integers(-2, 3, (97, 335)).astype(np.float32)
        got = product(cp, sf.decompose(x, *PAIRS[pair]).to("cuda"), B, ("row", "row"), "float32", 0)
        np.testing.assert_array_equal(got, x.astype(np.float64) @ B)


@pytest.mark.gpu
def test_random_values_stay_within_the_bound_of_float32_sums(cp: Any) -> None:
    rng = np.random.default_rng(6)
    for pair in ("bsr_csr", "two_four_csr", "ell_ell"):
        x = integers((130, 300), "float32", 6) * rng.random((130, 300), np.float32)
        B = rng.standard_normal((300, 65)).astype(np.float32)
        got = product(cp, sf.decompose(x, *PAIRS[pair]).to("cuda"), B, ("row", "row"), "float32", 0)
        exact, size = x.astype(np.float64) @ B, np.abs(x).astype(np.float64) @ np.abs(B)
        assert (np.abs(got - exact) <= 2.0**-24 * (np.abs(exact) + 300 * size)).all()
