"""Expand, then torch: rows of A become a dense panel in bfloat16, which torch multiplies.

Processors with AVX512_BF16 or AMX multiply bfloat16 several times as fast as float32, and numpy's BLAS does not use
that. The kernel takes part where torch has been imported already; it never imports torch. Sums are float32, rounded
once, and torch chooses their order.

Those instructions take subnormal numbers for zero. An A or B that holds any goes through ``cpu.expand_then_dense``, and
so does a B with infinities or NaN, which must not meet zeros of A. Sums below 2^-126 become zero.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ...arrays.library import Array, ceil_div, round_up
from ...arrays.torch_tensors import array_to_torch
from ...formats import by_name
from ...formats.base import Format
from ...formats.fast import compiled
from ...formats.vstack import row_range
from ...products.ideal import memory_us, operands_bytes, product_us, stored_bytes
from ...products.kernel import Kernel, reasons, spmm_of
from ...products.plan import Plan
from ...products.problem import STRIDED, Problem
from ...products.roofline import CUDA_32, Device
from ..host import check_operands
from . import spmm
from .expand import ExpandThenDense
from .operands import fixed

DTYPE = "bfloat16"
PANEL = 64 << 20
"""Bytes of rows of A that are expanded together, where the format can be cut between rows. Fewer are slower: after a
product the threads of torch look for work for a while, and our threads that expand the next rows have less of the
cores (2560x2560, 464 columns: 18.4 ms whole, 21.0 in panels of 4 MB, of which the product takes 14.6)."""
LEAST_PRODUCTS = 16**3
"""Up to so many multiply-adds torch uses loops of its own, which may round more often than once."""
INSTRUCTIONS = frozenset({"avx512_bf16", "amx_bf16"})
"""Flags in /proc/cpuinfo of processors that multiply bfloat16."""

_FORWARD = {name: k for k in spmm.KERNELS for name in k.formats if name not in ("dense", "sr-bcrs")}
"""The formats. The loop of SR-BCRS was as fast up to about 800 columns, and the choice between the two often wrong."""


@functools.cache
def _processor_multiplies() -> bool:
    """Whether this processor has one of ``INSTRUCTIONS``."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as f:
            flags = next((line for line in f if line.startswith("flags")), "")
    except OSError:
        return False
    return not INSTRUCTIONS.isdisjoint(flags.split())


_forked = False
"""Whether this process was forked from another. Threads of OpenMP, which torch uses, do not survive that."""


def _after_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_after_fork)


