"""The cost model against figures worked out by hand, and against times measured on an H200."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_cli import DIGITS, spformat

import spformat as sf
from spformat.dispatch import cost
from spformat.products.operations import SPMM_TRANSPOSED
from spformat.products.problem import Problem
from spformat.products.roofline import (
    H200,
    TENSOR_16,
    Blocking,
    Device,
    block_intensity,
    shared_bytes,
    thread_registers,
    tile_intensity,
)

SLOW = Device("slow", 90, 2, memory=4e9, cache=1e10, peak={TENSOR_16: 1e12})
"""Two processors of 5e11 operations a second each."""


def problem(M: int, K: int, n: int, length: int, dtype: str) -> Problem:
    params = {"n": n, "m": 32, "vector_length": length, "tile_rows": 0, "tile_cols": 0}
    return Problem.product("vector-nm", tuple(params.items()), M, K, 0, M * K * n // 32, dtype, dtype, dtype)


def test_intensity_of_a_tile() -> None:
    # 64 kept columns: 2*128*256*64 operations; A 128*64 and B 64*256 values of two bytes
    assert tile_intensity(128, 256, 64, 64, 2) == 4194304 / (2 * (8192 + 16384))
    # 8:32 without packing, k tiles of 128 columns: 32 are kept, 128 rows of B are loaded, 256/32 * 32 index bytes
    assert tile_intensity(256, 128, 32, 128, 2, 32) == 2097152 / (2 * (8192 + 16384) + 256)
    # packed to the measured half of the rows
    assert tile_intensity(256, 128, 32, 64, 2) == 2097152 / (2 * (8192 + 8192))
    assert tile_intensity(8, 8, 0, 0, 2) == 0


def test_bounds_of_a_blocking() -> None:
    """NM-SpMM's Eq. 4 to 6 by hand, for 128 x 128 of C, threads of 8 x 8, 16 of 32 columns, float32, vectors of 32."""
    one = 4 * (128 * 16 + 32 * 128) + 4 * 16  # A's values, rows of B, an index byte for 32 rows and a kept column
    assert shared_bytes(128, 128, 16, 32, 4, 32) == one == 24640
    assert shared_bytes(128, 128, 16, 32, 4, 32, stages=2) == 2 * one
    assert tile_intensity(128, 128, 16, 32, 4, 32) == 2 * 128 * 128 * 16 / one
    whole = 2 * 128 * 128 * 16 * 8 / (8 * one + 4 * 128 * 128)
    assert block_intensity(128, 128, 16, 32, 8, 4, 32) == whole
    assert block_intensity(128, 128, 16, 32, 1e9, 4, 32) == pytest.approx(tile_intensity(128, 128, 16, 32, 4, 32))
    assert block_intensity(128, 128, 16, 32, 8, 4, 32, out_itemsize=2) > whole
    assert block_intensity(0, 0, 0, 0, 0, 4) == 0
    assert thread_registers(8, 8) == 64 + 16
    assert thread_registers(8, 8, itemsize=8) == 2 * 80
    assert thread_registers(3, 3, itemsize=2) == 8  # 15 halves
    tiled = Blocking(128, 256, 64, 16, 32.0, 2, TENSOR_16)
    assert tiled.shared_bytes(3) == 3 * 2 * (128 * 16 + 32 * 256)
    assert tiled.block_intensity(2) == 2 * 128 * 256 * 16 * 64 / (64 * tiled.shared_bytes() + 2 * 128 * 256)


def test_operations_bytes_and_bounds() -> None:
    c = cost.estimate(problem(4096, 4096, 8, 128, "bfloat16"), 4096)
    assert c.kernel == "cuda.spmm_vector_nm_sm90a"
    assert c.operations == 2 * 4096 * 1024 * 4096
    assert c.bytes == 1024 * 4096 * 2 + 1024 * 32 + 2 * 4096 * 4096 * 2
    assert c.compute_us == pytest.approx(34359738368 / 989e6)
    assert c.memory_us == pytest.approx(c.bytes / 4.2e6)
    # 32 x 16 tiles of 128 x 256 over 1024 kept columns load 2 * 1024 * (128 + 256) bytes each
    assert c.cache_us == pytest.approx(32 * 16 * 2 * 1024 * 384 / 7.4e6)
    assert c.bound == "L2"
    assert c.floor_us == c.cache_us < c.expected_us
    assert c.intensity == c.operations / c.bytes
    across = cost.estimate(problem(4096, 4096, 8, 128, "bfloat16").changed(b_layout="col"), 4096)  # B is copied to rows
    assert across.bytes == c.bytes
    assert across.expected_us > c.expected_us + 2 * 33554432 / 4.2e6
    small = cost.estimate(problem(512, 512, 16, 32, "float32"), 16)
    assert small.bound == "launch"
    few = cost.estimate(problem(16384, 16384, 4, 128, "bfloat16"), 8)
    assert few.bound == "memory"
    slower = cost.estimate(problem(16384, 16384, 4, 128, "bfloat16"), 8, device=replace(H200, memory=2.1e12))
    assert slower.memory_us == pytest.approx(2 * few.memory_us)


