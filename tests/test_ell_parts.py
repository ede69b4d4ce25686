"""ELL buckets whose parts of K have a launch each: exact products on a GPU or the emulated one, and planted defects."""

from __future__ import annotations

import emulator
import numpy as np
import pytest
from emulator.process import printed

import spformat as sf
from spformat.backends.cuda.ell_buckets import spmm_ell_buckets
from spformat.dispatch.plans import plan_with

CASES = [
    # columns, column parts, widest bucket, value type, B column-major
    (1, 3, 4, np.float32, False),
    (37, 4, 16, np.float32, False),
    (128, 4, 8, np.float32, False),
    (37, 4, 16, np.float32, True),
    (40, 5, 2, np.float16, False),
]


def exact(n: int, parts: int, width: int, dtype: type, column_major: bool) -> None:
    """Small integers; rows without items, long rows, a column of infinity that no item is in; C full of NaN, twice."""
    import cupy

    rng = np.random.default_rng(n)
    M, K = 61, 203
    keep = rng.random((M, K)) < rng.choice((0, 0.01, 0.1, 0.5), (M, 1))
    keep[:, 100] = False
    x = (keep * rng.integers(1, 4, (M, K))).astype(dtype)
    a = sf.convert(x, "ell-buckets", column_parts=parts, max_width=width)
    B = rng.integers(-3, 4, (K, n)).astype(dtype)
    wanted = x.astype(np.float64) @ B
    B[100] = np.inf
    a = a.to("cuda")
    b = cupy.asarray(np.asfortranarray(B) if column_major else B)
    for gap in (0, 3):
        lines = cupy.asarray(np.full((M, n + gap), np.nan, np.float32))
        C = lines[:, :n]
        p = sf.dispatch.api.operations.operation("spmm").problem(a, b, C, False, 1 << 30)
        plan = plan_with(spmm_ell_buckets.SpmmELLBuckets(), a, p)
        for _ in range(2):
            plan(b, out=C)
            got = lines.get()
            assert np.array_equal(got[:, :n].astype(np.float64), wanted)
            assert np.isnan(got[:, n:]).all()
    work = a.kernel_arrays("stretches by part", lambda: pytest.fail("no launches by part"))
    assert any(g.adds for g in work.groups)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_products_are_exact(case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spmm_ell_buckets, "PIECES_OF_A_LAUNCH", 0)
    exact(*case)


PLANTED = """
from emulator import stand_in
from emulator.planted import plant, three_runs

planted = plant({old!r}, {new!r}{header})
stand_in.install(90)
import test_ell_parts as t

t.spmm_ell_buckets.PIECES_OF_A_LAUNCH = 0


def equal():
    t.exact(*t.CASES[{case}])
    return True


three_runs(equal, planted, shuffle_blocks=True)
"""
HEADER = ', header="spformat/gather.cuh"'


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize("case", [1, 2])
@pytest.mark.parametrize(
    ("old", "new", "header", "text"),
    [
        ("", "", HEADER, "equal"),
        ("task.log_width == -2", "false", "", "DIFFERENT"),
        ("task.log_width == -2", "true", "", "DIFFERENT"),
        ("[v % PER_WORD] + sum[t][v]", "[0] + sum[t][v]", HEADER, "DIFFERENT"),
    ],
    ids=["none", "never adds", "always adds", "first element of a word"],
)
def test_a_planted_defect_is_found(old: str, new: str, header: str, text: str, case: int) -> None:
    if "[0]" in new and case == 1:
        pytest.skip("an odd number of columns has one element in a word")
    seen = printed(PLANTED.format(old=old, new=new, header=header, case=case))
    assert (set(seen.split()) == {text}) if text == "equal" else (text in seen), seen
