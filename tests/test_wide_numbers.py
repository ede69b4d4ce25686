"""Extents past 32 bits, where a kernel or a unit of the GPU counts in 32: refused by name, or computed otherwise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stand_in_world import World

from spformat.backends.cuda.bsr import spmm_bsr, spmm_bsr_sm90a
from spformat.backends.cuda.runtime.launch import MAX_COLUMNS, Operands
from spformat.backends.cuda.sr_bcrs.spmm_sr_bcrs_sm90a import mappable
from spformat.backends.cuda.vector_nm import vector_nm_launch
from spformat.errors import LimitError
from spformat.products.problem import COL, Problem


def problem(fmt: str, M: int, K: int, **params: Any) -> Problem:
    types = ("bfloat16",) * 3
    return Problem.product(fmt, tuple(params.items()), M, K, 4096, 10**6, *types, device="cuda", sm=90)


def test_columns_are_counted_in_32_bits(world: World) -> None:
    plan, column = world.plan(), world.array(3, 1)
    too_many = np.lib.stride_tricks.as_strided(column, (3, MAX_COLUMNS + 1), (0, 0), subok=True)
    out = np.lib.stride_tricks.as_strided(world.array(4, 1), (4, MAX_COLUMNS + 1), (0, 0), subok=True)
    for into in (None, out):
        with pytest.raises(LimitError, match="2,147,418,113 columns are more than 2,147,418,112; multiply fewer"):
            plan.run(too_many, into)
    assert not world.prepared


def test_rows_of_b_that_pass_two_gigabytes(world: World) -> None:
    rows = vector_nm_launch.AlignedRows(problem("vector-nm", 64, 64, n=2, m=4, vector_length=8))
    with pytest.raises(LimitError, match="a row of 1,073,741,824 columns passes 2 GiB"):
        rows(Operands(1 << 20, 0, 2**30, 2**30, 2**30, 0))
    assert rows(Operands(1 << 20, 0, 8, 2**30 - 8, 8, 0)) == ([], 1 << 20, 2**31 - 16)


def test_rows_of_b_that_a_tensor_map_can_name() -> None:
    o = Operands(1 << 20, 0, 8, 8, 8, 0)
    p = problem("sr-bcrs", 64, 2**31 - 128)
    assert mappable(p, o)
    assert not mappable(p.changed(K=2**31), o)
    assert not mappable(p.changed(K=0), o)
    assert not mappable(p.changed(b_layout=COL), o)
    assert not mappable(p, o._replace(b=o.b + 2))
    assert not mappable(p, o._replace(ldb=9))


def test_rows_of_c_that_a_tensor_map_can_name(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """``out`` leaves through a map whose coordinates are signed: rows past 2^31 would be dropped silently."""
    monkeypatch.setattr(spmm_bsr, "launcher", lambda a, p: lambda o: ["the other kernel"])
    data = SimpleNamespace(data=SimpleNamespace(ptr=1 << 20))
    blocks = spmm_bsr.Arrays(None, np.arange(2), np.zeros(1, np.int32), data)
    p = problem("bsr", 2**31, 4096, blocksize=(128, 128))
    prepare, workspace = spmm_bsr_sm90a._launcher(blocks, p, spmm_bsr_sm90a.choose_tile(p))
    assert workspace == 0
    assert [str(call) for call in prepare(Operands(1 << 20, 1 << 20, 8, 8, 8, 0))] == ["the other kernel"]
