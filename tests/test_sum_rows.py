"""Sums of blocks and scattered nonzeros, the nonzeros row by row and the blocks beside: tables and exact products."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import emulator
import numpy as np
import pytest
from test_spmm_sum import EVERY_TYPE, PAIRS, described, integers, product

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.runtime import row_tiles, row_work
from spformat.backends.cuda.runtime.scratch import Scratch
from spformat.backends.cuda.sum import spmm_sum_rows
from spformat.backends.cuda.sum.sum_work import block_tasks, merged
from spformat.products import rates
from spformat.products.problem import Operand, Problem, itemsize
from spformat.products.roofline import SHARED_KB, shared_limit
from spformat.products.tiles import forced

KERNEL = spmm_sum_rows.SpmmSumRows()
OWN = {name: rules for name, rules in PAIRS.items() if not name.startswith("two_four")} | {
    "square_blocks_csr": ("bsr:64x64,density>=0.3", "csr"),
}
BLOCKED = [name for name, rules in OWN.items() if rules[0][:3] in ("bsr", "dbs")]
SHAPES = ((70, 130, 40), (33, 65, 136), (1, 200, 1), (129, 1, 9), (200, 97, 267))
CHOSEN = ("bsr_csr", "square_blocks_csr", "dbsr_csr", "odd_blocks_ell_csr")


# ------------------------------------------------------------------ without a GPU


@pytest.mark.parametrize(
    ("rules", "dtype", "text"),
    [
        (("two-four", "csr"), "float16", r"not part 0 \(two-four\)"),
        (("bsr:32x32,density>=0.4", "dbsr:1x1"), "float16", "takes one part in bsr or dbsr, got bsr, dbsr"),
        (PAIRS["bsr_csr"], "float64", "a.dtype must be one of float32, float16, bfloat16"),
    ],
)
def test_what_it_does_not_take_is_refused(rules: tuple[str, ...], dtype: str, text: str) -> None:
    p = described(sf.decompose(integers((64, 64), dtype, 0), *rules), 64)
    assert re.search(text, "; ".join(KERNEL.unsupported(p)))


def test_blocks_alone_are_refused() -> None:
    x = integers((64, 64), "float16", 0)
    one, two = (np.where(np.arange(64) // 32 == i, x, 0).astype(np.float16) for i in (0, 1))
    s = sf.Sum.from_parts([sf.convert(one, "bsr:32x32"), sf.convert(two, "bsr:32x32")])
    said = KERNEL.unsupported(described(s, 8))
    assert "takes one part in bsr or dbsr, got bsr, bsr" in said
    assert "takes one part or more in csr or ell-buckets" in said


@pytest.mark.parametrize("sm", SHARED_KB)
def test_shared_memory_suffices_on_every_architecture(sm: int) -> None:
    for name in BLOCKED:
        for dtype in EVERY_TYPE:
            s = sf.decompose(integers((200, 97), dtype, 0, (16, 8)), *OWN[name])
            width = s.parts[0].blocksize[1]
            for n in (1, 64, 65, 5000):
                for tile in KERNEL.options(described(s, n).changed(sm=sm)):
                    assert tile.smem(width, itemsize(dtype)) + (8 << 10) <= shared_limit(sm)


def test_every_tile_is_one_that_the_kernel_takes() -> None:
    """Whole panels in a column tile, 16 rows for a warp, every thread with the same copies of B, at most 16 sums a lane."""
    for name in BLOCKED:
        for dtype in EVERY_TYPE:
            p = described(sf.decompose(integers((200, 97), dtype, 0, (16, 8)), *OWN[name]), 64)
            for n in (1, 3, 8, 16, 40, 64, 65, 100, 128, 512, 513, 5000):
                options = KERNEL.options(p.changed(n=n))
                assert options
                for t in options:
                    assert t.cols % t.items.columns == 0
                    assert t.items.vec * t.items.tiles <= 16
                    assert t.rows == 16 or t.items.threads == 256
                    assert t.rows * 128 >= 16 * t.items.threads


@pytest.mark.parametrize("most", [1, 3, 1000])
def test_tasks_cover_every_block_once(most: int) -> None:
    rng = np.random.default_rng(most)
    counts = rng.integers(0, 40, 50) * (rng.random(50) < 0.7)
    first = np.cumsum(counts) - counts
    table = block_tasks(first, counts, most)
    blocks, number = table.tasks[:, 1] & 0xFFFFFFFF, table.tasks[:, 1] >> 32
    assert sorted(number) == list(range(table.number))
    assert (np.diff(blocks) <= 0).all()
    assert blocks.max() <= most
    assert blocks.min() >= 1
    for tile, (begin, count) in enumerate(table.of_tile):
        mine = table.tasks[np.isin(number, np.arange(begin, begin + count))]
        assert (mine[:, 2] == tile).all()
        mine = mine[np.argsort(mine[:, 1] >> 32)]
        at = np.concatenate(
            [np.arange(b, b + n) for b, n in zip(mine[:, 0], mine[:, 1] & 0xFFFFFFFF, strict=True)] or [[]]
        )
        assert at.tolist() == list(range(first[tile], first[tile] + counts[tile]))


def test_scattered_parts_become_one_csr() -> None:
    x = integers((50, 90), "float16", 3)
    parts = [sf.convert(np.where(np.arange(90) % 3 == i, x, 0).astype(np.float16), "csr") for i in range(3)]
    assert (merged(parts).in_order().validate().to_dense() == x).all()
    assert merged(parts[:1]) is parts[0]


def test_expected_times_of_empty_and_full_sums() -> None:
    """With constants of 1, as nothing was measured; without blocks they are those of CSR."""
    ones = {KERNEL.name: rates.Constants(KERNEL.terms, (1.0,) * len(KERNEL.terms), {}, "this test")}
    for rules in OWN.values():
        for shape in ((64, 64), (0, 64), (64, 0)):
            x = integers(shape, "float16", 0) if min(shape) else np.zeros(shape, np.float16)
            p = described(sf.decompose(x, *rules), 8)
            with rates.trying(ones):
                us = KERNEL.expected_us(p)
            assert 0 < us < 50
            if not spmm_sum_rows.blocks_of(p)[0]:
                assert us == spmm_sum_rows.ROWS_OF_CSR.expected_us(spmm_sum_rows.items_problem(p))


@pytest.mark.parametrize(
    ("case", "stored", "dtype", "n", "rows", "composed"),
    [
        ("BERT 768x3072", (160768, 44119), "bfloat16", 128, 12.99, 20.77),
        ("4096x4096, 10 % and 1 %", (1709056, 151555), "float32", 1024, 248.48, 199.58),
    ],
)
def test_the_faster_kernel_is_chosen(
    case: str, stored: tuple[int, int], dtype: str, n: int, rows: float, composed: float
) -> None:
    """Products that were measured on an H200, in microseconds (docs/results/2026-11-26-sums-h200.md)."""
    M, K = map(int, re.findall(r"\d+", case)[:2])
    parts = tuple(
        Operand(name, (M, K), dtype, params, count, device="cuda")
        for name, params, count in zip(("bsr", "csr"), ((("blocksize", (32, 32)),), ()), stored, strict=True)
    )
    p = Problem.product(
        "sum", (), M, K, n, sum(stored), dtype, dtype, dtype, device="cuda", sm=90, parts=parts,
        board="NVIDIA H200",
    )  # fmt: skip
    expected = {a.kernel: a.expected_us for a in sf.explain(p).answers if a}
    assert (expected[KERNEL.name] < expected["composed.sum_of_parts"]) == (rows < composed)
    assert expected[KERNEL.name] == pytest.approx(rows, rel=0.3)


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(
    "chosen",
    [f"exact and {p} and float16" for p in CHOSEN] + ["exact and bsr_csr and float32", "long", "several", "nothing"],
)
def test_on_the_emulated_device(chosen: str) -> None:
    """Tests for a GPU, below, in a process of its own: few, as each instance takes seconds to build. The others:
    ``make emulate``."""
    options = ["-q", "-p", "emulator.plugin", "-p", "no:cacheprovider", "-m", "gpu", __file__, "-k", chosen]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"[1-9]\d* passed", done.stdout.splitlines()[-1]), done.stdout


# ------------------------------------------------------------------ on a GPU


@pytest.fixture(scope="module")
def cp() -> Any:
    return pytest.importorskip("cupy")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", EVERY_TYPE)
@pytest.mark.parametrize("pair", OWN)
def test_products_are_exact(pair: str, dtype: str, cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, (M, K, n) in enumerate(SHAPES):
        monkeypatch.setattr(spmm_sum_rows, "LEAST_DEPTH", (256, 8)[i % 2])  # the second: most tiles have several tasks
        x = integers((M, K), dtype, i)
        s, layouts = sf.decompose(x, *OWN[pair]), (("row", "col")[i // 2 % 2], ("row", "col")[i % 2])
        B = np.random.default_rng(i).integers(-2, 3, (K, n)).astype(x.dtype)
        wanted = x.astype(np.float64) @ B.astype(np.float64)
        if pair not in BLOCKED:
            B[5:6] = np.inf  # no nonzero uses it; blocks multiply their zeros
        for out, pad in ((dtype, (0, 3, 8)[i % 3]), ("float32", 8))[: 2 if i == 0 else 1]:
            got = product(cp, s.to("cuda"), B, layouts, out, pad, KERNEL.name)
            np.testing.assert_array_equal(got, wanted.astype(VALUE_TYPES[out].numpy).astype(np.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tile_is_exact(dtype: str, cp: Any) -> None:
    x = integers((140, 300), dtype, 5)
    for pair in ("bsr_csr", "square_blocks_csr", "bsr_ell"):
        for n in (8, 72, 264):
            B = np.random.default_rng(n).integers(-2, 3, (300, n)).astype(x.dtype)
            s = sf.decompose(x, *OWN[pair])
            for tile in map(str, KERNEL.options(described(s, n))):
                with forced(KERNEL.name, tile):
                    got = product(cp, s.to("cuda"), B, ("row", "row"), "float32", 0, KERNEL.name)
                np.testing.assert_array_equal(got, x.astype(np.float64) @ B.astype(np.float64))


@pytest.mark.gpu
def test_a_long_row_beside_blocks(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is cut into pieces, and the last of them to arrive adds what the tasks of its tile left."""
    monkeypatch.setattr(row_work, "longest_piece", lambda items: 700)
    x = np.zeros((40, 9000), np.float32)
    x[3] = x[39] = np.random.default_rng(0).integers(-2, 3, 9000)
    x[32:, :640] = 1
    s = sf.decompose(x, "bsr:8x32,density>=0.9", "csr")
    assert int(s.parts[1].indptr[4] - s.parts[1].indptr[3]) > 2 * 2048
    assert int(s.parts[1].indptr[40] - s.parts[1].indptr[39]) > 2 * 2048
    for n in (70, 128):
        B = np.random.default_rng(1).integers(-2, 3, (9000, n)).astype(np.float32)
        got = product(cp, s.to("cuda"), B, ("row", "row"), "float32", 0, KERNEL.name)
        np.testing.assert_array_equal(got, x.astype(np.float64) @ B)


