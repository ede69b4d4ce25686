"""SpMM on CSR with CUDA cores: rows sorted by length, a sub-warp per row sized to N.  Kernel: spmm_csr.cu."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ...dtypes import VALUE_TYPES
from ...problem import Plan, Problem
from . import jit
from .launch import Launch, device_plan
from .row_work import (
    BinTable,
    Device,
    Tile,
    bin_table,
    choose_tile,
    gather,
    longest_piece,
    order_rows,
    row_gather_reasons,
)
from .transpose import row_major

ARCHS = ("sm_80",)


class SpmmCSR:
    """Float sums in a fixed order; every N, any alignment. B or C column-major: through a transposed copy."""

    name = "cuda.spmm_csr"
    formats = frozenset({"csr"})
    archs = ARCHS

    def unsupported(self, p: Problem) -> list[str]:
        return row_gather_reasons(p)

    def instances(self) -> tuple[str, ...]:
        """C++ names for the compile tests: every value type, wide and scalar loads, both index types."""
        tiles = [
            choose_tile(vec, 4, n, 1000, 1000, 10**5, Device()) for vec, n in ((4, 32), (4, 512), (1, 1), (1, 100))
        ]
        names = [f"spmm_csr<float, float, int, {t.template()}, false>" for t in tiles]
        half = choose_tile(8, 2, 128, 1000, 1000, 10**5, Device()).template()
        names += [
            f"spmm_csr<{t}, {o}, long long, {half}, false>" for t in ("__half", "__nv_bfloat16") for o in (t, "float")
        ]
        names.append(
            f"spmm_csr<double, double, int, {choose_tile(2, 8, 64, 1000, 1000, 10**5, Device()).template()}, false>"
        )
        names.append("spmm_csr<__half, __half, int, 8, 8, 2, 8, 4, 512, 1, true>")
        return (*names, "spmm_csr_pieces<float, __half>", "spmm_csr_pieces<double, double>")

    def plan(self, a: Any, p: Problem) -> Plan:
        import cupy

        indptr, indices, data = a.indptr, a.indices, a.data
        with cupy.cuda.Device(p.device_id):
            starts = indptr[:-1].astype(np.int64)
            lengths = indptr[1:].astype(np.int64) - starts
            rows = order_rows(starts, lengths, cupy.arange(p.M, dtype=np.int64), longest_piece(p.nnz))
        value, out = VALUE_TYPES[p.a_dtype], VALUE_TYPES[p.out_dtype]
        sums = "double" if p.a_dtype == "float64" else "float"
        index = "long long" if indices.dtype.itemsize == 8 else "int"
        arch, nnz = jit.architecture(p.sm or 0, ARCHS), int(data.size)

        @functools.cache
        def kernels(tile: Tile) -> list[tuple[Launch, int]]:
            resident = str(tile.resident).lower()
            instance = f"spmm_csr<{value.cuda}, {out.cuda}, {index}, {tile.template()}, {resident}>"
            smem = p.K * tile.columns * value.numpy.itemsize if tile.resident else 0
            function = jit.load("spmm_csr.cu", instance, arch, p.device_id, smem)
            table = bin_table(rows, tile.slots, tile.fill)
            fixed = (table, rows.records, indices, data, nnz, p.K)
            signature = (BinTable, "P", "P", "P", "q", "q", "P", "P", "P", "i", "i", "q", "q")
            return [(Launch(function, signature, fixed, tile.threads, smem), table.blocks)]

        @functools.cache
        def pieces() -> Launch:
            function = jit.load("spmm_csr.cu", f"spmm_csr_pieces<{sums}, {out.cuda}>", arch, p.device_id)
            return Launch(function, ("P", "P", "P", "i", "q"), (rows.cuts,), 256)

        prepare, tile = gather(p, rows, nnz, kernels, pieces, resident=True)
        return device_plan(self.name, p, row_major(p, prepare), tile=str(tile), workspace=rows.records.nbytes)
