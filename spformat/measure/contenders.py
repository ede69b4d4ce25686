"""The contenders of a measurement: every kernel that accepts, dense and sparse vendor libraries, scipy, torch."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import backends
from ..arrays.library import Array, is_cupy, namespace
from ..backends.host import numpy_dtype
from ..dispatch.api import explain, plan
from ..errors import LimitError, NoKernelError, SpformatError
from ..formats.base import Format
from ..formats.dense import Dense
from ..limits import check_bytes, product
from ..products.kernel import Accepted, Rejected
from ..products.operations import SPMM
from ..products.problem import ROW
from .bench import Contender

SCIPY_TYPES = ("float32", "float64")
HOPELESS = 30
"""Times the least expected time beyond which a kernel is listed but not measured: the dense copy of a large graph."""


def ours(a: Format, B: Array, only: Sequence[str] = (), first: bool = False) -> list[Contender]:
    """A contender for each of our kernels that accepts A @ B. only: backend names. first: only the kernel of spmm().

    If no kernel accepts, the kernels of these backends are listed with their reasons.
    """
    contenders: list[Contender] = []
    out = _out(a, B)
    answers = explain(a, B).answers
    least = next((r.expected_us for r in answers if isinstance(r, Accepted)), 0.0)
    for answer in answers:
        backend = answer.kernel.partition(".")[0]
        if isinstance(answer, Rejected) or backend in ("vendor", "reference") or (only and backend not in only):
            continue
        if contenders and answer.expected_us > HOPELESS * least:
            why = f"expects {answer.expected_us:,.0f} us, more than {HOPELESS} times the fastest: not measured"
            contenders.append(_absent(answer.kernel, NoKernelError(why), peer=False))
            continue
        product_plan = backends.kernel_named(answer.kernel).plan(a.ensure_valid(), SPMM.problem(a, B, out))
        tile = f" {product_plan.tile}" if product_plan.tile else ""
        contenders.append(Contender(answer.kernel + tile, functools.partial(product_plan, B, out)))
        if first:
            break
    wanted = only or ("cuda" if is_cupy(B) else "cpu",)
    absent = [r for r in answers if isinstance(r, Rejected) and r.kernel.partition(".")[0] in wanted]
    return contenders or [_absent(r.kernel, NoKernelError("; ".join(r.reasons)), peer=False) for r in absent]


def dense(a: Format, B: Array, out: Array | None = None) -> list[Contender]:
    """The dense product of the same matrix: cuBLAS on a device, numpy (BLAS) on the host.

    out: where cuBLAS writes the result; a row-major array without it.
    """
    try:
        x = a.to_dense()
    except LimitError as e:  # a large sparse matrix, for example of a graph: sparse libraries are still measured
        return [_absent("dense", e)]
    if is_cupy(B):
        out = _out(a, B) if out is None else out
        p = plan(Dense.from_dense(x), B=B, out=out, backend="vendor")
        return [Contender("dense cuBLAS", lambda: p(B, out), peer=True)]
    if x.dtype.name not in SCIPY_TYPES:
        wide, other = x.astype(np.float32), B.astype(np.float32)
        return [Contender("dense numpy float32", lambda: wide @ other, peer=True)]
    return [Contender("dense numpy", lambda: x @ B, peer=True)]


def _absent(name: str, why: SpformatError, peer: bool = True) -> Contender:
    """A contender that cannot run here or does not fit into memory. It is listed with the reason."""

    def run() -> Array:
        raise why

    return Contender(name, run, peer)


def sparse_library(a: Format, B: Array) -> list[Contender]:
    """The CSR product of the same matrix: cuSPARSE on a device, scipy on the host."""
    csr = a.to_csr()
    if is_cupy(B):
        out = _out(a, B)
        p = plan(csr, B=B, backend="vendor")
        return [Contender("cuSPARSE csr", lambda: p(B, out), peer=True)]
    if csr.dtype.name in SCIPY_TYPES:
        s = csr.to_scipy()
        return [Contender("scipy csr", lambda: s @ B, peer=True)]
    return []


def torch_peers(a: Format, B: Array) -> list[Contender]:
    """torch's dense mm and CSR; BSR (Triton) for a BSR; cuSPARSELt, its algorithms searched, for a 2:4."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    from ..arrays.torch_tensors import array_to_torch, torch_to_array

    b, x, contenders = array_to_torch(B), None, []
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        x = array_to_torch(a.to_dense())
        contenders.append(Contender("torch dense", lambda: torch_to_array(torch.mm(x, b)), peer=True))
    except LimitError as e:
        contenders.append(_absent("torch dense", e))
    if a.torch_layout == "sparse_csr":
        c = a.to_csr().to_torch()
        contenders.append(Contender("torch csr", lambda: torch_to_array(torch.mm(c, b)), peer=True))
    if a.torch_layout == "sparse_bsr":
        s = a.to_torch()
        contenders.append(Contender("torch bsr", lambda: torch_to_array(torch.mm(s, b)), peer=True))
    if a.torch_layout == "semi_structured" and is_cupy(B) and x is not None:
        contenders += _torch_cusparselt(torch, x, b, torch_to_array)
    return contenders


def _torch_cusparselt(torch: Any, x: Any, b: Any, back: Any) -> list[Contender]:
    """torch._cslt_sparse_mm with the searched algorithm, and cuSPARSELt's default."""
    try:
        packed = torch._cslt_compress(x)
        best = torch._cslt_sparse_mm_search(packed, b)
    except (AttributeError, RuntimeError):
        return []
    return [
        Contender("cuSPARSELt (searched)", lambda: back(torch._cslt_sparse_mm(packed, b, alg_id=best)), peer=True),
        Contender("cuSPARSELt (default)", lambda: back(torch._cslt_sparse_mm(packed, b)), peer=True),
    ]


def operand(a: Format, n: int, seed: int = 0, layout: str = ROW) -> Array:
    """A random normal B [K, n] of A's type, on A's device. It is drawn on the host, so that it is always the same.

    LimitError if B, drawn as float32 and rounded, exceeds the memory budget: a small file may claim any K.
    """
    check_bytes(product(a.shape[1], n, 4 + a.dtype.itemsize), f"B of shape ({a.shape[1]}, {n})", a.nbytes)
    shape = (a.shape[1], n) if layout == ROW else (n, a.shape[1])
    B = np.random.default_rng(seed).standard_normal(shape, np.float32).astype(a.dtype)
    B = B if layout == ROW else B.T
    xp = namespace(a.values)
    return B if xp is np else xp.asarray(B)


def _out(a: Format, B: Array) -> Array:
    dtype = numpy_dtype(SPMM.problem(a, B, None).out_dtype)
    return namespace(B).empty((a.shape[0], B.shape[1]), dtype)