def _refusals() -> list[str]:
    """Why torch cannot multiply in this process."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "backends"):  # not imported, or just being imported
        return ["torch is not imported in this process: import torch first"]
    onednn = torch.backends.mkldnn
    return reasons(
        (not _processor_multiplies(), f"the processor has none of {', '.join(sorted(INSTRUCTIONS))}"),
        (not (onednn.is_available() and onednn.enabled), "torch does not use oneDNN (torch.backends.mkldnn)"),
        (_forked, "threads of torch may not survive the fork of this process"),
    )


def _is_watched() -> bool:
    """Whether torch would not just compute: a mode records or replaces what is called (fake tensors, a device)."""
    c = sys.modules["torch"]._C
    return bool(c._len_torch_dispatch_stack() or c._len_torch_function_stack())


class ExpandThenTorch(Kernel):
    """C = A @ B of every sparse format in bfloat16, by torch's dense product."""

    name = "cpu.expand_then_torch"
    takes = spmm_of(*_FORWARD)
    terms = ("start", "panels", "products", "operands")

    def variant(self, p: Problem, tile: Any) -> tuple[str, ...]:
        """By format: some are expanded faster than others."""
        return (p.format,)

    def quantities(self, p: Problem, tile: Any, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``: 1; to read A and write its panels; of the products as if they were
        float32; to read B and write C."""
        panels = memory_us(stored_bytes(p) + 2 * p.M * p.K, device)
        return 1.0, panels, product_us(2.0 * p.M * p.K * p.n, CUDA_32, device), memory_us(operands_bytes(p), device)

    def unsupported(self, p: Problem) -> list[str]:
        """Takes bfloat16 alone, matrices that compiled code expands, and so much work that torch uses oneDNN."""
        dtypes, elements, refused = {p.a_dtype, p.b_dtype, p.out_dtype}, p.M * p.K, _FORWARD[p.format].unsupported(p)
        if p.device != "cpu":
            return refused
        return refused + reasons(
            (dtypes != {DTYPE}, f"a, b and out must be {DTYPE}, got {p.a_dtype}, {p.b_dtype} and {p.out_dtype}"),
            (2 * elements < compiled.WARM, f"M * K must be at least {compiled.WARM // 2}, got {elements}"),
            (p.K * p.n <= LEAST_PRODUCTS, f"K * N must exceed {LEAST_PRODUCTS}, got {p.K * p.n}"),
        ) + _refusals()  # fmt: skip

    def workspace_bytes(self, p: Problem) -> int:
        """Upper bound of the bytes of a panel, and of copies of B and C whose elements have gaps."""
        copies = (p.b_layout == STRIDED) * p.inner * p.n + (p.out_layout == STRIDED) * p.rows * p.n
        return 2 * (_rows_together(p.M, p.K, _unit(p.format, p.p)) * p.K + copies)

    def _plan(self, a: Format, p: Problem) -> Plan:
        """A plan that keeps the arrays of ``a``, and one for operands that torch must not multiply."""
        compiled.load_numba()
        otherwise = ExpandThenDense()._plan(a, p)
        rows = _rows_together(p.M, p.K, _unit(a.name, a.params()))
        cuts = [(i, min(p.M, i + rows)) for i in range(0, p.M, rows)]
        parts = [(lo, hi, row_range(a, lo, hi) if len(cuts) > 1 else a.alias()) for lo, hi in cuts]
        whole_numbers = not _unusual(a.values)

        def run(B: Array, out: Array) -> Array:
            out = check_operands(p, B, out)
            if not out.size:
                return out
            enough = p.K * B.shape[1] > LEAST_PRODUCTS
            if not whole_numbers or not enough or _refusals() or _is_watched() or _unusual(B):
                return otherwise.run(B, out)
            _multiply(parts, B, out)
            return out

        return Plan(self.name, p, run, "float32 sums", otherwise.workspace + self.workspace_bytes(p))


def _unit(format: str, params: Any) -> int:
    """Rows in which a format is cut without copying arrays; 0 if it cannot be."""
    layout = by_name(format).row_chunks(dict(params))
    return layout.rows if layout else 0


def _rows_together(M: int, K: int, unit: int) -> int:
    """Rows of a panel: all, or whole units in panels of about ``PANEL`` bytes, even in size."""
    if not unit:
        return max(1, M)
    return min(max(1, M), round_up(ceil_div(max(1, M), ceil_div(max(1, 2 * M * K), PANEL)), unit))


def _unusual(x: Array) -> bool:
    """Whether an array of bfloat16 holds subnormal numbers, infinities or NaN."""
    from .bfloat16_scan import holds_unusual

    codes = x.view(np.uint16)
    in_order = codes.T if codes.flags.f_contiguous else codes
    return bool(holds_unusual(*fixed(np.ascontiguousarray(in_order).reshape(-1))))


def _multiply(parts: list[tuple[int, int, Format]], B: Array, out: Array) -> None:
    """out = A @ B by panels: of ``out`` as it lies in memory, or of a copy where its elements have gaps."""
    torch = sys.modules["torch"]
    in_lines = out.flags.c_contiguous or out.flags.f_contiguous
    C = out if in_lines else np.empty(out.shape, out.dtype)
    with torch.no_grad():
        b, c = array_to_torch(_in_lines(B)), array_to_torch(C)
        for lo, hi, part in parts:
            panel = array_to_torch(part.to_dense())
            if C.flags.c_contiguous:
                torch.mm(panel, b, out=c[lo:hi])
            else:
                torch.mm(b.T, panel.T, out=c.T[:, lo:hi])
    if not in_lines:
        out[...] = C


def _in_lines(B: Array) -> Array:
    """B, or a copy if torch cannot read it where it lies: negative strides, elements at odd addresses."""
    plain = B.flags.aligned and min(B.strides) >= 0
    return B if plain else np.ascontiguousarray(B)


KERNELS: tuple[Kernel, ...] = (ExpandThenTorch(),)
