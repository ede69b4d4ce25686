"""Rows of a column-major B that the blocks of a kernel write themselves: exact products on a GPU or the emulated one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulator.process import printed
from exact import assert_exact, hopper
from test_kernels import Guarded, matrix, on_device, problem

from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.runtime import turned_rows
from spformat.backends.cuda.vector_nm.spmm_vector_nm_sm90a import SpmmVectorNMSm90a
from spformat.backends.cuda.vector_nm.spmm_vector_nm_tma_sm90a import SpmmVectorNMTMA
from spformat.formats import VectorNM
from spformat.products.tiles import forced

LONG, SHORT = (SpmmVectorNMSm90a(), (16, 32, 128)), (SpmmVectorNMTMA(), (8, 32, 32))
"""Kernels, and patterns that they take."""


def test_only_lines_of_whole_units_are_turned() -> None:
    a = VectorNM.from_dense(np.zeros((128, 64), np.float16), n=16, m=32, vector_length=128)
    p = problem(a, 100, "float16", ("col", "col"), 90)
    assert turned_rows.TurnedRows.suit(p)
    assert not turned_rows.TurnedRows.suit(p.changed(b_layout="row"))
    assert not turned_rows.TurnedRows.suit(p.changed(K=68))
    assert turned_rows.COLUMNS * 2 == turned_rows.DEPTH


CASES = [
    # kernel, tile, M, K, N, layout of C, elements between lines, output
    (LONG, "128x64x64 whole", 331, 528, 203, "col", 0, "bfloat16"),
    (LONG, "128x64x64 even", 260, 1000, 130, "row", 8, "bfloat16"),
    (LONG, "128x96x64 whole", 128, 64, 97, "col", 8, "float32"),
    (LONG, "128x128x64 whole", 300, 2056, 257, "row", 0, "bfloat16"),
    (LONG, "128x160x64 even", 200, 392, 161, "col", 16, "bfloat16"),
    (LONG, "128x224x64 whole", 140, 136, 225, "col", 8, "bfloat16"),
    (LONG, "128x256x64 whole", 130, 808, 520, "col", 0, "bfloat16"),
    (LONG, "128x64x64 whole", 200, 520, 131, "col", 4, "bfloat16"),  # lines that start between units: copied first
    (LONG, "128x64x64 whole", 200, 523, 131, "col", 0, "bfloat16"),
    (SHORT, "128x64x128 splits 2", 200, 520, 131, "col", 0, "bfloat16"),
    (SHORT, "256x128x128", 300, 776, 260, "row", 8, "float32"),
    (SHORT, "128x128x64", 260, 392, 410, "col", 8, "bfloat16"),
    (SHORT, "128x64x64", 130, 260, 70, "col", 0, "bfloat16"),  # copied first
]


def product(case: tuple[Any, ...], runs: int = 2) -> tuple[Any, Any, Any]:
    """C of one case, and what it is the product of; the same bits in every run."""
    (kernel, (n, m, length)), tile, M, K, N, layout, pad, out = case
    params = {"n": n, "m": m, "vector_length": length}
    cp, rng = hopper(), np.random.default_rng(N)
    x = matrix(rng, "vector-nm", params, "bfloat16", (M, K))
    B = rng.integers(-3, 4, (K, N)).astype(x.dtype)
    a = VectorNM.from_dense(x, **params)
    p, results = problem(a, N, out, ("col", layout), 90), []
    with forced(kernel.name, tile):
        plan, there = kernel.plan(a.to("cuda"), p), on_device(cp, B, "col", pad)
    for _ in range(runs):  # again: the counters are zeros after each run
        guarded = Guarded(cp, (M, N), VALUE_TYPES[out].numpy, layout, pad)
        plan(there, out=guarded.out)
        results.append(guarded.out.get())
        assert guarded.intact(), "wrote outside C"
        assert results[0].tobytes() == results[-1].tobytes()
    return results[0], x, B


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[1]} {c[2]}x{c[3]} {c[4]} {c[5]} {c[6]}")
def test_integers_are_exact(case: tuple[Any, ...]) -> None:
    assert_exact(*product(case, runs=3))


SMALL = """
from emulator import stand_in
from emulator.planted import plant, three_runs

planted = plant({old!r}, {new!r}, header="spformat/turned_rows.cuh")
stand_in.install(90)
from test_turned_rows import LONG, assert_exact, product

def equal():
    assert_exact(*product((LONG, "128x64x64 whole", 331, 528, 203, "col", 0, "bfloat16")))
    return True

three_runs(equal, planted)
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("while (__shfl_sync(~0u, *written, 0) < count)", "while (false)"),
        ("t_.words[0] = 0;", ""),
        ("n0 + lane / 8 * 8 + 2 * b + lane / 4 % 2", "n0 + lane / 4 + 8 * b"),
    ],
    ids=["panel not waited for", "counter not cleared", "another order of columns"],
)
def test_a_planted_defect_is_found(old: str, new: str) -> None:
    shown = printed(SMALL.format(old=old, new=new))
    assert "equal" not in shown.splitlines() or "DIFFERENT" in shown, shown
