"""Vector n:m products on a device: every pattern of the grid on every kernel that takes it, exact on small integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_kernels import Guarded, matrix, on_device, problem

from spformat.backends.cuda import KERNELS
from spformat.formats import VectorNM

pytestmark = pytest.mark.gpu

PATTERNS = ((1, 2), (2, 4), (1, 4), (3, 8), (4, 16), (8, 32), (12, 32), (32, 64), (5, 7))
LENGTHS = (8, 16, 32, 64, 128, 256)
LAYOUTS = (("row", "row"), ("col", "row"), ("row", "col"), ("col", "col"))
MINE = [k for k in KERNELS if "vector-nm" in k.formats]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("n", "m"), PATTERNS)
def test_every_pattern_on_every_kernel(n: int, m: int, dtype: str) -> None:
    """Ragged M, K and N; both layouts of B (torch's x [N, K] is a column-major B) and of C; C is NaN before."""
    cp = pytest.importorskip("cupy")
    sm = int(cp.cuda.Device().compute_capability)
    rng = np.random.default_rng(n * m)
    ran: dict[str, int] = {}
    for i, length in enumerate(LENGTHS):
        params: dict[str, Any] = {"n": n, "m": m, "vector_length": length}
        x = matrix(rng, "vector-nm", params, dtype, (331, 523))
        a = VectorNM.from_dense(cp.asarray(x), **params)
        for j, kernel in enumerate(MINE):
            layouts, N, pad = LAYOUTS[(i + j) % 4], (77, 203)[(i + j) // 4 % 2], (0, 3, 8)[(i + j) % 3]
            p = problem(a, N, dtype, layouts, sm)
            if kernel.unsupported(p):
                continue
            B = rng.integers(-2, 3, (x.shape[1], N)).astype(x.dtype)
            wanted = (x.astype(np.float64) @ B.astype(np.float64)).astype(x.dtype)
            guarded = Guarded(cp, wanted.shape, x.dtype, layouts[1], pad)
            kernel.plan(a, p)(on_device(cp, B, layouts[0], pad), out=guarded.out)
            where = f"{kernel.name} {n}:{m} L={length} {dtype} N={N} {layouts} pad={pad}"
            got = guarded.out.get().astype(np.float64)
            assert (got == wanted.astype(np.float64)).all(), (
                f"{where}: {(got != wanted.astype(np.float64)).sum()} wrong"
            )
            assert guarded.intact(), f"{where}: wrote outside C"
            ran[kernel.name] = ran.get(kernel.name, 0) + 1
    assert ran["cuda.spmm_vector_nm"] == ran["cuda.spmm_vector_nm_mma"] == len(LENGTHS)
    if sm == 90:
        assert ran.get("cuda.spmm_vector_nm_sm90a", 0) == (2 if dtype != "float32" else 0)
        assert ran["cuda.spmm_vector_nm_tma_sm90a"] == len(LENGTHS)
        assert ran.get("cuda.spmm_vector_nm_expanding_sm90a", 0) == (len(LENGTHS) if dtype != "float32" else 0)