@pytest.mark.gpu
def test_several_tasks_for_each_thread_block(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device of one multiprocessor one thread block takes all tasks, here of one block each, with the same buffers."""
    monkeypatch.setattr(spmm_sum_rows, "most_blocks", lambda *_: 1)
    monkeypatch.setattr(spmm_sum_rows.row_tiles, "device_of", lambda _: row_tiles.Device(1))
    for pair, dtype in (("bsr_csr", "float32"), ("square_blocks_csr", "bfloat16")):
        x = integers((200, 330), dtype, 9)
        B = np.random.default_rng(9).integers(-2, 3, (330, 136)).astype(x.dtype)
        s = sf.decompose(x, *OWN[pair]).to("cuda")
        got = product(cp, s, B, ("row", "row"), "float32", 0, KERNEL.name)
        np.testing.assert_array_equal(got, x.astype(np.float64) @ B.astype(np.float64))


@pytest.mark.gpu
def test_nothing_is_left_for_the_next_call(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that tasks leave is taken, also at the edges: the memory is zeros after every call, whatever its columns."""
    made: list[Scratch] = []

    def recorded(zeros: bool = False) -> Scratch:
        made.append(Scratch(zeros))
        return made[-1]

    monkeypatch.setattr(spmm_sum_rows, "Scratch", recorded)
    for pair, dtype in (("odd_blocks_ell_csr", "float32"), ("square_blocks_csr", "bfloat16")):
        x = integers((70, 130), dtype, 11)
        plan = sf.plan(sf.decompose(x, *OWN[pair]).to("cuda"), out_dtype="float32", backend=KERNEL.name)
        for n in (264, 261, 200, 136):
            B = np.random.default_rng(n).integers(-2, 3, (130, n)).astype(x.dtype)
            got = cp.asnumpy(plan(cp.asarray(B)))
            np.testing.assert_array_equal(got, x.astype(np.float64) @ B.astype(np.float64))
            zeros = [buffer for scratch in made if scratch._zeros for buffer in scratch._buffers.values()]
            assert zeros
            assert not any(cp.asnumpy(buffer.array).any() for buffer in zeros)


@pytest.mark.gpu
def test_empty_matrices(cp: Any) -> None:
    for shape in ((0, 40), (40, 0), (40, 70)):
        for rules in OWN.values():
            s = sf.decompose(np.zeros(shape, np.float32), *rules).to("cuda")
            for n in (0, 3):
                B = np.full((shape[1], n), np.inf, np.float32)
                got = product(cp, s, B, ("row", "row"), "float32", 0, KERNEL.name)
                assert (got == np.zeros((shape[0], n))).all()


@pytest.mark.gpu
def test_columns_beyond_a_grid_are_more_launches(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spmm_sum_rows, "MAX_GRID_Y", 4)
    monkeypatch.setattr(spmm_sum_rows, "LEAST_DEPTH", 16)
    for pair in ("bsr_csr", "square_blocks_csr"):
        x = integers((70, 97), "float32", 7)
        B = np.random.default_rng(7).integers(-2, 3, (97, 735)).astype(np.float32)
        got = product(cp, sf.decompose(x, *OWN[pair]).to("cuda"), B, ("row", "row"), "float32", 0, KERNEL.name)
        np.testing.assert_array_equal(got, x.astype(np.float64) @ B)


@pytest.mark.gpu
def test_random_values_stay_within_the_bound_of_float32_sums(cp: Any) -> None:
    rng = np.random.default_rng(6)
    x = integers((130, 300), "float32", 6) * rng.random((130, 300), np.float32)
    B = rng.standard_normal((300, 65)).astype(np.float32)
    got = product(cp, sf.decompose(x, *OWN["bsr_csr"]).to("cuda"), B, ("row", "row"), "float32", 0, KERNEL.name)
    exact, size = x.astype(np.float64) @ B, np.abs(x).astype(np.float64) @ np.abs(B)
    assert (np.abs(got - exact) <= 2.0**-24 * (np.abs(exact) + 300 * size)).all()
