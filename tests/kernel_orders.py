"""What holds of every order of a kernel that replaces the arrays of a matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import spformat as sf
from spformat.products.problem import Problem


def drawn_matrices() -> Iterator[tuple[np.random.Generator, np.ndarray[Any, Any], str]]:
    """(generator, float16 matrix of small integers, its description): ragged ones, nearly empty to full."""
    rng = np.random.default_rng(5)
    for M, K in ((1, 1), (40, 200), (131, 321)):
        for density in (0.05, 0.5, 1):
            x = rng.choice([-3, -2, -1, 1, 2, 3], (M, K)) * (rng.random((M, K)) < density)
            yield rng, x.astype(np.float16), f"{M}x{K} density {density}"


def assert_arrays_come_back(stored: Any, back: dict[str, Any], where: str) -> None:
    """back: what an order of a kernel gives for the arrays of the host matrix ``stored``: equal bit by bit."""
    assert back.keys() == stored.arrays().keys(), where
    for name, array in stored.arrays().items():
        got = back[name]
        assert (got.dtype, got.shape) == (array.dtype, array.shape), f"{where}: {name}"
        assert got.get().tobytes() == array.tobytes(), f"{where}: {name}"


def assert_products_come_from_order(
    kernel: Any, fmt: str, params: Callable[[int], dict[str, int]], problem_of: Callable[[Any, int], Problem],
    columns: tuple[tuple[int, str], ...] = ((1, "row"), (17, "col"), (40, "row")),
) -> None:  # fmt: skip
    """Also where B is not finite: a NaN or infinity meets values only that are not zero. The arrays are not kept beside the order.

    params: of the conversion of matrix number i. problem_of: of a matrix, on a GPU of a compute capability. columns: numbers of
    columns of B, with its layout.
    """
    cp = pytest.importorskip("cupy")
    sm = int(cp.cuda.Device().compute_capability)
    for i, (rng, x, described) in enumerate(drawn_matrices()):
        stored = sf.convert(x, fmt, **params(i))
        for n, layout in columns:
            a = stored.to("cuda")
            p = problem_of(a, sm).changed(n=n, b_layout=layout, out_layout=layout)
            if kernel.unsupported(p):
                pytest.skip(f"{kernel.name}: {kernel.unsupported(p)[0]}")
            B = rng.integers(-2, 3, (x.shape[1], n)).astype(np.float64)
            for value in () if kernel.multiplies_zeros else (np.inf, -np.inf, np.nan):
                B[rng.integers(x.shape[1]), rng.integers(n)] = value
            with np.errstate(invalid="ignore"):
                products = np.where(x[:, :, None] != 0, x[:, :, None].astype(np.float64) * B[None], 0)
                wanted = products.sum(axis=1).astype(np.float16)
            plan = kernel.plan(a, p)
            assert a.in_kernel_order, f"{a!r} keeps its arrays beside the order"
            order = "F" if layout == "col" else "C"
            out = cp.empty((x.shape[0], n), np.float16, order)
            out.fill(np.nan)
            plan(cp.asarray(np.asarray(B.astype(np.float16), order=order), order=order), out=out)
            where = f"{kernel.name} {described} n={n} {layout}"
            np.testing.assert_array_equal(out.get(), wanted, err_msg=where)
            assert a == stored, where
            assert (a.to_dense().get() == x).all(), where
            assert a.to_csr() == stored.to_csr(), where
            assert a.nbytes == stored.nbytes, where