MEASURED = (  # M, N, K, n of 32, L, dtype, microseconds on an H200, 2026-11-21, benchmarks/vector_nm.py
    (512, 512, 512, 16, 32, "float32", 15), (2048, 512, 2048, 4, 32, "float32", 22),
    (4096, 2048, 4096, 12, 32, "float32", 353), (4096, 4096, 4096, 8, 32, "float32", 480),
    (11008, 256, 4096, 16, 32, "float32", 188), (12288, 4096, 4096, 4, 32, "float32", 785),
    (4096, 4096, 4096, 16, 128, "bfloat16", 110), (4096, 4096, 4096, 8, 128, "bfloat16", 62),
    (4096, 4096, 4096, 4, 128, "bfloat16", 40), (4096, 512, 11008, 16, 32, "bfloat16", 76),
    (12288, 4096, 4096, 8, 32, "bfloat16", 317), (11008, 256, 4096, 4, 32, "bfloat16", 24),
)  # fmt: skip


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_expected_times_are_within_30_percent_of_measured_ones(case: Any) -> None:
    M, N, K, n, length, dtype, us = case
    expected = cost.estimate(problem(M, K, n, length, dtype), N).expected_us
    assert 0.7 * us < expected < 1.3 * us


def test_any_format_has_bounds() -> None:
    x = np.zeros((64, 64), np.float32)
    x[::2, ::2] = 1
    for fmt in sf.FORMATS:
        if "float32" not in fmt.value_dtypes:
            continue
        dtype = np.float16 if fmt.name == "two-four" else np.float32  # which no kernel of a GPU takes in 2:4
        a: Any = sf.convert(x.astype(dtype), fmt.name, **({"n": 1, "m": 2} if fmt.name == "vector-nm" else {}))
        c = cost.estimate(a, 32)
        assert c.kernel is not None, fmt.name
        assert c.operations == 2 * a.stored * 32
        assert c.bytes == a.nbytes + 2 * 64 * 32 * a.dtype.itemsize
        assert c.floor_us >= c.launch_us > 0
        assert "bound by launch" in str(c)
    with pytest.raises(sf.errors.UsageError, match="expected one of H200, H100, A100"):
        cost.estimate(a, 32, device="T4")
    for n in (-1, "x", None, [4], 4.0, True, 2**48):
        with pytest.raises(sf.errors.UsageError, match="n: expected a number of columns, got ") as refused:
            cost.estimate(a, n)
        assert str(refused.value).endswith(f"got {n!r}")


@pytest.mark.parametrize("n", [np.int64(4), np.uint8(4), np.array(4)], ids=lambda n: str(n.dtype))
def test_numbers_of_columns_of_numpy(n: Any) -> None:
    """numpy's ints have no ``bit_length``, and the narrow ones overflowed."""
    a = sf.convert(np.eye(512, 1024, dtype=np.float16), "csr")
    assert cost.estimate(a, n) == cost.estimate(a, 4)


def test_a_transposed_product_reads_and_writes_as_many_rows_as_it_has() -> None:
    a = sf.convert(np.eye(256, 1024, dtype=np.float16), "csr")
    p = SPMM_TRANSPOSED.problem(a, np.zeros((256, 64), np.float16), np.zeros((1024, 64), np.float32))
    assert cost.estimate(p, 64, nbytes=a.nbytes).bytes == a.nbytes + 256 * 64 * 2 + 1024 * 64 * 4


def test_explain_prints_the_cost() -> None:
    assert "on H200 at least " in spformat("explain", DIGITS, "--gpu", "sm_90", "-n", "256").stdout
    tree = json.loads(spformat("explain", DIGITS, "--gpu", "sm_90", "-n", "256", "--json").stdout)
    assert all(row["cost"]["bound"] in ("launch", "memory", "L2", "compute") for row in tree)
    assert "at least" not in spformat("explain", DIGITS).stdout


def test_explain_counts_the_bytes_that_a_file_has(tmp_path: Any) -> None:
    """Blocks share an index: four bytes for each of their values, as of CSR, gave a floor above the expected time."""
    x = np.kron(np.eye(16), np.ones((32, 32))).astype(np.float16)
    x[0, 40] = 2  # in a block of its own
    texts = ("bsr:blocksize=32x32", "dbsr:blocksize=32x32", "sr-bcrs", "ell-buckets", "bsr:32x32,density>=0.5+csr")
    matrices = {f"w{i}": sf.convert(x, text) for i, text in enumerate(texts)}
    experts = [sf.convert(y, texts[0]) for y in (x, x * (x != 2))]
    sf.save(tmp_path / "w.safetensors", matrices | {"w": sf.stack(experts)})
    tree = json.loads(spformat("explain", tmp_path / "w.safetensors", "--gpu", "H200", "-n", "8", "--json").stdout)
    beside = 2 * 512 * 8 * 2
    matrices |= {f"w.{e}": a for e, a in enumerate(experts)}
    expected = {name: a.nbytes + beside for name, a in matrices.items()}
    assert {row["tensor"]: row["cost"]["bytes"] for row in tree} == expected
